"""What the scheduler and the server take of a step, beside a real model that decodes a full batch.

    python bench/serving_share.py MODEL [--streams 16] [--tokens 128] [--threads N] [--json FILE]

Two measurements of the same load, `--streams` answers of `--tokens` tokens each after a short prompt:

    server   `attar serve MODEL` in its two processes, clients over HTTP. Steps and their seconds are the engine's own
             (`attar_steps`, `attar_step_seconds`); the server's part is the processor time of the process that speaks
             HTTP, from the first token of the last stream to the end.
    engine   the engine alone in this process: all of `Engine.step` but the runner's run and the choice of tokens,
             which is planning, committing, stop strings, text and events.

The share is (server's processor time + engine's rest) / step, all per step. It is an upper bound where the server runs
on a core that the kernels leave idle. Speed does not depend on the weights' values.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from server_events import ask, processor_seconds

PROMPT = list(range(100, 110))  # token ids: models of random weights may have no tokenizer to speak of
READY = 120.0  # seconds until a model must be loaded


def counter(port: int, name: str) -> float:
    """One number of /metrics."""
    found = re.search(rf"^{name}_total ([0-9.e+-]+)$", ask(port, "/metrics", b"").decode(), re.MULTILINE)
    assert found is not None, f"/metrics shows no {name}"
    return float(found[1])


def serve(model: str, streams: int, threads: int | None) -> tuple[subprocess.Popen[bytes], int]:
    """The server and its port, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "attar", "serve", model, "--port", str(port), "--max-running", str(streams)]
    command += ["--max-tokens-in-cache", str(streams * 1024)]
    command += [] if threads is None else ["--threads", str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + READY
    while True:
        try:
            if b" 200 " in ask(port, "/readyz", b"")[:20]:
                return process, port
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise SystemExit(f"{' '.join(command)} did not become ready")
        time.sleep(0.1)


def over_http(model: str, streams: int, tokens: int, threads: int | None) -> dict[str, float]:
    process, port = serve(model, streams, threads)
    try:
        started = threading.Barrier(streams + 1)
        events: list[int] = []

        def client() -> None:
            body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
            data = json.dumps(body).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                pieces, count, told = [], 0, False
                while piece := sock.recv(1 << 18):
                    pieces.append(piece)
                    count += piece.count(b"data: ")
                    if count and not told:
                        started.wait(READY)
                        told = True
                assert b" 200 " in pieces[0][:20], pieces[0]
                events.append(count)

        threads_ = [threading.Thread(target=client) for _ in range(streams)]
        for thread in threads_:
            thread.start()
        started.wait(READY)
        used, steps, seconds = (
            processor_seconds(process.pid),
            counter(port, "attar_steps"),
            counter(port, "attar_step_seconds"),
        )
        for thread in threads_:
            thread.join()
        steps, seconds = counter(port, "attar_steps") - steps, counter(port, "attar_step_seconds") - seconds
        used = processor_seconds(process.pid) - used
        return {
            "steps": steps,
            "step_ms": 1e3 * seconds / steps,
            "server_ms": 1e3 * used / steps,
            "events": sum(events),
        }
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def in_process(model: str, streams: int, tokens: int, threads: int | None) -> dict[str, float]:
    from attar.engine import inflight, startup
    from attar.protocol.messages import Submit
    from attar.protocol.request import SamplingParams
    from attar.protocol.settings import Settings

    settings = Settings(model, "", max_cached_tokens=streams * 1024, max_running=streams, threads=threads)
    engine, _ = startup.start_engine(settings)
    model_seconds = [0.0]

    def timed(call: Any) -> Any:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                model_seconds[0] += time.perf_counter() - began

        return run

    engine.runner.run = timed(engine.runner.run)  # type: ignore[method-assign]
    inflight.sample = timed(inflight.sample)  # type: ignore[attr-defined] # which imports it
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for number in range(streams):
        engine.submit(Submit(str(number), tuple(PROMPT), params))
    rest, whole = [], []
    while not engine.idle:
        model_seconds[0], began = 0.0, time.perf_counter()
        full = len(engine.scheduler.running) == streams
        engine.step()
        if full:
            whole.append(time.perf_counter() - began)
            rest.append(whole[-1] - model_seconds[0])
    return {"step_ms": 1e3 * statistics.median(whole), "rest_ms": 1e3 * statistics.median(rest)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a checkpoint, such as build/engines/llama-3.2-1b-attar, or demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="where the result goes; else it is the last line")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    http = over_http(given.model, given.streams, given.tokens, given.threads)
    alone = in_process(given.model, given.streams, given.tokens, given.threads)
    share = (http["server_ms"] + alone["rest_ms"]) / http["step_ms"]
    print(f"load before the run: {load:.1f}; {given.streams} streams of {given.tokens} tokens")
    print(f"a step          {http['step_ms']:8.2f} ms behind HTTP, {alone['step_ms']:.2f} ms alone")
    print(f"the server      {http['server_ms']:8.3f} ms of processor time a step")
    print(f"the engine      {alone['rest_ms']:8.3f} ms a step outside the model and the choice of tokens")
    print(f"together        {share:8.1%} of a step (at most 5 % wanted at 16 streams)")
    found = json.dumps({"load_before": load, "streams": given.streams, "http": http, "engine": alone, "share": share})
    given.json.write_text(found + "\n") if given.json else print(found)


if __name__ == "__main__":
    main()
