"""Several engines behind one server: where requests go, and what becomes of them when an engine is gone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest

from attar.server.engine_client import client
from attar.server.replicas import group
from attar.server.replicas.group import MAX_REPLAYS
from tests.server.replicas.conftest import Fleet

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "seed": 3}
"""Some hundred steps of a fake engine."""


def metric(made: Fleet, name: str) -> float:
    lines = made.get("/metrics").body.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


def choices(reply: Any) -> Any:
    assert reply.status == 200, reply.body
    return reply.json["choices"]


def half_way(made: Fleet) -> int:
    """Wait until some of an answer was told; return the number of the engine that makes it."""
    made.wait(lambda: any(relay.known > 20 for relay in list(made.group.open.values())))
    (at,) = made.with_work()
    return at


def test_requests_are_shared_and_every_engine_is_told_of(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2, step=0.005)
    waits = [made.post_beside(COMPLETIONS, LONG | {"seed": at, "max_tokens": 100}) for at in range(4)]
    made.wait(lambda: made.with_work() == [0, 1])
    assert metric(made, 'attar_engine_up{replica="1"}') == 1
    assert metric(made, 'attar_replica_state{replica="0",state="ready"}') == 1
    told = made.get("/v1/engine").json
    assert [each["state"] for each in told["replicas"]] == ["ready", "ready"]
    assert told["stats"]["running"] == sum(each["stats"]["running"] for each in told["replicas"])
    assert all(wait().status == 200 for wait in waits)
    made.wait(lambda: metric(made, 'attar_replica_requests_open{replica="0"}') == 0)
    assert metric(made, 'attar_replica_requests_total{replica="0"}') == 2
    assert not made.group.open
    assert made.group.router is not None
    made.group.router.check()
    assert not made.group.router.routed


@pytest.mark.parametrize(
    "more",
    [
        {}, {"n": 3}, {"logprobs": 2}, {"stop": ["zz"]}, {"prompt": ["a", "b", "c"], "n": 2},
        {"echo": True, "logprobs": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_goes_on_elsewhere_when_its_engine_dies(fleet: Callable[..., Fleet], more: dict[str, Any]) -> None:
    made = fleet(2, step=0.003)
    body = LONG | more
    alone = choices(made.post(COMPLETIONS, body))
    wait = made.post_beside(COMPLETIONS, body)
    made.wait(lambda: any(relay.known > 20 for relay in list(made.group.open.values())))
    at = made.with_work()[0]
    made.call(made.engines[at].die)
    assert choices(wait()) == alone
    assert metric(made, f'attar_replica_deaths_total{{replica="{at}"}}') == 1
    assert metric(made, 'attar_replays_total{outcome="continued"}') >= 1
    made.wait(lambda: made.group.places.total == 0)
    assert made.group.places.running == 0


def test_a_stream_has_every_token_once(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2, step=0.003)
    body = LONG | {"stream": True, "logprobs": 0}
    alone = [event["choices"] for event in made.post(COMPLETIONS, body).events[:-1]]
    wait = made.post_beside(COMPLETIONS, body)
    made.call(made.engines[half_way(made)].die)
    text = "".join(choice["text"] for event in wait().events[:-1] for choice in event["choices"])
    assert text == "".join(choice["text"] for event in alone for choice in event)


def test_an_answer_waits_where_no_engine_is_left_and_goes_on_with_the_first(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2, step=0.003)
    alone = choices(made.post(COMPLETIONS, LONG))
    wait = made.post_beside(COMPLETIONS, LONG)
    half_way(made)
    made.call(lambda: [engine.die() for engine in made.engines])  # both listen again at once
    assert choices(wait()) == alone


def test_a_request_that_ends_engines_ends_after_two_replays(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2, step=0.003)
    wait = made.post_beside(COMPLETIONS, LONG | {"max_tokens": 400})
    for death in range(MAX_REPLAYS + 1):
        made.wait(lambda n=death: any(len(relay.deaths) == n and relay.engine is not None and made.with_work()
                                      for relay in list(made.group.open.values())))  # fmt: skip
        (at,) = made.with_work()
        made.call(made.engines[at].die)
    reply = wait()
    assert (reply.status, reply.code) == (503, "engine_down")
    assert metric(made, 'attar_replays_total{outcome="exhausted"}') == 1
    assert sum(replica.deaths for replica in made.group.replicas) == MAX_REPLAYS + 1
    made.wait(lambda: made.get("/readyz").status == 200)
    assert made.post(COMPLETIONS, LONG | {"max_tokens": 4}).status == 200


@pytest.mark.parametrize("bits", [["a", "b"], ["", ""]])
def test_no_answer_goes_on_with_other_bits(fleet: Callable[..., Fleet], bits: list[str]) -> None:
    made = fleet(2, step=0.003, each=lambda at: {"bits": bits[at]})
    wait = made.post_beside(COMPLETIONS, LONG | {"max_tokens": 400})
    at = half_way(made)
    made.engines[at].bits = "c" * bool(bits[at])  # of its successor
    made.call(made.engines[at].die)
    if bits == ["", ""]:
        assert wait().code == "engine_down"
        assert metric(made, 'attar_replays_total{outcome="inexact"}') == 1
    else:  # it waits for an engine of its own kind
        made.wait(lambda: made.group.held == 1)
        made.engines[at].bits = bits[at]
        made.wait(lambda: made.group.replicas[at].client.ready is not None)
        made.call(made.engines[at].die)
        assert wait().status == 200


def test_a_token_that_is_drawn_otherwise_ends_the_answer(fleet: Callable[..., Fleet]) -> None:
    """An engine that says that its bits are the same, but is wrong: no answer of two halves."""
    made = fleet(2, step=0.003)
    wait = made.post_beside(COMPLETIONS, LONG)
    at = half_way(made)
    made.engines[1 - at].script = (7,) * 1000
    made.call(made.engines[at].die)
    reply = wait()
    assert (reply.status, reply.code) == (500, "internal")


def test_a_drained_engine_gets_no_requests_and_the_others_continue_its_own(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2, step=0.003)
    alone = choices(made.post(COMPLETIONS, LONG))
    wait = made.post_beside(COMPLETIONS, LONG)
    at = half_way(made)
    made.call(lambda: made.loop.create_task(made.group.drain(at, 0.01)))
    made.wait(lambda: made.with_work() == [1 - at])
    assert metric(made, f'attar_replica_state{{replica="{at}",state="draining"}}') == 1
    assert choices(wait()) == alone
    before = len(made.engines[at].commands)
    assert all(made.post(COMPLETIONS, LONG | {"max_tokens": 2}).status == 200 for _ in range(4))
    assert len(made.engines[at].commands) == before
    assert made.group.replicas[at].deaths == 0


def test_a_stopped_engine_is_left_and_may_come_back(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STOPPED", 0.5)
    made = fleet(2, step=0.003)
    alone = choices(made.post(COMPLETIONS, LONG))
    wait = made.post_beside(COMPLETIONS, LONG)
    engine = made.engines[half_way(made)]
    engine.beats, engine.held = False, True
    reply = wait()
    assert choices(reply) == alone
    assert made.get(f"/v1/requests/{reply.json['id']}/why").json["replays"] == 1
    engine.beats, engine.held = True, False
    made.wait(lambda: not any(made.with_work()))
    made.wait(lambda: [each.state for each in made.group.replicas] == ["ready", "ready"])
    assert sum(each.deaths for each in made.group.replicas) == 0


def test_a_full_engine_is_passed_over_and_all_full_ones_are_told_of(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2, batch=1, queue=1)
    made.call(lambda: [setattr(engine, "held", True) for engine in made.engines])
    waits = [made.post_beside(COMPLETIONS, LONG | {"max_tokens": 2}) for _ in range(4)]
    made.wait(lambda: len(made.group.open) == 4 or any(engine.choices for engine in made.engines))
    made.wait(lambda: made.with_work() == [0, 1])
    replies = [made.post(COMPLETIONS, LONG | {"max_tokens": 2}) for _ in range(0)]
    made.call(lambda: [setattr(engine, "held", False) for engine in made.engines])
    replies += [wait() for wait in waits]
    assert {reply.status for reply in replies} <= {200, 429}
    assert sum(reply.status == 200 for reply in replies) >= 2
    made.wait(lambda: made.group.places.total == 0)


def test_one_request_may_ask_for_what_one_engine_takes(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2, queue=4, batch=4)
    assert made.post(COMPLETIONS, LONG | {"n": 4, "max_tokens": 2}).status == 200
    assert made.post(COMPLETIONS, LONG | {"n": 5, "max_tokens": 2}).status in (400, 429)


def test_a_request_that_cannot_be_routed_ends_alone(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fleet(2, step=0.003)
    wait = made.post_beside(COMPLETIONS, LONG)
    half_way(made)
    with monkeypatch.context() as patched:
        patched.setattr(group.block_digests, "key_of", lambda salt: 1 / 0)
        reply = made.post(COMPLETIONS, LONG | {"max_tokens": 2})
    assert (reply.status, reply.code) == (500, "internal")
    assert wait().status == 200
    assert not made.group.open
    assert made.post(COMPLETIONS, {"prompt": [2**40], "max_tokens": 2}).status in (200, 400)  # the engine decides


def test_embeddings_are_made_again(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2)
    body = {"input": ["a", "b"]}
    first = made.post("/v1/embeddings", body).json["data"]
    made.call(made.engines[0].die)
    assert made.post("/v1/embeddings", body).json["data"] == first


def test_a_cancelled_request_leaves_nothing(fleet: Callable[..., Fleet]) -> None:
    made = fleet(2, step=0.003)
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps(LONG | {"stream": True}), {"Content-Type": "application/json"})
    connection.getresponse().read(200)
    at = half_way(made)
    made.call(made.engines[at].die)
    connection.close()
    made.wait(lambda: not made.group.open and not any(made.with_work()))
    assert made.group.router is not None
    assert not made.group.router.routed
    assert made.group.places.total == made.group.places.running == 0
