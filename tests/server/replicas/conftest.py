"""A server in front of several fake engines, in a loop of their own in another thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attar.server.options import ServerOptions
from attar.server.replicas.group import ReplicaGroup
from attar.server.serve import Server
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine


class Fleet(Running):
    """A server and its engines. `engine` is the first."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, count: int, options: ServerOptions,
        each: Callable[[int], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.sockets = [folder / f"engine{at}.sock" for at in range(count)]
        self.engines: list[FakeEngine] = []
        self._made = tokenizer, options, each
        self.port = 0
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._begun.wait(60)
        self.wait(lambda: all(replica.client.ready is not None for replica in self.group.replicas))

    async def _main(self) -> None:
        tokenizer, options, each = self._made
        self.loop = asyncio.get_running_loop()
        self.engines = [FakeEngine(path, tokenizer, **each(at)) for at, path in enumerate(self.sockets)]
        for engine in self.engines:
            await engine.start()
        self.engine = self.engines[0]
        self.group = ReplicaGroup(self.sockets)
        self.server = Server(self.group, tokenizer, options)

        def started(url: str) -> None:
            self.port = int(url.rpartition(":")[2])
            self._begun.set()

        await self.server.run(started, signals=False)
        for engine in self.engines:
            await engine.stop()

    def with_work(self) -> list[int]:
        """The engines that have requests."""
        return [at for at, engine in enumerate(self.engines) if engine.open]

    def post_beside(self, path: str, body: Any) -> Callable[[], Any]:
        """Ask in another thread; returns what waits for the answer."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(self.post(path, body)))
        thread.start()

        def joined() -> Any:
            thread.join(60)
            return found[0]

        return joined


@pytest.fixture(scope="session")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.load(demo)


@pytest.fixture
def fleet(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Starts fleets: `fleet(count, options, **arguments of every FakeEngine, each=function of the number)`."""
    running: list[Fleet] = []

    def make(
        count: int = 2, options: ServerOptions | None = None, each: Callable[[int], dict[str, Any]] | None = None,
        **how: Any,
    ) -> Fleet:  # fmt: skip
        def arguments(at: int) -> dict[str, Any]:
            return how | ({} if each is None else each(at))

        folder = tmp_path / str(len(running))
        folder.mkdir()
        running.append(Fleet(folder, tokenizer, count, options or ServerOptions(port=0), arguments))
        return running[-1]

    yield make
    ended = []
    for made in running:
        with contextlib.suppress(RuntimeError):
            ended.append(made.stop())
    assert all(ended)
