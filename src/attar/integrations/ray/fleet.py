"""The replicas of a Serve deployment, where attar's HTTP process expects a group of engines.

`Fleet` is a `ReplicaGroup`: it routes, queues, and continues answers whose engine has gone, with the same tokens. Its
places are taken by the replicas that Serve has at the moment. `ReplicaClient` stands in each where the client of an
engine's socket stands otherwise. A request is one stream of the deployment's handle. What a replica tells beside comes
from the request router of the same process (`router.py`).

A replica that Serve takes away gets no new requests. Its open ones end there, then Serve may stop it. Where it is
stopped earlier, or dies, they go on at others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attar.integrations.ray import wire
from attar.integrations.ray.wire import Order, Told
from attar.protocol.messages import Cancel, Command, Embed, Failed, QueryStatus, Submit
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.heartbeat import STUCK
from attar.server.replicas.group import ReplicaGroup
from attar.server.replicas.replica import Replica

DOUBT = 1.0  # seconds that a request without a stream waits for its replica to be lost

logger = logging.getLogger(__name__)


class Handle(Protocol):
    """What a fleet needs of a Serve deployment's handle."""

    def answer(self, data: bytes) -> AsyncIterator[bytes]:
        """Stream the events of an order."""

    async def whole(self, data: bytes) -> bytes:
        """Return all events of an order at once."""

    async def status(self, replica: str, ids: Sequence[str]) -> bytes:
        """Return reports on requests of a replica."""

    def died(self, error: Exception) -> bool:
        """Return whether an error of the two says that the replica has died, or is not there."""


class Listener(Protocol):
    """What hears of replicas, in the loop of a request router."""

    def known(self, replicas: frozenset[str], leave: dict[str, Any]) -> None:
        """Take the ids of all replicas. `leave` has a function for each watched one, which ends its watch."""

    def told(self, replica: str, told: Told) -> None:
        """Take what a replica tells. A lost one may tell more later."""


LISTENERS: dict[str, Listener] = {}
"""Listeners of this process, by the deployment's name."""


class ReplicaGone(Exception):
    """The replica that an order names is not there any more."""


class ReplicaClient(EngineClient):
    """A place for a replica of the deployment behind `handle`; `replica` is the present one's id, empty for none."""

    def __init__(self, handle: Handle, stuck: float, name: str) -> None:
        super().__init__(Path(), stuck, name=name)
        self.replica = ""
        self._handle = handle
        self._tasks: dict[str, asyncio.Task[None]] = {}  # streams, by request
        self._asking: set[asyncio.Task[None]] = set()
        self._heard, self._gone = asyncio.Event(), asyncio.Event()

    @property
    def told(self) -> dict[str, Any]:
        """Where the engine is, for JSON."""
        return {"ray_replica": self.replica}

    def hear(self, told: Told) -> None:
        """Take what the replica tells."""
        if told.lost:
            self.lose()
        if told.events:
            if not self._heard.is_set():
                self._gone = asyncio.Event()
                self.heartbeat.begin()
                self._heard.set()
            self._arrived(told.events)

    def lose(self) -> None:
        """Note that the engine has gone: its requests go on elsewhere."""
        if self._heard.is_set():
            self._heard.clear()
            self._gone.set()
            for task in self._tasks.values():
                task.cancel()
            self._tasks.clear()
            self._lost()

    async def close(self) -> None:
        """End open requests. The engine ends with its replica."""
        for task in (*self._tasks.values(), *self._asking):
            task.cancel()
        await super().close()

    async def _run(self) -> None:
        while True:
            await self._heard.wait()
            await self._watch(self._gone)

    def _send(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Submit | Embed):
                data = wire.encode(Order(command, self.replica))
                self._tasks[command.id] = asyncio.get_running_loop().create_task(self._stream(command, data))
            elif isinstance(command, Cancel):
                if (task := self._tasks.pop(command.id, None)) is not None:
                    task.cancel()
            elif isinstance(command, QueryStatus):
                asking = asyncio.get_running_loop().create_task(self._ask(command.ids))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)

    async def _stream(self, command: Submit | Embed, data: bytes) -> None:
        failed = None
        try:
            if isinstance(command, Embed) or command.n * command.params.max_tokens <= 1:
                self._arrived(wire.events(await self._handle.whole(data)))
            else:
                async with contextlib.aclosing(self._handle.answer(data)) as items:  # type: ignore[type-var]
                    async for item in items:
                        self._arrived(wire.events(item))
            if command.id in self.open:  # its engine has died, and the replica will tell
                await asyncio.sleep(DOUBT)
                failed = "shutdown"
        except Exception as error:
            if self._handle.died(error):
                self._tasks.pop(command.id, None)
                self.lose()
                return
            logger.error("%s: the stream of %s failed: %s", self.name, command.id, type(error).__name__)
            failed = "internal"
        self._tasks.pop(command.id, None)
        if failed and command.id in self.open:
            self._hand_on(Failed(command.id, failed, ""))

    async def _ask(self, ids: Sequence[str]) -> None:
        with contextlib.suppress(Exception):  # it is of no use any more where the replica has gone
            self._arrived(wire.reports(await self._handle.status(self.replica, ids)))


class Fleet(ReplicaGroup):
    """The replicas behind `handle`, at most `places` at a time. `stuck` and `keys` are `EngineClient`'s."""

    def __init__(self, handle: Handle, places: int, stuck: float = STUCK, keys: int = 0) -> None:
        self._clients = [ReplicaClient(handle, stuck, f"replica {at}") for at in range(places)]
        super().__init__(self._clients, stuck, keys)
        self._ends: Mapping[str, Callable[[], Any]] = {}
        self._releases: dict[str, asyncio.Task[None]] = {}

    def known(self, replicas: Iterable[str], leave: Mapping[str, Callable[[], Any]]) -> None:
        """Take the ids of all replicas that Serve sends requests to. `leave` has ends of watches."""
        present, self._ends = set(replicas), leave
        placed = {client.replica: place for place, client in zip(self.replicas, self._clients, strict=True)}
        for id, place in placed.items():
            if id and id not in present and id not in self._releases:
                place.draining = True
                self._releases[id] = asyncio.get_running_loop().create_task(self._release(id, place))
        for id in sorted(present - placed.keys()):
            free = next((client for client in self._clients if not client.replica), None)
            if free is None:
                logger.error("a replica gets no requests: there are places for %d", len(self._clients))
                return
            free.replica = id

    def told(self, replica: str, told: Told) -> None:
        """Take what a replica tells."""
        for client in self._clients:
            if client.replica == replica:
                client.hear(told)

    async def close(self) -> None:
        """End open requests."""
        for task in self._releases.values():
            task.cancel()
        await super().close()

    async def _release(self, id: str, place: Replica) -> None:
        """Wait until a replica that Serve takes away has no requests, and give its place to another."""
        client = self._clients[place.number]
        try:
            while client.open and client.ready is not None:
                await asyncio.sleep(0.05)
            if (leave := self._ends.get(id)) is not None:
                leave()
            client.lose()
        finally:
            client.replica = ""
            place.draining = False
            del self._releases[id]
