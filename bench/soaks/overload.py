"""L3: ten times the clients that the server has slots for, refused at the door, or, in `queue`, by a full queue alone.

The plateau is what as many clients as slots (64; 16 in `queue`) get, each asking again as soon as it has its answer:
tokens a second of answers that came whole, in a window that leaves the first seconds out. It is measured before and
after, and its mean counts, because a machine's speed drifts. The load is then ten clients a slot, with connections that
they keep, who wait as long as Retry-After says, and up to a second more, before they ask again. Everything else is the
same, prompts that nobody has sent before included, and the same process makes both loads; what it and the server's two
processes take of the cores is shown. When the load ends its clients hang up, and the time until the engine is idle
counts from there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from soaks.mixed import LAG_BAR, WORDS
from soaks.served import Gate, Served, rest
from soaks.wire import Address, Connection, Reply, percentile, request

SLOTS, TIMES = 64, 10  # and clients for each slot
OPTIONS = ("--max-running", str(SLOTS), "--max-requests", "256")
QUEUE_SLOTS = 16
QUEUE_OPTIONS = ("--preset", "latency", "--max-running", str(QUEUE_SLOTS), "--max-requests", "1024")
PLATEAU_SECONDS = 20.0
WARM_UP = 4.0
TOKENS = (32, 96)  # of an answer: were all as long, they would all start and end together
REFUSAL_BAR, GOODPUT_BAR, GAP_BAR, IDLE_BAR = 0.1, 0.95, 1.5, 5.0


@dataclass
class Window:
    """What was seen between `start` and `end`."""

    start: float
    end: float
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.tokens / (self.end - self.start)

    def note(self, reply: Reply, tokens: int) -> None:
        """Count an answer that was to have so many tokens, by when it ended."""
        if not self.start <= reply.ended <= self.end:
            return
        if reply.status == 429 and reply.complete and "retry-after" in reply.headers:
            self.refusals.append(reply.ended - reply.sent)
        elif reply.status == 200 and reply.complete and reply.body.endswith(b"data: [DONE]\n\n"):
            self.tokens += tokens  # eos is ignored
            self.gaps += reply.gaps()
        else:
            self.wrong[f"{reply.status}{'' if reply.complete else ', cut'}"] += 1


async def run(served: Served, seconds: float, tell: Callable[[str], None], slots: int = SLOTS) -> list[Gate]:
    """All of it. The server must be idle."""
    shares: list[str] = []
    windows = []
    idles = []
    steps: list[str] = []
    _, state = await rest(served.address)
    reused: list[str] = []
    loads = ((slots, PLATEAU_SECONDS), (TIMES * slots, seconds), (slots, PLATEAU_SECONDS))
    for phase, (clients, length) in enumerate(loads):
        tell(f"{clients} clients for {length:g} s")
        before, began, own = served.look(), time.perf_counter(), time.process_time()
        windows.append(await _load(served.address, clients, length, phase))
        last_state = state
        settled, state = await rest(served.address)
        idles.append(settled)
        count, busy = state.steps - last_state.steps, state.step_seconds - last_state.step_seconds
        took, after = time.perf_counter() - began, served.look()
        asked, hit = state.asked - last_state.asked, state.reused - last_state.reused
        reused.append(f"{hit / max(1, asked):.1%}")
        steps.append(f"{count / took:.1f} x {1e3 * busy / max(1, count):.1f} ms")
        used = [(b.cpu - a.cpu) / took for a, b in zip(before, after, strict=True)]
        shares.append(f"{used[0]:.2f} + {used[1]:.2f} + {(time.process_time() - own) / took:.2f}")
    first, over, last = windows
    plateau = (first.rate + last.rate) / 2
    gap = percentile(first.gaps + last.gaps, 0.99)
    wrong = first.wrong + over.wrong + last.wrong
    p99 = percentile(over.refusals, 0.99)
    return [
        Gate("plateau, before and after", f"{first.rate:.0f} and {last.rate:.0f} tokens/s"),
        Gate("goodput under overload", f"{over.rate:.0f} tokens/s = {over.rate / plateau:.1%} of the plateau",
             ">= 95 %", over.rate >= GOODPUT_BAR * plateau),
        Gate("refusals", f"{len(over.refusals)}, {len(over.refusals) / (over.end - over.start):.0f} a second"),
        Gate("refusals: time to the whole 429, p50 / p99 / max", f"{1e3 * percentile(over.refusals, 0.5):.1f} / "
             f"{1e3 * p99:.1f} / {1e3 * max(over.refusals, default=0):.1f} ms", "p99 <= 100 ms",
             bool(over.refusals) and p99 <= REFUSAL_BAR),
        Gate("gap between tokens, p99", f"{1e3 * percentile(over.gaps, 0.99):.1f} ms; plateau {1e3 * gap:.1f} ms",
             "<= 1.5 x", percentile(over.gaps, 0.99) <= GAP_BAR * gap),
        Gate("neither a whole stream nor 429 with Retry-After", f"{wrong.total()} {dict(wrong) or ''}".strip(), "0",
             not wrong),
        Gate("idle after the load", f"{idles[1]:.2f} s", "<= 5 s", idles[1] <= IDLE_BAR),
        Gate("worst lag of the event loop", f"{1e3 * state.lag:.0f} ms", "<= 100 ms", state.lag <= LAG_BAR),
        Gate("cores taken: server + engine + load", "; ".join(shares)),
        Gate("steps a second, and their length", "; ".join(steps)),
        Gate("of prompts taken from the cache", "; ".join(reused)),
    ]  # fmt: skip


async def _load(address: Address, clients: int, seconds: float, phase: int) -> Window:
    """So many clients for so long, and then none."""
    start = time.perf_counter() + WARM_UP
    window = Window(start, start + seconds)
    tasks = []
    for number in range(clients):
        tasks.append(asyncio.create_task(_client(address, random.Random(f"{phase} {number}"), window)))
        if number % SLOTS == SLOTS - 1:
            await asyncio.sleep(0.1)  # connections come by and by: this is not about accepting them
    await asyncio.sleep(window.end - time.perf_counter())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and task.exception() is not None:
            raise RuntimeError(f"a client failed: {task.exception()!r}")
    return window


async def _client(address: Address, rng: random.Random, window: Window) -> None:
    connection = await Connection.open(address)
    try:
        while True:
            prompt, tokens = " ".join(rng.choices(WORDS, k=24)), rng.randint(*TOKENS)
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1}
            asked, refused = request("POST", "/v1/completions", body), True
            while refused:  # and asks the same again
                if connection.closed:
                    connection = await Connection.open(address)
                reply = await connection.ask(asked)
                window.note(reply, tokens)
                refused = reply.status == 429
                if refused:
                    await asyncio.sleep(int(reply.headers.get("retry-after", "1")) + rng.random())
                elif not reply.complete:
                    await asyncio.sleep(0.1)
    finally:
        connection.leave(rudely=False)
