"""L5: 64 readers of a kilobyte a second and 64 that never read, beside readers that keep up.

The slow ask for long streams with log probabilities, more than the buffers hold. What is compared is the gap between
tokens of eight others, once while 128 prompt readers ask for the very same, and for as long while the 128 do not read:
the engine has the same to do (less, where it drops those who fall behind). What the server keeps for the slow is read
off its memory and off the kernel's send queues. When the server hangs up on them is seen without reading.
"""

from __future__ import annotations

import asyncio
import random
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soaks.mixed import LAG_BAR, WORDS
from soaks.served import Gate, Served, rest
from soaks.wire import RECEIVE_BUFFER, Address, Connection, percentile, request

SLOW = NEVER = 64
OTHERS = 8
OPTIONS = ("--max-running", "160")
STALL_SECONDS = 30.0  # documented
ALONE_SECONDS = 10.0
BUFFER_BAR = 256 << 10
GAP_BAR = 1.1
RATE = 1024  # bytes a second
INTERVAL = 0.25  # seconds between looks
GREEDY = {"prompt": "It was", "max_tokens": 480, "ignore_eos": True, "stream": True, "logprobs": 5}


class Reader:
    """A client by a plain socket, that reads `rate` bytes a second or nothing."""

    def __init__(self, address: Address, rate: int) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        self.sock.connect((address.host, address.port))
        self.sock.sendall(request("POST", "/v1/completions", GREEDY))
        self.sock.setblocking(False)
        self.rate, self.sent, self.ended = rate, time.perf_counter(), 0.0
        self._poll = select.poll()
        self._poll.register(self.sock, 0)  # errors and the end are told unasked

    def look(self, interval: float) -> None:
        """Read what the rate allows in `interval`, and see whether the server is still there."""
        if self.ended:
            return
        try:
            gone = self.rate and self.sock.recv(int(self.rate * interval)) == b""
        except BlockingIOError:
            gone = False
        except OSError:
            gone = True
        if gone or self._poll.poll(0):
            self.ended = time.perf_counter() - self.sent


async def run(served: Served, seconds: float, tell: Callable[[str], None]) -> list[Gate]:
    """All of it. The server must be idle."""
    tell("others alone")
    alone = await _others(served.address, asyncio.create_task(asyncio.sleep(ALONE_SECONDS)))
    tell("with 128 that read")
    prompt = [asyncio.create_task(_prompt(served.address)) for _ in range(SLOW + NEVER)]
    began = time.perf_counter()
    beside = await _others(served.address, asyncio.gather(*prompt))
    took = time.perf_counter() - began
    await rest(served.address)
    before = served.look()[0]
    readers = [Reader(served.address, RATE) for _ in range(SLOW)] + [Reader(served.address, 0) for _ in range(NEVER)]
    watching = asyncio.create_task(_watch(served, readers, seconds, tell))
    with_slow = await _others(served.address, asyncio.create_task(asyncio.sleep(took)))
    held_up = await _others(served.address, watching)
    most_memory, most_queued, filled = await watching
    for reader in readers:
        reader.sock.close()
    settled, state = await rest(served.address)
    each = (most_memory - before.anonymous) / (SLOW + NEVER) + most_queued
    never = [reader.ended for reader in readers[SLOW:]]
    slow = [reader.ended for reader in readers[:SLOW] if reader.ended]
    gap, bar = percentile(with_slow, 0.99), GAP_BAR * percentile(beside, 0.99)
    held = seconds > STALL_SECONDS + 10
    return [
        Gate("kept for each slow reader", f"{each / 1024:.0f} KiB: {(most_memory - before.anonymous) / 2**20:.1f} MiB "
             f"of memory in all, and at most {most_queued >> 10} KiB in the kernel", "<= 256 KiB", each <= BUFFER_BAR),
        Gate("those who never read, hung up on", f"{sum(map(bool, never))} of {NEVER}, "
             f"{min(never):.1f} to {max(never):.1f} s after their request; buffers were full at {filled:.1f} s",
             "all, within 30 s of that, and 2 s",
             (all(never) and max(never) <= filled + STALL_SECONDS + 2) if held else None),
        Gate("those of 1 KB/s, hung up on", f"{len(slow)} of {SLOW}" + (
             f", {min(slow):.1f} to {max(slow):.1f} s" if slow else "")),
        Gate("gap between others' tokens, p99", f"{1e3 * gap:.1f} ms; beside 128 that read "
             f"{1e3 * percentile(beside, 0.99):.1f} ms, alone {1e3 * percentile(alone, 0.99):.1f} ms",
             "+ <= 10 %", gap <= bar),
        Gate("the same, once the engine is done with the 128", f"{1e3 * percentile(held_up, 0.99):.1f} ms; alone "
             f"{1e3 * percentile(alone, 0.99):.1f} ms"),
        Gate("blocks active at the end", f"{state.active}, after {settled:.2f} s", "0", state.active == 0),
        Gate("worst lag of the event loop", f"{1e3 * state.lag:.0f} ms", "<= 100 ms", state.lag <= LAG_BAR),
    ]  # fmt: skip


async def _watch(
    served: Served, readers: list[Reader], seconds: float, tell: Callable[[str], None]
) -> tuple[int, int, float]:
    """Drive the readers; returns the most memory that the server had, the most that a socket of it had to send, and
    when the send queues last grew, in seconds."""
    began, told, memory, most, all_queued, filled = time.perf_counter(), 0.0, 0, 0, 0, 0.0
    while (now := time.perf_counter() - began) < seconds:
        for reader in readers:
            reader.look(INTERVAL)
        memory = max(memory, served.look()[0].anonymous)
        queued = to_send(served.address.port)
        most = max([most, *queued])
        if sum(queued) > all_queued:
            all_queued, filled = sum(queued), now
        if now - told > 1:
            told = now
            tell(f"{now:.0f}/{seconds:.0f} s: {sum(not reader.ended for reader in readers)} slow ones connected")
        await asyncio.sleep(INTERVAL)
    return memory, most, filled


def to_send(port: int) -> list[int]:
    """Bytes that the kernel holds for each reader of a port, as /proc/net/tcp has them."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return [int(fields[4].partition(":")[0], 16) for fields in lines if int(fields[1].rpartition(":")[2], 16) == port]


async def _prompt(address: Address) -> None:
    connection = await Connection.open(address)
    await connection.ask(request("POST", "/v1/completions", GREEDY))
    connection.leave(rudely=False)


async def _others(address: Address, until: asyncio.Future[Any]) -> list[float]:
    """Gaps of the streams of those who read, as long as something else goes on."""
    gaps: list[float] = []

    async def one(rng: random.Random) -> None:
        connection = await Connection.open(address)
        while not until.done():
            body = {"prompt": " ".join(rng.choices(WORDS, k=20)), "max_tokens": 64, "ignore_eos": True, "stream": True}
            reply = await connection.ask(request("POST", "/v1/completions", body))
            if reply.status != 200 or not reply.complete:
                raise RuntimeError(f"one of the others got {reply.status}, {reply.body[-200:]!r}")
            gaps.extend(reply.gaps())
        connection.leave(rudely=False)

    await asyncio.gather(*(one(random.Random(number)) for number in range(OTHERS)))
    return gaps
