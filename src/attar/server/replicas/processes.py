"""`attar serve --replicas`: the HTTP process with several engines' processes, and their restart one after another.

SIGUSR1 restarts the engines one by one. Each takes no new requests, has `drain_seconds` to end its own, and others
continue the rest. Its successor must be ready before the next one's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from attar import env, faults
from attar.protocol.settings import CHANGED, HOPELESS, Settings
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.heartbeat import STUCK
from attar.server.http import sockets
from attar.server.options import ServerOptions
from attar.server.replicas import cores
from attar.server.replicas.forked import ForkServerProcess
from attar.server.replicas.group import ReplicaGroup
from attar.server.supervisor import EngineProcess, private_socket
from attar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from attar.server.serve import Server

LOAD_SECONDS = 1800.0  # for a restarted engine to be ready

logger = logging.getLogger(__name__)


class RollingRestart:
    """Restarts the engines of `group`, whose processes are `children`, one after another."""

    def __init__(self, group: ReplicaGroup, children: Sequence[EngineProcess], drain_seconds: float) -> None:
        self._group, self._children, self._drain_seconds = group, children, drain_seconds
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin, unless a restart is under way."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        else:
            logger.warning("the replicas are being restarted already")

    async def end(self) -> None:
        """Stop where it stands."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        for replica, child in zip(self._group.replicas, self._children, strict=True):
            others = [each for each in self._group.replicas if each is not replica and each.usable]
            if not replica.usable or not others:
                why = "it is not ready" if others else "no other replica is ready"
                logger.warning("replica %d is not restarted: %s", replica.number, why)
                continue
            try:
                await self._group.drain(replica.number, self._drain_seconds)
                await asyncio.get_running_loop().run_in_executor(None, child.restart)
                if not await _gone_and_back(replica.client, lambda each=replica: each.given_up):  # type: ignore[misc]
                    logger.error("replica %d is not ready again: the restart ends here", replica.number)
                    return
                replica.restarts += 1
            finally:
                replica.draining = False


async def _gone_and_back(client: EngineClient, given_up: Callable[[], bool]) -> bool:
    """Wait until an engine that was ended is gone and its successor is ready; return whether that came."""
    end = time.monotonic() + LOAD_SECONDS
    for wanted in (False, True):
        while (client.ready is not None) is not wanted:
            if given_up() or time.monotonic() > end:
                return False
            await asyncio.sleep(0.02)
    return True


def fork_servers(
    shares: Sequence[tuple[Settings, tuple[int, ...]]], command: Sequence[str]
) -> list[ForkServerProcess | None]:
    """Return who forks each engine: one process for those of a memory node, None for an engine that is alone there."""
    nodes: dict[int, list[int]] = {}
    for number, (settings, own) in enumerate(shares):
        if settings.sharers > 1:
            nodes.setdefault(cores.node(own[0]), []).append(number)
    found: list[ForkServerProcess | None] = [None] * len(shares)
    for numbers in nodes.values():
        together = sorted({cpu for number in numbers for cpu in shares[number][1]})
        server = ForkServerProcess(command, shares[numbers[0]][0], together)
        for number in numbers:
            found[number] = server
    return found


def run(
    shares: Sequence[tuple[Settings, tuple[int, ...]]], tokenizer: Tokenizer, options: ServerOptions,
    engine: Sequence[str], forks: Sequence[str], started: Callable[[str], None],
) -> int:  # fmt: skip
    """Serve one model by several engines until told to stop: settings and cores of each are `shares`. Returns the exit
    status: 0, 1 if all engines kept dying, 2 if one cannot serve the model at all.

    `engine` is the command line of an engine's process, `forks` that of one that forks those of one memory node.

    Raises OSError where the address is not available, ValueError
    for unknown faults to be armed (`attar/faults.py`).
    """
    faults.arm_from(env.get().faults)
    sockets.allow(options.max_requests)
    status = 0
    with sockets.listen(options.host, options.port) as listener, ExitStack() as stack:
        paths = [stack.enter_context(private_socket()) for _ in shares]

        async def main() -> None:
            loop = asyncio.get_running_loop()
            keys = len(set(options.keys.hashes))
            group = ReplicaGroup(paths, max(STUCK, options.deadline), keys, [own for _, own in shares])
            server: Server | None = None

            def given_up(number: int, code: int) -> None:
                nonlocal status
                logger.error("replica %d is given up", number)
                if not group.give_up(number) or code == HOPELESS:
                    status = code
                    if server is not None:
                        server.stop()
                        server.stop()

            def child(number: int) -> EngineProcess:
                settings, own = shares[number]
                placed = msgspec.structs.replace(settings, socket=str(paths[number]), tells_cache=True, hands_over=True)
                client = group.replicas[number].client

                def gave_up(code: int) -> None:
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(given_up, number, code)

                return EngineProcess(
                    engine,
                    placed,
                    lambda: client.was_ready,
                    gave_up,
                    cores=own,
                    name=f"the engine of replica {number}",
                    forked=None if (fork := servers[number]) is None else fork.start,
                )

            servers = fork_servers(shares, forks)
            children = [child(number) for number in range(len(shares))]
            rolling = RollingRestart(group, children, options.drain_seconds)
            try:
                for replica, process in zip(group.replicas, children, strict=True):
                    process.start()
                    replica.client.hung = process.kill
                from attar.server.serve import Server  # a fifth of a second, in which the processes start

                server = Server(group, tokenizer, options, listener)
                loop.add_signal_handler(signal.SIGUSR1, rolling.begin)
                await server.run(started)
            finally:
                await rolling.end()
                await asyncio.gather(*(loop.run_in_executor(None, each.end) for each in children))
                await asyncio.gather(*(loop.run_in_executor(None, each.end) for each in {*servers} if each))

        gc.freeze()
        asyncio.run(main())
    return 1 if status == CHANGED else status
