"""Decisions of a server with several models: which to load, which to unload, and which requests wait meanwhile.

A plain state machine: there is no I/O, times are arguments, and each event returns the actions that follow from it. So
a simulation can drive it through thousands of random runs (`tests/server/models/test_load_scheduler.py`).

A request of a ready model begins at once. Another waits, and its model is loaded in the order in which models were
first asked for. A model that does not fit takes the place of idle ones, the least recently used first. Where too few
are idle, busy models go on for `PATIENCE` seconds. Then the least recently used of them drain: they finish what runs,
and their new requests wait. So steady requests of some models keep no other one out. A model with running requests is
never unloaded.

The bytes of a model count from the order to load it until its process has ended. A load that fails, or an engine that
is given up, ends the waiting requests of that model alone. It is tried again on the first request after a back-off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from attar.server.admission.fair_queue import FairQueue

PATIENCE = 2.0  # seconds that a model waits for idle ones before busy ones drain
BACK_OFF, MAX_BACK_OFF = 5.0, 300.0  # seconds after a failed load, twice as many after each further one, and at most


class State(StrEnum):
    """The state of a model. One that drains accepts no request; it is unloaded once none runs."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class Ticket:
    """One request for `model` of an API key, by its salt, since a time."""

    model: str
    key: bytes
    since: float


@dataclass(frozen=True, slots=True)
class Load:
    """Start the model's engine; then comes `loaded` or `failed`."""

    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    """End the model's engine; then comes `unloaded`."""

    model: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Let the request begin; at its end comes `leave`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the request, which may come again after so many seconds: its model `failed`, or has no place to wait."""

    ticket: Ticket
    failed: str
    retry_after: float


Action = Load | Unload | Grant | Refuse


@dataclass(slots=True)
class Model:
    """What is known of a model. `failed` says why its last load failed; `size` is in bytes."""

    name: str
    size: int
    places: FairQueue
    state: State = State.UNLOADED
    waiting: dict[Ticket, None] = field(default_factory=dict)
    running: set[Ticket] = field(default_factory=set)
    ending: bool = False  # its engine has been told to end
    granted: float = float("-inf")  # when a request last began
    used: float = float("-inf")  # when one last began or ended
    began: float = 0.0  # when its load began
    load_seconds: float = 0.0  # of the last load
    loads: int = 0
    failures: int = 0  # of all loads
    failed: str = ""
    failed_in_row: int = 0
    retry_at: float = 0.0


class LoadScheduler:
    """Decides about models of `sizes` bytes, whose sum in memory is at most `memory`. At most `max_waiting` requests of
    each wait, shared by `keys` API keys as in `FairQueue`. Raises ValueError for a model that does not fit alone."""

    def __init__(self, sizes: Mapping[str, int], memory: int, max_waiting: int, keys: int = 0) -> None:
        if too_large := [name for name, size in sizes.items() if size > memory]:
            raise ValueError(f"{too_large[0]} has {sizes[too_large[0]]} bytes, more than {memory}")
        self.memory, self.max_waiting = memory, max_waiting
        self.models = {name: Model(name, size, FairQueue(keys)) for name, size in sizes.items()}
        for model in self.models.values():
            model.places.size = max_waiting
        self._wanted: dict[str, float] = {}  # models to be loaded, in order, each since a time
        self._wake: float | None = None

    @property
    def held(self) -> int:
        """Bytes of all models whose engines run, begin or end."""
        return sum(model.size for model in self.models.values() if _in_memory(model))

    @property
    def wake(self) -> float | None:
        """The time at which `tick` is due, None where nothing waits for one."""
        return self._wake

    def ask(self, ticket: Ticket, now: float) -> list[Action]:
        """Take a request: it begins, waits or is refused."""
        model = self.models[ticket.model]
        if model.state is State.READY:
            return [_begin(model, ticket, now)]
        if model.state is State.FAILED and now < model.retry_at:
            return [Refuse(ticket, model.failed, model.retry_at - now)]
        if not model.places.fit(ticket.key, 1):
            return [Refuse(ticket, "", self._seconds_to_load(model, now))]
        model.places.take(ticket.key, 1)
        model.waiting[ticket] = None
        if model.state is not State.LOADING:
            self._wanted.setdefault(model.name, now)
        return self._decided(now)

    def leave(self, ticket: Ticket, now: float) -> list[Action]:
        """End a request, whether it runs, waits, or was refused."""
        model = self.models[ticket.model]
        if ticket in model.running:
            model.running.remove(ticket)
            model.used = now
        elif ticket in model.waiting:
            self._called(model, ticket)
            if not model.waiting:
                self._wanted.pop(model.name, None)
        return self._decided(now)

    def loaded(self, name: str, now: float) -> list[Action]:
        """Take note that a model's engine is ready: its requests begin."""
        model = self.models[name]
        model.state, model.failed, model.failed_in_row = State.READY, "", 0
        model.loads, model.load_seconds = model.loads + 1, now - model.began
        model.used = now
        return self._begun(model, now) + self._decided(now)  # what it was loaded for comes before it may drain

    def failed(self, name: str, why: str, now: float) -> list[Action]:
        """Take note that a model could not be loaded, or that its engine was given up. Its process has ended."""
        model = self.models[name]
        model.state, model.ending, model.failed = State.FAILED, False, why
        model.failures, model.failed_in_row = model.failures + 1, model.failed_in_row + 1
        wait = min(MAX_BACK_OFF, BACK_OFF * 2 ** min(model.failed_in_row - 1, 10))
        model.retry_at = now + wait
        self._wanted.pop(name, None)
        refused: list[Action] = [Refuse(ticket, why, wait) for ticket in list(model.waiting)]
        for ticket in list(model.waiting):
            self._called(model, ticket)
        return refused + self._decided(now)

    def unloaded(self, name: str, now: float) -> list[Action]:
        """Take note that the engine of a model that was to be unloaded has ended."""
        model = self.models[name]
        model.state, model.ending = State.UNLOADED, False
        return self._decided(now)

    def tick(self, now: float) -> list[Action]:
        """Take note of the time."""
        return self._decided(now)

    def _decided(self, now: float) -> list[Action]:
        """Return what follows from the state, which is changed as if it were done."""
        self._wake = None
        actions: list[Action] = []
        for model in self.models.values():
            if model.state is State.DRAINING and not model.ending:
                model.state = State.READY  # unless it is chosen again below
        for name, since in list(self._wanted.items()):
            model = self.models[name]
            if model.state not in (State.UNLOADED, State.FAILED):
                continue  # it was loaded when it was first asked for, and drains
            missing = model.size - (self.memory - self.held)
            if missing > 0:
                actions += self._make_room(missing, since, now)
                break  # in order: a smaller one that fits would take what this one waits for
            del self._wanted[name]
            model.state, model.began = State.LOADING, now
            actions.append(Load(name))
        for model in self.models.values():
            if model.state is State.READY:
                actions += self._begun(model, now)
        return actions

    def _begun(self, model: Model, now: float) -> list[Action]:
        """Begin all waiting requests of a model."""
        actions: list[Action] = []
        for ticket in list(model.waiting):
            self._called(model, ticket)
            actions.append(_begin(model, ticket, now))
        self._wanted.pop(model.name, None)
        return actions

    def _make_room(self, missing: int, since: float, now: float) -> list[Action]:
        """Unload idle models, or let busy ones drain, for `missing` bytes that one waits for since a time."""
        missing -= sum(model.size for model in self.models.values() if model.ending)
        ready = [model for model in self.models.values() if model.state is State.READY]
        idle = [model for model in ready if not model.running and not model.waiting]
        chosen = _least_recent(idle, missing)
        if sum(model.size for model in chosen) < missing:
            if now < since + PATIENCE:
                self._wake = since + PATIENCE
                return []
            chosen = _least_recent(ready, missing)
        actions: list[Action] = []
        for model in chosen:
            model.state = State.DRAINING
            if not model.running:
                model.ending = True
                actions.append(Unload(model.name))
            if model.waiting:
                self._wanted.setdefault(model.name, now)
        return actions

    def _called(self, model: Model, ticket: Ticket) -> None:
        del model.waiting[ticket]
        model.places.give(ticket.key, 1)

    def _seconds_to_load(self, model: Model, now: float) -> float:
        """Return the seconds until a model may be ready, as far as its last load tells."""
        left = model.load_seconds - (now - model.began if model.state is State.LOADING else 0.0)
        return max(0.0, left)


def _in_memory(model: Model) -> bool:
    return model.state not in (State.UNLOADED, State.FAILED)


def _begin(model: Model, ticket: Ticket, now: float) -> Grant:
    model.running.add(ticket)
    model.granted = model.used = now
    return Grant(ticket)


def _least_recent(models: Iterable[Model], missing: int) -> list[Model]:
    """Return the least recently used of `models`, idle ones first, that have the `missing` bytes; all where they have
    less. None is among them whose bytes the others do not need.

    A busy model counts as used when a request last began: its requests that end while it drains change no choice.
    """
    chosen: list[Model] = []
    for model in sorted(models, key=lambda each: (bool(each.running), each.granted if each.running else each.used)):
        if missing <= sum(each.size for each in chosen):
            break
        chosen.append(model)
    for model in reversed(list(chosen)):
        if sum(each.size for each in chosen) - model.size >= missing:
            chosen.remove(model)
    return chosen
