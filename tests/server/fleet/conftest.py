"""A router in front of servers with fake engines, in one loop of another thread; a wire to each can be cut or held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attar.server.fleet import attar_hosts
from attar.server.fleet.host_client import client
from attar.server.fleet.router_key import RouterKeys
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from attar.server.replicas.group import ReplicaGroup
from attar.server.serve import Server
from attar.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.several import Several, all_stopped

ROUTER_KEY = "router-key-of-at-least-32-characters"


class Wire:
    """A TCP relay before a server. `refuse` closes new connections at once; while `held` no byte passes; `says` is what
    it answers instead of the server."""

    def __init__(self) -> None:
        self.port = self.target = 0
        self.refuse = False
        self.says: bytes | None = None
        self.free = asyncio.Event()
        self.free.set()
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """End all connections, as a dying process does."""
        for each in self._open:
            each.transport.abort()
        self._open.clear()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        self._open.add(writer)
        if self.says is not None:
            await reader.read(1)
            writer.write(self.says)
            writer.close()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._open.add(back)
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer), return_exceptions=True)
        writer.transport.abort()
        back.transport.abort()
        self._open -= {writer, back}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self.free.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


class Hosts(Several):
    """A router and its hosts. `engine` is the first host's."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, count: int, options: ServerOptions, keys: tuple[str, ...],
        each: Callable[[int], dict[str, Any]],
    ) -> None:  # fmt: skip
        self._made = folder, tokenizer, count, options, keys, each
        self.hosts: list[Server] = []
        self.wires: list[Wire] = []
        self._start()

    async def _main(self) -> None:
        folder, tokenizer, count, options, keys, each = self._made
        self.loop = asyncio.get_running_loop()
        routers = RouterKeys.of([ROUTER_KEY])
        tasks = []
        for at in range(count):
            engine = FakeEngine(folder / f"engine{at}.sock", tokenizer, **each(at))
            await engine.start()
            own = ServerOptions(
                port=0, keys=Keys(Keys.of(keys).hashes, routers.secret), router_keys=routers, drain_seconds=0.3
            )
            host, wire, up = Server(engine.path, tokenizer, own), Wire(), asyncio.Event()
            await wire.start()

            def listening(url: str, wire: Wire = wire, up: asyncio.Event = up) -> None:
                wire.target = int(url.rpartition(":")[2])
                up.set()

            tasks.append(self.loop.create_task(host.run(listening, signals=False)))
            await up.wait()
            self.engines.append(engine)
            self.hosts.append(host)
            self.wires.append(wire)
        self.engine = self.engines[0]
        self.urls = [f"http://127.0.0.1:{wire.port}" for wire in self.wires]
        async with client() as http:
            greeting, read = await attar_hosts.greet(http, self.urls, ROUTER_KEY)
            self.server = attar_hosts.make(self.urls, ROUTER_KEY, options, http, greeting, read)
            assert isinstance(self.server.engine, ReplicaGroup)
            self.group = self.server.engine
            await self.server.run(self._started, signals=False)
        for wire in self.wires:
            wire.free.set()
            wire.close()
        for host in self.hosts:
            host.stop()
            host.stop()
        await asyncio.gather(*tasks)
        for engine in self.engines:
            await engine.stop()

    def half_way(self, tokens: int = 20, over: Callable[[], bool] = lambda: False) -> int:
        """Wait until some of an answer was told, or all is over; return the number of the host that makes it."""
        found: list[int] = []

        def looked() -> bool:
            relays = list(self.group.open.values())
            found[:] = [each.engine for each in relays if each.known > tokens and each.engine is not None]
            return bool(found) or over()

        self.wait(looked)
        return found[0] if found else 0

    def kill(self, at: int) -> None:
        """Let a host die: its connections end, and it takes no others."""

        def die() -> None:
            self.wires[at].refuse = True
            self.wires[at].cut()

        self.call(die)

    def states(self) -> list[str]:
        return [each.state for each in self.group.replicas]


@pytest.fixture
def fleet(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """Starts routers: `fleet(count, options, keys, **arguments of every FakeEngine, each=function of the number)`."""
    running: list[Hosts] = []

    def make(
        count: int = 2, options: ServerOptions | None = None, keys: tuple[str, ...] = (),
        each: Callable[[int], dict[str, Any]] | None = None, **how: Any,
    ) -> Hosts:  # fmt: skip
        def arguments(at: int) -> dict[str, Any]:
            return how | ({} if each is None else each(at))

        folder = tmp_path / str(len(running))
        folder.mkdir()
        running.append(Hosts(folder, tokenizer, count, options or ServerOptions(port=0), keys, arguments))
        return running[-1]

    yield make
    assert all_stopped(running)
