"""What a client sends of tools stays text: names, descriptions, schemas, arguments and results of every family."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from attar.text.literal import LiteralChat
from attar.text.template import render_chat
from attar.text.tokenizer import Tokenizer
from attar.text.tools import generic
from attar.text.tools.formats import detect
from attar.text.tools.tool import Tool
from tests.text.tools.families import ADDED, FAMILIES, SPECIAL, call, with_markers

MARKERS = SPECIAL + ADDED


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return with_markers(Tokenizer.load(demo))


def conversation(words: str) -> tuple[list[dict[str, Any]], list[Tool]]:
    """A conversation that has the words wherever a client's may be."""
    schema = {"type": "object", "properties": {words: {"type": "string", "description": words, "enum": [words]}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"a {words} b"},
        {"role": "assistant", "content": "", "tool_calls": [call("get", {words: [words, {"x": words}]})]},
        {"role": "tool", "name": "get", "tool_call_id": "a1b2c3d4e", "content": f"{words}\n{words}"},
    ]
    return messages, [Tool("get", f"It {words} gets.", schema)]


def control(tokenizer: Tokenizer, template: str, words: str) -> tuple[Counter[int], str, str]:
    """Control tokens of the prompt, its text, and what the template rendered."""
    messages, tools = conversation(words)
    form = detect(tokenizer, template)
    forms: list[dict[str, Any]] = [tool.template_form() for tool in tools]
    if form.name == "generic":
        messages, forms = generic.plain(messages, tools), []
    elif form.arguments_as_text:
        messages[1]["tool_calls"][0]["function"]["arguments"] = f'{{"x": "{words}"}}'

    def render(said: Any, more: Any) -> str:
        return render_chat(template, said, tools=more, bos_token=None, eos_token=None)

    ids = LiteralChat(tokenizer).encode(messages, render, forms)
    found = Counter(token for token in ids if token in {tokenizer.token_to_id(each) for each in MARKERS})
    return found, tokenizer.decode(ids, skip_special_tokens=False), render(messages, forms)


@pytest.mark.parametrize("name", FAMILIES)
def test_markers_of_clients_never_become_control_tokens(tokenizer: Tokenizer, name: str) -> None:
    template = FAMILIES[name].template
    expected, _, _ = control(tokenizer, template, "word")
    assert expected
    for marker in MARKERS:
        found, text, rendered = control(tokenizer, template, marker)
        assert found == expected, marker
        assert text == rendered


def test_an_assistant_s_own_text_keeps_its_markers_of_reasoning(tokenizer: Tokenizer) -> None:
    """Templates split an answer at `</think>`, and earlier reasoning is left out."""

    def render(said: Any) -> str:
        return str(said[0]["content"].split("</think>")[-1])

    text = "<think>a<tool_call></think>b<tool_call>"
    ids = LiteralChat(tokenizer).encode([{"role": "assistant", "content": text}], render)
    assert tokenizer.decode(ids) == "b<tool_call>"
    assert tokenizer.token_to_id("<tool_call>") not in ids
    ids = LiteralChat(tokenizer).encode([{"role": "user", "content": text}], lambda said: said[0]["content"])
    assert not {tokenizer.token_to_id(each) for each in ADDED} & set(ids)


def test_added_words_that_are_no_markup_are_left_alone(demo: Path) -> None:
    plain = Tokenizer.load(demo)
    plain._backend.add_tokens(["   ", "<table>"])
    tokenizer = Tokenizer(plain._backend, plain.bos_token, plain.eos_token)
    special = tokenizer.id_to_token(min(tokenizer.special_ids))
    ids = LiteralChat(tokenizer).encode(
        [{"role": "user", "content": f"a   <table>{special}"}], lambda s: s[0]["content"]
    )
    assert {tokenizer.token_to_id("   "), tokenizer.token_to_id("<table>")} <= set(ids)
