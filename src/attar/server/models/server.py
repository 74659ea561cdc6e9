"""The HTTP process of several models: `serve.Server` with a pool of engines in the place of one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from prometheus_client import generate_latest

from attar import env, faults
from attar.server.admission.retry_after import RetryAfter
from attar.server.api.responses.store import ResponseStore
from attar.server.errors import FULL, APIError
from attar.server.fair_thread_pool import TextThreads
from attar.server.http import sockets
from attar.server.http.middleware import Middleware
from attar.server.metrics import HttpMetrics, Labelled
from attar.server.models.front import Front
from attar.server.models.pool import ModelPool, PoolMetrics, Start
from attar.server.models.served import ModelSpec, ServedModel
from attar.server.options import ServerOptions
from attar.server.serve import HttpServer
from attar.server.supervisor import EngineProcess, private_socket


class ModelsContext:
    """State that all requests share."""

    def __init__(self, takes_images: bool = False) -> None:
        self.metrics, self.draining, self.takes_images = HttpMetrics(), False, takes_images
        self._backoff = RetryAfter()

    def full(self) -> APIError:
        """Make the refusal of a request for which there is no room."""
        return APIError("overloaded", FULL, retry_after=self._backoff.retry_after(time.monotonic(), 0))


class ModelsServer(HttpServer):
    """A server of `models`, the engine of each at its socket. At most `memory` bytes of engines run, which `start`
    makes."""

    def __init__(
        self, models: Sequence[tuple[ModelSpec, Path]], memory: int, start: Start, options: ServerOptions,
        listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        keys = len(set(options.keys.hashes))
        self.context = ModelsContext(any(spec.images is not None for spec, _ in models))
        self.threads = TextThreads(keys)
        http = self.context.metrics
        store = ResponseStore(options.response_store) if options.response_store else None
        self.models = [ServedModel(spec, path, options, self.threads, http, store) for spec, path in models]
        waiting = min(spec.settings.limits().max_waiting for spec, _ in models)
        self.pool = ModelPool(self.models, memory, start, options.deadline, waiting, keys)
        http.registry.register(PoolMetrics(self.pool))
        http.registry.register(Labelled({each.name: each.context.metrics.registry for each in self.models}))
        self.front = Front(
            self.pool, self.threads, lambda: generate_latest(http.registry), bool(options.keys.hashes),
            options.root_path,
        )  # fmt: skip
        super().__init__(options, Middleware(self.front.app, options, self.context), listener)

    def begin(self) -> None:
        """Begin nothing: models are loaded on first use."""

    async def end(self) -> None:
        """End all engines."""
        await self.pool.close()

    def drain(self) -> None:
        """Take no more requests."""
        self.context.draining = self.front.draining = True
        for each in self.models:
            each.context.draining = True
        self.pool.drain()

    def close(self) -> None:
        """Release threads and child processes."""
        self.threads.close()
        for each in self.models:
            each.grammars.close()
            if each.images is not None:
                each.images.close()


def run(
    models: Sequence[ModelSpec], memory: int, options: ServerOptions, engine: Sequence[str],
    started: Callable[[str], None],
) -> int:  # fmt: skip
    """Serve several models until told to stop. Returns the exit status, 0.

    `engine` is the command line of an engine's process, and `memory` the bytes that engines may take together. Raises
    OSError where the address is not available, ValueError for unknown faults to be armed (`attar/faults.py`).
    """
    faults.arm_from(env.get().faults)
    sockets.allow(options.max_requests)
    with sockets.listen(options.host, options.port) as listener, ExitStack() as stack:
        placed = [(spec, stack.enter_context(private_socket())) for spec in models]

        def start(model: ServedModel, served: Callable[[], bool], gave_up: Callable[[int], None]) -> EngineProcess:
            settings = msgspec.structs.replace(model.spec.settings, socket=str(model.socket))
            return EngineProcess(engine, settings, served, gave_up, retries=False)

        async def main() -> None:
            await ModelsServer(placed, memory, start, options, listener).run(started)

        gc.freeze()
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(main())
    return 0
