"""The HTTP process, from its socket to its last answer.

The first SIGTERM (or Ctrl-C) stops admission and lets open requests finish, for `drain_seconds`. Then, or at the second
signal, open requests get their terminal error, the engine is told to end, and the process exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from attar.server.api.app import make_app
from attar.server.api.responses.store import ResponseStore
from attar.server.dispatcher import Dispatcher
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.heartbeat import STUCK
from attar.server.fair_thread_pool import TextThreads
from attar.server.fleet.internal import InternalRoutes
from attar.server.grammars import Grammars
from attar.server.http.limits import KEEP_ALIVE_SECONDS, LimitedProtocol
from attar.server.http.middleware import Context, Middleware
from attar.server.http.sockets import BACKLOG, Waiting, allowed, listen
from attar.server.images import ImageReader
from attar.server.options import ServerOptions
from attar.server.prompts import Prompts
from attar.server.replicas.group import ReplicaGroup
from attar.server.request_handler import RequestContext
from attar.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class HttpServer(ABC):
    """A server of `middleware` at the address of the options. Subclasses begin and end what it works with.

    `stop` may be called from a signal handler of the loop, several times. The server closes its `listener`; without one
    it listens at the address of the options once it runs.
    """

    context: Context

    def __init__(self, options: ServerOptions, middleware: Middleware, listener: socket.socket | None = None) -> None:
        self.options, self.middleware, self._listener = options, middleware, listener
        self._stop, self._now = asyncio.Event(), asyncio.Event()

    @abstractmethod
    def begin(self) -> None:
        """Begin what answers need, in the running loop."""

    @abstractmethod
    async def end(self) -> None:
        """End open requests, and what `begin` began."""

    @abstractmethod
    def drain(self) -> None:
        """Take no more requests."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and child processes, after the end."""

    def stop(self) -> None:
        """Drain; the second time, end at once."""
        if self._stop.is_set():
            self._now.set()
        self._stop.set()

    async def run(self, started: Callable[[str], None] | None = None, signals: bool = True) -> None:
        """Serve until stopped. `started` is called with the server's address once it listens. Signals can be handled in
        the main thread only. Raises OSError where the address is not available."""
        listener = self._listener or listen(self.options.host, self.options.port)

        class Protocol(LimitedProtocol):
            waiting = Waiting(allowed())

        server = _Uvicorn(uvicorn.Config(
            self.middleware, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=2,
        ))  # fmt: skip
        loop = asyncio.get_running_loop()
        if signals:
            for each in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(each, self.stop)
        self.begin()
        lag = loop.create_task(self.context.metrics.watch_loop())
        serving = loop.create_task(server.serve([listener]))
        try:
            if started is not None:
                host, port = listener.getsockname()[:2]
                started(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            await asyncio.wait([loop.create_task(self._stop.wait()), serving], return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            await self.end()
            server.should_exit = True
            await serving
            lag.cancel()
            self.close()

    async def _drain(self) -> None:
        self.drain()
        logger.info("draining: %d requests are open", self.middleware.open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.options.drain_seconds):
                while self.middleware.open and not self._now.is_set():
                    await asyncio.sleep(0.02)


class Server(HttpServer):
    """A server of one model. `engine` is the engine's Unix socket, to which it connects whenever the engine listens, or
    a group of engines."""

    context: RequestContext

    def __init__(
        self, engine: Path | ReplicaGroup, tokenizer: Tokenizer, options: ServerOptions,
        listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        keys = len(set(options.keys.hashes))
        self.engine: EngineClient | ReplicaGroup
        if isinstance(engine, Path):
            self.engine = EngineClient(engine, max(STUCK, options.deadline), keys)
        else:
            self.engine = engine
        self.context = RequestContext(self.engine, times=options.request_metrics)
        self.dispatcher = Dispatcher(self.context, options.deadline, options.aliases)
        self.threads = TextThreads(keys)
        self.images = ImageReader(options.images, tokenizer, keys) if options.images else None
        self.prompts = Prompts(tokenizer, self.threads, options.template_date, options.reasoning, self.images)
        self.grammars = Grammars(tokenizer)
        self.app = make_app(
            self.dispatcher, self.prompts, self.grammars, self.threads, options.sampling, bool(options.keys.hashes),
            options.root_path, ResponseStore(options.response_store) if options.response_store else None,
        )  # fmt: skip
        if options.router_keys.hashes:
            InternalRoutes(self.dispatcher, self.grammars, tokenizer, options).add_to(self.app)
        super().__init__(options, Middleware(self.app, options, self.context), listener)

    def begin(self) -> None:
        """Connect to the engine."""
        self.engine.start()

    async def end(self) -> None:
        """End open requests, and tell the engine to end."""
        await self.engine.close()

    def drain(self) -> None:
        """Take no more requests."""
        self.context.draining = True

    def close(self) -> None:
        """Release threads and the child process."""
        self.threads.close()
        self.grammars.close()
        if self.images is not None:
            self.images.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Server`."""
        yield
