"""A request's way through the server: what the engine is asked, a window at a time, and what `/why` tells of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attar import faults
from attar.engine.messages import Ready, Submit
from attar.engine.request import SamplingParams
from attar.faults import Fault
from attar.server import work
from attar.server.client import EngineClient
from attar.server.door import Options
from attar.server.errors import Refusal
from attar.server.metrics import Metrics
from attar.server.security import Keys
from attar.server.work import Caller, Desk, Story, Work
from tests.server.bad_requests import USER
from tests.server.conftest import Running
from tests.server.test_api import CHAT, COMPLETIONS, SEEDED
from tests.server.test_metrics import metric
from tests.server.test_protocol import connect, post


def test_why(server: Running) -> None:
    reply = server.post(CHAT, {"messages": USER, "max_tokens": 3, "ignore_eos": True})
    for name in (reply.headers["x-request-id"], reply.json["id"]):
        story = server.get(f"/v1/requests/{name}/why").json
        assert (story["outcome"], story["generated_tokens"]) == ("length", 3)
        assert 0 < story["seconds_to_first_token"] <= story["seconds"] < 5
        [report] = story["prompts"]
        assert report["limited_by"] == {"overhead": 1}
    assert server.get("/v1/requests/nobody/why").status == 404


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """Once, within."""
    faults.arm(Fault(name))
    try:
        yield
    finally:
        faults.disarm()


def why(server: Running, name: str) -> Any:
    return server.get(f"/v1/requests/{name}/why").json


def test_why_of_a_request_that_runs(start: Callable[..., Running]) -> None:
    made = start()
    made.engine.held = True
    with connect(made) as sock:
        sock.sendall(post(json.dumps(SEEDED).encode()))
        made.wait(lambda: made.engine.open == 1)
        [command] = made.engine.commands
        story = why(made, command.id)
        assert (story["outcome"], story["prompts"], story["generated_tokens"]) == ("running", [None], 0)
        assert story["seconds_to_first_token"] is None
        assert why(made, command.id)["seconds"] > story["seconds"] > 0
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
    story = why(made, name)
    assert (story["outcome"], story["generated_tokens"]) == (code, 6)
    assert [report["prefill"] for report in story["prompts"]] == [0.002, 0.002]


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
    story = why(made, reply.headers["x-request-id"])
    assert story["outcome"] == "stop"
    assert len(story["prompts"]) == 128  # what is kept of so many
    assert {report["reuse_ended"] for report in story["prompts"]} == {"bypassed"}
    deadlines = [command.deadline for command in made.engine.commands]
    assert deadlines == sorted(deadlines, reverse=True)
    assert len(set(deadlines)) > 1


def test_any_number_of_prompts_that_is_allowed_fits_into_a_small_queue(start: Callable[..., Running]) -> None:
    made = start(queue=20, batch=4)
    body = {"prompt": [[token] for token in range(128)], "n": 16, "max_tokens": 1, "seed": 1}
    reply = made.post(COMPLETIONS, body)
    assert reply.status == 200
    assert len(reply.json["choices"]) == 2048
    assert made.post(COMPLETIONS, SEEDED | {"n": 16}).status == 200


def test_choices_that_can_never_wait_together_are_refused_with_both_numbers(start: Callable[..., Running]) -> None:
    made = start(queue=6)
    schemas = made.get("/openapi.json").json["components"]["schemas"]
    for path, field, more in (
        (COMPLETIONS, "n", {"prompt": "a"}), (COMPLETIONS, "best_of", {"prompt": "a"}), (CHAT, "n", {"messages": USER}),
    ):  # fmt: skip
        reply = made.post(path, more | {field: 7, "max_tokens": 1})
        assert (reply.status, reply.code, reply.json["error"]["param"]) == (400, "out_of_range", field)
        assert "7 choices" in reply.json["error"]["message"]
        assert "6 that one key may have waiting: ask for fewer" in reply.json["error"]["message"]
        assert made.post(path, more | {field: 6, "max_tokens": 1}).status == 200
        name = "ChatBody" if path == CHAT else "CompletionBody"
        assert schemas[name]["properties"][field]["anyOf"][0]["maximum"] == 6


def test_more_log_probabilities_than_an_answer_may_have_are_refused_with_both_numbers(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MAX_LOGPROBS", 600)
    scored: dict[str, Any] = {"prompt": [[1] * 100] * 2, "max_tokens": 50, "echo": True, "logprobs": 1, "seed": 1}
    chat = {"messages": USER, "max_tokens": 100, "logprobs": True, "top_logprobs": 5, "seed": 1}
    for path, body, count in (
        (COMPLETIONS, scored | {"logprobs": 2}, 900), (COMPLETIONS, scored | {"n": 2}, 1200),
        (COMPLETIONS, scored | {"best_of": 3}, 1800), (COMPLETIONS, scored | {"n": 2, "stream": True}, 800),
        (CHAT, chat | {"n": 2}, 1200),
    ):  # fmt: skip
        reply = server.post(path, body)
        assert (reply.status, reply.code, reply.json["error"]["param"]) == (400, "out_of_range", "logprobs")
        assert f"up to {count} of them are more than the 600 that" in reply.json["error"]["message"]
    for path, body in (
        (COMPLETIONS, scored), (CHAT, chat), (CHAT, chat | {"n": 2, "stream": True}),
        (COMPLETIONS, scored | {"logprobs": None, "best_of": 8}), (COMPLETIONS, scored | {"echo": False, "n": 3}),
    ):  # fmt: skip
        assert server.post(path, body).status == 200


def test_what_lm_eval_asks_for_at_once_is_not_too_much() -> None:
    params = SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)
    work.written([(1,) * 4096] * 128, params, 1, False)
    work.written([(1,)], SamplingParams(max_tokens=(128 << 10) - 1, logprobs=20), 1, False)
    with pytest.raises(Refusal, match="out_of_range"):
        work.written([(1,) * 16384] * 128, params, 1, False)


def test_a_deadline_counts_from_when_the_request_came() -> None:
    engine = EngineClient(Path("nobody"))
    engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
    desk = Desk(engine, Metrics(engine), 600.0)
    asks: list[Callable[[Caller], Work]] = [
        lambda caller: desk.submit(caller, [(1,)], SamplingParams(), 1, "fake"),
        lambda caller: desk.embed(caller, [(1,)], "mean", "fake"),
    ]

    async def ask() -> None:
        for at, submit in enumerate(asks):
            made = submit(Caller(f"{at}", time.monotonic() - 400.0, b""))
            left = made.answer._commands[f"{at}"].deadline
            assert left is not None
            assert 100 < left <= 200
            made.close()
            with pytest.raises(Refusal, match="deadline"):
                submit(Caller("late", time.monotonic() - 600.0, b""))
            assert "late" not in engine.open

    asyncio.run(ask())


def test_what_is_sent_to_the_engine_is_what_was_asked(start: Callable[..., Running]) -> None:
    keys = ["a" * 32, "b" * 32]
    made = start(Options(port=0, keys=Keys.of(keys)))
    for key in keys:
        bearer = {"Authorization": f"Bearer {key}"}
        made.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "priority": 7, "seed": -1}, bearer)
        made.post(CHAT, {"messages": USER, "max_tokens": 1, "priority": -100, "seed": -(2**63)}, bearer)
        made.post("/v1/embeddings", {"input": ["a", "b"]}, bearer)
    sent = list(made.engine.commands)
    submits = [command for command in sent if isinstance(command, Submit)]
    assert [command.priority for command in submits] == [7, 0] * 2  # -100 would go before the other key's
    assert [command.params.seed for command in submits] == [2**64 - 1, 2**63] * 2
    salts = [command.salt for command in sent]
    assert salts == [salts[0]] * 4 + [salts[4]] * 4
    assert salts[0] != salts[4]
    assert b"" not in salts


def test_without_keys_a_priority_may_be_less_than_0(server: Running) -> None:
    assert server.post(COMPLETIONS, SEEDED | {"priority": -100}).status == 200
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    assert command.priority == -100


@pytest.mark.parametrize("code, told", [("cancelled", "cancelled"), ("shutdown", "shutdown"), (None, "internal")])
def test_why_tells_the_end_of_an_answer_whose_reader_had_gone(code: str | None, told: str) -> None:
    """The task that reads it may end before it has taken the answer's end; without one, the task is what failed."""
    engine = EngineClient(Path("nobody"))
    engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
    desk = Desk(engine, Metrics(engine), 600.0)
    answer = engine.ask([Submit("a", (1,), SamplingParams())], 1)
    work = Work(Caller("a", 0.0, b""), [(1,)], 1, answer, desk, Story("a", b"", 0.0, [None]))
    if code is not None:
        answer.cancel(code)
    work.close()
    assert desk.story("a", b"")["outcome"] == told


def test_a_streams_status_waits_for_a_queue_that_may_be_full_but_not_for_long() -> None:
    engine = EngineClient(Path("nobody"))
    engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
    desk = Desk(engine, Metrics(engine), 600.0)
    engine.pulse.longest = 300.0
    assert desk.patience() == work.PROMPT_ANSWER
    engine.places.take(b"", 9)
    for longest, patience in ((0.1, work.PROMPT_ANSWER), (2.0, 4.0), (300.0, work.LATE_ANSWER)):
        engine.pulse.longest = longest
        assert desk.patience() == patience
