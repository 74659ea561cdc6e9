"""A fleet without Ray: replicas whose engines are fake, and a handle that calls them in this loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attar.integrations.ray import engine, exposure, wire
from attar.integrations.ray.engine import Engine
from attar.integrations.ray.fleet import Fleet, ReplicaGone
from attar.protocol.messages import Delta, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.settings import Settings
from attar.server.engine_client.response_stream import ResponseStream
from attar.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

SECONDS = 20.0


class Died(Exception):
    """What the handle raises for a replica that has been killed."""


@pytest.fixture(scope="session")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.load(demo)


@pytest.fixture
def replica(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes replicas with an engine in this loop (`replica.fake`). Arguments are those of `FakeEngine`."""
    monkeypatch.setattr(exposure, "require", lambda *given: None)
    monkeypatch.setattr(exposure, "narrow_replica_port", lambda: None)

    async def make(**how: Any) -> Any:
        found: list[FakeEngine] = []

        class Process:
            def __init__(self, command: Sequence[str], settings: Settings, *rest: Any) -> None:
                found.append(FakeEngine(Path(settings.socket), tokenizer, **how))
                self.gave_up = rest[1]

            def start(self) -> None:
                self.begun = asyncio.get_running_loop().create_task(found[0].start())

            def kill(self) -> None:
                found[0].die()

            def end(self) -> None:
                """Nothing is left of it."""

        monkeypatch.setattr(engine, "EngineProcess", Process)
        made: Any = Engine.__new__(Engine)
        await made.__init__(msgspec.to_builtins(Settings("demo", "")))
        made.fake = found[0]
        return made

    return make


class Local:
    """A handle of replicas in this loop. It watches them for `fleet`, as the request router does."""

    def __init__(self, replica: Callable[..., Any], places: int = 4, **how: Any) -> None:
        self.make, self.how = replica, how
        self.replicas: dict[str, Any] = {}
        self.killed: set[str] = set()
        self.away: set[str] = set()
        self.fleet = Fleet(self, places)
        self.watches: dict[str, asyncio.Task[None]] = {}
        self.calls: dict[str, set[asyncio.Task[Any]]] = {}
        self.wholes = 0  # answers that came in one call

    async def __aenter__(self) -> Local:
        self.fleet.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.close()
        for each in self.watches.values():
            each.cancel()
        for each in self.replicas.values():
            await each.end()
            await each.fake.stop()

    async def add(self, name: str) -> Any:
        """Start a replica, and wait until the fleet may use it."""
        self.replicas[name] = await self.make(**self.how)
        self.watches[name] = asyncio.get_running_loop().create_task(self._watch(name))
        self.publish()
        await until(lambda: any(each.replica == name and each.ready for each in self.fleet._clients))
        return self.replicas[name]

    def publish(self, *away: str) -> None:
        """Tell the fleet of all replicas. Serve takes some `away` from now on."""
        self.away.update(away)
        present = self.replicas.keys() - self.killed - self.away
        self.fleet.known(present, {name: watch.cancel for name, watch in self.watches.items()})

    def kill(self, name: str) -> None:
        """Let a replica be gone, as by SIGKILL."""
        self.killed.add(name)
        self.watches[name].cancel()
        for task in self.calls.get(name, ()):
            task.cancel()
        self.fleet.told(name, wire.Told(lost=True))
        self.publish()

    async def _watch(self, name: str) -> None:
        while True:
            async for item in self.replicas[name].watch("test"):
                self.fleet.told(name, wire.told(item))

    async def answer(self, data: bytes) -> AsyncIterator[bytes]:
        name = wire.order(data).replica
        if name in self.killed or name not in self.replicas:
            raise ReplicaGone(name)
        async with contextlib.aclosing(self.replicas[name].answer(data)) as items:
            async for item in items:
                if name in self.killed:
                    raise Died
                yield item

    async def whole(self, data: bytes) -> bytes:
        name = wire.order(data).replica
        if name in self.killed or name not in self.replicas:
            raise ReplicaGone(name)
        self.wholes += 1
        found: bytes = await self.replicas[name].whole(data)
        if name in self.killed:
            raise Died
        return found

    async def status(self, replica: str, ids: Sequence[str]) -> bytes:
        found: bytes = await self.replicas[replica].status(replica, ids)
        return found

    def died(self, error: Exception) -> bool:
        return isinstance(error, Died | ReplicaGone)


@pytest.fixture
def local(replica: Callable[..., Any]) -> Callable[..., Local]:
    """Makes handles: `local(places, **arguments of every FakeEngine)`."""
    return lambda places=4, **how: Local(replica, places, **how)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not true():
            await asyncio.sleep(0.005)


def submit(id: str, prompt: Sequence[int] = (5, 6, 7), tokens: int = 40, n: int = 1) -> Submit:
    return Submit(id, tuple(prompt), SamplingParams(max_tokens=tokens, ignore_eos=True, seed=3), n)


async def read(stream: ResponseStream, count: int = 2**31) -> dict[int, list[int]]:
    """The tokens of each choice, all of them, or until there are so many. The stream must end well."""
    found: dict[int, list[int]] = {}
    async with asyncio.timeout(SECONDS):
        while sum(map(len, found.values())) < count and (events := await stream.take()):
            for event in events:
                assert isinstance(event, Delta | Finished), event
                if isinstance(event, Delta):
                    found.setdefault(event.choice, []).extend(event.token_ids)
    return found
