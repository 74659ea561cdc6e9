"""A replica of the deployment `Engine`: one of attar's engines, a child process as under `attar serve`.

The replica passes requests to its engine's socket, and events back. It holds no model, so a crash of the engine ends
neither the replica nor Ray's worker. A new engine is started, as by `attar serve`; a replica whose engine keeps dying
fails its health check, and Serve replaces it.

Each item of a stream costs Ray about half a millisecond. So the first event of a request is sent at once, and later
ones are gathered for as long as ITEMS_PER_SECOND asks of all streams of the replica together.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attar.errors import UserError
from attar.integrations.ray import exposure, wire
from attar.integrations.ray.wire import State, Told
from attar.protocol import block_digests
from attar.protocol.messages import (
    CachedBlocks,
    Embed,
    Embedding,
    Failed,
    Finished,
    RequestStatus,
    Submit,
)
from attar.protocol.settings import Settings
from attar.routing.costs import Costs
from attar.server.engine_client.client import Answer, EngineClient
from attar.server.engine_client.connection import AnswerEvent, Event
from attar.server.supervisor import EngineProcess, private_socket

COMMAND = (sys.executable, "-m", "attar.engine.main")  # of an engine's process
ITEMS_PER_SECOND = 50  # of all streams of a replica, first items apart
MAX_PAUSE = 0.05  # seconds between two items of a stream, at most
GATHER_SECONDS = 0.02  # between two items of a watch
MAX_TOLD = 1024  # events that may wait for a watcher; then it gets the whole state instead
MAX_WATCHERS = 64
LEASE_SECONDS = 5.0  # of a watch


class Engine:
    """The user class of the deployment. `settings` are those of the engine (`protocol/settings.py`), as plain values.
    An `insecure` replica runs on a node that listens beyond loopback, `http` is the port of the HTTP server, and
    `command` starts an engine's process."""

    _process: EngineProcess | None = None
    _ended = False

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Mapping[str, Any], insecure: bool = False, http: int = 0, command: Sequence[str] = COMMAND
    ) -> None:
        exposure.require(insecure, http)
        exposure.narrow_replica_port()
        self._insecure, self._http = insecure, http
        self._stack = contextlib.ExitStack()
        path = self._stack.enter_context(private_socket())
        placed = msgspec.structs.replace(msgspec.convert(settings, Settings), socket=str(path), tells_cache=True)
        self._status: int | None = None  # of an engine that was given up
        self._requests: dict[str, Collected] = {}
        self.costs = Costs()
        self.client = Tapped(path)
        self.client.lost = self._lost
        process = self._process = EngineProcess(command, placed, lambda: self.client.was_ready, self._gave_up)
        self.client.hung = process.kill
        process.start()
        self.client.start()
        while self.client.ready is None:
            self._alive()
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        """End the engine."""
        self._ended = True
        if self._process is None:  # Serve calls this after a failed start, too
            return
        await self.client.close()
        await asyncio.get_running_loop().run_in_executor(None, self._process.end)
        self._stack.close()

    def __del__(self) -> Coroutine[None, None, None] | None:
        """Return what ends it, for Serve, which awaits that when it stops the replica; None where it has ended."""
        return None if self._ended else self.end()

    async def answer(self, data: bytes) -> AsyncIterator[bytes]:
        """Run a request (`wire.Order`), and yield its events (`wire.events`). The stream ends after the request's last
        event, or before it where the engine has died. Raises ValueError for other bytes, and for an id that runs."""
        async with contextlib.aclosing(self._run(data)) as found:
            async for events in found:
                yield wire.encode(events)

    async def whole(self, data: bytes) -> bytes:
        """Run a request, and return at once all events that `answer` would yield. A call costs Ray less than a stream
        of one item."""
        async with contextlib.aclosing(self._run(data)) as found:
            return wire.encode([event async for events in found for event in events])

    async def _run(self, data: bytes) -> AsyncGenerator[list[AnswerEvent]]:
        command = wire.order(data).command
        if command.id in self._requests:
            raise ValueError("a request of this id runs")
        if self.client.ready is None:
            return
        answer = self._requests[command.id] = Collected(command)
        try:
            self.client.send(answer, [command])
            while events := await answer.take():
                self._learn(events)
                yield events
                if answer.complete:
                    return
                await answer.gather(min(MAX_PAUSE, len(self._requests) / ITEMS_PER_SECOND))
        finally:
            del self._requests[command.id]
            self.client.drop([command.id], not answer.ended)

    async def watch(self, name: str) -> AsyncIterator[bytes]:
        """Yield what the engine tells that is not of one request (`wire.Told`), for LEASE_SECONDS. A call of the same
        `name` then goes on. Raises ValueError where MAX_WATCHERS watch already.

        Ray cancels no stream whose reader has died, and Serve waits for streams before it stops a replica.
        """
        watcher = self.client.watcher(name)
        end = time.monotonic() + LEASE_SECONDS
        while (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    told = await watcher.take()
            except TimeoutError:
                return
            yield wire.encode(told)
            watcher.seen = time.monotonic()
            await asyncio.sleep(GATHER_SECONDS)

    async def status(self, replica: str, ids: Sequence[str]) -> bytes:
        """Return the progress of requests (`wire.reports`), for those that the engine has and reports in time. The
        request router sends the call to this replica by its id."""
        found = await self.client.reports(ids)
        return wire.encode([RequestStatus(id, report) for id, report in found.items()])

    async def check_health(self) -> None:
        """Raise RuntimeError where the engine is given up, or this replica listens where it must not."""
        self._alive()
        exposure.require(self._insecure, self._http)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `autoscaling.py` decides by: seconds of queued prompts, and the used part of the cache."""
        return {"queued_prefill_seconds": self.queued_seconds(), "cache_use": self.cache_use()}

    def queued_seconds(self) -> float:
        """Return the seconds that the prompts take which have not been answered yet."""
        return sum(each.prompt for each in self._requests.values() if not each.begun) * self.costs.prefill

    def cache_use(self) -> float:
        """Return the part of the cache's blocks that running requests hold, from 0 to 1."""
        stats = self.client.stats
        return 0.0 if stats is None else stats.blocks_active / max(1, stats.blocks_active + stats.blocks_free
                                                                   + stats.blocks_cached)  # fmt: skip

    def _alive(self) -> None:
        if self._status is not None:
            raise UserError("worker_failed", f"the engine keeps dying, with status {self._status}: its log says why")

    def _gave_up(self, status: int) -> None:
        self._status = status

    def _lost(self, gone: Mapping[str, Answer]) -> None:
        for watcher in self.client.watchers.values():
            watcher.lose()
        for answer in gone.values():
            assert isinstance(answer, Collected)
            answer.leave()

    def _learn(self, events: Sequence[AnswerEvent]) -> None:
        for event in events:
            if isinstance(event, Finished) and (told := event.report) is not None:
                computed = told.prompt_tokens - told.reused_tokens
                self.costs.learn(computed, told.prefill, event.completion_tokens, told.decode, 1)


class Collected:
    """The events of one request until its stream takes them."""

    def __init__(self, command: Submit | Embed) -> None:
        self.ended = self.begun = False
        self.prompt = len(command.prompt)
        self._id = command.id
        self._open = 1
        if isinstance(command, Submit):
            self._open = sum(each is not None for each in command.generated) or command.n
        self._events: list[AnswerEvent] = []
        self._left = False
        self._wake, self._end = asyncio.Event(), asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether the last event has come, and all events have been taken."""
        return self.ended and not self._events

    def put(self, event: AnswerEvent) -> None:
        """Take an event."""
        self.begun = True
        self._events.append(event)
        self._open -= isinstance(event, Finished | Embedding)
        self.ended = self.ended or self._open <= 0 or isinstance(event, Failed)
        self._wake.set()
        if self.ended:
            self._end.set()

    def cancel(self, code: str = "cancelled") -> None:
        """End with a `Failed`, unless it has ended."""
        if not self.ended:
            self.put(Failed(self._id, code, ""))

    def leave(self) -> None:
        """End without a last event: the engine has died."""
        self._left = True
        self._wake.set()
        self._end.set()

    @property
    def late(self) -> Callable[[AnswerEvent], None]:
        """What takes events that come after the end."""
        return lambda event: None

    async def take(self) -> list[AnswerEvent]:
        """Return all events that have come, at least one; none where there will be no more."""
        if not self._events and not self._left:
            self._wake.clear()
            await self._wake.wait()
        events, self._events = self._events, []
        return [] if self._left else events

    async def gather(self, seconds: float) -> None:
        """Let events gather for so many seconds, or until there will be no more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._end.wait()


class Tapped(EngineClient):
    """The engine's client, which passes on what is not of one request, and knows the blocks that the engine has."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.watchers: dict[str, Watcher] = {}
        self.blocks: set[int] = set()
        self.begun, self.cached = self.blocks.clear, self._cached

    def watcher(self, name: str) -> Watcher:
        """Return the watcher of a name, a new one where there is none. Those that nobody has called for long are
        forgotten. Raises ValueError for the one after MAX_WATCHERS."""
        now = time.monotonic()
        self.watchers = {key: each for key, each in self.watchers.items() if now - each.seen < 2 * LEASE_SECONDS}
        if name not in self.watchers and len(self.watchers) >= MAX_WATCHERS:
            raise ValueError("too many watch this replica")
        found = self.watchers.setdefault(name, Watcher(self))
        found.seen = now
        return found

    def _cached(self, told: CachedBlocks) -> None:
        if told.whole:
            self.blocks.clear()
        self.blocks.difference_update(block_digests.unpacked(told.evicted))
        self.blocks.update(block_digests.unpacked(told.stored))

    def _arrived(self, events: Sequence[Event]) -> None:
        super()._arrived(events)
        for event in events:
            if isinstance(event, State):
                for watcher in self.watchers.values():
                    watcher.put(event)


class Watcher:
    """What one reader of `Engine.watch` has not been told yet."""

    def __init__(self, client: Tapped) -> None:
        self._client = client
        self.seen = time.monotonic()
        self._events: list[State] = []
        self._whole = True  # the next item is the whole state
        self._lost = False
        self._wake = asyncio.Event()

    def put(self, event: State) -> None:
        """Take an event. A reader that lags far behind gets the whole state instead."""
        if not self._whole:
            self._events.append(event)
            self._whole = len(self._events) > MAX_TOLD
        if self._whole:
            self._events.clear()
        self._wake.set()

    def lose(self) -> None:
        """Note that the engine has died."""
        self._events.clear()
        self._whole = self._lost = True
        self._wake.set()

    async def take(self) -> Told:
        """Return what there is to tell, at least one event or the loss of the engine."""
        while True:
            if (found := self._taken()) is not None:
                return found
            self._wake.clear()
            await self._wake.wait()

    def _taken(self) -> Told | None:
        client, lost, events = self._client, self._lost, tuple(self._events)
        if self._whole and client.ready is not None:
            blocks = CachedBlocks(block_digests.packed(client.blocks), whole=True)
            events = (client.ready, blocks, *filter(None, (client.stats,)))
            self._whole = False
        if not events and not lost:
            return None
        self._events, self._lost = [], False
        return Told(events, lost)
