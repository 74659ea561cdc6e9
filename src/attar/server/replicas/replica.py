"""One engine of a group: its connection, its cores, its state and what was counted of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attar.server.engine_client.client import EngineClient


class Replica:
    """One engine of the group, that of `client`. Metrics call it `label`."""

    def __init__(self, number: int, client: EngineClient, cores: tuple[int, ...] = (), label: str = "") -> None:
        self.number, self.client, self.cores, self.label = number, client, cores, label or str(number)
        self.draining = False
        """Whether it takes no new requests, because it is to be restarted."""
        self.given_up = False
        """Whether no process will be started for it any more."""
        self.strange = False
        """Whether its last engine serves something else than the others."""
        self.deaths = self.restarts = self.routed = 0
        self.cached = self.asked = 0  # prompt tokens of routed requests that were cached there, and all of them

    @property
    def usable(self) -> bool:
        """Whether it takes requests."""
        well = self.client.ready is not None and self.client.heartbeat.trouble is None
        return well and not (self.draining or self.client.draining or self.strange)

    @property
    def state(self) -> str:
        """One of STATES."""
        if self.given_up:
            return "failed"
        if self.draining or (self.client.draining and self.client.ready is not None):
            return "draining"
        if self.client.ready is None:
            return "down" if self.client.was_ready else "loading"
        if self.strange:
            return "strange"
        return "ready" if self.client.heartbeat.trouble is None else "stuck"

    def told(self) -> dict[str, Any]:
        """Return its state for JSON."""
        return {
            "replica": self.number, **self.client.told, "state": self.state, "processors": self.cores,
            "open": len(self.client.open), "deaths": self.deaths, "restarts": self.restarts, "requests": self.routed,
            "prompt_tokens": self.asked, "cached_prompt_tokens": self.cached, "stats": self.client.stats,
        }  # fmt: skip


def handed_by(replicas: Sequence[Replica], new: Replica, held: Callable[[int], int]) -> str:
    """Return where the engine of `new`, which has just become ready, may take over cached blocks: from the engine of
    equal bits that has most of them. `held` tells how many by number. Empty where there are none, or it cannot."""
    ready, most, found = new.client.ready, 0, ""
    if ready is None or not ready.blocks_at or new.strange:
        return ""
    for each in replicas:
        other = each.client.ready
        if each is new or other is None or not each.usable or other.bits != ready.bits or not other.blocks_at:
            continue
        if (count := held(each.number)) > most:
            most, found = count, other.blocks_at
    return found


STATES = ("loading", "ready", "draining", "down", "stuck", "strange", "failed")
"""States of a replica.

loading: its first engine has not been ready. draining: it is being restarted, or its host ends. down: its engine died,
and another starts. stuck: its process is stopped, or in a step without end. strange: it serves something else than the
others. failed: it is given up.
"""
