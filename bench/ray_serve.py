"""Ray Serve beside the same engine without it: latency of one token and rate of a stream, by handle and by HTTP.

    .venv-ray/bin/python bench/ray_serve.py

Both sides have one engine of the embedded model with one thread, and are asked in turn, so that other load of the
machine meets both. Overhead is the difference of medians; the rate is relative to that without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from attar.checkpoints.sources.hub import embedded
from attar.integrations.ray import exposure, wire
from attar.integrations.ray.config import NAME, Size, document
from attar.integrations.ray.settings import Arguments, HttpSettings
from attar.integrations.ray.wire import Order
from attar.protocol.messages import Delta, Failed, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.settings import Settings
from attar.server.engine_client.client import EngineClient
from attar.server.supervisor import EngineProcess, private_socket

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)
ENGINE = (sys.executable, "-m", "attar.engine.main")
SECONDS = 180.0

Ask = Callable[[int], Awaitable[int]]
"""Asks for so many tokens, and returns how many came."""


def submit(tokens: int) -> Submit:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    return Submit(os.urandom(8).hex(), PROMPT, params)


def by_socket(client: EngineClient) -> Ask:
    async def ask(tokens: int) -> int:
        stream, count = client.ask([submit(tokens)], 1), 0
        while events := await stream.take():
            assert not any(isinstance(event, Failed) for event in events), events
            count += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        stream.close()
        return count

    return ask


def by_handle(handle: Any) -> Ask:
    stream, whole = handle.options(method_name="answer", stream=True), handle.options(method_name="whole")

    async def ask(tokens: int) -> int:
        order, count = wire.encode(Order(submit(tokens))), 0
        items = stream.remote(order) if tokens > 1 else _one(whole.remote(order))
        async for item in items:
            events = wire.events(item)
            count += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        return count

    return ask


async def _one(call: Awaitable[bytes]) -> AsyncIterator[bytes]:
    yield await call


def by_http(port: int) -> Ask:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)

    def read(tokens: int) -> int:
        body = {"model": "demo", "prompt": list(PROMPT), "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
                "stream": tokens > 1}  # fmt: skip
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        reply.read()
        return tokens

    async def ask(tokens: int) -> int:
        return await asyncio.to_thread(read, tokens)

    return ask


async def seconds(ask: Ask, tokens: int) -> float:
    began = time.perf_counter()
    assert await ask(tokens) == tokens
    return time.perf_counter() - began


async def compare(direct: Ask, ray: Ask, count: int, tokens: int) -> dict[str, float]:
    """Compare both sides, asked in turn: milliseconds of one token, and tokens a second of a stream."""
    for ask in (direct, ray):  # caches of prefixes, connections
        for _ in range(5):
            await ask(1)
    one = [(await seconds(direct, 1), await seconds(ray, 1)) for _ in range(count)]
    long = [(await seconds(direct, tokens), await seconds(ray, tokens)) for _ in range(max(4, count // 20))]
    without, through = (statistics.median(side) * 1e3 for side in zip(*one, strict=True))
    rates = [tokens / statistics.median(side) for side in zip(*long, strict=True)]
    return {
        "direct_ms": without, "ray_ms": through, "overhead_ms": through - without, "direct_tokens_per_s": rates[0],
        "ray_tokens_per_s": rates[1], "stream_ratio": rates[1] / rates[0],
    }  # fmt: skip


def arguments(settings: Settings) -> dict[str, Any]:
    size = Size()
    http = HttpSettings(settings.model, size.places, port=0)
    return document(Arguments(settings, http), size, {"num_cpus": 1})


async def measure(count: int, tokens: int, folder: Path) -> dict[str, Any]:
    import ray
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    settings = Settings(str(embedded()), "", threads=1, name="demo", verify=False, memory=1 << 30)
    served = subprocess.Popen(
        [sys.executable, "-m", "attar", "serve", "demo", "--no-verify", "--threads", "1", "--memory", "1GB", "--port",
         "0", "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        with private_socket() as path:
            client = EngineClient(path)
            own = Settings(settings.model, str(path), threads=1, name="demo", verify=False, memory=1 << 30)
            process = EngineProcess(ENGINE, own, lambda: client.was_ready, lambda status: None)
            process.start()
            client.start()
            ray.init(
                include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=str(folder / "ray"),
                log_to_driver=False, object_store_memory=128 << 20, num_cpus=4, logging_level="error",
            )  # fmt: skip
            serve.start(proxy_location="Disabled")
            deploy = serve.context._get_global_client().deploy_apps
            deploy(ServeDeploySchema.model_validate(arguments(settings)), _blocking=True)
            address = await serve.get_deployment_handle("Http", NAME).address.remote()
            assert served.stdout is not None
            plain = json.loads(served.stdout.readline())["url"]
            ports = [int(url.rpartition(":")[2]) for url in (plain, address)]
            while client.ready is None or not all(map(_ready, ports)):
                await asyncio.sleep(0.1)
            by = compare(by_socket(client), by_handle(serve.get_deployment_handle("Engine", NAME)), count, tokens)
            handle = await by
            found = {"handle": handle, "http": await compare(by_http(ports[0]), by_http(ports[1]), count, tokens)}
            await client.close()
            await asyncio.to_thread(process.end)
            return found
    finally:
        served.terminate()
        served.wait(SECONDS)
        await asyncio.to_thread(serve.shutdown)
        await asyncio.to_thread(ray.shutdown)


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/readyz")
    status = connection.getresponse().status
    connection.close()
    return status == 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="requests of one token on each side")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of a stream")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attar-") as name:
        token = Path(name) / "token"
        token.write_text(os.urandom(32).hex())
        token.chmod(0o600)
        os.environ.update(exposure.START_ENVIRONMENT, RAY_AUTH_TOKEN_PATH=str(token))
        load = os.getloadavg()[0]
        found = asyncio.run(measure(given.count, given.tokens, Path(name)))
    print(json.dumps({"count": given.count, "tokens": given.tokens, "load_before": load, **found}))


if __name__ == "__main__":
    main()
