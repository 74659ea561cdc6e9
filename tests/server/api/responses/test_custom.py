"""Custom tools in /v1/responses: their calls whole and streamed, their grammar, and conversations with outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.protocol.grammar import Grammar
from attar.server.api.responses.custom import InputReader, ResponseCustom, TextByGrammar
from attar.text.grammars import Vocabulary, matcher
from attar.text.schemas import regular
from attar.text.tokenizer import Tokenizer
from tests.server.api.responses.test_calls import BODY, TOOLS, ask
from tests.server.api.responses.test_routes import PATH, events, types
from tests.server.conftest import Running
from tests.server.test_tools_served import USER, Saying, asked, caller, saying, server
from tests.text.schemas.test_regular import ADDED, CHANGED, PATCH

__all__ = ["caller", "saying", "server"]  # fixtures

CODE = 'print("\\u2192 Køln")\n'
RUN = {"type": "custom", "name": "run", "description": "Runs Python."}
CALL = f'Look.\n<tool_call>\n{{"name": "run", "arguments": {json.dumps({"input": CODE})}}}\n</tool_call>'
CUSTOM = {"tools": [*TOOLS, RUN]}


@given(st.text(st.characters()), st.booleans(), st.lists(st.integers(0, 300)), st.sampled_from(["", " ", "\n"]))
def test_an_input_is_read_from_pieces(text: str, ascii: bool, cuts: list[int], space: str) -> None:
    whole = f'{{{space}"input"{space}:{space}{json.dumps(text, ensure_ascii=ascii)}{space}}}'
    ends = sorted({*(min(cut, len(whole)) for cut in cuts), len(whole)})
    reader = InputReader()
    pieces = [reader.push(whole[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    assert "".join(pieces) == json.loads(json.dumps(text)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.mark.parametrize(
    "escaped, text",
    [(r"\ud83d\ude00", "😀"), (r"\ud83dx", "\ufffdx"), (r"\ud83d\n", "\ufffd\n"), (r"\ude00\ud83d", "\ufffd\ufffd"),
     (r"\ud83dA", "\ufffdA"), (r"\\ud83d\"", '\\ud83d"')],
)  # fmt: skip
def test_escapes_are_read_a_character_at_a_time(escaped: str, text: str) -> None:
    reader = InputReader()
    assert "".join(map(reader.push, f'{{"input": "{escaped}"}}')) == text


def test_an_answer_calls(server: Running, saying: Saying) -> None:
    saying(CALL)
    answer = ask(server, **CUSTOM)
    assert [item["type"] for item in answer["output"]] == ["message", "custom_tool_call"]
    item = answer["output"][1]
    assert (item["name"], item["input"], item["status"]) == ("run", CODE, "completed")
    assert answer["tools"][2] == RUN | {"format": {"type": "text"}}
    read = events(server.post(PATH, BODY | CUSTOM | {"stream": True}))
    own = [event for event in read if types([event])[0].startswith("custom_tool_call_input")]
    assert types(own) == ["custom_tool_call_input.delta"] * (len(own) - 1) + ["custom_tool_call_input.done"]
    assert "".join(event.delta for event in own[:-1]) == own[-1].input == CODE
    assert {(event.item_id, event.output_index) for event in own} == {(own[0].item_id, 1)}
    assert read[-1].response.output[1].input == CODE


def test_an_answer_that_breaks_off_has_its_input_so_far(server: Running, saying: Saying) -> None:
    for most in range(1, saying(CALL), 3):
        answer = ask(server, **CUSTOM, max_output_tokens=most)
        assert answer["status"] == "incomplete"
        last = answer["output"][-1]
        if last["type"] == "custom_tool_call":
            assert CODE.startswith(last["input"])
            assert last["status"] == "incomplete" or last["input"] == CODE


def test_calls_and_outputs_are_sent_back(server: Running, saying: Saying) -> None:
    """They are those of a function with one argument."""
    saying(CALL)
    output = ask(server, **CUSTOM)["output"]
    custom = ResponseCustom(name="run", description="Runs Python.")
    function = {"type": "function", "name": "run", "description": "Runs Python.", "parameters": custom.arguments()[0]}
    call = {
        "type": "function_call", "call_id": output[1]["call_id"], "name": "run",
        "arguments": json.dumps({"input": CODE}, ensure_ascii=False),
    }  # fmt: skip
    result: dict[str, Any] = {"call_id": call["call_id"], "output": "done"}
    functions = {"tools": [*TOOLS, function | {"strict": True}]}
    for kind in ("auto", "required", "none"):
        ask(server, **CUSTOM, input=[*USER, *output, result | {"type": "custom_tool_call_output"}], tool_choice=kind)
        mine = asked(server)
        again = [*USER, output[0], call, result | {"type": "function_call_output"}]
        ask(server, **functions, input=again, tool_choice=kind)
        assert (mine.prompt, mine.grammar) == (asked(server).prompt, asked(server).grammar)


def test_it_is_chosen(server: Running, saying: Saying) -> None:
    saying(CALL)
    named = {"type": "custom", "name": "run"}
    for choice, alone in ((named, named), ({"type": "allowed_tools", "mode": "auto", "tools": [named]}, "auto")):
        told = ask(server, **CUSTOM, tool_choice=choice)
        assert told["tool_choice"] == choice
        mine = asked(server).grammar
        ask(server, tools=[RUN], tool_choice=alone)
        assert mine == asked(server).grammar


def test_a_regular_expression_is_in_the_grammar(server: Running, saying: Saying) -> None:
    format = {"type": "grammar", "syntax": "regex", "definition": r"a|b\n+"}
    saying(CALL)
    answer = ask(server, tools=[RUN | {"format": format}])
    assert answer["tools"][0]["format"] == format
    mine = asked(server).grammar
    ask(server, tools=[RUN])
    assert mine != asked(server).grammar


def test_a_grammar_of_lark_is_in_the_grammar(server: Running, saying: Saying) -> None:
    format = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" | "b" LF+\n%import common.LF'}
    saying(CALL)
    answer = ask(server, tools=[RUN | {"format": format}])
    assert answer["tools"][0]["format"] == format
    mine = asked(server).grammar
    ask(server, tools=[RUN])
    assert mine != asked(server).grammar
    for wrong in ("start: other", 'start: "a" start | /^/', 'start: "a" start\n%ignore " "'):
        reply = server.post(PATH, BODY | {"input": USER, "tools": [RUN | {"format": format | {"definition": wrong}}]})
        assert (reply.status, reply.json["error"]["param"]) == (400, "tools[0].format.definition")
    many = [
        RUN | {"name": f"run{at}", "format": format | {"definition": 'start: "a"' + " " * 16_000}} for at in range(3)
    ]
    reply = server.post(PATH, BODY | {"input": USER, "tools": many})
    assert (reply.status, reply.code) == (400, "invalid_length")


@pytest.mark.parametrize(
    "text, fits", [('(a("b\n"))', True), ("()", True), ("(a", False), ("(a))", False), ("", False)]
)
def test_a_grammar_with_recursion(server: Running, saying: Saying, caller: Tokenizer, text: str, fits: bool) -> None:
    lark = 'start: "(" (start | WORD | TEXT)* ")"\nTEXT: /"[^"]*"/\n%import common.WORD'
    format = {"type": "grammar", "syntax": "lark", "definition": lark}
    saying(CALL)
    answer = ask(server, tools=[RUN | {"format": format}], tool_choice="required")
    assert answer["tools"][0]["format"] == format
    grammar = asked(server).grammar
    assert grammar is not None
    call = f'<tool_call>\n{{"name": "run", "arguments": {json.dumps({"input": text})}}}\n</tool_call>'
    found = matcher(Vocabulary.of(caller, caller.vocab_size, [caller.eos_id or 0]), grammar)
    said = caller.encode_chat(call)
    assert (found.try_consume_tokens(said) == len(said) and found.is_accepting()) == fits


@pytest.mark.parametrize("text, fits", [(ADDED, True), (CHANGED, True), (ADDED[1:], False), (ADDED + "\n-", False)])
def test_a_patch_by_the_grammar_of_codex(caller: Tokenizer, text: str, fits: bool) -> None:
    custom = ResponseCustom(name="apply_patch", format=TextByGrammar(syntax="lark", definition=PATCH))
    vocabulary = Vocabulary.of(caller, caller.vocab_size, [caller.eos_id or 0])
    found = matcher(vocabulary, Grammar.json_schema(custom.arguments()[0]))
    said = caller.encode(json.dumps({"input": text}), add_special_tokens=False)
    assert (found.try_consume_tokens(said) == len(said) and found.is_accepting()) == fits


@pytest.mark.parametrize("text, fits", [("a", True), ("b\n\n", True), ("ab", False), ("ca", False), ("", False)])
def test_an_input_matches_as_a_whole(caller: Tokenizer, text: str, fits: bool) -> None:
    custom = ResponseCustom(name="run", format=TextByGrammar(syntax="regex", definition=r"a|b\n+"))
    vocabulary = Vocabulary.of(caller, caller.vocab_size, [caller.eos_id or 0])
    found = matcher(vocabulary, Grammar.json_schema(custom.arguments()[0]))
    said = caller.encode(json.dumps({"input": text}), add_special_tokens=False)
    assert (found.try_consume_tokens(said) == len(said) and found.is_accepting()) == fits


def test_a_grammar_is_read_once(server: Running, saying: Saying, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is read in the event loop, where a long one takes milliseconds."""
    read, expression = [], regular.expression

    def counted(text: str) -> str:
        read.append(text)
        return expression(text)

    monkeypatch.setattr(regular, "expression", counted)
    saying(CALL)
    format = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" | "b"'}
    ask(server, tools=[RUN | {"format": format}])
    assert read == [format["definition"]]
