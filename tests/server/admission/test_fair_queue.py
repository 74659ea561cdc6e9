"""Places in the queue: a key that takes what it can get never keeps another one out."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attar.protocol.messages import Beat, Delta, Failed, Finished, Ready, Stats, Submit
from attar.protocol.request import SamplingParams
from attar.server.admission.fair_queue import FairQueue
from attar.server.admission.rate_limits import Caller, KeyLimits, Quotas
from attar.server.dispatcher import Dispatcher
from attar.server.engine_client import response_stream
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.response_stream import ResponseStream
from attar.server.errors import APIError
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from attar.server.request_handler import PROMPT_ANSWER, RequestContext
from tests.server.api.test_routes import COMPLETIONS
from tests.server.conftest import Reply, Running
from tests.server.http.test_limits import connect, post

STATS = Stats(
    running=2, waiting=0, blocks_free=8, blocks_active=2, blocks_cached=0, steps=2, prompt_tokens=2, reused_tokens=0,
    generated_tokens=2, preemptions=0, step_seconds=6.0,
)  # fmt: skip
LONG = {"prompt": "a", "max_tokens": 2, "ignore_eos": True, "seed": 1}


class Queue(RuleBasedStateMachine):
    """Keys that send what they like, whenever they like, and a queue that lets any of those who wait go first."""

    @initialize(keys=st.integers(2, 9), size=st.integers(1, 300))
    def begin(self, keys: int, size: int) -> None:
        self.places = FairQueue(keys)
        self.places.size = size
        self.keys = [bytes([key]) for key in range(keys)]
        self.kept = size // (2 * keys)

    def of(self, key: int) -> bytes:
        return self.keys[key % len(self.keys)]

    @rule(key=st.integers(0, 8), count=st.integers(1, 300))
    def send(self, key: int, count: int) -> None:
        if self.places.fit(self.of(key), count):
            self.places.take(self.of(key), count)

    @rule(key=st.integers(0, 8))
    def flood(self, key: int) -> None:
        while self.places.fit(self.of(key), 1):
            self.places.take(self.of(key), 1)

    @precondition(lambda self: self.places.total)
    @rule(key=st.integers(0, 8), share=st.floats(0, 1))
    def serve(self, key: int, share: float) -> None:
        waiting = self.places.waiting(self.of(key))
        if count := round(share * waiting):
            self.places.give(self.of(key), count)

    @invariant()
    def nobody_is_kept_out(self) -> None:
        """The point of it all: whoever has less than its part gets the rest of that, whatever the others did."""
        assert self.places.total <= self.places.size
        for key in self.keys:
            if (missing := self.kept - self.places.waiting(key)) > 0:
                assert self.places.fit(key, missing)

    @invariant()
    def no_more_than_half_is_kept(self) -> None:
        assert 2 * self.places.most >= self.places.size

    @invariant()
    def what_is_free_is_not_withheld_from_a_key_alone(self) -> None:
        waiting = [key for key in self.keys if self.places.waiting(key)]
        if len(waiting) == 1 and (more := self.places.most - self.places.waiting(waiting[0])):
            assert self.places.fit(waiting[0], more)
            assert not self.places.fit(waiting[0], more + 1)


Queue.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestQueue = Queue.TestCase


@given(flooding=st.integers(1, 20), size=st.integers(42, 400), rounds=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_polite_key_among_floods_is_always_let_in(flooding: int, size: int, rounds: int) -> None:
    """K keys refill the queue after everything that leaves it; one more sends a request at a time."""
    places = FairQueue(flooding + 1)
    places.size = size
    for turn in range(rounds):
        for key in range(flooding):
            while places.fit(bytes([key]), 1):
                places.take(bytes([key]), 1)
        assert places.fit(b"polite", 1)
        places.take(b"polite", 1)
        places.give(bytes([turn % flooding]), 1)  # the engine takes one of a flood's first
        places.give(b"polite", 1)
    shares = [places.waiting(bytes([key])) for key in range(flooding)]
    assert sum(shares) >= size // 2 - flooding, "the floods do not get half of the queue"


def test_shares_even_out_as_the_queue_moves() -> None:
    """Who was first has most of it only until it has been served."""
    places = FairQueue(3)
    places.size = 60
    for key in (b"a", b"b"):
        while places.fit(key, 1):
            places.take(key, 1)
    assert (places.waiting(b"a"), places.waiting(b"b")) == (40, 10)  # 10 are kept for c
    for _ in range(40):  # first come, first served
        places.give(b"a", 1)
        for key in (b"a", b"b"):
            if places.fit(key, 1):
                places.take(key, 1)
    assert abs(places.waiting(b"a") - places.waiting(b"b")) <= 10
    assert places.waiting(b"a") + places.waiting(b"b") == 50


def test_the_choices_of_one_prompt_may_be_more_than_a_share() -> None:
    """They wait together or not at all, so a key that has nothing waiting may send them where there is room."""
    places = FairQueue(3)
    places.size = 60
    places.take(b"a", 20)
    places.take(b"b", 5)
    assert places.fit(b"c", 30)
    assert not places.fit(b"c", 31)  # 5 are kept for b
    places.take(b"c", 1)
    assert not places.fit(b"c", 21)
    assert places.fit(b"c", 19)


@pytest.mark.parametrize("keys", [0, 1])
def test_without_several_keys_one_has_all_and_what_can_still_begin_to_run(keys: int) -> None:
    places = FairQueue(keys)
    places.size, places.slots = 4, 2
    assert places.most == 4
    assert places.fit(b"", 6)
    places.take(b"", 4)
    for running, room in ((0, 2), (1, 1), (2, 0), (3, 0)):  # 3: one has given way
        places.running = running
        assert places.fit(b"", room)
        assert not places.fit(b"", room + 1)


def test_many_keys_leave_one_alone_half_of_the_queue() -> None:
    for keys, most in ((2, 96), (63, 66), (64, 65), (65, 128), (128, 128)):
        places = FairQueue(keys)
        places.size = 128
        assert places.most == most
        assert places.fit(b"a", most)


def test_more_keys_than_places_share_what_there_is() -> None:
    places = FairQueue(5)
    places.size = 2
    assert places.most == 2
    for key in (b"a", b"b"):
        assert places.fit(key, 1)
        places.take(key, 1)
    assert not places.fit(b"c", 1)


def asking(places: FairQueue, *prompts: int, window: int = 100) -> tuple[ResponseStream, list[str]]:
    """An answer to prompts of so many choices each, and the ids that it has sent."""
    sent: list[str] = []
    answer = ResponseStream(
        [Submit(f"{at}", (1,), SamplingParams(), n, b"key") for at, n in enumerate(prompts)], window,
        lambda answer, batch: sent.extend(each.id for each in batch), lambda ids, tell: None, places,
    )  # fmt: skip
    return answer, sent


def delta(request: str, choice: int) -> Delta:
    return Delta(request, choice, (1,), "a")


def test_a_choice_waits_until_it_is_heard_of_first_and_runs_until_it_ends() -> None:
    places = FairQueue(2)
    places.size = 100
    answer, _ = asking(places, 3, 1)
    answer.go_on()
    assert places.waiting(b"key") == 4
    for event, waiting, running in (
        (delta("0", 1), 3, 1), (delta("0", 1), 3, 1), (delta("1", 0), 2, 2), (Finished("1", 0, "stop", 1), 2, 1),
        (Finished("0", 0, "stop", 0), 1, 1), (Failed("0", "internal", ""), 0, 0),
    ):  # fmt: skip
        answer.put(event)
        assert (places.waiting(b"key"), places.running) == (waiting, running)
    answer, _ = asking(places, 2, 2)
    answer.go_on()
    answer.put(delta("1", 1))
    answer.put(Finished("1", 1, "stop", 1))
    answer.put(delta("0", 0))
    assert (places.total, places.running) == (2, 1)
    answer.cancel()
    assert (places.total, places.running) == (0, 0)


class Full:
    """A server without keys, of whose two slots and four places all are taken, and whose engine is in a step."""

    def __init__(self, start: Callable[..., Running]) -> None:
        self.server = start(queue=4, batch=2, step=0.02)
        engine, places = self.server.engine, self.server.server.engine.places
        self.body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        self.socks: list[socket.socket] = []
        self.send(2)
        self.server.wait(lambda: places.running == 2)
        engine.held = True
        self.send(4)
        self.server.wait(lambda: places.total == 4)
        self.server.wait(lambda: len(engine.commands) == 6)

    def send(self, count: int) -> None:
        for _ in range(count):
            self.socks.append(connect(self.server))
            self.socks[-1].sendall(post(json.dumps(self.body).encode()))

    def end(self) -> None:
        self.server.engine.held = False
        for sock in self.socks:
            sock.close()
        self.server.wait(lambda: not self.server.server.engine.open)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_known_before_the_engine_has_ended_its_step(
    start: Callable[..., Running], stream: bool
) -> None:
    full = Full(start)
    reply = full.server.post(COMPLETIONS, full.body | {"stream": stream})
    assert (reply.status, reply.code) == (429, "overloaded")
    assert int(reply.headers["retry-after"]) >= 1
    assert len(full.server.engine.commands) == 6, "the engine was asked"
    full.end()
    assert full.server.server.engine.places.running == 0
    assert full.server.post(COMPLETIONS, full.body | {"max_tokens": 1}).status == 200


def test_a_stream_s_status_waits_for_an_engine_that_may_have_no_room() -> None:
    """It says so between two steps, and of those the longest seen is what is known."""
    engine = EngineClient(Path("nobody"))
    engine._arrived([Ready("fake", 512, 100, 10, 16, 8, (), max_running=4), Beat(2.5), STATS])
    dispatcher = Dispatcher(RequestContext(engine), 600.0)
    assert engine.heartbeat.longest == 3.0
    for waiting, seconds in ((8, PROMPT_ANSWER), (9, 6.0)):
        engine.places.take(b"", waiting - engine.places.total)
        assert dispatcher.context.patience() == seconds


def test_what_finds_no_place_waits_here() -> None:
    """A request of many prompts goes on as its key's places come free."""

    async def scene() -> None:
        places = FairQueue(2)
        places.size = 8  # 2 kept for each, so 6 for one alone
        answer, sent = asking(places, 2, 2, 2, 2)
        answer.go_on()
        assert sent == ["0", "1", "2"]
        places.take(b"other", 2)
        for choice in range(2):
            answer.put(delta("0", choice))
            answer.put(Finished("0", choice, "length", 1))
        assert sent == ["0", "1", "2"]  # the key has 4, which is half
        for choice in range(2):
            answer.put(delta("1", choice))
            answer.put(Finished("1", choice, "length", 1))
        assert sent == ["0", "1", "2", "3"]
        answer.cancel()
        assert places.waiting(b"key") == 0

    asyncio.run(scene())


def test_what_waits_here_goes_on_while_others_of_it_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens give places back long before a prompt ends, and nobody says so but a look now and then."""
    monkeypatch.setattr(response_stream, "ROOM_SECONDS", 0.001)

    async def scene() -> None:
        places = FairQueue(2)
        places.size = 4  # 3 for one alone
        answer, sent = asking(places, *[1] * 5)
        answer.go_on()
        answer.go_on()  # one timer at a time
        assert sent == ["0", "1", "2"]
        for at in range(3):
            answer.put(delta(f"{at}", 0))
        assert places.total == 0
        async with asyncio.timeout(10):
            while len(sent) < 5:
                await asyncio.sleep(0.001)
        assert places.waiting(b"key") == 2
        answer.cancel()
        assert places.total == 0

    asyncio.run(scene())


class Keyed:
    """A server with three keys and a queue of 12 that stands still."""

    def __init__(self, start: Callable[..., Running]) -> None:
        self.names = [name * 32 for name in "abc"]
        self.server = start(ServerOptions(port=0, keys=Keys.of(self.names), max_requests=64), queue=12, batch=4)
        self.server.engine.held = True
        self.socks: list[socket.socket] = []

    def flood(self, key: int) -> Reply:
        """Requests until one is refused, which is returned."""
        bearer = {"Authorization": f"Bearer {self.names[key]}"}
        while True:
            before = len(self.server.engine.commands)
            if self.server.server.engine.places.fit(self.cache_salt(key), 1):
                self.send(key)
                self.server.wait(lambda before=before: len(self.server.engine.commands) > before)  # type: ignore[misc]
            else:
                return self.server.post(COMPLETIONS, LONG, bearer)

    def cache_salt(self, key: int) -> bytes:
        found = self.server.server.options.keys.cache_salt({b"x-api-key": self.names[key].encode()})
        assert found is not None
        return found

    def send(self, key: int) -> None:
        sock = connect(self.server)
        body = json.dumps(LONG).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.names[key]}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.replace("Host: x", "Host: localhost").encode() + body)
        self.socks.append(sock)


def test_keys_that_flood_are_refused_and_a_polite_one_is_served(start: Callable[..., Running]) -> None:
    made = Keyed(start)
    server, places = made.server, made.server.server.engine.places
    limited = 'attar_requests_limited_total{limit="queue"}'
    counts = []
    for key in (0, 1):
        reply = made.flood(key)
        assert (reply.status, reply.code) == (429, "rate_limit_exceeded")
        assert int(reply.headers["retry-after"]) >= 1
        counts.append(places.waiting(made.cache_salt(key)))
    assert counts == [8, 2]  # all but what is kept for the others; its part
    assert len(server.engine.commands) == sum(counts)
    bearer = {"Authorization": f"Bearer {made.names[2]}"}
    text = server.get("/metrics", bearer).body.decode()
    assert f"{limited} 2.0" in text
    many = server.post(COMPLETIONS, LONG | {"n": 9}, bearer)
    assert (many.status, many.code) == (400, "out_of_range"), "more than could ever wait is no matter of time"
    made.send(2)
    server.wait(lambda: len(server.engine.commands) == sum(counts) + 1)  # the polite one is in
    server.engine.held = False
    for sock in made.socks:
        assert b" 200 " in sock.recv(65536).split(b"\r\n")[0]
        sock.close()
    server.wait(lambda: places.total == 0)
    server.wait(lambda: not server.server.engine.open)


def test_a_request_that_finds_no_place_costs_its_key_nothing() -> None:
    engine = EngineClient(Path("nobody"), keys=2)
    engine.ready = Ready("fake", 512, 100, 10, 16, 8, ())
    engine.places.size = 8
    dispatcher = Dispatcher(RequestContext(engine), 600.0)
    account = Quotas(KeyLimits(tokens_per_minute=100), lambda _: None, clock=lambda: 0.0).enter(b"key")
    caller = Caller("a", time.monotonic(), b"key", account)
    engine.places.take(b"key", 6)
    for at in range(20):
        dispatcher.context.backoff.served(time.monotonic() - 5 + at / 10)
    before = dispatcher.context.backoff.retry_after(time.monotonic(), 0)
    for ask in 20 * (
        lambda: dispatcher.submit(caller, [(1, 2)], SamplingParams(max_tokens=5), 1, "fake"),
        lambda: dispatcher.embed(caller, [(1, 2)], "mean", "fake"),
    ):
        with pytest.raises(APIError, match="rate_limit_exceeded") as caught:
            ask()
        assert "this key has 6 of the 8 places" in caught.value.message
        assert caught.value.retry_after == 1
    assert dispatcher.context.backoff.retry_after(time.monotonic(), 0) <= before + 1, (
        "a flood of one key sends others to the end"
    )
    account.close()
    assert account.quotas.fill(account.state) == 100
