"""What a request router knows of replicas, and the choice among them by cost (`routing/`).

Replicas come and go under names. The scorer numbers them, feeds their cached blocks to the router of `routing/`, and
asks it. Its time is an argument.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from attar.integrations.ray.wire import Told
from attar.protocol import block_digests
from attar.protocol.messages import CachedBlocks, Embed, Ready, Submit
from attar.routing.router import Asked, Router

MOST = 256  # replicas


class Scorer:
    """The replicas of one deployment, by id."""

    def __init__(self) -> None:
        self._router: Router | None = None
        self._numbers: dict[str, int] = {}
        self._free = list(range(MOST))
        self._ready: dict[str, Ready] = {}

    def hear(self, replica: str, told: Told) -> None:
        """Take note of what a replica tells. More than MOST replicas at a time are not known."""
        if told.lost:
            self.lose(replica)
        for event in told.events:
            if isinstance(event, Ready):
                self._begin(replica, event)
            elif isinstance(event, CachedBlocks) and (number := self._numbers.get(replica)) is not None:
                assert self._router is not None
                prefixes = self._router.prefixes
                if event.whole:
                    prefixes.clear(number)
                prefixes.evicted(number, block_digests.unpacked(event.evicted))
                prefixes.stored(number, block_digests.unpacked(event.stored))

    def lose(self, replica: str) -> None:
        """Forget a replica."""
        self._ready.pop(replica, None)
        if (number := self._numbers.pop(replica, None)) is not None:
            assert self._router is not None
            self._router.begin(number, 0, 0)
            for id in [id for id, routed in self._router.routed.items() if routed.engine == number]:
                self._router.ended(id)
            self._free.append(number)

    def choose(self, id: str, command: Submit | Embed, among: Collection[str], now: float) -> str | None:
        """Choose one of the replicas `among` for a request; None where none of them is known to be ready with room for
        it. An id that was chosen for before is chosen for anew."""
        self.ended(id)
        able = {number: each for each in among if (number := self._numbers.get(each)) is not None}
        if self._router is None or not able:
            return None
        ready = self._ready[next(iter(able.values()))]
        if command.adapter and command.adapter not in ready.adapters:
            digests = array("Q")  # the engine will refuse it
        else:
            digests = digests_of(command, ready)
        choices = command.n if isinstance(command, Submit) else 1
        routed = self._router.route(id, Asked(len(command.prompt), digests, choices), able, now)
        return None if routed is None else able[routed.engine]

    def ended(self, id: str) -> None:
        """Note that a request has ended; unknown ones are ignored."""
        if self._router is not None:
            self._router.ended(id)

    def _begin(self, replica: str, ready: Ready) -> None:
        if self._router is None:
            self._router = Router(MOST, ready.block_size)
        if ready.block_size != self._router.block:
            self.lose(replica)
            return
        if replica not in self._numbers:
            if not self._free:
                return
            self._numbers[replica] = self._free.pop(0)
        self._ready[replica] = ready
        self._router.begin(self._numbers[replica], ready.blocks, ready.max_waiting + ready.max_running)


def digests_of(command: Submit | Embed, ready: Ready) -> array[int]:
    """Return the digests of a prompt's whole blocks, as its engine has them; none for numbers that are no tokens."""
    adapter = 0 if not command.adapter else 1 + ready.adapters.index(command.adapter)
    horizon = block_digests.horizon_of(ready.horizons, len(command.prompt))
    key = block_digests.key_of(block_digests.salt_of(adapter, command.cache_salt, horizon))
    try:
        return block_digests.chain(key, array("i", command.prompt), ready.block_size)
    except OverflowError:
        return array("Q")
