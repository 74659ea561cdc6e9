"""Loads of models by the scheduler: each rule alone, and all of them in a simulation of random runs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.server.models import load_scheduler
from attar.server.models.load_scheduler import (
    BACK_OFF,
    PATIENCE,
    Action,
    Grant,
    Load,
    LoadScheduler,
    Refuse,
    State,
    Ticket,
    Unload,
)

WAITING = 8


def made(*sizes: int, memory: int, keys: int = 0) -> LoadScheduler:
    return LoadScheduler(dict(zip("abcdef", sizes, strict=False)), memory, WAITING, keys)


def asked(scheduler: LoadScheduler, model: str, now: float, key: bytes = b"") -> tuple[Ticket, list[Action]]:
    ticket = Ticket(model, key, now)
    return ticket, scheduler.ask(ticket, now)


def loaded(scheduler: LoadScheduler, model: str, now: float) -> Ticket:
    """Load a model for a request, which begins."""
    ticket, actions = asked(scheduler, model, now)
    assert actions == [Load(model)]
    assert scheduler.loaded(model, now) == [Grant(ticket)]
    return ticket


def test_a_model_that_does_not_fit_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="b has 3 bytes, more than 2"):
        made(1, 3, memory=2)


def test_requests_of_a_ready_model_begin_at_once() -> None:
    scheduler = made(1, memory=1)
    loaded(scheduler, "a", 0.0)
    ticket, actions = asked(scheduler, "a", 1.0)
    assert actions == [Grant(ticket)]


def test_the_least_recently_used_idle_model_makes_room() -> None:
    scheduler = made(1, 1, 1, memory=2)
    tickets = [loaded(scheduler, name, at) for at, name in enumerate("ab")]
    scheduler.leave(tickets[1], 2.0)
    scheduler.leave(tickets[0], 3.0)  # so it was used after the other
    ticket, actions = asked(scheduler, "c", 4.0)
    assert actions == [Unload("b")]
    assert scheduler.unloaded("b", 5.0) == [Load("c")]
    assert scheduler.loaded("c", 6.0) == [Grant(ticket)]


def test_no_more_is_unloaded_than_is_needed() -> None:
    scheduler = made(1, 3, 3, memory=4)
    for at, name in enumerate("ab"):
        scheduler.leave(loaded(scheduler, name, at), at)
    _, actions = asked(scheduler, "c", 4.0)
    assert actions == [Unload("b")]  # the older one is too small, and not needed beside it


def test_a_busy_model_drains_after_a_while_and_its_new_requests_wait() -> None:
    scheduler = made(1, 1, memory=1)
    running = loaded(scheduler, "a", 0.0)
    waiting, actions = asked(scheduler, "b", 1.0)
    assert actions == []
    assert scheduler.wake == 1.0 + PATIENCE
    ticket, actions = asked(scheduler, "a", 2.0)
    assert actions == [Grant(ticket)]
    assert scheduler.tick(1.0 + PATIENCE) == []
    assert scheduler.models["a"].state is State.DRAINING
    late, actions = asked(scheduler, "a", 4.0)
    assert actions == []
    scheduler.leave(running, 5.0)
    assert scheduler.leave(ticket, 6.0) == [Unload("a")]
    assert scheduler.unloaded("a", 7.0) == [Load("b")]
    assert scheduler.loaded("b", 8.0) == [Grant(waiting)]
    assert scheduler.leave(waiting, 9.0) == [Unload("b")]
    assert scheduler.unloaded("b", 10.0) == [Load("a")]
    assert scheduler.loaded("a", 11.0) == [Grant(late)]


def test_a_model_that_drains_for_nobody_goes_on() -> None:
    scheduler = made(1, 1, memory=1)
    loaded(scheduler, "a", 0.0)
    gone, _ = asked(scheduler, "b", 1.0)
    scheduler.tick(1.0 + PATIENCE)
    ticket, actions = asked(scheduler, "a", 4.0)
    assert actions == []
    assert scheduler.leave(gone, 5.0) == [Grant(ticket)]


def test_what_a_model_was_loaded_for_begins_before_it_can_drain() -> None:
    scheduler = made(1, 1, 1, memory=2)
    loaded(scheduler, "a", 0.0)
    ticket, _ = asked(scheduler, "b", 0.0)
    asked(scheduler, "c", 0.0)
    assert scheduler.loaded("b", PATIENCE)[0] == Grant(ticket)
    assert scheduler.models["b"].state is State.READY


def test_waiting_requests_have_a_bound_and_none_beyond_it_is_kept() -> None:
    scheduler = made(1, memory=1)
    for _ in range(WAITING):
        assert Refuse not in map(type, asked(scheduler, "a", 0.0)[1])
    ticket, actions = asked(scheduler, "a", 0.0)
    assert actions == [Refuse(ticket, "", 0.0)]
    assert len(scheduler.loaded("a", 1.0)) == WAITING


def test_no_key_takes_all_places_to_wait() -> None:
    scheduler = made(1, memory=1, keys=2)
    refused = [asked(scheduler, "a", 0.0, b"one")[1] for _ in range(WAITING)]
    assert Refuse in map(type, refused[-1])
    assert Refuse not in map(type, asked(scheduler, "a", 0.0, b"two")[1])


def test_a_failed_load_ends_its_own_requests_and_is_tried_again_ever_later() -> None:
    scheduler = made(1, 1, memory=2)
    other = loaded(scheduler, "b", 0.0)
    ticket, _ = asked(scheduler, "a", 0.0)
    assert scheduler.failed("a", "broken", 1.0) == [Refuse(ticket, "broken", BACK_OFF)]
    again, actions = asked(scheduler, "a", 2.0)
    assert actions == [Refuse(again, "broken", BACK_OFF - 1.0)]
    ticket, actions = asked(scheduler, "a", 1.0 + BACK_OFF)
    assert actions == [Load("a")]
    assert scheduler.failed("a", "broken", 7.0) == [Refuse(ticket, "broken", 2 * BACK_OFF)]
    assert other in scheduler.models["b"].running


class Simulation:
    """Random requests, ends, loads, failures and disconnections, with what the outside sees of each model."""

    def __init__(self, random: Random, steps: int) -> None:
        self.random = random
        names = "abcde"[: random.randint(1, 5)]
        sizes = {name: random.randint(1, 6) for name in names}
        self.memory = random.randint(max(sizes.values()), sum(sizes.values()))
        self.keys = random.choice((0, 2, 3))
        self.scheduler = LoadScheduler(sizes, self.memory, WAITING, self.keys)
        self.sizes, self.broken = sizes, {name for name in names if random.random() < 0.15}
        self.failing = random.random() < 0.3
        self.processes: dict[str, str] = {}  # "loading", "ready" or "ending", of those that exist
        self.events: list[tuple[float, int, str, object]] = []
        self.running: dict[Ticket, str] = {}
        self.waiting: set[Ticket] = set()
        self.ended: dict[Ticket, str] = {}
        self.tickets, self.now, self._number = 0, 0.0, 0
        for _ in range(steps):
            self.later(random.uniform(0, 30), "arrive", None)

    def later(self, seconds: float, kind: str, what: object) -> None:
        self._number += 1
        heapq.heappush(self.events, (self.now + seconds, self._number, kind, what))

    def run(self) -> None:
        for _ in range(100_000):
            wake = self.scheduler.wake
            if wake is not None and (not self.events or wake <= self.events[0][0]):
                self.now = max(self.now, wake)
                self.do(self.scheduler.tick(self.now))
            elif self.events:
                self.now, _, kind, what = heapq.heappop(self.events)
                getattr(self, kind)(what)
            else:
                break
            self.check()
        else:
            raise AssertionError("it does not end")
        assert not self.waiting, "requests were lost"
        assert not self.running
        assert len(self.ended) == self.tickets

    def arrive(self, _: object) -> None:
        name, key = self.random.choice(list(self.sizes)), b"%d" % self.random.randrange(max(1, self.keys))
        ticket = Ticket(name, key, self.now)
        self.tickets += 1
        self.waiting.add(ticket)
        self.do(self.scheduler.ask(ticket, self.now))
        if ticket in self.waiting and self.random.random() < 0.2:
            self.later(self.random.expovariate(0.5), "disconnect", ticket)

    def disconnect(self, ticket: Ticket) -> None:
        if ticket in self.waiting:
            self.waiting.remove(ticket)
            self.ended[ticket] = "disconnected"
            self.do(self.scheduler.leave(ticket, self.now))

    def finish(self, ticket: Ticket) -> None:
        del self.running[ticket]
        self.ended[ticket] = "served"
        self.do(self.scheduler.leave(ticket, self.now))

    def loaded(self, name: str) -> None:
        if name in self.broken or (self.failing and self.random.random() < 0.2):
            del self.processes[name]
            self.do(self.scheduler.failed(name, f"{name} is broken", self.now))
            return
        self.processes[name] = "ready"
        if self.failing and self.random.random() < 0.2:
            self.later(self.random.expovariate(0.5), "given_up", name)
        self.do(self.scheduler.loaded(name, self.now))

    def given_up(self, name: str) -> None:
        if self.processes.get(name) == "ready":
            del self.processes[name]
            self.do(self.scheduler.failed(name, f"{name} is broken", self.now))

    def unloaded(self, name: str) -> None:
        del self.processes[name]
        self.do(self.scheduler.unloaded(name, self.now))

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Load(name):
                    assert name not in self.processes
                    self.processes[name] = "loading"
                    self.later(self.random.expovariate(0.5), "loaded", name)
                case Unload(name):
                    assert self.processes[name] == "ready"
                    assert all(ticket.model != name for ticket in self.running), "unloaded while it ran"
                    self.processes[name] = "ending"
                    self.later(self.random.uniform(0, 1), "unloaded", name)
                case Grant(ticket):
                    assert self.processes[ticket.model] == "ready"
                    self.waiting.remove(ticket)
                    self.running[ticket] = ticket.model
                    self.later(self.random.expovariate(0.5), "finish", ticket)
                case Refuse(ticket, why, seconds):
                    assert seconds >= 0
                    assert why in ("", f"{ticket.model} is broken"), "the failure of another"
                    self.waiting.remove(ticket)
                    self.ended[ticket] = "refused" if not why else "failed"
                    self.do(self.scheduler.leave(ticket, self.now))

    def check(self) -> None:
        assert sum(self.sizes[name] for name in self.processes) <= self.memory
        assert self.scheduler.held == sum(self.sizes[name] for name in self.processes)
        for name, model in self.scheduler.models.items():
            mine = {ticket for ticket in self.waiting if ticket.model == name}
            assert set(model.waiting) == mine
            assert len(mine) == model.places.total <= WAITING
            if model.state in (State.UNLOADED, State.FAILED) and mine:
                assert name in self.scheduler._wanted
            assert model.state is not State.READY or not mine


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_random_runs_lose_no_request_and_keep_to_the_memory(seed: int, steps: int) -> None:
    Simulation(Random(seed), steps).run()


def test_steady_requests_of_some_models_keep_no_other_out() -> None:
    """Two models of three are in memory, and each is always asked for again before it is idle."""
    scheduler, now = made(1, 1, 1, memory=2), 0.0
    running = {name: [loaded(scheduler, name, 0.0)] for name in "ab"}
    running["c"] = []
    hungry, actions = asked(scheduler, "c", now)
    for _ in range(200):
        now += 0.1
        actions = scheduler.tick(now)
        for name in "ab":
            ticket, more = asked(scheduler, name, now)
            if more == [Grant(ticket)]:
                running[name].append(ticket)
            if running[name]:
                actions += scheduler.leave(running[name].pop(0), now)
        for action in actions:
            if isinstance(action, Unload):
                actions += scheduler.unloaded(action.model, now)
            elif isinstance(action, Load):
                actions += scheduler.loaded(action.model, now)
        if Grant(hungry) in actions:
            assert now < PATIENCE + 1.0
            return
    raise AssertionError("it was kept out")


def test_the_back_off_has_a_bound() -> None:
    scheduler, now = made(1, memory=1), 0.0
    for _ in range(20):
        ticket, _ = asked(scheduler, "a", now)
        [refused] = scheduler.failed("a", "broken", now)
        assert isinstance(refused, Refuse)
        assert refused.retry_after <= load_scheduler.MAX_BACK_OFF
        now += refused.retry_after
    assert refused == Refuse(ticket, "broken", load_scheduler.MAX_BACK_OFF)
