"""The store of answers: random histories against a list, with a clock of the test's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from attar.server.api.responses.store import BASE, PER_TEXT, ResponseStore
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from tests.server.api.responses.test_routes import BODY, PATH, prompt
from tests.server.bad_requests import USER
from tests.server.conftest import Running

SIZE, AGE = 16 * BASE, 100.0
NAMES = st.sampled_from([b"one", b"two", b"three"])


class Histories(RuleBasedStateMachine):
    """What is put in is there for its key until it is taken out, too old, or displaced by a fair rule."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = ResponseStore(SIZE, AGE, lambda: self.now)
        self.all: list[tuple[bytes, str, bytes, float]] = []  # key, id, answer, when
        self.gone: set[str] = set()

    def there(self, key: bytes, id: str) -> bool:
        return self.store.get(key, id) is not None

    def living(self, key: bytes | None = None) -> list[tuple[bytes, str, bytes, float]]:
        """What was not taken out and is young enough, in order."""
        return [
            each
            for each in self.all
            if each[1] not in self.gone and self.now - each[3] <= AGE and key in (None, each[0])
        ]

    @rule(key=NAMES, size=st.integers(0, SIZE), turns=st.integers(0, 3))
    def put(self, key: bytes, size: int, turns: int) -> None:
        id = f"resp_{len(self.all)}"
        answer = json.dumps({"output": [{"id": "item" + id, "text": "x" * size}]}).encode()
        before = [each for each in self.living() if self.there(*each[:2])]
        fits = self.store.put(key, id, answer, [b"[]"] * turns, ["item" + id])
        assert fits == (BASE + PER_TEXT * (turns + 1) + len(answer) + 2 * turns <= SIZE)
        assert self.there(key, id) == fits
        if not fits:
            self.gone.add(id)
        self.all.append((key, id, answer, self.now))
        for each in before:
            if not self.there(*each[:2]):
                self.gone.add(each[1])
                own = [other for other in before if other[0] == each[0]]
                assert all(other[1] in self.gone for other in own[: own.index(each)])  # the oldest of a key go first

    @rule(data=st.data())
    def take_out(self, data: st.DataObject) -> None:
        if self.all:
            key, id, _, _ = data.draw(st.sampled_from(self.all))
            known = self.there(key, id)
            assert self.store.remove(key, id) == known
            self.gone.add(id)

    @rule(seconds=st.floats(0, AGE))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def each_key_finds_its_own_alone(self) -> None:
        living = {each[1] for each in self.living()}
        for key, id, answer, _ in self.all:
            stored = self.store.get(key, id)
            assert (stored is not None) == (id in living)
            if stored is not None:
                assert stored.answer == answer
                item = self.store.item(key, "item" + id)
                assert item is not None
                assert json.loads(item) == json.loads(answer)["output"][0]
            else:
                assert self.store.item(key, "item" + id) is None
            for other in (b"one", b"two", b"three", b""):
                if other != key:
                    assert self.store.get(other, id) is None
                    assert self.store.item(other, "item" + id) is None
                    assert not self.store.remove(other, id)

    @invariant()
    def bytes_are_bounded(self) -> None:
        assert 0 <= self.store.held <= SIZE
        assert (self.store.held == 0) == (not self.living())


Histories.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase


def test_a_key_displaces_its_own_answers_while_it_holds_most() -> None:
    store = ResponseStore(SIZE)
    assert store.put(b"quiet", "mine", b"{}", [])
    for number in range(200):
        assert store.put(b"loud", f"resp_{number}", b"x" * BASE, [])
    assert store.get(b"quiet", "mine") is not None
    assert store.get(b"loud", "resp_199") is not None
    assert store.get(b"loud", "resp_0") is None


ONE, TWO = ("a-key-of-these-tests-" + letter * 20 for letter in "ab")


@pytest.fixture(scope="module")
def storing(start: Callable[..., Running]) -> Running:
    return start(ServerOptions(port=0, keys=Keys.of([ONE, TWO]), response_store=1 << 20))


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_a_stored_answer(storing: Running, stream: bool) -> None:
    """To the same prompt as with all items, but for instructions, which are each request's own."""
    first = storing.post(PATH, BODY | {"instructions": "One.", "stream": stream}, of(ONE))
    answer: Any = first.events[-1]["response"] if stream else first.json
    assert answer["store"] is True
    stored = storing.get(f"{PATH}/{answer['id']}", of(ONE))
    assert stored.json == answer
    again: dict[str, Any] = {"max_output_tokens": 2, "instructions": "Two."}
    second = storing.post(PATH, again | {"input": "more", "previous_response_id": answer["id"]}, of(ONE)).json
    mine = prompt(storing)
    more = {"role": "user", "content": "more"}
    storing.post(PATH, again | {"input": [*USER, *answer["output"], more]}, of(ONE))
    assert mine == prompt(storing)
    third = {"input": "end", "previous_response_id": second["id"], "store": False} | again
    assert storing.post(PATH, third, of(ONE)).json["store"] is False
    mine = prompt(storing)
    end = {"role": "user", "content": "end"}
    references = [{"type": "item_reference", "id": each["output"][0]["id"]} for each in (answer, second)]
    storing.post(PATH, again | {"input": [*USER, references[0], more, references[1], end]}, of(ONE))
    assert mine == prompt(storing)


def test_an_answer_is_known_to_its_key_alone(storing: Running) -> None:
    answer = storing.post(PATH, BODY, of(ONE)).json
    path, item = f"{PATH}/{answer['id']}", answer["output"][0]["id"]
    for body in ({"previous_response_id": answer["id"]}, {"input": [{"type": "item_reference", "id": item}]}):
        reply = storing.post(PATH, BODY | body, of(TWO))
        assert (reply.status, reply.code) == (404, "not_found")
        assert storing.post(PATH, BODY | body, of(ONE)).status == 200
    assert storing.get(path, of(TWO)).status == storing.request("DELETE", path, None, of(TWO)).status == 404
    assert storing.get(path).status == 401
    assert storing.get(path, of(ONE)).status == 200
    assert storing.get(path + "?stream=true", of(ONE)).status == 400
    gone = storing.request("DELETE", path, None, of(ONE))
    assert gone.json == {"id": answer["id"], "object": "response", "deleted": True}
    assert storing.get(path, of(ONE)).status == storing.request("DELETE", path, None, of(ONE)).status == 404


def test_what_has_no_room_is_not_stored_and_says_so(start: Callable[..., Running]) -> None:
    server = start(ServerOptions(port=0, response_store=BASE))
    answer = server.post(PATH, BODY).json
    assert answer["store"] is False
    assert server.get(f"{PATH}/{answer['id']}").status == 404


def test_without_a_store_nothing_is_kept(server: Running) -> None:
    answer = server.post(PATH, BODY | {"store": True}).json
    assert answer["store"] is False
    path = f"{PATH}/{answer['id']}"
    for reply in (server.get(path), server.request("DELETE", path)):
        assert (reply.status, reply.code) == (404, "not_found")
    for body in ({"previous_response_id": "resp_1"}, {"input": [{"type": "item_reference", "id": "msg_1"}]}):
        reply = server.post(PATH, BODY | body)
        assert (reply.status, reply.code) == (404, "not_found")
        assert "--response-store" in reply.json["error"]["message"]
