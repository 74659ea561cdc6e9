"""What one request may ask for at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attar.protocol.request import SamplingParams
from attar.server.api import sampling_params
from attar.server.api.sampling_params import check_logprobs
from attar.server.errors import APIError
from tests.server.api.test_routes import CHAT, COMPLETIONS
from tests.server.bad_requests import USER
from tests.server.conftest import Running


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
    monkeypatch.setattr(sampling_params, "MAX_LOGPROBS", 600)
    scored: dict[str, Any] = {"prompt": [[1] * 100] * 2, "max_tokens": 50, "echo": True, "logprobs": 1, "seed": 1}
    chat = {"messages": USER, "max_tokens": 100, "logprobs": True, "top_logprobs": 5, "seed": 1}
    for path, body, count in (
        (COMPLETIONS, scored | {"logprobs": 2}, 900), (COMPLETIONS, scored | {"n": 2}, 1200),
        (COMPLETIONS, scored | {"best_of": 3}, 1800), (COMPLETIONS, scored | {"n": 2, "stream": True}, 800),
        (CHAT, chat | {"n": 2}, 1200), (CHAT, chat | {"logprob_token_ids": [1] * 6}, 700),
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
    check_logprobs([(1,) * 4096] * 128, params, 1, False)
    check_logprobs([(1,)], SamplingParams(max_tokens=(128 << 10) - 1, logprobs=20), 1, False)
    with pytest.raises(APIError, match="out_of_range"):
        check_logprobs([(1,) * 16384] * 128, params, 1, False)
