"""Arrival times of requests: open and closed loop.

Open loop: requests are sent at times of their own, whatever the server does, as independent users behave; a server that
falls behind meets a growing queue. Times come from a trace or from a Poisson process, with gaps drawn from an
exponential distribution. Closed loop: a number of clients, each of which sends its next request when its last has
ended. The load adapts to the server, so a stall hides the requests that it kept from being sent. Latency of a closed
loop therefore does not answer "how long would users wait at this rate".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attar.errors import UserError
from attar.load.traces import Ask


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the way they are sent: at their times, or by `clients` that wait for their answers."""

    asks: tuple[Ask, ...]
    clients: int | None = None  # None: open loop
    rate: float | None = None  # requested requests a second
    warm: int = 0  # requests at the beginning that are not counted

    @property
    def label(self) -> str:
        if self.clients is not None:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return "trace" if self.rate is None else f"{self.rate:g}/s"


def poisson(asks: Sequence[Ask], rate: float, seed: int = 0) -> Load:
    """Return the requests in their order, `rate` of them a second on average, as a Poisson process.

    The first is sent at the first arrival, not at once: 0 is no arrival of the process. Raises ValueError for a rate
    that is not positive.
    """
    _check(rate)
    numbers, now, timed = random.Random(f"arrivals {seed}"), 0.0, []
    for ask in asks:
        now += numbers.expovariate(1.0) / rate  # the same pattern at every rate, only faster
        timed.append(replace(ask, at=now))
    return Load(tuple(timed), rate=rate)


def as_recorded(asks: Sequence[Ask], rate: float | None = None) -> Load:
    """Return the requests at the times of the trace, all stretched by one factor to `rate` requests a second where
    given.

    Raises ValueError where the trace has no times to stretch.
    """
    if rate is None:
        return Load(tuple(asks))
    _check(rate)
    span = asks[-1].at - asks[0].at
    if span <= 0:
        raise UserError("trace_malformed", "all requests arrive at once: there are no times to stretch to a rate")
    factor = (len(asks) - 1) / span / rate
    return Load(tuple(replace(ask, at=ask.at * factor) for ask in asks), rate=rate)


def closed(asks: Sequence[Ask], clients: int, ramp: float | None = None) -> Load:
    """Return the requests for `clients` clients, in order, each sent as soon as a client is free.

    All clients begin at once. With `ramp` they begin evenly over so many seconds, and the first request of each is not
    counted, so that no queue of the beginning is. Raises ValueError below one client.
    """
    if clients < 1:
        raise UserError("option_out_of_range", f"a closed loop has at least one client, not {clients}")
    if ramp is None:
        return Load(tuple(replace(ask, at=0.0) for ask in asks), clients)
    begins = [ramp * number / clients for number in range(clients)] + [0.0] * max(0, len(asks) - clients)
    timed = tuple(replace(ask, at=at) for ask, at in zip(asks, begins, strict=False))
    return Load(timed, clients, warm=min(clients, len(asks)))


def _check(rate: float) -> None:
    if not 0 < rate <= 1e6:
        raise UserError("option_out_of_range", f"a rate is requests a second, above 0, not {rate:g}")
