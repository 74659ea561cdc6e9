"""A request's way through the server: what the engine is asked, a window at a time, and what `/why` tells of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attar import faults
from attar.faults import Fault
from attar.protocol.messages import Ready, Submit
from attar.protocol.request import SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.dispatcher import Dispatcher
from attar.server.engine_client import client
from attar.server.engine_client.client import EngineClient
from attar.server.request_handler import RequestContext, RequestHandler
from tests.server.api.test_routes import CHAT, COMPLETIONS, SEEDED
from tests.server.bad_requests import USER
from tests.server.conftest import Running
from tests.server.http.test_limits import connect, post
from tests.server.test_metrics import metric


def test_why(server: Running) -> None:
    reply = server.post(CHAT, {"messages": USER, "max_tokens": 3, "ignore_eos": True})
    for name in (reply.headers["x-request-id"], reply.json["id"]):
        trace = server.get(f"/v1/requests/{name}/why").json
        assert (trace["outcome"], trace["generated_tokens"]) == ("length", 3)
        assert 0 < trace["seconds_to_first_token"] <= trace["seconds"]
        [report] = trace["prompts"]
        assert report["limited_by"] == {"overhead": 1}
    assert server.get("/v1/requests/nobody/why").status == 404


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """Once, within."""
    faults.arm(Fault(name))
    try:
        yield
    finally:
        faults.arm()


def why(server: Running, name: str) -> Any:
    return server.get(f"/v1/requests/{name}/why").json


def test_why_of_a_request_that_runs(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the engine tells of it, which it may not do in time."""
    monkeypatch.setattr(client, "TOLD_SECONDS", 0.1)
    made = start()
    made.engine.held = True
    with connect(made) as sock:
        sock.sendall(post(json.dumps(SEEDED).encode()))
        made.wait(lambda: made.engine.open == 1)
        [command] = made.engine.commands
        made.engine.tells = False
        trace = why(made, command.id)
        assert (trace["outcome"], trace["prompts"], trace["generated_tokens"]) == ("running", [None], 0)
        made.engine.tells = True
        monkeypatch.setattr(client, "TOLD_SECONDS", 10.0)
        [report] = why(made, command.id)["prompts"]
        assert (report["prefill"], report["prompt_tokens"]) == (0.002, len(command.prompt))
        assert trace["seconds_to_first_token"] is None
        assert why(made, command.id)["seconds"] > trace["seconds"] > 0
        made.engine.held = False
        made.wait(lambda: why(made, command.id)["outcome"] == "length")


@pytest.mark.parametrize("code", ["deadline", "internal", "bad_logits"])
@pytest.mark.parametrize("stream", [False, True])
def test_why_of_a_request_that_failed(start: Callable[..., Running], code: str, stream: bool) -> None:
    made = start()
    made.engine.fail = (code, 3)
    made.post(COMPLETIONS, SEEDED | {"prompt": ["a", "b"], "stream": stream})
    first, second = made.engine.commands
    assert first.id == second.id[:-1] + "0"
    name = first.id.partition(".")[0]
    made.wait(lambda: None not in why(made, name)["prompts"])  # the second's comes when it was cancelled
    trace = why(made, name)
    assert (trace["outcome"], trace["generated_tokens"]) == (code, 6)
    assert [report["prefill"] for report in trace["prompts"]] == [0.002, 0.002]


def test_a_request_that_failed_here_is_not_running_any_more(start: Callable[..., Running]) -> None:
    made = start()
    with failing("openai.whole"):
        assert made.post(COMPLETIONS, SEEDED).status == 500
    with failing("openai.delta"):
        assert made.post(COMPLETIONS, SEEDED | {"stream": True}).events[-1]["error"]["code"] == "internal"
    whole, streamed = made.engine.commands
    made.wait(lambda: why(made, streamed.id)["outcome"] == "internal")
    assert why(made, whole.id)["outcome"] == "length"  # as far as the engine went


def test_embeddings_are_one_request_however_many_windows_they_take(start: Callable[..., Running]) -> None:
    made = start(queue=16)
    before = metric(made, "attar_request_seconds_count")
    reply = made.post("/v1/embeddings", {"input": [[token] for token in range(200)]})
    assert reply.status == 200
    assert len(reply.json["data"]) == 200
    assert metric(made, "attar_request_seconds_count") == before + 1
    trace = why(made, reply.headers["x-request-id"])
    assert trace["outcome"] == "stop"
    assert len(trace["prompts"]) == 128  # what is kept of so many
    assert {report["reuse_ended"] for report in trace["prompts"]} == {"bypassed"}
    deadlines = [command.deadline for command in made.engine.commands]
    assert deadlines == sorted(deadlines, reverse=True)
    assert len(set(deadlines)) > 1


@pytest.mark.parametrize("code, told", [("cancelled", "cancelled"), ("shutdown", "shutdown"), (None, "internal")])
def test_why_tells_the_end_of_an_answer_whose_reader_had_gone(code: str | None, told: str) -> None:
    """The task that reads it may end before it has taken the answer's end; without one, the task is what failed."""
    engine = EngineClient(Path("nobody"))
    engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
    dispatcher = Dispatcher(RequestContext(engine), 600.0)
    answer = engine.ask([Submit("a", (1,), SamplingParams())], 1)
    work = RequestHandler(Caller("a", 0.0, b""), [(1,)], 1, answer, dispatcher.context)
    if code is not None:
        answer.cancel(code)
    work.close()
    assert dispatcher.context.traces.find("a", b"").outcome == told
