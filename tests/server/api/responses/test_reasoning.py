"""Reasoning in /v1/responses: an item of its own, which may be sent back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attar.text.tokenizer import Tokenizer
from tests.server.api.responses.test_routes import PATH, events, types
from tests.server.conftest import Running
from tests.server.test_reasoning_served import CHAT, MOST, REASONING, TEXT, USER, saying, server, submitted, thinker

__all__ = ["saying", "server", "thinker"]  # fixtures

BODY: dict[str, Any] = {"input": USER, "max_output_tokens": MOST}


def test_reasoning_is_an_item(server: Running, saying: Callable[[str], int], thinker: Tokenizer) -> None:
    count = saying(f"<think>\n{REASONING}\n</think>\n\n{TEXT}")
    one = server.post(PATH, BODY).json
    assert one["status"] == "completed"
    thought, message = one["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": REASONING}])
    assert (message["type"], message["content"][0]["text"]) == ("message", TEXT)
    behind = len(thinker.encode(f"\n\n{TEXT}", add_special_tokens=False))
    assert one["usage"]["output_tokens_details"]["reasoning_tokens"] == count - behind

    read = events(server.post(PATH, BODY | {"stream": True}))
    assert types(read)[-1] == "completed"
    deltas = [event for event in read if types([event])[0].endswith("delta")]
    said = {index: "".join(event.delta for event in deltas if event.output_index == index) for index in (0, 1)}
    assert said == {0: REASONING, 1: TEXT}

    server.post(PATH, BODY | {"input": [*USER, *one["output"], *USER]})
    mine = submitted(server).prompt
    again = {"role": "assistant", "content": TEXT, "reasoning_content": REASONING}
    server.post(CHAT, {"messages": [*USER, again, *USER], "max_tokens": 1})
    assert mine == submitted(server).prompt


@pytest.mark.parametrize("effort, budget", [("low", 2048), ("none", None), (None, None)])
def test_effort_is_that_of_a_chat(server: Running, effort: str | None, budget: int | None) -> None:
    answer = server.post(PATH, BODY | {"max_output_tokens": 1, "reasoning": {"effort": effort, "summary": "auto"}}).json
    mine = submitted(server)
    server.post(CHAT, {"messages": USER, "max_tokens": 1, "reasoning_effort": effort})
    assert (mine.prompt, mine.reasoning) == (submitted(server).prompt, submitted(server).reasoning)
    assert (mine.reasoning and mine.reasoning.budget) == budget
    assert answer["reasoning"] == {"effort": effort, "summary": "auto"}


def test_an_answer_cut_off_in_its_reasoning_has_no_message(server: Running, saying: Callable[[str], int]) -> None:
    saying(f"<think>\n{REASONING}\n</think>\n\n{TEXT}")
    one = server.post(PATH, BODY | {"max_output_tokens": 4}).json
    assert [(item["type"], item["status"]) for item in one["output"]] == [("reasoning", "incomplete")]
