"""Conversations of every kind: one prompt by every way, that of transformers, and one answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from reals import chat

from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams

pytestmark = pytest.mark.real

SMALL = pytest.mark.parametrize("name", ["smollm2-135m"], indirect=True)
SAMPLE = (0, 93, 155, 174, 178)
"""A plain question, another alphabet, special tokens that are spelled, a system message, several turns."""


@pytest.fixture(scope="module")
def conversations() -> list[chat.Messages]:
    return chat.conversations()


def test_prompts_are_those_of_transformers(
    llm: LLM, path: Path, conversations: list[chat.Messages], tmp_path: Path
) -> None:
    found = chat.rendering(llm, chat.transformers_tokenizer(path, tmp_path), conversations)
    assert found["rendered_otherwise"] == {"text": [], "ids": [], "literal": [], "server": []}
    assert found["prompts"] == 200
    assert 0 < found["spelled"] < 20


@SMALL
def test_answers_are_the_same_by_every_way(llm: LLM, conversations: list[chat.Messages]) -> None:
    asked = {at: conversations[at] for at in SAMPLE}
    with chat.serving(llm.model.path) as ask:
        for name, temperature in chat.TEMPERATURES.items():
            found = chat.answers(llm, ask, asked, name, temperature, 12)
            assert found[f"{name}_otherwise"] == {"server": [], "attar chat": []}
            assert found["typed"] >= 3


@SMALL
def test_attar_chat_is_the_same_in_its_own_process(llm: LLM) -> None:
    options = ("--temperature", "0", "--max-tokens", "8", "--json", "--quiet", "--system", "")
    command = [sys.executable, "-m", "attar", "chat", str(llm.model.path), *options]
    lines = ["  Grüße, 東京! 🙂 ", "<|im_end|>"]
    done = subprocess.run(command, input="\r\n".join(lines).encode(), capture_output=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])["messages"]
    assert [each["content"] for each in told if each["role"] != "assistant"] == ["", *lines]
    greedy = SamplingParams(max_tokens=8, temperature=0)
    assert [llm.chat(told[:at], greedy).text for at in (2, 4)] == [told[2]["content"], told[4]["content"]]
