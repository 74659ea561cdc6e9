"""Several engines as one: their health and the sums of their states, for routes and metrics that know one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from attar.protocol.messages import Stats
from attar.server.replicas.replica import Replica


class Health:
    """The health of several engines: that of the best. The names are those of `heartbeat.Heartbeat`."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    def trouble(self) -> str | None:
        """A sentence about what is wrong with every connected engine; None if one is well."""
        return self._best("trouble")

    @property
    def slow(self) -> str | None:
        """A sentence where the step of every engine takes far longer than any before; else None."""
        return self._best("slow")

    @property
    def longest(self) -> float:
        """Approximate seconds of the longest step of any engine."""
        return max(each.client.heartbeat.longest for each in self._replicas)

    def _best(self, name: str) -> str | None:
        told = [getattr(each.client.heartbeat, name) for each in self._replicas if each.client.ready is not None]
        return told[0] if told and all(each is not None for each in told) else None


def total(stats: Sequence[Stats]) -> Stats | None:
    """Return the sums of the engines' states, and all of their blocks in order; None where there is none."""
    if len(stats) < 2:
        return stats[0] if stats else None
    columns = zip(*(msgspec.structs.astuple(each) for each in stats), strict=True)
    return Stats(*(_sum([each for each in column if each is not None]) for column in columns))


def _sum(values: Sequence[Any]) -> Any:
    if not values:
        return None
    if isinstance(values[0], bytes):
        return b"".join(values)
    if isinstance(values[0], tuple):
        length = max(map(len, values))
        return tuple(sum(each[at] for each in values if at < len(each)) for at in range(length))
    return sum(values)
