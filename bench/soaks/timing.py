"""V21: whether the time to the first token tells one key what another key's requests held.

Two keys. In each pair, the second asks for a prompt that the first has just asked for ("hit"), and for one of the same
length that nobody has ("miss"; the first asks for something else just before, so that both follow the same work). The
area under the ROC curve of the two samples of times must lie close to a half. As a control, which shows that the test
would see a shared block, the second key repeats a prompt of its own: those times must stand apart.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable
from typing import IO

from soaks.served import Gate, Served
from soaks.wire import Connection, request

PAIRS = 2000
LENGTH = 192  # tokens of a prompt: a dozen blocks, and prefill enough to be seen
LOW, HIGH = 0.45, 0.55
APART = 0.95
FIRST, SECOND = "sk-first-" + "a" * 24, "sk-second-" + "b" * 24


def key_file() -> IO[str]:
    """A file of both keys, there as long as it is open."""
    file = tempfile.NamedTemporaryFile("w")  # noqa: SIM115 - of mode 600, as keys must be
    file.write(f"{FIRST}\n{SECOND}\n")
    file.flush()
    return file


async def run(served: Served, pairs: int, tell: Callable[[str], None]) -> list[Gate]:
    """`served` was started with `key_file()`."""
    draw = random.Random(0)
    connection = await Connection.open(served.address)

    async def seconds(key: str, prompt: list[int]) -> float:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        reply = await connection.ask(request("POST", "/v1/completions", body, Authorization=f"Bearer {key}"))
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.body[:200]!r}")
        return time.perf_counter() - began

    def fresh() -> list[int]:
        return [draw.randrange(256, 2048) for _ in range(LENGTH)]

    hits: list[float] = []
    misses: list[float] = []
    own: list[float] = []
    try:
        for number in range(pairs):
            for hit in draw.sample((True, False), 2):
                prompt = fresh()
                await seconds(FIRST, prompt if hit else fresh())
                (hits if hit else misses).append(await seconds(SECOND, prompt))
                if number % 10 == 0 and hit:
                    own.append(await seconds(SECOND, prompt))
            if number % 50 == 0:
                tell(f"{number}/{pairs} pairs")
    finally:
        connection.transport.abort()
    across, within = area(hits, misses), area(own, misses)
    error = math.sqrt((2 * pairs + 1) / (12 * pairs * pairs))  # of an area under no difference (Hanley, McNeil 1982)
    return [
        Gate("another key's prompt, AUC", f"{across:.3f} (standard error {error:.3f}, {pairs} pairs)",
             f"{LOW} to {HIGH}", LOW <= across <= HIGH, timed=True),
        Gate("one's own prompt, AUC", f"{within:.3f} ({len(own)} of them)", f">= {APART}", within >= APART, timed=True),
    ]  # fmt: skip


def area(faster: list[float], slower: list[float]) -> float:
    """The chance that one of `faster` is below one of `slower`: the area under the ROC curve, by ranks."""
    ranked = sorted([(value, True) for value in faster] + [(value, False) for value in slower])
    below = wins = 0
    for _, one in reversed(ranked):
        if one:
            wins += below
        else:
            below += 1
    return wins / (len(faster) * len(slower))
