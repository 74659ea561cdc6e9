"""Engines of several models: started and ended as `load_scheduler.py` decides, and requests that wait for them.

Each loaded model has one task (`_live`), from the start of its engine's process until that has ended. A request holds
its model from before its body goes to the model's application until its answer has been written, or its client has
gone (`lease`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Receive

from attar.faults import point
from attar.protocol.settings import CHANGED, HOPELESS
from attar.server.admission.rate_limits import Caller
from attar.server.errors import APIError
from attar.server.http import sse
from attar.server.models.load_scheduler import Action, Grant, Load, LoadScheduler, Refuse, State, Ticket, Unload
from attar.server.models.served import ServedModel

LOAD_SECONDS = 1800.0  # a load that takes longer is given up
_WHY = {
    HOPELESS: "it cannot be loaded",
    CHANGED: "its files changed since the server was started, which must be started again",
}
_DIED = "its engine ended"

logger = logging.getLogger(__name__)


class Process(Protocol):
    """A process of an engine, as `supervisor.EngineProcess`."""

    def start(self) -> None:
        """Start the process. Raises OSError."""

    def kill(self) -> None:
        """Kill an engine that makes no progress."""

    def end(self) -> None:
        """Make sure that the process has ended."""


Start = Callable[[ServedModel, Callable[[], bool], Callable[[int], None]], Process]
"""Makes the process of a model, from functions that tell whether its engine was ready, and that it is given up, with
its exit status, from any thread."""


class ModelPool:
    """Holds the engines of `models`, at most those that fit in `memory` bytes. At most `max_waiting` requests of each
    model wait; a request has `deadline` seconds from its arrival."""

    def __init__(
        self, models: Sequence[ServedModel], memory: int, start: Start, deadline: float, max_waiting: int, keys: int
    ) -> None:
        self.models = {model.name: model for model in models}
        sizes = {model.name: model.spec.size for model in models}
        self.scheduler = LoadScheduler(sizes, memory, max_waiting, keys)
        self._start, self._deadline = start, deadline
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._lives: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @contextlib.asynccontextmanager
    async def lease(self, model: ServedModel, caller: Caller, receive: Receive) -> AsyncIterator[None]:
        """Hold a model for a request whose body was read; it is loaded before. Raises APIError where too many others
        wait, its load fails, the deadline comes, the client disconnects, or the server shuts down."""
        point("models.lease", caller.id)
        if self._closed:
            raise APIError("draining", "the server is shutting down")
        ticket = Ticket(model.name, caller.cache_salt, time.monotonic())
        granted = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._do(self.scheduler.ask(ticket, time.monotonic()))
            if granted.done():
                granted.result()
            else:
                left = caller.arrived + self._deadline - time.monotonic()
                await sse.while_wanted(receive, _within(granted, max(0.0, left)))
            yield
        finally:
            self._waiting.pop(ticket, None)
            self._do(self.scheduler.leave(ticket, time.monotonic()))

    def drain(self) -> None:
        """End the requests that wait, and take no more."""
        self._closed = True
        for granted in self._waiting.values():
            if not granted.done():
                granted.set_exception(APIError("draining", "the server is shutting down"))

    async def close(self) -> None:
        """End all engines."""
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        for _, stop in self._lives.values():
            stop.set()
        if self._lives:
            await asyncio.wait([task for task, _ in self._lives.values()])

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Load(name) if not self._closed:
                    stop = asyncio.Event()
                    task = asyncio.get_running_loop().create_task(self._live(self.models[name], stop))
                    self._lives[name] = (task, stop)
                case Unload(name):
                    self._lives[name][1].set()
                case Grant(ticket):
                    if not (granted := self._waiting[ticket]).done():  # else it leaves at once
                        granted.set_result(None)
                case Refuse(ticket, why, seconds):
                    if not (granted := self._waiting[ticket]).done():
                        granted.set_exception(self._refusal(ticket.model, why, seconds))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if (wake := self.scheduler.wake) is not None and not self._closed:
            delay = max(0.0, wake - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._do(self.scheduler.tick(time.monotonic()))

    def _refusal(self, name: str, why: str, seconds: float) -> APIError:
        after = max(1, math.ceil(seconds))
        if why:
            return APIError("model_failed", f"model {name}: {why}; it is tried again later", "model", retry_after=after)
        waiting = len(self.scheduler.models[name].waiting)
        message = f"model {name} is being loaded, and {waiting} requests wait for it: try again later"
        return APIError("loading", message, "model", retry_after=max(2, after))

    async def _live(self, model: ServedModel, stop: asyncio.Event) -> None:
        """Start the model's engine, and end it once it is to `stop`, or is given up."""
        loop, name, began = asyncio.get_running_loop(), model.name, time.monotonic()
        ready, over = asyncio.Event(), asyncio.Event()
        why = ""

        def give_up(status: int) -> None:
            nonlocal why
            why = _WHY.get(status, _DIED)
            over.set()

        def given_up(status: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(give_up, status)

        process = self._start(model, ready.is_set, given_up)
        logger.info("model %s is being loaded", name)
        try:
            model.engine.hung, model.engine.begun = process.kill, ready.set
            await loop.run_in_executor(None, process.start)
            model.engine.start()
            await _first(LOAD_SECONDS, ready, over, stop)
            if ready.is_set() and not over.is_set():
                logger.info("model %s is loaded, after %.1f s", name, time.monotonic() - began)
                self._do(self.scheduler.loaded(name, time.monotonic()))
                await _first(None, over, stop)
            elif not stop.is_set():
                why = why or f"it was not loaded within {LOAD_SECONDS:g} s"
        except Exception as error:  # whatever it is: other models are served on
            logger.error("the engine of model %s could not be started: %s", name, type(error).__name__)
            why = "its engine could not be started"
        finally:
            await model.engine.close()
            await loop.run_in_executor(None, process.end)
            del self._lives[name]
            now = time.monotonic()
            if stop.is_set() and not over.is_set():
                logger.info("model %s is unloaded", name)
                self._do(self.scheduler.unloaded(name, now))
            else:
                logger.error("model %s: %s", name, why or _DIED)
                self._do(self.scheduler.failed(name, why or _DIED, now))


class PoolMetrics(Collector):
    """Metrics of a pool: the state of each model, its loads, and the requests that wait for it."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        scheduler = self._pool.scheduler
        states = GaugeMetricFamily("attar_model_state", "1 for the state of a model", labels=["model", "state"])
        size = GaugeMetricFamily("attar_model_memory_bytes", "Memory of a model that is loaded", labels=["model"])
        waiting = GaugeMetricFamily("attar_model_requests_waiting", "Requests that wait for a load", labels=["model"])
        loads = CounterMetricFamily("attar_model_loads", "Loads by their outcome", labels=["model", "outcome"])
        for name, model in scheduler.models.items():
            for state in State:
                states.add_metric([name, state.value], float(model.state is state))
            loaded = model.state in (State.LOADING, State.READY, State.DRAINING)
            size.add_metric([name], model.size if loaded else 0)
            waiting.add_metric([name], len(model.waiting))
            loads.add_metric([name, "loaded"], model.loads)
            loads.add_metric([name, "failed"], model.failures)
        yield from (states, size, waiting, loads)


async def _within(granted: asyncio.Future[None], seconds: float) -> None:
    """Wait for a future for some seconds. Raises APIError past them."""
    try:
        async with asyncio.timeout(seconds):
            await granted
    except TimeoutError:
        raise APIError("deadline", "the request took longer than the server allows") from None


async def _first(seconds: float | None, *events: asyncio.Event) -> None:
    """Wait for the first of events, for some seconds at most."""
    tasks = [asyncio.get_running_loop().create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
