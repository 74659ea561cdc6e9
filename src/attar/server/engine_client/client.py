"""The engine's process as seen from the server: requests go in, each request's events go to its own stream.

One connection carries everything. An event is handed on at once, without a task per event (`response_stream.py`).

When the connection ends, every open request ends in the same moment, with a `Failed`: the kernel reports the death of a
process whatever its cause. The client then connects again, as soon as an engine listens.

A process can also stop without dying (`heartbeat.py`). A stopped one may be continued, so its connection is kept,
nothing new is accepted, and open requests wait, until their deadline and a grace have passed. Then the client ends
them, since no engine will. A process that runs without progress is `hung`, and its owner ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from attar.faults import point
from attar.protocol import messages
from attar.protocol.messages import (
    CachedBlocks,
    Command,
    Embed,
    Embedding,
    Failed,
    Finished,
    Ready,
    RequestStatus,
    Stats,
    Submit,
)
from attar.server.admission.fair_queue import FairQueue
from attar.server.engine_client.connection import AnswerEvent, Connection, Event
from attar.server.engine_client.heartbeat import STUCK, Heartbeat
from attar.server.engine_client.response_stream import Backlog, ResponseStream

RETRY_SECONDS = 0.1
WATCH_SECONDS = 0.1
STOPPED = 5.0  # seconds without a beat after which `stopped` is called
RECENT_STEPS = 256  # whose times are kept
TOLD_SECONDS = 1.0  # for the engine to report a request's progress, which it does between two steps

logger = logging.getLogger(__name__)


class Answer(Protocol):
    """What takes the events of a request: a `ResponseStream`, or what stands before one."""

    def put(self, event: AnswerEvent) -> None:
        """Take an event."""

    def cancel(self, code: str = "cancelled") -> None:
        """End with a `Failed`, unless it has ended."""

    @property
    def late(self) -> Callable[[AnswerEvent], None]:
        """What takes events that come after the end."""


class EngineClient:
    """The connection to the engine at a Unix socket, made anew when it is lost."""

    def __init__(self, path: Path, stuck: float = STUCK, keys: int = 0, name: str = "the engine") -> None:
        """A step that exceeds `stuck` seconds is taken for stuck (`heartbeat.py`). `keys` API keys share the queue.
        Logs call the engine `name`."""
        self.path, self.name = path, name
        self.places, self.heartbeat, self.backlog = FairQueue(keys), Heartbeat(stuck), Backlog()
        self.ready: Ready | None = None
        """The engine's message when it became ready; None while there is none."""
        self.stats: Stats | None = None
        self.recent_steps: deque[tuple[int, int, int, float]] = deque(maxlen=RECENT_STEPS)
        """The last steps: rows, sequences, cached tokens of these, seconds."""
        self.was_ready = False
        self.open: dict[str, Answer] = {}
        """The engine's requests that have not ended, by id."""
        self._streams: WeakSet[ResponseStream] = WeakSet()
        self._left: dict[str, Answer] = {}  # ended here, and not yet by the engine
        self._asked: dict[str, asyncio.Future[messages.Report]] = {}  # reports awaited, by request
        self.hung: Callable[[], None] | None = None
        """Called repeatedly while the engine runs without progress."""
        self.stopped: Callable[[], None] | None = None
        """Called repeatedly while the engine has not been heard for `STOPPED` seconds."""
        self.begun: Callable[[], None] | None = None
        """Called each time that an engine has become ready."""
        self.cached: Callable[[CachedBlocks], None] | None = None
        """Called with changes of the engine's prefix cache, where it tells of them."""
        self.resumed: Callable[[], None] | None = None
        """Called when an engine that failed a request without being lost may be asked again."""
        self.draining = False
        """Whether the engine's host ends, and takes no more requests."""
        self.deaf = False
        """Whether changes of the cache are not heard at present, and will be told later."""
        self.lost: Callable[[Mapping[str, Answer]], None] | None = None
        """Called with the open requests when the connection has ended; else these end."""
        self._given_up = ""  # why the last connection was given up, if no engine has been ready since
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def full_for(self) -> float:
        """Seconds until there may be room, where the engine's host has said so."""
        return 0.0

    @property
    def told(self) -> dict[str, Any]:
        """Where the engine is, for JSON; empty for one on this host."""
        return {}

    @property
    def held(self) -> int:
        """Choices that have not been sent to the engine yet."""
        return sum(stream.held for stream in self._streams)

    def start(self) -> None:
        """Start connecting."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End open requests, and tell the engine to end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._end_all()
        if self._connection is not None:
            self._send([messages.Drain()])
            self._connection.close()
        self.ready = self.stats = self._connection = None

    def ask(self, commands: Sequence[Submit | Embed], window: int) -> ResponseStream:
        """Send requests whose answers belong together, up to `window` choices at a time; their ids must be new."""
        stream = ResponseStream(commands, window, self.send, self.drop, self.places, self.backlog)
        self._streams.add(stream)
        return stream.begin(self.ready is not None)

    async def reports(self, requests: Iterable[str]) -> dict[str, messages.Report]:
        """Return the progress of requests by id, for those that the engine has and reports within `TOLD_SECONDS`."""
        open, loop = [each for each in requests if each in self.open], asyncio.get_running_loop()
        new = {each: loop.create_future() for each in open if each not in self._asked}
        self._asked |= new
        if new:
            self._send([messages.QueryStatus(tuple(new))])  # once, however many callers wait
        asked = {each: self._asked[each] for each in open}
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=TOLD_SECONDS)
        finally:
            for each, future in new.items():  # the engine reports nothing on what it refused meanwhile
                if self._asked.get(each) is future:
                    del self._asked[each]
        return {each: future.result() for each, future in asked.items() if future.done() and not future.cancelled()}

    def send(self, answer: Answer, commands: Sequence[Submit | Embed]) -> None:
        """Send requests, whose events go to `answer`."""
        self.open.update((command.id, answer) for command in commands)
        code = ""
        try:
            point("client.send", commands[0].id)
            self._send(commands)
        except ValueError:  # longer than a frame
            code = "too_long"
        except Exception as error:  # whatever it is, it ends this answer alone
            logger.error("%s could not be sent: %s", commands[0].id, type(error).__name__)
            code = "internal"
        if code:
            answer.cancel(code)
            for command in commands:  # unknown to the engine
                self._left.pop(command.id, None)

    def take_over(self, blocks_at: str) -> None:
        """Tell the engine to take over cached blocks of the one whose `Ready.blocks_at` this is."""
        self._send([messages.TakeOver(blocks_at)])

    def drop(self, requests: Iterable[str], tell: bool) -> None:
        """Forget requests that have ended here, and `tell` the engine to cancel them."""
        tell = tell and self.ready is not None
        for request in requests:
            answer = self.open.pop(request, None)
            if (asked := self._asked.pop(request, None)) is not None:
                asked.cancel()
            if tell and answer is not None:
                self._left[request] = answer
        if tell:
            self._send([messages.Cancel(request) for request in requests])

    def abandon(self, requests: Iterable[str]) -> None:
        """Tell the engine to cancel requests that go on elsewhere; what it still says of them is nobody's."""
        requests = list(requests)
        self.drop(requests, True)
        for request in requests:
            self._left.pop(request, None)

    def _send(self, commands: Sequence[Command]) -> None:
        if self._connection is not None and commands:
            self._connection.write(messages.encode(commands))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ended = asyncio.Event()
            with contextlib.suppress(OSError):  # no process listens yet
                _, self._connection = await loop.create_unix_connection(
                    lambda ended=ended: Connection(self._arrived, ended.set, self._give_up),  # type: ignore[misc]
                    str(self.path),
                )
                self.heartbeat.begin()
                await self._watch(ended)
                self._lost()
            await asyncio.sleep(RETRY_SECONDS)

    def _give_up(self, why: str) -> None:
        """Log it once: an unsuitable listener is met anew every `RETRY_SECONDS`."""
        if why != self._given_up:
            logger.error("%s is given up: %s", self.name, why)
        self._given_up = why

    async def _watch(self, ended: asyncio.Event) -> None:
        """Count the seconds of silence until the connection has ended, and log when trouble comes and goes."""
        known = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await ended.wait()
            if ended.is_set():  # the last message is not the next connection's
                return
            self.heartbeat.silent += WATCH_SECONDS
            if self.heartbeat.hung and self.hung is not None:
                self.hung()
            if self.heartbeat.silent >= STOPPED and self.stopped is not None:
                self.stopped()
            if (trouble := self.heartbeat.trouble) != known:
                known = trouble
                level = logging.INFO if trouble is None else logging.ERROR
                logger.log(level, "%s; open requests: %d", trouble or "the engine gets on again", len(self.open))

    def _arrived(self, events: Sequence[Event]) -> None:
        self.heartbeat.silent = 0.0
        for event in events:
            if isinstance(event, Stats):
                self.heartbeat.count(self.stats, event)
                self.stats = event
            elif isinstance(event, messages.StepTimes):
                self.recent_steps.extend(event.steps)
            elif isinstance(event, messages.Beat):
                self.heartbeat.beat(event.busy)
            elif isinstance(event, RequestStatus):
                if (told := self._asked.pop(event.id, None)) is not None:
                    told.set_result(event.report)
            elif isinstance(event, Ready):
                self.ready, self.was_ready, self._given_up = event, True, ""
                self.places.size, self.places.slots = event.max_waiting, event.max_running
                logger.info("%s is ready: %d blocks of %d tokens", self.name, event.blocks, event.block_size)
                if self.begun is not None:
                    self.begun()
            elif isinstance(event, CachedBlocks):
                if self.cached is not None:
                    self.cached(event)
            else:
                self._hand_on(event)

    def _hand_on(self, event: AnswerEvent) -> None:
        if (answer := self.open.get(event.id)) is not None:
            try:
                point("client.receive", event.id)
                answer.put(event)
            except Exception as error:  # whatever it is, it ends this answer alone
                logger.error("what was said of %s could not be taken: %s", event.id, type(error).__name__)
                answer.cancel("internal")
        # This was on its way when its answer was ended, or is what ended it, and it may be the engine's last word.
        if (left := self._left.get(event.id)) is not None:
            left.late(event)
            if isinstance(event, Failed | Embedding) or (isinstance(event, Finished) and event.report is not None):
                del self._left[event.id]

    def _lost(self) -> None:
        if self.ready is not None:
            logger.error("%s is gone; open requests: %d", self.name, len(self.open))
        self.ready = self.stats = self._connection = None
        self._left.clear()
        self.recent_steps.clear()
        if self.lost is not None:
            gone, self.open = self.open, {}
            self.lost(gone)
        self._end_all()

    def _end_all(self) -> None:
        """End all streams, those without a request in the engine included: their unsent prompts wait here for room."""
        for stream in list(self._streams):
            stream.cancel("shutdown")
