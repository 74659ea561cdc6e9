"""A server in front of several fake engines, in a loop of their own in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

from attar.server.replicas.group import ReplicaGroup
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine


class Several(Running):
    """A server and its engines. `engine` is the first. Subclasses begin with `_start`, whose `_main` makes them."""

    engines: list[FakeEngine]
    group: ReplicaGroup

    def _start(self) -> None:
        self.engines = []
        self.port = 0
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._begun.wait(60)
        self.wait(lambda: all(replica.client.ready is not None for replica in self.group.replicas))

    def _started(self, url: str) -> None:
        self.port = int(url.rpartition(":")[2])
        self._begun.set()

    def with_work(self) -> list[int]:
        """The engines that have requests."""
        return [at for at, engine in enumerate(self.engines) if engine.open]

    def post_beside(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Callable[[], Any]:
        """Ask in another thread; returns what waits for the answer, which is 0 where there was none."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(self.post(path, body, headers)))
        thread.start()

        def joined() -> Any:
            thread.join(60)
            return found[0] if found else 0

        return joined


def all_stopped(running: Iterable[Running]) -> bool:
    """Stop servers; return whether all have ended."""
    ended = [each.stop() for each in running]
    return all(ended)
