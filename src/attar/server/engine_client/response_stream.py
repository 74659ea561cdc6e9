"""The events of one HTTP request, as its reader takes them.

A reader that falls behind finds several events together, and one that falls behind for good loses its request, so that
no queue grows without bound. A stream may leave MAX_WAITING, and MAX_LEFT for as long as it likes; what is between the
two for PATIENCE, as long as whoever takes nothing is waited for. Where all that are late together leave more than
MAX_TOTAL, whoever leaves most is let go, so that many slow readers hold no more, but for what comes within LATENESS.

A request of many prompts enters the engine's queue a window at a time, so that it fits whatever its length, and leaves
room for others. What is refused there because others have taken the room, while the request is under way, waits here;
so does what its key has no place for (`fair_queue.py`), and it asks again every `ROOM_SECONDS`: places come free
whenever anything of that key is first heard of, and when others leave.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakSet

import msgspec

from attar.protocol.messages import Delta, Embed, Embedding, Failed, Finished, Submit
from attar.server.admission.fair_queue import Places
from attar.server.engine_client.connection import AnswerEvent, PromptScores
from attar.server.http.limits import STALL_SECONDS

MAX_LEFT = 128 << 10  # bytes, about, of events that a reader leaves for longer than PATIENCE
MAX_WAITING = 2 << 20  # the same for longer than LATENESS: thousands of tokens
MAX_HELD = 64 << 20  # the same of those that wait at all, also while it is at work on what came before
MAX_TOTAL = 8 << 20  # the same of all streams together, those that leave anything for longer than LATENESS
PATIENCE = STALL_SECONDS
LATENESS = 0.5  # seconds: this process may be late itself
LOOK_SECONDS = 0.05
ROOM_SECONDS = 0.1  # until a request with prompts still to come, for which there was no room, asks again


class Backlog:
    """What the readers of all streams have left: `size` bytes, about, also of those that take what has just come."""

    def __init__(self) -> None:
        self.size = 0
        self.streams: WeakSet[ResponseStream] = WeakSet()
        self._looked = 0.0

    def excess(self, now: float) -> list[ResponseStream]:
        """Whom to let go, those that leave most, so that all that have left anything for longer than LATENESS leave no
        more than MAX_TOTAL. All streams are looked at, and so only every LOOK_SECONDS."""
        if self.size <= MAX_TOTAL or now - self._looked < LOOK_SECONDS:
            return []
        self._looked = now
        late = [each for each in self.streams if each.left and now - each.since > LATENESS]
        total, found = sum(each.left for each in late), []
        for each in sorted(late, key=lambda each: each.left, reverse=True):
            if total <= MAX_TOTAL:
                break
            total -= each.left
            found.append(each)
        return found


class ResponseStream:
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
        send: Callable[[ResponseStream, Sequence[Submit | Embed]], None],
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
        self._places, self._salt = places, commands[0].cache_salt
        self._unheard: dict[str, set[int]] = {}  # choices that were sent and of which the engine has said nothing yet
        self._running: dict[str, set[int]] = {}  # those that it has said something of, but not that they ended
        self._events: list[AnswerEvent] = []
        self.left = 0  # bytes of them, about; of one that is whole 0
        self.since = 0.0  # when the oldest of them came
        self._backlog = Backlog() if backlog is None else backlog
        self._backlog.streams.add(self)
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
