"""Several engines of one model, where the rest of the server expects one (`engine_client/client.py`).

Each request goes to the engine that the router chooses (`routing/`). When an engine dies, is given up or is drained for
a restart, each of its requests is continued by another engine with the same tokens (`relay.py`). Its reader notices a
pause. While no engine can take a request it waits here, until its deadline at most.

*Deaths are attributed.* A request may be continued `MAX_REPLAYS` times, not counting drains, which somebody asks for
and no request causes. So a request that ends every engine ends `MAX_REPLAYS` + 1 of them and then itself. Requests
whose engine has died are kept apart where there are engines enough: the next death then tells which one it was, and its
companions have used up one replay only.

*The same bits.* An answer that has begun is continued only by an engine whose bits are the same (`Ready.bits`). Where
an engine's bits depend on what else runs, its requests end with it, as those of a single engine do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from weakref import WeakSet

from attar.protocol import block_digests
from attar.protocol.messages import CachedBlocks, Embed, Failed, Finished, Ready, Report, Stats, Submit
from attar.routing.router import Asked, Router
from attar.server.admission.fair_queue import FairQueue
from attar.server.engine_client.client import Answer, EngineClient
from attar.server.engine_client.connection import AnswerEvent
from attar.server.engine_client.heartbeat import STUCK
from attar.server.engine_client.response_stream import Backlog, ResponseStream
from attar.server.replicas.observed import Health, total
from attar.server.replicas.relay import Relay
from attar.server.replicas.replica import Replica, handed_by

MAX_REPLAYS = 2  # of a request
RETRY_SECONDS = 0.05  # until a request that no engine had room for is routed again

logger = logging.getLogger(__name__)


class SharedQueue(FairQueue):
    """The queues of all engines together. One request's choices wait at one engine: `each` is what that one takes."""

    each = 0

    @property
    def most(self) -> int:
        """Places that a key may have while no other waits, and that one request may ask for."""
        return min(super().most, self.each)


class ReplicaGroup:
    """Some engines: those at Unix sockets, each on its `cores`, or those of other clients, with the `labels` that
    metrics give them. `stuck` and `keys` are `EngineClient`'s."""

    def __init__(
        self, engines: Sequence[Path | EngineClient], stuck: float = STUCK, keys: int = 0,
        cores: Sequence[tuple[int, ...]] = (), clock: Callable[[], float] = time.monotonic, labels: Sequence[str] = (),
    ) -> None:  # fmt: skip
        clients = [
            EngineClient(each, stuck, name=f"replica {at}") if isinstance(each, Path) else each
            for at, each in enumerate(engines)
        ]
        placed, named = list(cores) or [()] * len(clients), list(labels) or [""] * len(clients)
        self.replicas = [Replica(at, each, placed[at], named[at]) for at, each in enumerate(clients)]
        self.places, self.backlog, self.heartbeat = SharedQueue(keys), Backlog(), Health(self.replicas)
        self.router: Router | None = None
        """Made with the first engine that is ready, which tells the size of blocks."""
        self.open: dict[str, Relay] = {}
        """The engines' requests that have not ended, by id."""
        self.replays: Counter[str] = Counter()
        """Requests that were to be continued, by what became of it: one of REPLAYS."""
        self._streams: WeakSet[ResponseStream] = WeakSet()
        self._pending: deque[Relay] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._clock = clock
        for replica in self.replicas:
            self._attach(replica)

    def _attach(self, replica: Replica) -> None:
        client = replica.client
        client.begun = lambda: self._begun(replica)
        client.resumed = lambda: self._resumed(replica)
        client.cached = lambda told: self._cached(replica, told)
        client.lost = lambda gone: self._lost(replica, gone)
        client.stopped = lambda: self._stopped(replica)

    @property
    def ready(self) -> Ready | None:
        """The message of the first engine that is ready; None while there is none."""
        return next((each.client.ready for each in self.replicas if each.client.ready is not None), None)

    @property
    def stats(self) -> Stats | None:
        """The sums over all engines that have told theirs."""
        return total([each.client.stats for each in self.replicas if each.client.stats is not None])

    @property
    def recent_steps(self) -> list[tuple[int, int, int, float]]:
        """The last steps of all engines, one engine after another."""
        return [step for each in self.replicas for step in each.client.recent_steps]

    @property
    def was_ready(self) -> bool:
        """Whether any engine was ever ready."""
        return any(each.client.was_ready for each in self.replicas)

    @property
    def held(self) -> int:
        """Choices that have not been sent to an engine yet."""
        return sum(stream.held for stream in self._streams) + sum(relay.choices for relay in self._pending)

    @property
    def full_for(self) -> float:
        """Seconds until the first of the usable engines may have room, where all have said so."""
        return min((each.client.full_for for each in self.replicas if each.usable), default=0.0)

    def start(self) -> None:
        """Start connecting."""
        for each in self.replicas:
            each.client.start()

    async def close(self) -> None:
        """End open requests, and tell the engines to end."""
        for stream in list(self._streams):
            stream.cancel("shutdown")
        if self._timer is not None:
            self._timer.cancel()
        self._pending.clear()
        for each in self.replicas:
            each.client.lost = None
            await each.client.close()

    def ask(self, commands: Sequence[Submit | Embed], window: int) -> ResponseStream:
        """Send requests whose answers belong together, up to `window` choices at a time; their ids must be new."""
        stream = ResponseStream(commands, window, self._forward, self._drop, self.places, self.backlog)
        self._streams.add(stream)
        return stream.begin(self.ready is not None)

    async def reports(self, requests: Iterable[str]) -> dict[str, Report]:
        """Return the progress of requests by id, for those that an engine has and reports in time."""
        asked: dict[int, list[str]] = {}
        for each in requests:
            relay = self.open.get(each)
            if relay is not None and relay.engine is not None:
                asked.setdefault(relay.engine, []).append(each)
        told = await asyncio.gather(*(self.replicas[at].client.reports(own) for at, own in asked.items()))
        return {id: report for each in told for id, report in each.items()}

    async def drain(self, number: int, seconds: float) -> None:
        """Give an engine no new requests, wait for its open ones for `seconds`, and let others continue the rest."""
        replica = self.replicas[number]
        replica.draining = True
        end = self._clock() + seconds
        while replica.client.open and self._clock() < end and replica.client.ready is not None:
            await asyncio.sleep(0.02)
        relays = [relay for relay in self.open.values() if relay.engine == number]
        logger.info("replica %d is drained; requests to continue elsewhere: %d", number, len(relays))
        self._take_away(replica, relays, True)

    def give_up(self, number: int) -> bool:
        """Note that an engine's process will not be started again; return whether any other is left."""
        self.replicas[number].given_up = True
        return not all(each.given_up for each in self.replicas)

    # ---- from streams

    def _forward(self, stream: ResponseStream, commands: Sequence[Submit | Embed]) -> None:
        now = self._clock()
        for command in commands:
            relay = self.open[command.id] = Relay(self, stream, command, now)
            self._place(relay)

    def _drop(self, requests: Iterable[str], tell: bool) -> None:
        for request in requests:
            relay = self.open.pop(request, None)
            if relay is None:
                continue
            if relay.engine is not None:
                self.replicas[relay.engine].client.drop([request], tell)
                self._leave(relay)
            elif relay in self._pending:
                self._pending.remove(relay)

    # ---- routing

    def _place(self, relay: Relay) -> None:
        """Send a request, or let it wait. An exception ends its own answer alone."""
        try:
            if not self._send(relay):
                self._wait(relay)
        except Exception as error:
            logger.error("%s could not be routed: %s", relay.command.id, type(error).__name__)
            relay.stream.cancel("internal")

    def _send(self, relay: Relay) -> bool:
        """Send a request to the engine that the router chooses; return whether there was one."""
        router, command, now = self.router, relay.command, self._clock()
        passed = relay.declined | relay.left
        among = [each.number for each in self.replicas if each.usable and each.number not in passed]
        if relay.begun:
            among = [each for each in among if self._bits(each) == relay.bits]
        if router is None or not among:
            return False
        avoid = self._suspects() if relay.deaths else ()
        routed = router.route(command.id, self._asked(relay, among[0]), among, now, avoid)
        if routed is None:
            return False
        replica = self.replicas[routed.engine]
        relay.engine, relay.bits = routed.engine, relay.bits if relay.begun else self._bits(routed.engine)
        replica.routed += 1
        replica.cached += routed.cached
        replica.asked += len(command.prompt)
        replica.client.send(relay, [relay.next_command(now)])
        return True

    def _asked(self, relay: Relay, engine: int) -> Asked:
        ready, command = self.replicas[engine].client.ready, relay.command
        assert ready is not None
        if relay.digests is None:
            relay.digests = _digests(command, ready)
        return Asked(len(command.prompt) + relay.known, relay.digests, relay.choices)

    def _suspects(self) -> set[int]:
        """Return the engines that have a request with which another engine died."""
        return {each.engine for each in self.open.values() if each.deaths and each.engine is not None}

    def _bits(self, engine: int) -> str:
        ready = self.replicas[engine].client.ready
        return "" if ready is None else ready.bits

    def _leave(self, relay: Relay) -> None:
        relay.engine = None
        if self.router is not None:
            self.router.ended(relay.command.id)

    def _wait(self, relay: Relay) -> None:
        """Route a request again a little later, to any engine."""
        relay.declined.clear()
        self._pending.append(relay)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        self._timer = None
        waiting, self._pending = self._pending, deque()
        for relay in waiting:
            if self.open.get(relay.command.id) is relay:  # else an end before has ended its stream
                self._place(relay)

    # ---- from engines

    def heard(self, relay: Relay, event: AnswerEvent) -> None:
        """Take note of an event of a request before its reader does."""
        router, id = self.router, relay.command.id
        assert router is not None
        router.begun(id)
        if isinstance(event, Finished) and event.report is not None and not relay.replays:
            told = event.report
            computed = told.prompt_tokens - told.reused_tokens
            router.costs.learn(computed, told.prefill, event.completion_tokens, told.decode, 1)
            if relay.engine is not None and relay.digests is not None and self.replicas[relay.engine].client.deaf:
                router.prefixes.stored(relay.engine, relay.digests)

    def refused(self, relay: Relay, failed: Failed) -> None:
        """Send a request elsewhere that its engine had no room for, or gave up at its own end. A request that is new,
        and that no engine has room for, is refused."""
        number, id = relay.engine, relay.command.id
        if number is not None:
            self.replicas[number].client.drop([id], False)
            self._leave(relay)
        if failed.code != "full":
            if number is not None:
                relay.left.add(number)
            drained = number is not None and (self.replicas[number].draining or self.replicas[number].client.draining)
            self._continue([relay], drained)
            return
        if number is not None:
            relay.declined.add(number)
        if self._send(relay):
            return
        if relay.begun or relay.replays:
            self._wait(relay)
        else:
            self.open.pop(id, None)
            relay.stream.put(failed)

    def _begun(self, replica: Replica) -> None:
        ready = replica.client.ready
        assert ready is not None
        if self.router is None:
            self.router = Router(len(self.replicas), ready.block_size)
        replica.strange = ready.block_size != self.router.block or not self._alike(ready)
        if replica.strange:
            logger.error("replica %d serves another model, or other settings: it gets no requests", replica.number)
        self._resumed(replica)
        self.router.begin(replica.number, ready.blocks, ready.max_waiting + ready.max_running)
        if not ready.bits:
            logger.warning("replica %d: its bits depend on what runs beside: no answer is continued", replica.number)
        self._count_places()
        if blocks_at := handed_by(self.replicas, replica, self.router.prefixes.held):
            replica.client.take_over(blocks_at)

    def _resumed(self, replica: Replica) -> None:
        for relay in self.open.values():
            relay.left.discard(replica.number)

    def _alike(self, ready: Ready) -> bool:
        others = [each.client.ready for each in self.replicas if each.client.ready is not None]
        return all((each.model, each.vocab_size, each.adapters) == (ready.model, ready.vocab_size, ready.adapters)
                   for each in others)  # fmt: skip

    def _count_places(self) -> None:
        told = [each.client.ready for each in self.replicas if each.client.ready is not None]
        if told:
            self.places.size = sum(each.max_waiting for each in told)
            self.places.slots = sum(each.max_running for each in told)
            self.places.each = max(each.max_waiting for each in told)

    def _cached(self, replica: Replica, told: CachedBlocks) -> None:
        assert self.router is not None
        if told.whole:
            self.router.prefixes.clear(replica.number)
        self.router.prefixes.evicted(replica.number, block_digests.unpacked(told.evicted))
        self.router.prefixes.stored(replica.number, block_digests.unpacked(told.stored))

    def _lost(self, replica: Replica, gone: Mapping[str, Answer]) -> None:
        if self.router is not None:
            self.router.prefixes.clear(replica.number)
        self._count_places()
        relays = [relay for id, answer in gone.items() if (relay := self.open.get(id)) is answer and relay is not None]
        if not (replica.draining or replica.client.draining):
            replica.deaths += 1
            for relay in relays:
                relay.deaths.append(replica.number)
        self._continue(relays, replica.draining or replica.client.draining)

    def _stopped(self, replica: Replica) -> None:
        """Take the requests of an engine that does not run to others. It may be continued, so it is not ended, and a
        request that nothing else may continue stays."""
        if any(each.usable for each in self.replicas):
            relays = [each for each in self.open.values() if each.engine == replica.number]
            self._take_away(replica, [each for each in relays if self._may_go_on(each)])

    def _take_away(self, replica: Replica, relays: Sequence[Relay], drained: bool = False) -> None:
        if relays:
            replica.client.abandon([relay.command.id for relay in relays])
            for relay in relays:
                relay.left.add(replica.number)
            self._continue(relays, drained)

    def _may_go_on(self, relay: Relay, drained: bool = False) -> bool:
        return (drained or relay.counted < MAX_REPLAYS) and (bool(relay.bits) or not relay.begun)

    def _continue(self, relays: Sequence[Relay], drained: bool = False) -> None:
        """Let other engines continue requests, or end those that none may continue. That their engine was `drained`
        does not count against them."""
        for relay in relays:
            self._leave(relay)
        for relay in relays:
            if self.open.get(relay.command.id) is not relay:
                continue  # an end before has ended its stream
            if not self._may_go_on(relay, drained):
                outcome = "exhausted" if not drained and relay.counted >= MAX_REPLAYS else "inexact"
                logger.error("%s ends: %s, engines that died with it: %s", relay.command.id, outcome, relay.deaths)
                self.replays[outcome] += 1
                relay.stream.cancel("shutdown")
            else:
                relay.replays += 1
                relay.counted += not drained
                relay.stream.replays += 1
                self.replays["continued"] += 1
                relay.declined.clear()
                self._place(relay)


def _digests(command: Submit | Embed, ready: Ready) -> Sequence[int]:
    """Return the digests of a prompt's whole blocks, as its engine has them; none for numbers that are no tokens, which
    the engine will refuse."""
    adapter = 0 if not command.adapter else 1 + ready.adapters.index(command.adapter)
    horizon = block_digests.horizon_of(ready.horizons, len(command.prompt))
    key = block_digests.key_of(block_digests.salt_of(adapter, command.cache_salt, horizon))
    try:
        return block_digests.chain(key, array("i", command.prompt), ready.block_size)
    except OverflowError:
        return ()


REPLAYS = ("continued", "exhausted", "inexact")
"""What became of requests whose engine had gone.

continued: another engine took them up. exhausted: they had been continued as often as allowed. inexact: the bits of
their engine depend on what runs beside.
"""
