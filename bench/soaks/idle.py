"""L4: 2,000 connections over which nothing is asked, and 500 whose request comes a byte at a time.

All are open while /livez is asked by others, each on a connection of its own, as a balancer does. How long each of the
slow is let go on is seen from here; what all of them cost is read off the server's memory. The idle have asked once, so
that they are kept for the next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from soaks.mixed import LAG_BAR
from soaks.served import Gate, Served, rest
from soaks.wire import Address, Connection, once, percentile, request

IDLE, SLOW = 2000, 500
AT_ONCE = 50  # connections that are made together
BYTES_APART = 1.0  # seconds between two bytes of a slow request
EVERY = 0.05  # seconds between two looks at /livez
LIVE_BAR, SLOW_BAR, MEMORY_BAR = 0.25, 10.0 + BYTES_APART, 40 << 20
LIVE = request("GET", "/livez")


async def run(served: Served, seconds: float, tell: Callable[[str], None]) -> list[Gate]:
    """All of it. The server must be idle."""
    address = served.address
    before = served.look()[0]
    tell(f"{IDLE} idle connections")
    idle = await _many(IDLE, lambda: _idle(address))
    tell(f"{SLOW} slow ones")
    slow = [asyncio.create_task(_slow(address)) for _ in range(SLOW)]
    looks, wrong, end = list[float](), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        sent = time.perf_counter()
        reply = await once(address, LIVE)
        looks.append(time.perf_counter() - sent)
        wrong += reply.status != 200
        await asyncio.sleep(EVERY)
    most = served.look()[0].anonymous - before.anonymous
    lasted = await asyncio.gather(*slow)
    gone = sum(each.closed for each in idle)
    for each in idle:
        each.leave(rudely=False)
    settled, state = await rest(address)
    return [
        Gate("/livez, p50 / p99 / max", f"{1e3 * percentile(looks, 0.5):.1f} / {1e3 * percentile(looks, 0.99):.1f} / "
             f"{1e3 * max(looks):.1f} ms, {len(looks)} times, {wrong} wrong", "p99 <= 250 ms, 0 wrong",
             percentile(looks, 0.99) <= LIVE_BAR and not wrong),
        Gate("slow requests, until they were hung up on", f"{min(lasted):.1f} to {max(lasted):.1f} s", "<= 11 s",
             max(lasted) <= SLOW_BAR),
        Gate("idle connections that were closed", f"{gone} of {IDLE}"),
        Gate("memory of all", f"{most / 2**20:.1f} MiB", "<= 40 MiB", most <= MEMORY_BAR),
        Gate("idle after they left", f"{settled:.2f} s"),
        Gate("worst lag of the event loop", f"{1e3 * state.lag:.0f} ms", "<= 100 ms", state.lag <= LAG_BAR),
    ]  # fmt: skip


async def _many(count: int, make: Callable[[], asyncio.Future[Connection]]) -> list[Connection]:
    made: list[Connection] = []
    for at in range(0, count, AT_ONCE):
        made += await asyncio.gather(*(make() for _ in range(min(AT_ONCE, count - at))))
    return made


def _idle(address: Address) -> asyncio.Future[Connection]:
    async def make() -> Connection:
        connection = await Connection.open(address)
        assert (await connection.ask(LIVE)).status == 200
        return connection

    return asyncio.ensure_future(make())


async def _slow(address: Address) -> float:
    """Seconds until the server hangs up."""
    connection = await Connection.open(address)
    began, said = time.perf_counter(), request("POST", "/v1/completions", {"prompt": "a" * 500})
    for at in range(len(said)):
        if connection.closed:
            break
        connection.transport.write(said[at : at + 1])
        await asyncio.sleep(BYTES_APART)
    connection.leave(rudely=False)
    return time.perf_counter() - began
