"""One server that speaks OpenAI's API, as a router sees it: its health, and what was counted of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2

from attar.server.fleet.host_client import CONNECT_SECONDS

LOOK_SECONDS = 1.0  # between two looks at a host's health
HEALTH = ("/health", "/v1/models")  # the first that a server knows
STATES = ("loading", "ready", "busy", "down", "slow")
"""States of a host.

loading: it was not looked at yet. busy: it answers 503, since it loads, drains or is overloaded. down: it does not
answer, or not as a server of models does. slow: it answers too late.
"""

BROKEN = (httpx2.HTTPError, httpx2.StreamError, OSError, ValueError)
"""What is raised where a host does not answer, breaks off, speaks no HTTP, or answers too much."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class HostFailed(Exception):
    """A host failed before the client got anything; another may be asked."""


@dataclass
class PlainHost:
    """The server at `url`. `went_down` is called when it has gone down."""

    number: int
    url: str
    label: str
    went_down: Callable[[], None] = lambda: None
    state: str = "loading"
    open: int = 0
    requests: int = 0
    failures: int = 0
    full_until: float = 0.0
    path: str = HEALTH[0]
    trouble: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the host is down or slow."""

    def become(self, state: str) -> None:
        """Note a state, and log that it changed."""
        if state != self.state:
            level = logging.INFO if state == "ready" else logging.WARNING
            logger.log(level, "%s is %s; open requests: %d", self.url, state, self.open)
            if state == "down":
                self.went_down()
            self.state = state
        if state in ("down", "slow"):
            self.trouble.set()
        else:
            self.trouble.clear()

    async def unless_down(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work. Raises HostFailed once the host is found down or slow before it is done."""
        doing, trouble = asyncio.create_task(work), asyncio.create_task(self.trouble.wait())
        try:
            await asyncio.wait((doing, trouble), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise HostFailed
            return await doing
        finally:
            doing.cancel()
            trouble.cancel()

    def full(self, seconds: float) -> None:
        """Note that the host has no room for a while."""
        self.full_until = time.monotonic() + seconds

    @property
    def usable(self) -> bool:
        """Whether it gets new requests."""
        return self.state == "ready"

    async def watch(self, http: httpx2.AsyncClient) -> None:
        """Look at the host's health for ever."""
        while True:
            self.become(await self._look(http))
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, http: httpx2.AsyncClient) -> str:
        """Return the host's state. Nothing of the answer but its status is read."""
        try:
            async with asyncio.timeout(2 * CONNECT_SECONDS):
                status = await self._status(http, self.path)
                if status == 404 and self.path == HEALTH[0]:
                    status = await self._status(http, HEALTH[1])
                    self.path = HEALTH[1]
        except (httpx2.TimeoutException, TimeoutError):
            return "slow"
        except BROKEN:
            return "down"
        if status in (200, 401, 403):  # a server that wants a key is well
            return "ready"
        return "busy" if status in (429, 503) else "down"

    async def _status(self, http: httpx2.AsyncClient, path: str) -> int:
        async with http.stream("GET", self.url + path, timeout=httpx2.Timeout(CONNECT_SECONDS)) as reply:
            with contextlib.suppress(httpx2.HTTPError):
                await reply.aclose()
            return reply.status_code
