"""Turns with tools: calls are asked about, run or refused, and answered; what is shown is escaped."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from attar.cli.tool_use.conversation import MAX_ROUNDS, REFUSED, SHOWN, ToolChat, allowed_names, ask_terminal, escaped
from attar.cli.tool_use.functions import Functions
from attar.errors import UserError
from attar.protocol.request import Completion, SamplingParams, ToolCall
from attar.text.answers.events import AnswerEvent
from attar.text.answers.made_calls import calls
from attar.text.answers.reasoning import reasoning_and_text
from attar.text.tokenizer import Tokenizer
from attar.text.tools.formats import detect
from attar.text.tools.parsers import parser
from attar.text.tools.tool import Tool, ToolChoice
from tests.cli.test_commands import BAD_INPUT, attar, refused
from tests.text.tools.families import HERMES, with_markers

CALL = '<tool_call>\n{"name": "twice", "arguments": {"text": "a\\u001b[2J"}}\n</tool_call>'


class FakeLLM:
    """Says its answers one after another, a character at a time; keeps the conversations that it saw."""

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self._answers = list(answers)
        self.seen: list[list[dict[str, Any]]] = []

    def chat_events(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, tools: Sequence[Tool], **more: Any
    ) -> Generator[AnswerEvent, None, Completion]:
        assert [tool.name for tool in tools] == ["twice"]
        self.seen.append(list(messages))
        form = detect(self.tokenizer, self.tokenizer.chat_template(tools=True))
        reader, answer = parser(form, tools, ToolChoice()), self._answers.pop(0)
        events = [event for each in answer for event in reader.feed(each)] + reader.close()
        yield from events
        made = tuple(ToolCall(f"call_{len(self.seen)}", call.name, call.arguments) for call in calls(events))
        return Completion(reasoning_and_text(events)[1], (), "stop", tool_calls=made)


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Functions:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text("def twice(text: str) -> str:\n    return text + text\n")
    return Functions(path)


@pytest.fixture(scope="module")
def caller(demo: Path) -> Tokenizer:
    made = with_markers(Tokenizer.load(demo))
    made.chat_templates["default"] = HERMES
    return made


def talk(
    caller: Tokenizer, functions: Functions, answers: Sequence[str], says: bool, allowed: str = ""
) -> tuple[Any, list[str], Any]:
    """The messages of a turn, the questions, and the model."""
    questions: list[str] = []

    def ask(shown: str) -> bool:
        questions.append(shown)
        return says

    llm: Any = FakeLLM(caller, answers)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    ToolChat(llm, functions, allowed_names(allowed, functions), ask).turn(messages, SamplingParams())
    return messages, questions, llm


@pytest.mark.parametrize(("says", "allowed"), [(True, ""), (False, "twice"), (False, "")])
def test_a_call_runs_where_it_is_allowed(
    caller: Tokenizer, functions: Functions, capsys: pytest.CaptureFixture[str], says: bool, allowed: str
) -> None:
    messages, questions, llm = talk(caller, functions, ["Well. " + CALL, "Done."], says, allowed)
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    [call] = messages[1]["tool_calls"]
    assert (messages[1]["content"], json.loads(call["function"]["arguments"])) == ("Well.", {"text": "a\x1b[2J"})
    assert messages[2]["content"] == ("a\x1b[2Ja\x1b[2J" if says or allowed else REFUSED)
    assert messages[2]["tool_call_id"] == call["id"]
    assert messages[3] == {"role": "assistant", "content": "Done."}
    assert len(questions) == (not allowed)
    shown = capsys.readouterr()
    assert shown.out == "Well.\nDone.\n"
    assert "\x1b" not in shown.err + "".join(questions)
    assert llm.seen[1][1]["tool_calls"] == [call]


def test_calls_without_end_are_ended(caller: Tokenizer, functions: Functions) -> None:
    with pytest.raises(UserError) as error:
        talk(caller, functions, [CALL] * MAX_ROUNDS, says=False)
    assert error.value.code == "answer_invalid"


def test_names_that_are_no_functions(functions: Functions) -> None:
    assert allowed_names("twice, twice", functions) == {"twice"}
    with pytest.raises(UserError) as error:
        allowed_names("thrice", functions)
    assert error.value.code == "name_unknown"


def test_without_a_terminal_the_answer_is_no() -> None:
    assert not ask_terminal("f()")


def test_what_is_shown_is_printable_and_short() -> None:
    assert escaped("a\nb\x1b[2J\u202eø") == "a\\nb\\x1b[2J\\u202eø"
    assert escaped("x" * 1000) == "x" * SHOWN + "..."


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text("def f() -> None: ...\n")
    for options, code in (
        (["--yes-tools", "f"], "option_unused"),
        (["--tools", str(path), "--regex", "a"], "option_conflict"),
        (["--tools", str(path), "--yes-tools", "g"], "name_unknown"),
        (["--tools", str(tmp_path / "none.py")], "file_not_found"),
    ):
        refused(attar("chat", "demo", *options, "--json", stdin="hello\n"), BAD_INPUT, code, as_json=True)
