"""Time of a router's decision: hashing of the prompt, the choice among hosts, and the notes of its first event and end.

    python bench/routing_time.py [--hosts N] [--digests N] [--decisions N] [--tokens N ...]

Each host's cache is full, with `digests` blocks in all. Half of the prompts begin with cached blocks of some host.
`tokens` are exact digests of token ids, and `text` are pieces of as many tokens' text (four bytes each). Times are the
thread's own, which others on the machine do not lengthen by taking its turns. The last line is JSON, with
milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections.abc import Callable

from msgspec import Raw

from attar.protocol import block_digests
from attar.routing.router import Asked, Router
from attar.server.fleet.text_prefixes import BYTES_A_TOKEN, PIECE, PromptBody, TextRouter

BLOCK = 64
KEY = block_digests.key_of(b"salt")


def exact(draw: random.Random, hosts: int, digests: int, length: int) -> Callable[[str], float]:
    """Return what makes one decision, and returns its seconds."""
    router, blocks = Router(hosts, BLOCK), length // BLOCK
    bases = []
    for host in range(hosts):
        router.begin(host, digests // hosts, 1 << 16)
        left = digests // hosts
        while left > 0:
            base = array("i", [draw.randrange(1 << 17) for _ in range(min(left, blocks) * BLOCK)])
            bases.append(base)
            router.prefixes.stored(host, block_digests.chain(KEY, base, BLOCK))
            left -= blocks

    def decide(id: str) -> float:
        base = draw.choice(bases) if draw.random() < 0.5 else array("i")
        fresh = array("i", [draw.randrange(1 << 17) for _ in range(length)])
        prompt = (base[: draw.randrange(len(base) + 1)] + fresh)[:length]
        began = time.thread_time()
        asked = Asked(length, block_digests.chain(KEY, prompt, BLOCK))
        assert router.route(id, asked, range(hosts), began) is not None
        router.begun(id)
        router.ended(id)
        return time.thread_time() - began

    return decide


def text(draw: random.Random, hosts: int, digests: int, length: int) -> Callable[[str], float]:
    """Return what makes one decision by text, and returns its seconds."""
    router, size = TextRouter(hosts), length * BYTES_A_TOKEN
    bases = []
    for host in range(hosts):
        for at in range(max(1, digests // hosts * PIECE // size)):
            bases.append(draw.randbytes(size))
            body = PromptBody(prompt=Raw(bases[-1]))
            router.begun(f"{host}.{at}", host, body.asked(b"salt").digests)

    def decide(id: str) -> float:
        base = draw.choice(bases) if draw.random() < 0.5 else b""
        prompt = Raw((base[: draw.randrange(len(base) + 1)] + draw.randbytes(size))[:size])
        began = time.thread_time()
        asked = PromptBody(prompt=prompt).asked(b"salt")
        routed = router.router.route(id, asked, range(hosts), began)
        assert routed is not None
        router.begun(id, routed.engine, asked.digests)
        router.router.ended(id)
        return time.thread_time() - began

    return decide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--digests", type=int, default=100_000)
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    asked = parser.parse_args()
    found = {}
    for length in asked.tokens:
        for name, kind in (("tokens", exact), ("text", text)):
            decide = kind(random.Random(0), asked.hosts, asked.digests, length)
            times = sorted(decide(str(at)) for at in range(asked.decisions))
            figures = {
                share: round(times[min(len(times) - 1, int(len(times) * part))] * 1e3, 3)
                for share, part in (("p50", 0.5), ("p99", 0.99))
            }
            found[f"{name} {length}"] = figures
            print(f"{name:<7}{length:>7} tokens", json.dumps(figures), flush=True)
    print(json.dumps({"hosts": asked.hosts, "digests": asked.digests, "milliseconds": found}))


if __name__ == "__main__":
    main()
