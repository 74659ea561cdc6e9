"""The engine's process as seen from the server's: requests go in, each one's events come out of its own queue.

One connection carries everything. What arrives is handed on at once, without a task per event; a reader that falls
behind finds several events together, and one that falls behind for good loses its request, so that no queue grows
without bound. A stream may leave MAX_WAITING, and MAX_LEFT for as long as it likes; what is between the two for
PATIENCE, as long as whoever takes nothing is waited for. Where all that are late together leave more than MAX_TOTAL,
whoever leaves most is let go, so that many slow readers hold no more, but for what comes within LATENESS.

When the connection ends, so does every open request, in the same moment, with a `Failed`: the kernel tells of a
process's death whatever it died of. The client then connects again, as soon as an engine listens.

A process can also stop without dying (`heartbeat.py`). One that does not run may be continued, so its connection is
kept, nothing new is taken, and what is open waits, until its deadline and `GRACE` have passed. Then its end comes from
here: nobody else will tell it. One that runs but will not get on is `hung`, and whoever owns it ends it.

A request of many prompts enters the engine's queue a window at a time, so that it fits whatever its length, and leaves
room for others. What is refused there because others have taken the room, while the request is under way, waits here;
so does what its key has no place for (`places.py`), and it asks again every `ROOM_SECONDS`: places come free whenever
anything of that key is first heard of, and when others leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from weakref import WeakSet

import msgspec

from attar.faults import point
from attar.protocol.messages import (
    Ask,
    Beat,
    Cancel,
    Command,
    Delta,
    Drain,
    Embed,
    Embedding,
    Failed,
    Finished,
    Ready,
    Report,
    Stats,
    Submit,
    Told,
    encode,
)
from attar.server.admission.fair_queue import Places
from attar.server.engine_client.connection import AnswerEvent, Connection, Event
from attar.server.engine_client.heartbeat import STUCK, Heartbeat
from attar.server.http.limits import STALL_SECONDS
from attar.server.logprobs import PromptScores

MAX_LEFT = 128 << 10  # bytes, about, of events that a reader leaves for longer than PATIENCE
MAX_WAITING = 2 << 20  # the same for longer than LATENESS: thousands of tokens
MAX_HELD = 64 << 20  # the same of those that wait at all, also while it is at work on what came before
MAX_TOTAL = 8 << 20  # the same of all streams together, those that leave anything for longer than LATENESS
PATIENCE = STALL_SECONDS
LATENESS = 0.5  # seconds: this process may be late itself
LOOK_SECONDS = 0.05
RETRY_SECONDS = 0.1
WATCH_SECONDS = 0.1
GRACE = 1.0  # seconds past its deadline that a request is left to the engine, which ends it between two steps
TOLD_SECONDS = 1.0  # that the engine has to say how far a request is: it does so between two steps
ROOM_SECONDS = 0.1  # until a request with prompts still to come, for which there was no room, asks again

logger = logging.getLogger(__name__)


class Backlog:
    """What the readers of all streams have left: `size` bytes, about, also of those that take what has just come."""

    def __init__(self) -> None:
        self.size = 0
        self.answers: WeakSet[Answer] = WeakSet()
        self._looked = 0.0

    def excess(self, now: float) -> list[Answer]:
        """Whom to let go, those that leave most, so that all that have left anything for longer than LATENESS leave no
        more than MAX_TOTAL. All streams are looked at, and so only every LOOK_SECONDS."""
        if self.size <= MAX_TOTAL or now - self._looked < LOOK_SECONDS:
            return []
        self._looked = now
        late = [each for each in self.answers if each.left and now - each.since > LATENESS]
        total, found = sum(each.left for each in late), []
        for each in sorted(late, key=lambda each: each.left, reverse=True):
            if total <= MAX_TOTAL:
                break
            total -= each.left
            found.append(each)
        return found


class Answer:
    """The events of one HTTP request, which may be several of the engine's (`prompts`: their ids, in order).

    It ends with a `Failed`, which ends all of them, or with the `Finished` or `Embedding` after which none is open.
    Then `ended` holds, and nothing follows; `failure` is the code of the `Failed` that ended it. At most `window`
    choices are in the engine at a time, or those of one prompt, and none for whom its key has no place among `places`.
    `late` is told what never reaches the reader: what waits when it is let go, and what the engine says after that. A
    `whole` one is never let go for what waits: no connection keeps its reader from it. Whoever reads it closes it, so
    that what is left is no part of the `backlog`.
    """

    def __init__(
        self,
        commands: Sequence[Submit | Embed],
        window: int,
        send: Callable[[Answer, Sequence[Submit | Embed]], None],
        drop: Callable[[Iterable[str], bool], None],
        places: Places,
        backlog: Backlog | None = None,
    ) -> None:
        self.prompts = {command.id: at for at, command in enumerate(commands)}
        self.ended = False
        self.failure: str | None = None
        self.late: Callable[[AnswerEvent], None] = lambda event: None
        self.whole = False
        self._commands = {command.id: command for command in commands}
        self._open = {command.id: _choices(command) for command in commands}
        self._later = deque(commands)
        self._window, self._within = window, 0
        self._under_way = False
        self._began = time.monotonic()
        self._send, self._drop = send, drop
        self._places, self._salt = places, commands[0].salt
        self._unheard: dict[str, set[int]] = {}  # choices that were sent and of which the engine has said nothing yet
        self._running: dict[str, set[int]] = {}  # those that it has said something of, but not that they ended
        self._events: list[AnswerEvent] = []
        self.left = 0  # bytes of them, about; of one that is whole 0
        self.since = 0.0  # when the oldest of them came
        self._backlog = Backlog() if backlog is None else backlog
        self._backlog.answers.add(self)
        self._wake = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def take(self) -> list[AnswerEvent]:
        """All events that have arrived, at least one. Empty once everything was taken and the answer has ended."""
        if not self._events and not self.ended:
            self._wake.clear()
            await self._wake.wait()
        return self._emptied()

    def _emptied(self) -> list[AnswerEvent]:
        self._backlog.size -= self.left
        events, self._events, self.left = self._events, [], 0
        return events

    def reading(self) -> None:
        """What was taken last is still being read: what came since has not been left."""
        self.since = time.monotonic()

    @property
    def held(self) -> int:
        """Choices that have not been sent yet."""
        return sum(map(_choices, self._later))

    def go_on(self) -> None:
        """Send what the window has room for."""
        passed, batch = time.monotonic() - self._began, []
        while self._later and (not self._within or self._within + _choices(self._later[0]) <= self._window):
            command, count = self._later[0], _choices(self._later[0])
            if not self._places.fit(self._salt, count):
                self._ask_again()
                break
            self._later.popleft()
            self._within += count
            self._places.take(self._salt, count)
            self._unheard[command.id] = set(range(count))
            left = None if command.deadline is None else max(0.0, command.deadline - passed)
            batch.append(msgspec.structs.replace(command, deadline=left))
        if batch:
            self._send(self, batch)

    def _ask_again(self) -> None:
        """Look for room once more, in a while."""
        if "room" not in self._timers:
            self._timers["room"] = asyncio.get_running_loop().call_later(ROOM_SECONDS, self._look)

    def _look(self) -> None:
        del self._timers["room"]
        self.go_on()

    def put(self, event: AnswerEvent) -> None:
        """The engine says something."""
        if self.ended:
            return
        if isinstance(event, Failed) and event.code == "full" and self._under_way:
            self._put_back(event.id)
            return
        self._under_way = True
        if isinstance(event, Finished) or (self._unheard and isinstance(event, Delta)):
            self._hear(event)
        now = time.monotonic()
        if not self._events:
            self.since = now
        if not self.whole:
            self._leave_more(_size(event), now)
            if self.ended:
                return
        self._events.append(event)
        self._wake.set()
        if isinstance(event, Failed):
            self.failure = event.code
            self._close(event.id)
            self._end()
        elif isinstance(event, Finished | Embedding):
            self._open[event.id] -= 1
            if not self._open[event.id]:
                self._close(event.id)
                self.go_on()
            if not self._open:
                self._end()

    def _leave_more(self, size: int, now: float) -> None:
        """So much has come. Who has left too much is let go: its own reader, or another."""
        self.left += size
        self._backlog.size += size
        seconds = now - self.since
        if (
            self.left > MAX_HELD
            or (self.left > MAX_WAITING and seconds > LATENESS)
            or (self.left > MAX_LEFT and seconds > PATIENCE)
        ):
            self._let_go()
        for each in self._backlog.excess(now):
            each._let_go()

    def _let_go(self) -> None:
        """What waits would do so for as long as the connection stalls."""
        for event in self._emptied():
            self.late(event)
        if self.ended:  # by the engine, and its reader does not know
            self.failure = "slow_reader"
            self._events.append(Failed(next(iter(self.prompts)), "slow_reader", ""))
        else:
            self.cancel("slow_reader")

    def end_after(self, seconds: float) -> None:
        """End with `deadline` then, if it has not ended."""
        self._timers["deadline"] = asyncio.get_running_loop().call_later(seconds, self.cancel, "deadline")

    def cancel(self, code: str = "cancelled") -> None:
        """End here, with a `Failed`, unless it has ended; the engine is told to drop what is open."""
        if not self.ended:
            self.failure = code
            self._events.append(Failed(next(iter(self._open)), code, ""))
            self._wake.set()
            self._end()

    def close(self) -> None:
        """Nobody takes what still waits."""
        self.cancel()
        for event in self._emptied():
            self.late(event)

    def _put_back(self, request: str) -> None:
        """Others were quicker: it is sent again when one before it has ended."""
        command = self._commands[request]
        self._within -= _choices(command)
        self._leave(request)
        self._later.appendleft(command)
        if not self._within:
            self._ask_again()

    def _hear(self, event: Delta | Finished) -> None:
        """The choice waits no more: it runs, or has ended."""
        unheard = self._unheard.get(event.id)
        if unheard is not None and event.choice in unheard:
            unheard.remove(event.choice)
            self._places.give(self._salt, 1)
            if not unheard:
                del self._unheard[event.id]
            self._running.setdefault(event.id, set()).add(event.choice)
            self._places.running += 1
        if isinstance(event, Finished) and event.choice in self._running.get(event.id, ()):
            self._running[event.id].remove(event.choice)
            self._places.running -= 1

    def _leave(self, request: str) -> None:
        """No choice of it waits or runs any more."""
        self._places.give(self._salt, len(self._unheard.pop(request, ())))
        self._places.running -= len(self._running.pop(request, ()))

    def _close(self, request: str) -> None:
        self._within -= _choices(self._commands.pop(request))
        self._leave(request)
        del self._open[request]
        self._drop([request], False)

    def _end(self) -> None:
        self.ended = True
        for timer in self._timers.values():
            timer.cancel()
        for request in (*self._unheard, *self._running):
            self._leave(request)
        unsent = {command.id for command in self._later}
        self._later.clear()
        self._commands.clear()
        if unsent:
            self._drop(unsent, False)
        if sent := [request for request in self._open if request not in unsent]:
            self._drop(sent, True)


def _choices(command: Submit | Embed) -> int:
    return command.n if isinstance(command, Submit) else 1


def _size(event: AnswerEvent) -> int:
    if isinstance(event, Delta):
        return 256 + 4 * len(event.text) + sum(128 + 112 * len(each.top) for each in event.logprobs or ())
    if isinstance(event, PromptScores):
        return 128 + memoryview(event.logprobs).nbytes
    return 128 + (len(event.vector) if isinstance(event, Embedding) else 0)


class EngineClient:
    """The connection to the engine at a Unix socket, made anew when it is lost."""

    def __init__(self, path: Path, stuck: float = STUCK, keys: int = 0) -> None:
        """Nothing is expected of a step after `stuck` seconds (`heartbeat.py`). So many `keys` share the queue."""
        self.path = path
        self.places, self.heartbeat, self.backlog = Places(keys), Heartbeat(stuck), Backlog()
        self.ready: Ready | None = None
        """What the engine said when it was ready; None while there is none."""
        self.stats: Stats | None = None
        self.was_ready = False
        self.open: dict[str, Answer] = {}
        """The engine's requests that have not ended, by id."""
        self._answers: WeakSet[Answer] = WeakSet()
        self._left: dict[str, Answer] = {}  # those that ended here, and of which the engine has not said so yet
        self._asked: dict[str, asyncio.Future[Report]] = {}  # what is to be told of requests that are open
        self.hung: Callable[[], None] | None = None
        """Called, again and again, while the engine runs but will not get on."""
        self._given_up = ""  # why the last connection was, if no engine has been ready since
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str | None:
        """What is wrong with an engine that is there, in a sentence; None if nothing is."""
        return self.heartbeat.trouble

    @property
    def held(self) -> int:
        """Choices that the engine has not been told of yet."""
        return sum(answer.held for answer in self._answers)

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End what is open, and tell the engine to end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._end_all()
        if self._connection is not None:
            self._send([Drain()])
            self._connection.close()
        self.ready = self.stats = self._connection = None

    def ask(self, commands: Sequence[Submit | Embed], window: int) -> Answer:
        """Send requests whose answers belong together, up to `window` choices at a time; their ids must be new."""
        answer = Answer(commands, window, self._forward, self._drop, self.places, self.backlog)
        self._answers.add(answer)
        if self.ready is None:
            answer.cancel("shutdown")
        else:
            deadlines = [command.deadline for command in commands if command.deadline is not None]
            if deadlines:
                answer.end_after(max(deadlines) + GRACE)
            answer.go_on()
        return answer

    async def reports(self, requests: Iterable[str]) -> dict[str, Report]:
        """How far these requests are, by id: those of them that the engine has and tells of within `TOLD_SECONDS`."""
        open, loop = [each for each in requests if each in self.open], asyncio.get_running_loop()
        new = {each: loop.create_future() for each in open if each not in self._asked}
        self._asked |= new
        if new:
            self._send([Ask(tuple(new))])  # once, however many wait to be told
        asked = {each: self._asked[each] for each in open}
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=TOLD_SECONDS)
        finally:
            for each, future in new.items():  # of what the engine refused meanwhile it says nothing
                if self._asked.get(each) is future:
                    del self._asked[each]
        return {each: future.result() for each, future in asked.items() if future.done() and not future.cancelled()}

    def _forward(self, answer: Answer, commands: Sequence[Submit | Embed]) -> None:
        self.open.update((command.id, answer) for command in commands)
        code = ""
        try:
            point("client.send", commands[0].id)
            self._send(commands)
        except ValueError:  # longer than a frame
            code = "too_long"
        except Exception as error:
            logger.error("%s could not be sent: %s", commands[0].id, type(error).__name__)
            code = "internal"
        if code:
            answer.cancel(code)
            for command in commands:  # of which the engine knows nothing
                self._left.pop(command.id, None)

    def _drop(self, requests: Iterable[str], tell: bool) -> None:
        tell = tell and self.ready is not None
        for request in requests:
            answer = self.open.pop(request, None)
            if (asked := self._asked.pop(request, None)) is not None:
                asked.cancel()
            if tell and answer is not None:
                self._left[request] = answer
        if tell:
            self._send([Cancel(request) for request in requests])

    def _send(self, commands: Sequence[Command]) -> None:
        if self._connection is not None and commands:
            self._connection.write(encode(commands))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ended = asyncio.Event()
            with contextlib.suppress(OSError):  # nobody listens yet
                _, self._connection = await loop.create_unix_connection(
                    lambda ended=ended: Connection(self._arrived, ended.set, self._give_up),  # type: ignore[misc]
                    str(self.path),
                )
                self.heartbeat.begin()
                await self._watch(ended)
                self._lost()
            await asyncio.sleep(RETRY_SECONDS)

    def _give_up(self, why: str) -> None:
        """Say it once: whoever listens in the engine's place is met anew every `RETRY_SECONDS`."""
        if why != self._given_up:
            logger.error("the engine is given up: %s", why)
        self._given_up = why

    async def _watch(self, ended: asyncio.Event) -> None:
        """Count the seconds of silence until the connection has ended, and log when trouble comes and goes."""
        known = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await ended.wait()
            if ended.is_set():  # what was last heard is not the next one's
                return
            self.heartbeat.silent += WATCH_SECONDS
            if self.heartbeat.hung and self.hung is not None:
                self.hung()
            if (trouble := self.trouble) != known:
                known = trouble
                level = logging.INFO if trouble is None else logging.ERROR
                logger.log(level, "%s; open requests: %d", trouble or "the engine gets on again", len(self.open))

    def _arrived(self, events: Sequence[Event]) -> None:
        self.heartbeat.silent = 0.0
        for event in events:
            if isinstance(event, Stats):
                self.heartbeat.count(self.stats, event)
                self.stats = event
            elif isinstance(event, Beat):
                self.heartbeat.beat(event.busy)
            elif isinstance(event, Told):
                if (told := self._asked.pop(event.id, None)) is not None:
                    told.set_result(event.report)
            elif isinstance(event, Ready):
                self.ready, self.was_ready, self._given_up = event, True, ""
                self.places.size, self.places.slots = event.max_waiting, event.max_running
                logger.info("the engine is ready: %d blocks of %d tokens", event.blocks, event.block_size)
            else:
                self._hand_on(event)

    def _hand_on(self, event: AnswerEvent) -> None:
        if (answer := self.open.get(event.id)) is not None:
            try:
                point("client.receive", event.id)
                answer.put(event)
            except Exception as error:
                logger.error("what was said of %s could not be taken: %s", event.id, type(error).__name__)
                answer.cancel("internal")
        # This was on its way when its answer was ended, or is what ended it, and it may be the engine's last word.
        if (answer := self._left.get(event.id)) is not None:
            answer.late(event)
            if isinstance(event, Failed | Embedding) or (isinstance(event, Finished) and event.report is not None):
                del self._left[event.id]

    def _lost(self) -> None:
        if self.ready is not None:
            logger.error("the engine is gone; open requests: %d", len(self.open))
        self.ready = self.stats = self._connection = None
        self._left.clear()
        self._end_all()

    def _end_all(self) -> None:
        """Also those of which the engine has nothing: what is left of them waits here for room."""
        for answer in list(self._answers):
            answer.cancel("shutdown")
