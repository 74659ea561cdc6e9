"""A server in front of several fake engines, in a loop of their own in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attar.server.options import ServerOptions
from attar.server.replicas.group import ReplicaGroup
from attar.server.serve import Server
from attar.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.several import Several, all_stopped


class Fleet(Several):
    """A server and its engines. `engine` is the first."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, count: int, options: ServerOptions,
        each: Callable[[int], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.sockets = [folder / f"engine{at}.sock" for at in range(count)]
        self._made = tokenizer, options, each
        self._start()

    async def _main(self) -> None:
        tokenizer, options, each = self._made
        self.loop = asyncio.get_running_loop()
        self.engines = [FakeEngine(path, tokenizer, **each(at)) for at, path in enumerate(self.sockets)]
        for engine in self.engines:
            await engine.start()
        self.engine = self.engines[0]
        self.group = ReplicaGroup(self.sockets)
        self.server = Server(self.group, tokenizer, options)
        await self.server.run(self._started, signals=False)
        for engine in self.engines:
            await engine.stop()


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
    assert all_stopped(running)
