"""F8, F11: the engine killed or stopped under load, and the server told to end under load.

In all, 32 clients have streams open. After SIGKILL to the engine, each must get exactly one error and the end of its
stream, /readyz must say 503, and the server must come back by itself in the time that it needed to start, and 2 s,
besides what it waits on purpose after each further death.
While the engine is stopped, /readyz must say 503, and once it goes on, every stream must come to its own end. After
SIGTERM to the server, every open stream must come to its own end, what is new be refused, and the exit status be 0.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable

from attar.server.supervisor import waits
from soaks.served import Gate, Served
from soaks.wire import Address, Connection, Reply, once, request

CLIENTS = 32
KILLS = 5  # after a sixth within ten minutes the server would give up
DRAINS = 3
SEEN_BAR, BACK_BAR = 2.0, 2.0
DRAIN_SECONDS = 30.0
LONG = {"prompt": "Once", "max_tokens": 450, "ignore_eos": True, "stream": True}


def run(served: Served, tell: Callable[[str], None]) -> list[Gate]:
    """All of it; besides the one it is given it starts servers of its own."""
    gates = asyncio.run(_kills(served, tell))
    ends = []
    for number in range(DRAINS):
        tell(f"SIGTERM {number + 1}/{DRAINS}")
        one = Served("--drain-seconds", f"{DRAIN_SECONDS:g}")
        try:
            ends.append(asyncio.run(_drain(one)))
        finally:
            one.end()
    cut, statuses, seconds, orphans = (list(column) for column in zip(*ends, strict=True))
    return [
        *gates,
        Gate("SIGTERM: streams cut", f"{sum(cut)} of {DRAINS * CLIENTS}", "0", not any(cut)),
        Gate("SIGTERM: exit statuses", str(statuses), "0", not any(statuses)),
        Gate("SIGTERM: seconds to the end", f"{max(seconds):.1f}", f"<= {DRAIN_SECONDS + 1:g}",
             max(seconds) <= DRAIN_SECONDS + 1),
        Gate("SIGTERM: processes left", str(sum(orphans)), "0", not any(orphans)),
    ]  # fmt: skip


async def _kills(served: Served, tell: Callable[[str], None]) -> list[Gate]:
    told, unready, back, wrong = [], [], [], 0
    for number in range(KILLS):
        tell(f"SIGKILL {number + 1}/{KILLS}")
        streams = await _streams(served.address)
        engine = served.engine()
        killed = time.perf_counter()
        os.kill(engine, signal.SIGKILL)
        down = asyncio.create_task(served.ready(503, 30))
        replies = await asyncio.gather(*(stream.end() for stream in streams))
        await down
        unready.append(down.result())
        told.append(max(reply.ended for reply in replies) - killed)
        wrong += sum(not _one_error(reply) for reply in replies)
        await served.ready()
        back.append(time.perf_counter() - killed - waits(number + 1))
        for stream in streams:
            stream.leave(rudely=False)
        after = await once(served.address, request("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 4}))
        wrong += after.status != 200
    tell("SIGSTOP")
    streams = await _streams(served.address)
    os.kill(served.engine(), signal.SIGSTOP)
    try:
        stopped = await served.ready(503, 30)
    finally:
        os.kill(served.engine(), signal.SIGCONT)
    cut = sum(not _whole(reply) for reply in await asyncio.gather(*(stream.end() for stream in streams)))
    bar = served.load_seconds + BACK_BAR
    return [
        Gate("SIGKILL: streams without exactly one error and an end", f"{wrong} of {KILLS * CLIENTS}", "0", not wrong),
        Gate("SIGKILL: the last of them told", f"{max(told):.2f} s", "<= 2 s", max(told) <= SEEN_BAR),
        Gate("SIGKILL: /readyz 503", f"{max(unready):.2f} s", "<= 2 s", max(unready) <= SEEN_BAR),
        Gate("SIGKILL: ready again", f"{max(back):.2f} s besides waits; the start took {served.load_seconds:.2f} s",
             f"<= {bar:.2f} s", max(back) <= bar),
        Gate("SIGSTOP: /readyz 503", f"{stopped:.2f} s", "<= 2 s", stopped <= SEEN_BAR),
        Gate("SIGSTOP, SIGCONT: streams cut", f"{cut} of {CLIENTS}", "0", not cut),
    ]  # fmt: skip


def _one_error(reply: Reply) -> bool:
    """Whether a stream was told of its end, once, in its own language, and then ended."""
    events = reply.events
    errors = sum("error" in event for event in events if event != "[DONE]")
    return reply.complete and errors == 1 and "error" in events[-1] and "[DONE]" not in events


def _whole(reply: Reply) -> bool:
    return reply.complete and reply.body.endswith(b"data: [DONE]\n\n")


async def _drain(served: Served) -> tuple[int, int, float, int]:
    """Streams cut, the exit status, seconds, and processes left."""
    streams = await _streams(served.address)
    engine = served.engine()
    began = time.perf_counter()
    served.process.send_signal(signal.SIGTERM)
    await served.ready(503, 5)
    refused = await once(served.address, request("POST", "/v1/completions", {"prompt": "Once"}))
    replies = await asyncio.gather(*(stream.end() for stream in streams))
    cut = sum(not _whole(reply) for reply in replies)
    try:
        status = await asyncio.to_thread(served.process.wait, DRAIN_SECONDS + 5)
    except subprocess.TimeoutExpired:
        status = -1
    seconds = time.perf_counter() - began
    return cut + (refused.status != 503), status, seconds, int(os.path.exists(f"/proc/{engine}"))


async def _streams(address: Address) -> list[Connection]:
    """Streams of which each has begun."""
    found = [await Connection.open(address) for _ in range(CLIENTS)]
    for each in found:
        each.begin(request("POST", "/v1/completions", LONG))
    await asyncio.gather(*(each.until(2) for each in found))
    return found
