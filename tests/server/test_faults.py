"""An exception at any of the server's fault points ends one request, once, with an error; its neighbours read on."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from attar import faults
from attar.faults import Fault
from attar.server.options import ServerOptions
from tests.server.bad_requests import USER
from tests.server.conftest import Reply, Running
from tests.server.engine_client.test_client import rest
from tests.server.http.test_limits import connect, post
from tests.server.test_disconnects import idle
from tests.server.test_supervisor import ASK, SECONDS, Served

COMPLETIONS, CHAT, MESSAGES, RESPONSES, EMBEDDINGS, LLAMACPP = (
    "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/completion"
)  # fmt: skip
PLAIN: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 3, "ignore_eos": True}
PREDICTED: dict[str, Any] = {"prompt": "Once upon a time", "n_predict": 12, "seed": 3, "ignore_eos": True}
ITEMS: dict[str, Any] = {"input": "hello", "max_output_tokens": 12, "temperature": 0}
TALK: dict[str, Any] = {"messages": USER, "max_tokens": 12, "temperature": 0}
CANARY = PLAIN | {"prompt": "canary", "max_tokens": 80}
ENDS = ("completed", "incomplete", "failed")  # of /v1/responses
LATE = 10**9  # hits, which never come
TIMES = int(os.environ.get("TEST_FAULT_MOMENTS", "1"))
"""How often each point raises; `make soak-faults` asks for a hundred."""

BOTH, WHOLE, STREAM = (False, True), (False,), (True,)


class Case(NamedTuple):
    """How a point is reached, and whether it knows whose request it is."""

    path: str = COMPLETIONS
    more: dict[str, Any] = {}  # noqa: RUF012 - read only
    kinds: tuple[bool, ...] = BOTH
    keyed: bool = True


CASES = {
    "http.door": Case(),
    "http.read_body": Case(),
    "http.parse": Case(),
    "prompt.tokenize": Case(keyed=False),
    "prompt.render": Case(CHAT, keyed=False),
    "prompt.decode": Case(more={"prompt": [11, 12, 13], "echo": True}, keyed=False),
    "params.build": Case(keyed=False),
    "dispatcher.submit": Case(),
    "client.send": Case(),
    "client.receive": Case(),
    "work.take": Case(),
    "metrics.observe": Case(),
    "why.remember": Case(),
    "sse.start": Case(kinds=STREAM),
    "sse.format": Case(kinds=STREAM, keyed=False),
    "sse.write": Case(kinds=STREAM),
    "openai.logprobs": Case(more={"logprobs": 2}, keyed=False),
    "openai.delta": Case(CHAT, kinds=STREAM),
    "openai.usage": Case(CHAT),
    "openai.whole": Case(kinds=WHOLE),
    "anthropic.delta": Case(MESSAGES, kinds=STREAM),
    "anthropic.whole": Case(MESSAGES, kinds=WHOLE),
    "responses.delta": Case(RESPONSES, kinds=STREAM),
    "responses.store": Case(RESPONSES),
    "responses.whole": Case(RESPONSES, kinds=WHOLE),
    "llamacpp.delta": Case(LLAMACPP, kinds=STREAM),
    "llamacpp.whole": Case(LLAMACPP, kinds=WHOLE),
    "embeddings.whole": Case(EMBEDDINGS, kinds=WHOLE, keyed=False),
}

ON_TIME = {
    "client.receive",
    "openai.delta",
    "openai.logprobs",
    "anthropic.delta",
    "responses.delta",
    "llamacpp.delta",
    "openai.usage",
    "sse.format",
}
"""Hit as often as an answer is long, however its events happen to come together: made to fail late, too."""


def body_of(case: Case, stream: bool) -> dict[str, Any]:
    bodies = {COMPLETIONS: PLAIN, LLAMACPP: PREDICTED, EMBEDDINGS: {"input": ["a", "b"]}, RESPONSES: ITEMS}
    body = bodies.get(case.path, TALK)
    options = {"stream_options": {"include_usage": True}} if stream and case.path in (COMPLETIONS, CHAT) else {}
    return body | case.more | ({"stream": True} | options if stream else {})


@pytest.fixture(scope="module")
def faulty(start: Callable[..., Running]) -> Running:
    return start(ServerOptions(port=0, response_store=1 << 20))


def begun(server: Running) -> socket.socket:
    """A canary's stream, with its first event read."""
    sock = connect(server)
    sock.sendall(post(json.dumps(CANARY | {"stream": True}).encode()))
    data = b""
    while b"data: " not in data:
        data += (more := sock.recv(1))
        assert more, data
    return sock


def text_of(stream: bytes) -> str:
    """What a stream of completions says; that it ends well is checked."""
    assert stream.count(b"data: [DONE]") == 1
    assert b'"error"' not in stream
    texts = [json.loads(line[6:])["choices"] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for choices in texts for choice in choices)


def ended_with_an_error(reply: Reply, path: str, stream: bool) -> None:
    """Once, and as the last that is said."""
    if reply.status != 200:
        assert reply.status == 500
        error = reply.json["error"]
        shape = {MESSAGES: ("type", "api_error"), LLAMACPP: ("type", "server_error")}.get(path, ("code", "internal"))
        assert error[shape[0]] == shape[1]
    elif path == MESSAGES:
        assert stream
        assert reply.body.count(b"event: error\n") == 1
        assert reply.events[-1]["type"] == "error"
        assert b"message_stop" not in reply.body
    elif path == RESPONSES:
        assert stream
        ends = [event for event in reply.events if event["type"].rpartition(".")[2] in ENDS]
        assert ends == [reply.events[-1]]
        assert ends[0]["response"]["error"]["code"] == "server_error"
        assert [event["sequence_number"] for event in reply.events] == list(range(len(reply.events)))
    else:
        assert stream
        assert [event for event in reply.events if "error" in event] == [reply.events[-1]]
        assert reply.events[-1]["error"]["code"] == "internal"
        assert "[DONE]" not in reply.events
    assert b"injected" not in reply.body


@pytest.mark.parametrize("point, stream", [(point, stream) for point, case in CASES.items() for stream in case.kinds])
def test_one_request_fails_and_its_neighbours_read_on(
    faulty: Running, monkeypatch: pytest.MonkeyPatch, point: str, stream: bool
) -> None:
    case = CASES[point]
    body, key = body_of(case, stream), "victim" if case.keyed else ""
    names = (f"victim{number}" for number in itertools.count())
    expected = faulty.post(case.path, body)
    assert expected.status == 200

    def ask(fault: Fault) -> Reply:
        with monkeypatch.context() as patch:
            patch.setattr(secrets, "token_hex", lambda size: next(names))
            faults.arm(fault)
            reply = faulty.post(case.path, body)
            faults.arm()
        return reply

    dry = Fault(point, after=LATE, key=key)
    ask(dry)
    assert dry.hits > 0, "the point was never reached"
    for after in (0, dry.hits // 2, dry.hits - 1) * TIMES if point in ON_TIME else (0,) * TIMES:
        with begun(faulty) as canary:
            fault = Fault(point, after=after, key=key)
            ended_with_an_error(ask(fault), case.path, stream)
            assert fault.fired == 1
            stream_of_canary = rest(canary)
        faulty.wait(lambda: idle(faulty))
        assert text_of(b"data: " + stream_of_canary).endswith(alone(faulty)[1:])
        again = faulty.post(case.path, body)
        assert shown(again) == shown(expected)


def alone(server: Running) -> str:
    return str(server.post(COMPLETIONS, CANARY).json["choices"][0]["text"])


def shown(reply: Reply) -> object:
    """An answer, without what names it and how its events came together."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        choices = [choice for event in reply.events if isinstance(event, dict) for choice in event.get("choices", ())]
        deltas = [event["delta"] for event in reply.events if isinstance(event, dict) and "delta" in event]
        return choices, deltas
    if reply.json.get("object") == "response":
        return [item["content"] for item in reply.json["output"]], reply.json["status"]
    return {name: value for name, value in reply.json.items() if name not in ("id", "created", "usage")}


def test_a_failure_like_that_is_in_the_document(faulty: Running) -> None:
    paths = faulty.get("/openapi.json").json["paths"]
    for path in (COMPLETIONS, CHAT, MESSAGES, RESPONSES, EMBEDDINGS):
        assert "internal" in paths[path]["post"]["responses"]["500"]["description"]


def test_both_processes_read_the_environment_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTAR_FAULTS", "http.parse:after=1,detokenizer.push:after=20")  # twelve tokens an answer
    served = Served()
    try:
        served.wait_for(200, SECONDS)
        replies = [served.get(COMPLETIONS, ASK) for _ in range(4)]
    finally:
        served.process.terminate()
        _, said = served.process.communicate(timeout=SECONDS)
    assert [status for status, _ in replies] == [200, 500, 500, 200]
    assert replies[3][1]["choices"] == replies[0][1]["choices"]
    assert said.count("FAULTS ARE ARMED") == 2
    assert served.process.returncode == 0


def test_what_is_logged_of_failures_holds_nothing_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine logs where each was raised, with a traceback."""
    places = "engine.submit,engine.choice,runner.rows:after=3,detokenizer.push:after=9,events.encode:after=20"
    monkeypatch.setenv("ATTAR_FAULTS", places)
    served = Served()
    secret = ASK | {"prompt": "CANARY in a prompt", "stop": ["CANARY in a stop"], "user": "CANARY"}
    try:
        served.wait_for(200, SECONDS)
        statuses = [served.get(COMPLETIONS, secret)[0] for _ in range(8)]
    finally:
        served.process.terminate()
        _, said = served.process.communicate(timeout=SECONDS)
    assert statuses.count(500) >= 3
    assert statuses[-1] == 200
    assert said.count("Traceback") >= 3
    assert "CANARY" not in said
