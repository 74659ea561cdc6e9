"""The events of one HTTP request, as its reader takes them.

A slow reader finds several events together, and one that falls behind for good loses its request, so that no queue
grows without bound. A stream may leave MAX_LEFT unread for any time, up to MAX_WAITING for PATIENCE, as long as a
client that takes nothing is waited for, and more for LATENESS only. Where all late streams together leave more than
MAX_TOTAL, those that leave most are dropped: many slow readers hold no more, but for what comes within LATENESS.

A request of many prompts enters the engine's queue a window at a time, so that it fits whatever its length, and leaves
room for others. A prompt that the engine refuses as full, while the request is under way, waits here. So does one whose
key has no place (`fair_queue.py`); the stream asks again every `ROOM_SECONDS`, since places come free whenever a choice
of that key has its first event, and when others leave.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Self
from weakref import WeakSet

import msgspec

from attar.protocol.messages import Delta, Embed, Embedding, Failed, Finished, Submit
from attar.server.admission.fair_queue import FairQueue
from attar.server.engine_client.connection import AnswerEvent, PromptScores
from attar.server.http.limits import STALL_SECONDS

GRACE = 1.0  # seconds past a request's deadline that the engine has to end it, which it does between two steps
MAX_LEFT = 128 << 10  # approximate bytes of events that a reader may leave for longer than PATIENCE
MAX_WAITING = 2 << 20  # bytes for longer than LATENESS: thousands of tokens
MAX_HELD = 64 << 20  # bytes that may wait at all, also while the reader works on earlier events
MAX_TOTAL = 8 << 20  # bytes of all streams together that leave anything for longer than LATENESS
PATIENCE = STALL_SECONDS
LATENESS = 0.5  # seconds: this process may be late itself
LOOK_SECONDS = 0.05
ROOM_SECONDS = 0.1  # until a request with prompts still to come, for which there was no room, asks again


class Backlog:
    """Unread events of all streams: `size` approximate bytes, those just arrived included."""

    def __init__(self) -> None:
        self.size = 0
        self.streams: WeakSet[ResponseStream] = WeakSet()
        self._looked = 0.0

    def excess(self, now: float) -> list[ResponseStream]:
        """Return the streams to drop, those that leave most, so that all that have left anything for longer than
        LATENESS leave no more than MAX_TOTAL. All streams are looked at, and so only every LOOK_SECONDS."""
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
    """The events of one HTTP request, which may be several engine requests (`prompts`: their ids, in order).

    It ends with a `Failed`, which ends all of them, or with the last `Finished` or `Embedding`. Then `ended` holds, and
    nothing follows; `failure` is the code of the `Failed`. At most `window` choices are in the engine at a time, or the
    choices of one prompt, and none without a place of its key among `places`. `late` gets the events that never reach
    the reader: those unread when it is dropped, and later ones. A `whole` stream is never dropped for unread events:
    its reader waits for no connection. The reader must close it, so that its unread events leave the `backlog`.
    """

    def __init__(
        self, commands: Sequence[Submit | Embed], window: int,
        send: Callable[[ResponseStream, Sequence[Submit | Embed]], None], drop: Callable[[Iterable[str], bool], None],
        places: FairQueue, backlog: Backlog | None = None,
    ) -> None:  # fmt: skip
        self.prompts = {command.id: at for at, command in enumerate(commands)}
        self.ended = False
        self.failure: str | None = None
        self.late: Callable[[AnswerEvent], None] = lambda event: None
        self.whole = False
        self.replays = 0  # times that another engine went on with one of its prompts
        self._commands = {command.id: command for command in commands}
        self._open = {command.id: _choices(command) for command in commands}
        self._later = deque(commands)
        self._window, self._within = window, 0
        self._under_way = False
        self._began = time.monotonic()
        self._send, self._drop = send, drop
        self._places, self._salt = places, commands[0].cache_salt
        self._unheard: dict[str, set[int]] = {}  # choices sent and without an event yet
        self._running: dict[str, set[int]] = {}  # choices with an event that have not ended
        self._events: list[AnswerEvent] = []
        self.left = 0  # their approximate bytes; 0 for a whole stream
        self.since = 0.0  # arrival of the oldest event
        self._backlog = Backlog() if backlog is None else backlog
        self._backlog.streams.add(self)
        self._wake = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def take(self) -> list[AnswerEvent]:
        """Take all events that have arrived, at least one. Empty once everything was taken and the answer has ended."""
        if not self._events and not self.ended:
            self._wake.clear()
            await self._wake.wait()
        return self._emptied()

    def _emptied(self) -> list[AnswerEvent]:
        self._backlog.size -= self.left
        events, self._events, self.left = self._events, [], 0
        return events

    def reading(self) -> None:
        """Note that the reader still works on the events taken last: later ones do not count as left."""
        self.since = time.monotonic()

    @property
    def held(self) -> int:
        """Choices that have not been sent yet."""
        return sum(map(_choices, self._later))

    def begin(self, ready: bool) -> Self:
        """Send the first requests, or end with `shutdown` where no engine is `ready`. It ends `GRACE` past its deadline
        at the latest."""
        if not ready:
            self.cancel("shutdown")
            return self
        if (left := self._later[0].deadline) is not None:  # the others have the same
            self.end_after(left + GRACE)
        self.go_on()
        return self

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
        """Look for room once more after ROOM_SECONDS."""
        if "room" not in self._timers:
            self._timers["room"] = asyncio.get_running_loop().call_later(ROOM_SECONDS, self._look)

    def _look(self) -> None:
        del self._timers["room"]
        self.go_on()

    def put(self, event: AnswerEvent) -> None:
        """Add an event of the engine."""
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
        """Count new bytes, and drop streams that have left too much: this one, or others."""
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
        """Drop the stream: its events would wait for as long as the connection stalls."""
        for event in self._emptied():
            self.late(event)
        if self.ended:  # by the engine, unknown to its reader
            self.failure = "slow_reader"
            self._events.append(Failed(next(iter(self.prompts)), "slow_reader", ""))
        else:
            self.cancel("slow_reader")

    def end_after(self, seconds: float) -> None:
        """End with `deadline` after `seconds`, if it has not ended by then."""
        self._timers["deadline"] = asyncio.get_running_loop().call_later(seconds, self.cancel, "deadline")

    def cancel(self, code: str = "cancelled") -> None:
        """End with a `Failed`, unless it has ended, and tell the engine to drop open requests."""
        if not self.ended:
            self.failure = code
            self._events.append(Failed(next(iter(self._open)), code, ""))
            self._wake.set()
            self._end()

    def close(self) -> None:
        """End the stream; unread events are late."""
        self.cancel()
        for event in self._emptied():
            self.late(event)

    def _put_back(self, request: str) -> None:
        """Queue a refused request again; it is sent when one before it has ended."""
        command = self._commands[request]
        self._within -= _choices(command)
        self._leave(request)
        self._later.appendleft(command)
        if not self._within:
            self._ask_again()

    def _hear(self, event: Delta | Finished) -> None:
        """Note that a choice waits no more: it runs, or has ended."""
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
        """Release all choices of an engine request that wait or run."""
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
