"""The deployment `Http`: attar's own HTTP process, at a port of its own, in front of the deployment of engines.

Serve's proxy is off. So every limit, check and route is that of `attar serve`, and Ray adds no port for clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attar.errors import UserError
from attar.integrations.ray import exposure
from attar.integrations.ray.fleet import LISTENERS, Fleet, ReplicaGone
from attar.integrations.ray.settings import HttpSettings
from attar.integrations.ray.wire import Told
from attar.server.engine_client.heartbeat import STUCK

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from attar.server.serve import Server


logger = logging.getLogger(__name__)


class ServeHandle:
    """A deployment's handle as `Fleet` needs it."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._answer = handle.options(method_name="answer", stream=True)
        self._whole = handle.options(method_name="whole")
        self._status = handle.options(method_name="status")

    async def answer(self, data: bytes) -> AsyncIterator[bytes]:
        """Stream the events of an order. Closing the stream cancels the request."""
        stream = self._answer.remote(data)
        ended = False
        try:
            async for item in stream:
                yield item
            ended = True
        finally:
            if not ended:
                stream.cancel()

    async def whole(self, data: bytes) -> bytes:
        """Return all events of an order at once. Cancelling the call cancels the request."""
        answer = self._whole.remote(data)
        try:
            found: bytes = await answer
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return found

    async def status(self, replica: str, ids: Sequence[str]) -> bytes:
        """Return reports on requests of a replica."""
        found: bytes = await self._status.remote(replica, tuple(ids))
        return found

    def died(self, error: Exception) -> bool:
        """Return whether an error says that the replica has died, or is not there."""
        from ray.exceptions import RayActorError

        return isinstance(error, RayActorError | ReplicaGone)


class Http:
    """The user class of the deployment. `settings` are plain values of `HttpSettings`."""

    _server: Server | None = None
    _ended = False

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engines: DeploymentHandle, settings: Mapping[str, Any], insecure: bool = False
    ) -> None:
        from attar.checkpoints import vocabulary
        from attar.server.http import sockets
        from attar.server.serve import Server
        from attar.text import template

        self._insecure, self._port = insecure, int(settings.get("port", 0))
        exposure.require(insecure, self._port)
        exposure.narrow_replica_port()
        self._loop = asyncio.get_running_loop()
        given = msgspec.convert(settings, HttpSettings)
        options = given.options()
        tokenizer = vocabulary.tokenizer(Path(given.path))
        if given.chat_template is not None:
            tokenizer.chat_templates = {"default": given.chat_template}
        sockets.allow(options.max_requests)
        keys = len(set(options.keys.hashes))
        self._fleet = Fleet(ServeHandle(engines), given.places, max(STUCK, options.deadline), keys)
        LISTENERS[engines.deployment_name] = self
        await engines.options(method_name="check_health").remote()  # makes the handle's router, which hears of replicas
        self._address: asyncio.Future[str] = self._loop.create_future()
        server = self._server = Server(self._fleet, tokenizer, options, sockets.listen(options.host, options.port))
        self._task = self._loop.create_task(server.run(self._address.set_result, signals=False))
        if tokenizer.chat_templates:
            self._warming = self._loop.run_in_executor(None, template.warm)
        await self._address

    async def end(self) -> None:
        """Let open requests finish, and end the server."""
        self._ended = True
        if self._server is not None:  # Serve calls this after a failed start, too
            self._server.stop()
            try:
                await self._task
            except Exception:  # whatever it is: Serve goes on to stop the replica, and the log has it
                logger.exception("the HTTP server ended with an error")

    def __del__(self) -> Coroutine[None, None, None] | None:
        """Return what ends it, for Serve, which awaits that when it stops the replica; None where it has ended."""
        return None if self._ended else self.end()

    def known(self, replicas: frozenset[str], leave: dict[str, Any]) -> None:
        """Take the ids of all replicas, from the loop of the handle's router."""
        loop = asyncio.get_running_loop()
        ends = {id: lambda end=end: loop.call_soon_threadsafe(end) for id, end in leave.items()}
        self._loop.call_soon_threadsafe(self._fleet.known, replicas, ends)

    def told(self, replica: str, told: Told) -> None:
        """Take what a replica tells, from the loop of the handle's router."""
        self._loop.call_soon_threadsafe(self._fleet.told, replica, told)

    async def address(self) -> str:
        """Return the address at which the server listens."""
        return await self._address

    async def check_health(self) -> None:
        """Raise where the server has ended, or this replica listens where it must not."""
        if self._task.done():
            raise UserError("worker_failed", "the HTTP server has ended")
        exposure.require(self._insecure, self._port)
