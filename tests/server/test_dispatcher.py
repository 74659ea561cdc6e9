"""What the engine is asked for a request, and how long a stream's status waits for its word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attar.protocol.messages import Ready, Submit
from attar.protocol.request import SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.dispatcher import Dispatcher
from attar.server.engine_client.client import EngineClient
from attar.server.errors import APIError
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from attar.server.request_handler import LATE_ANSWER, PROMPT_ANSWER, RequestContext, RequestHandler
from tests.server.api.test_routes import CHAT, COMPLETIONS, SEEDED
from tests.server.bad_requests import USER
from tests.server.conftest import Running


def test_any_number_of_prompts_that_is_allowed_fits_into_a_small_queue(start: Callable[..., Running]) -> None:
    made = start(queue=20, batch=4)
    body = {"prompt": [[token] for token in range(128)], "n": 16, "max_tokens": 1, "seed": 1}
    reply = made.post(COMPLETIONS, body)
    assert reply.status == 200
    assert len(reply.json["choices"]) == 2048
    assert made.post(COMPLETIONS, SEEDED | {"n": 16}).status == 200


def test_a_deadline_counts_from_when_the_request_came() -> None:
    engine = EngineClient(Path("nobody"))
    engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
    dispatcher = Dispatcher(RequestContext(engine), 600.0)
    asks: list[Callable[[Caller], RequestHandler]] = [
        lambda caller: dispatcher.submit(caller, [(1,)], SamplingParams(), 1, "fake"),
        lambda caller: dispatcher.embed(caller, [(1,)], "mean", "fake"),
    ]

    async def ask() -> None:
        for at, submit in enumerate(asks):
            made = submit(Caller(f"{at}", time.monotonic() - 400.0, b""))
            left = made.stream._commands[f"{at}"].deadline
            assert left is not None
            assert 100 < left <= 200
            made.close()
            with pytest.raises(APIError, match="deadline"):
                submit(Caller("late", time.monotonic() - 600.0, b""))
            assert "late" not in engine.open

    asyncio.run(ask())


def test_what_is_sent_to_the_engine_is_what_was_asked(start: Callable[..., Running]) -> None:
    keys = ["a" * 32, "b" * 32]
    made = start(ServerOptions(port=0, keys=Keys.of(keys)))
    for key in keys:
        bearer = {"Authorization": f"Bearer {key}"}
        made.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "priority": 7, "seed": -1}, bearer)
        made.post(CHAT, {"messages": USER, "max_tokens": 1, "priority": -100, "seed": -(2**63)}, bearer)
        made.post("/v1/embeddings", {"input": ["a", "b"]}, bearer)
    sent = list(made.engine.commands)
    submits = [command for command in sent if isinstance(command, Submit)]
    assert [command.priority for command in submits] == [7, 0] * 2  # -100 would go before the other key's
    assert [command.params.seed for command in submits] == [2**64 - 1, 2**63] * 2
    salts = [command.cache_salt for command in sent]
    assert salts == [salts[0]] * 4 + [salts[4]] * 4
    assert salts[0] != salts[4]
    assert b"" not in salts


def test_prompts_of_one_request_are_drawn_for_apart(server: Running) -> None:
    def seeds(**more: object) -> list[int | None]:
        server.engine.commands.clear()  # other tests' are there too, and it holds only so many
        assert server.post(COMPLETIONS, {"prompt": ["a"] * 3, "max_tokens": 1, **more}).status == 200
        return [command.params.seed for command in server.engine.commands if isinstance(command, Submit)]

    assert len(set(seeds())) == 3, "the same prompt three times would be the same text three times"
    assert seeds(seed=5) == [5, 5, 5]


def test_without_keys_a_priority_may_be_less_than_0(server: Running) -> None:
    assert server.post(COMPLETIONS, SEEDED | {"priority": -100}).status == 200
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    assert command.priority == -100


def test_a_streams_status_waits_for_a_queue_that_may_be_full_but_not_for_long() -> None:
    engine = EngineClient(Path("nobody"))
    engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
    dispatcher = Dispatcher(RequestContext(engine), 600.0)
    engine.heartbeat.longest = 300.0
    assert dispatcher.context.patience() == PROMPT_ANSWER
    engine.places.take(b"", 9)
    for longest, patience in ((0.1, PROMPT_ANSWER), (2.0, 4.0), (300.0, LATE_ANSWER)):
        engine.heartbeat.longest = longest
        assert dispatcher.context.patience() == patience
