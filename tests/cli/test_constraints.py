"""Constraints on the command line: files and expressions, one at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import BAD_INPUT, attar, last_json, refused

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}
ASK = ("generate", "demo", "--prompt", "The", "--max-tokens", "40", "--seed", "1", "--json")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    made = {"schema.json": json.dumps(SCHEMA), "rules.gbnf": 'root ::= "a" root | "b"', "bad.json": '{"not": {}}'}
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    schema, rules, bad = (str(tmp_path / name) for name in made)
    return schema, rules, bad


def test_generate_keeps_to_a_constraint(files: tuple[str, str, str]) -> None:
    schema, rules, _ = files
    done = last_json(attar(*ASK, "--schema", schema))
    assert done["finish_reason"] == "stop"
    assert set(json.loads(done["text"])) == {"age"}
    assert re.fullmatch("a*b?", last_json(attar(*ASK, "--grammar", rules))["text"])
    assert last_json(attar(*ASK, "--regex", "[0-9]{3}"))["text"].isdigit()


def test_what_cannot_be_kept_is_an_error(files: tuple[str, str, str]) -> None:
    schema, _, bad = files
    refused(attar(*ASK, "--schema", bad), BAD_INPUT, "grammar_invalid", as_json=True)
    refused(attar(*ASK, "--regex", "("), BAD_INPUT, "grammar_invalid", as_json=True)
    refused(attar(*ASK, "--regex", "a", "--schema", schema), BAD_INPUT, "option_conflict", as_json=True)
    refused(attar(*ASK, "--regex", "a", "--ignore-eos"), BAD_INPUT, "option_conflict", as_json=True)
    refused(attar(*ASK, "--schema", f"{bad}.none"), BAD_INPUT, "file_not_found", as_json=True)


def test_chat_keeps_to_a_constraint_in_every_turn(files: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from attar.text.tokenizer import Tokenizer

    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(Tokenizer, "chat_template", lambda self, tools=False: template)
    done = last_json(attar("chat", "demo", "--regex", "(yes|no)", "--json", stdin="A?\nB?\n"))
    answers = [each["content"] for each in done["messages"] if each["role"] == "assistant"]
    assert len(answers) == 2
    assert set(answers) <= {"yes", "no"}
