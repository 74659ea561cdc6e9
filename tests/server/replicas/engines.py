"""Real engines in threads of this process behind a `ReplicaGroup`: `--replicas` without HTTP and processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attar.engine.engine import Engine
from attar.engine.main import Loop, listen
from attar.protocol.messages import Event, Ready, Submit
from attar.server.replicas.group import ReplicaGroup

TURN = threading.Lock()
"""Engines of one process compute one at a time: kernels share the process's threads."""
SECONDS = 60.0


class Member:
    """An engine with its socket. It loses its server in its step number `dies_at`, whose events nobody hears."""

    def __init__(self, engine: Engine, path: Path, dies_at: int = 0) -> None:
        self.path, self.steps = path, 0
        self._listener = listen(path)
        vocab, limits = engine.decoder.config.vocab_size, engine.scheduler.limits
        adapters = tuple(name for name in engine.intake.adapters if name)
        ready = Ready(
            "model", engine.context, vocab, engine.pool.total, engine.pool.size, limits.max_waiting, (), adapters,
            limits.together, bits="equal", horizons=engine.runner.horizons, images=engine.images is not None,
            kv_evictions=tuple((name, each.longest(engine.context)) for name, each in engine.intake.evictions.items()),
        )  # fmt: skip
        self.loop = Loop(engine, ready, self._listener, None)
        step = engine.step

        def locked() -> list[Event]:
            with TURN:
                events = step()
            self.steps += 1
            if self.steps == dies_at and self.loop._server is not None:
                self.loop._server.shutdown(socket.SHUT_RDWR)
            return events

        engine.step = locked  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it, also where no group is connected that could ask for it."""
        self.loop.ended = True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:  # the loop sleeps until one comes
            knock.connect(str(self.path))
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self._listener.close()
        assert self.loop.engine.pool.active == 0


class Told(NamedTuple):
    """What readers got, by request; how many requests each engine was given; and what became of continued ones."""

    events: dict[str, list[Event]]
    routed: list[int]
    replays: Counter[str]


def answered(engines: Sequence[Engine], asks: Sequence[Submit], folder: Path, dies_at: int = 0) -> Told:
    """Ask a group of engines, all at once. Each engine dies once, at its step `dies_at`, where it gets there."""
    members = [Member(engine, folder / f"{at}.sock", dies_at) for at, engine in enumerate(engines)]
    try:
        return asyncio.run(_asked(members, asks))
    finally:
        for member in members:
            member.end()


async def _asked(members: Sequence[Member], asks: Sequence[Submit]) -> Told:
    group = ReplicaGroup([member.path for member in members])
    group.start()
    try:
        async with asyncio.timeout(SECONDS):
            while not all(each.client.ready is not None for each in group.replicas):
                await asyncio.sleep(0.005)
            found = await asyncio.gather(*(_read(group, ask) for ask in asks))
        return Told(dict(found), [each.routed for each in group.replicas], group.replays)
    finally:
        await group.close()


async def _read(group: ReplicaGroup, ask: Submit) -> tuple[str, list[Event]]:
    stream, events = group.ask([ask], ask.n), list[Event]()
    while batch := await stream.take():
        events += batch  # type: ignore[arg-type]
    stream.close()
    return ask.id, events
