"""Engines of `attar serve --replicas` killed in mid-stream: each answer must be the one that it is without.

    python bench/replica_kills.py [--kills 100] [--model demo]

Two replicas answer three requests at once: a greedy one, a sampled one with two choices, and one by a JSON schema. When
each has begun, one of the engines gets SIGKILL. Answers are compared, token for token, with those of the
same server before. A new server is started behind every `EACH` kills, for an engine that dies often is given up. Ends
with status 1 where an answer differs or fails, or where nothing was continued.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from soaks.served import Served, children

EACH = 4  # kills of a server
SECONDS = 120.0
PROMPT = "Once upon a time there was a little fox who"
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 9, "maxItems": 9}
    },
    "required": ["names"],
    "additionalProperties": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "n": 2, "ignore_eos": True},
    "schema": {"temperature": 0.9, "structured_outputs": {"json": SCHEMA}},
}


def asked(served: Served, body: dict[str, Any], begun: Callable[[], Any] = lambda: None) -> dict[int, tuple[Any, ...]]:
    """Return token ids and reason of each choice of a streamed answer; `begun` is called at its 20th event."""
    connection = http.client.HTTPConnection(served.address.host, served.address.port, timeout=SECONDS)
    given = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "return_token_ids": True} | body
    connection.request("POST", "/v1/completions", json.dumps(given), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise SystemExit(f"status {reply.status}: {reply.read()[:200]!r}")
    tokens, reasons, count = dict[int, list[int]](), dict[int, str](), 0
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return {-1: (json.dumps(event["error"]),)}
        for choice in event["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"], "")
        count += 1
        if count == 20:
            begun()
    connection.close()
    return {index: (*found, reasons[index]) for index, found in tokens.items()}


def told(served: Served) -> list[dict[str, Any]]:
    """Return what the server says of its replicas."""
    connection = http.client.HTTPConnection(served.address.host, served.address.port, timeout=SECONDS)
    connection.request("GET", "/v1/engine")
    found: list[dict[str, Any]] = json.loads(connection.getresponse().read())["replicas"]
    connection.close()
    return found


def ready(served: Served) -> None:
    """Wait until all replicas are."""
    end = time.monotonic() + SECONDS
    while not all(each["state"] == "ready" for each in told(served)):
        if time.monotonic() > end:
            raise SystemExit("a replica does not come back")
        time.sleep(0.02)


def engines(served: Served) -> list[int]:
    """Return the engines' process ids, which a child of the server has forked."""
    below = [each for child in children(served.process.pid) for each in children(child)]
    return [pid for pid in below if Path(f"/proc/{pid}/comm").read_text() == "attar-engine\n"]


def killed(served: Served, draw: random.Random, alone: dict[str, Any], bodies: dict[str, dict[str, Any]]) -> list[str]:
    """Kill an engine while all requests are answered; return the names of answers that differ."""
    begun, found = threading.Barrier(len(bodies) + 1, timeout=SECONDS), dict[str, Any]()

    def again(name: str) -> None:
        found[name] = asked(served, bodies[name], begun.wait)

    threads = [threading.Thread(target=again, args=(name,)) for name in bodies]
    for each in threads:
        each.start()
    begun.wait()
    os.kill(draw.choice(engines(served)), signal.SIGKILL)
    for each in threads:
        each.join(SECONDS)
    ready(served)
    return [name for name in bodies if found.get(name) != alone[name]]


def main() -> int:
    """Print each server's kills, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    draw, done, wrong, replays = random.Random(0), 0, 0, 0
    while done < options.kills:
        served = Served(options.model, "--no-verify", "--replicas", "2", "--memory", "4GB")
        try:
            ready(served)
            bodies = {name: body | {"seed": draw.randrange(1 << 30)} for name, body in BODIES.items()}
            alone = {name: asked(served, body) for name, body in bodies.items()}
            before = sum(each["requests"] for each in told(served))
            count = min(EACH, options.kills - done)
            for _ in range(count):
                if differ := killed(served, draw, alone, bodies):
                    wrong += len(differ)
                    print(f"kill {done}: {', '.join(differ)} differ", flush=True)
                done += 1
            replays += sum(each["requests"] for each in told(served)) - before - count * len(bodies)
        finally:
            served.process.terminate()
            served.process.wait(SECONDS)
            served.end()
        print(f"{done} kills, {done * len(BODIES)} answers, {replays} continued, {wrong} differ", flush=True)
    return int(bool(wrong) or not replays)


if __name__ == "__main__":
    sys.exit(main())
