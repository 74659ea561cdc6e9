"""Parsers of calls: the same events for any cut of a text, and nothing that a model says is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.text.answers.events import AnswerEvent, CallArguments, CallEnd, CallStart, TextDelta
from attar.text.tokenizer import Tokenizer
from attar.text.tools.formats import ToolFormat, detect
from attar.text.tools.parsers import parser
from attar.text.tools.tool import Tool, ToolChoice
from tests.text.tools.families import DSML, FAMILIES, answer, call, with_markers

TOOLS = (Tool("get_weather"), Tool("get"), Tool("f-1"))
PIECES = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "get", "arguments": {}}',
    '{"name": "get", "parameters": {"a": [1, "\\n"]}}', "[get(a=1)]", "get", "{", "}", "[", "]", "(", ")", '"', "\n",
    " ", "; ", ", ", '{"response": "', '{"tool_calls": [', "\\u00e9", "\\", "é", "x", "get(", "a=", "'", "None", "1e5",
    "<", "```json\n", "```\n", "```", "<function=get>\n", "<parameter=a>\n", "\n</parameter>\n", "</function>",
    "<arg_key>a</arg_key>\n<arg_value>", "</arg_value>", f"<{DSML}function_calls>",
    f'<{DSML}invoke name="get">',
)  # fmt: skip


@pytest.fixture(scope="module")
def forms(demo: Path) -> dict[str, ToolFormat]:
    tokenizer = with_markers(Tokenizer.load(demo))
    return {name: detect(tokenizer, family.template) for name, family in FAMILIES.items()}


def events(form: ToolFormat, pieces: Sequence[str]) -> list[AnswerEvent]:
    found = parser(form, TOOLS, ToolChoice())
    return [event for piece in pieces for event in found.feed(piece)] + found.close()


def joined(found: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """Events with neighbouring pieces joined."""
    made: list[AnswerEvent] = []
    for event in found:
        last = made[-1] if made else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            made[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            made[-1] = CallArguments(event.index, last.text + event.text)
        else:
            made.append(event)
    return made


def calls(found: Sequence[AnswerEvent]) -> list[tuple[str, Any]]:
    """Names and arguments of the complete calls."""
    names = {event.index: event.name for event in found if isinstance(event, CallStart)}
    texts = dict.fromkeys(names, "")
    for event in found:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    return [(names[event.index], json.loads(texts[event.index])) for event in found if isinstance(event, CallEnd)]


def text(found: Sequence[AnswerEvent]) -> str:
    return "".join(event.text for event in found if isinstance(event, TextDelta))


def cut(whole: str, places: Sequence[int]) -> list[str]:
    at = sorted(place % (len(whole) + 1) for place in places)
    return [whole[start:end] for start, end in zip([0, *at], [*at, len(whole)], strict=True)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", "'\"\\", "<|im_end|>", "]}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = st.text("abc_1", min_size=1, max_size=5)
CALLS = st.lists(st.tuples(st.sampled_from([tool.name for tool in TOOLS]), st.dictionaries(KEYS, VALUES, max_size=3)),
                 min_size=1, max_size=3)  # fmt: skip
PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.format not in ("generic", "xml")])
@settings(max_examples=40)
@given(data=st.data())
def test_calls_as_the_template_renders_them_are_read_back(
    forms: dict[str, ToolFormat], name: str, data: st.DataObject
) -> None:
    form, said = forms[name], data.draw(CALLS)
    said = said if form.parallel else said[:1]
    rendered = [call(tool, json.dumps(given) if form.arguments_as_text else given) for tool, given in said]
    whole = answer(FAMILIES[name].template, rendered)
    found = events(form, cut(whole, data.draw(PLACES)))
    assert calls(found) == said
    assert text(found) == ""
    assert [event.index for event in found if isinstance(event, CallStart)] == list(range(len(said)))


TYPED: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"}, "whole": {"type": "integer"}, "real": {"type": "number"},
        "any": {"$ref": "#/$defs/any"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "word": {"enum": ["1", "true", 2, None]},
    },
    "$defs": {"any": {"type": ["array", "object", "boolean"]}},
}  # fmt: skip
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9) | st.sampled_from(
    ["1", "\n", " a\n", "null", "</a>"]
)
TYPED_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS, "whole": st.integers(), "real": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
        "any": st.booleans() | st.lists(VALUES, max_size=3) | st.dictionaries(KEYS, VALUES, max_size=3),
        "maybe": WORDS.filter(lambda word: word.strip(" \t\n\r") not in ("null", "None")) | st.none(),
        "word": st.sampled_from(["true", 2, None]),
    },
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.format == "xml"])
@settings(max_examples=60)
@given(given=st.lists(TYPED_ARGUMENTS, min_size=1, max_size=3), places=PLACES)
def test_parameters_between_tags_have_the_types_of_the_schema(
    forms: dict[str, ToolFormat], name: str, given: list[dict[str, Any]], places: list[int]
) -> None:
    form, tools = forms[name], (Tool("get", parameters=TYPED),)
    whole = answer(FAMILIES[name].template, [call("get", arguments) for arguments in given])
    found = parser(form, tools, ToolChoice())
    told = [event for piece in cut(whole, places) for event in found.feed(piece)] + found.close()
    assert calls(told) == [("get", arguments) for arguments in given]
    assert text(told) == ""


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), places=PLACES)
def test_any_cut_of_a_text_gives_the_same_events_and_loses_nothing(
    forms: dict[str, ToolFormat], name: str, pieces: list[str], places: list[int]
) -> None:
    whole = "".join(pieces)
    found = joined(events(forms[name], [whole]))
    assert joined(events(forms[name], cut(whole, places))) == found
    assert joined(events(forms[name], list(whole))) == found
    for _, arguments in calls(found):
        assert isinstance(arguments, dict)
    if not any(isinstance(event, CallStart) for event in found) and FAMILIES[name].format != "generic":
        assert text(found) == whole


@pytest.mark.parametrize(
    "name, whole, expected, said",
    [
        ("hermes", 'A.\n<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>', [("get", {"a": 1})], "A."),
        ("hermes", '<tool_call>{"name":"get","arguments":{}}</tool_call> and', [("get", {})], " and"),
        ("hermes", '<tool_call>\n{"name": "get"}\n</tool_call>', [("get", {})], ""),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {}}\n', [("get", {})], ""),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {}}\n</tool', [("get", {})], ""),
        ("hermes", '<tool_call>[{"name": "get"}, {"name": "f-1"}]</tool_call>', [("get", {}), ("f-1", {})], ""),
        ("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', [],
         '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
        ("hermes", "a <tool_call> is", [], "a <tool_call> is"),
        ("hermes", "<tool_call><tool_call>\n{\"name\": \"get\"}</tool_call>", [("get", {})], "<tool_call>"),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": nope}}', [], "ope}}"),
        ("hermes", " \n", [], " \n"),
        ("hermes", '{"name": "get", "arguments": {"a": 1}}', [("get", {"a": 1})], ""),
        ("hermes", '\n{"name":"get","parameters":{}}\n{"name":"f-1","arguments":{}}', [("get", {}), ("f-1", {})], ""),
        ("hermes", 'So:\n```json\n{\n  "name": "get",\n  "arguments": {"a": 1}\n}\n```', [("get", {"a": 1})], "So:"),
        ("hermes", '```\n{"name": "get", "arguments": {}}\n``', [("get", {})], ""),
        ("hermes", '```json\n{"name": "get", "arguments": {}}\n```\nDone.', [("get", {})], "\nDone."),
        ("hermes", '```json\n{"name": "get"}\n```', [], '```json\n{"name": "get"}\n```'),
        ("hermes", '```python\n{"name": "get", "arguments": {}}', [], '```python\n{"name": "get", "arguments": {}}'),
        ("hermes", 'Is {"name": "get", "arguments": {}}', [], 'Is {"name": "get", "arguments": {}}'),
        ("hermes", '{"name": "John", "arguments": {}}', [], '{"name": "John", "arguments": {}}'),
        ("hermes", '{"name": "get", "arguments": [1]}', [], '{"name": "get", "arguments": [1]}'),
        ("hermes", '{"name": "get", "arguments": {}, "a": 1}', [("get", {})], ', "a": 1}'),
        ("mistral", '{"name": "get", "arguments": {}}', [], '{"name": "get", "arguments": {}}'),
        ("llama3", '<|python_tag|>{"name": "get", "parameters": {}}', [("get", {})], ""),
        ("llama3", '{"type": "function", "name": "get", "parameters": {}}', [("get", {})], ""),
        ("llama3", '{"name": "get", "parameters": {}}; {"name": "get", "parameters": {}}', [("get", {})] * 2, ""),
        ("llama3", '{"name": "John", "parameters": {}}', [], '{"name": "John", "parameters": {}}'),
        ("llama3", 'It is {"name": "get"}', [], 'It is {"name": "get"}'),
        ("llama3", '<|python_tag|>print(1)', [], '<|python_tag|>print(1)'),
        ("pythonic", "[get(), f-1(a=[True, (1, {'b': None,}),], b='\\'\\x41\\n')]",
         [("get", {}), ("f-1", {"a": [True, [1, {"b": None}]], "b": "'A\n"})], ""),
        ("pythonic", "[1] Paper", [], "[1] Paper"),
        ("pythonic", "[get(a=__import__('os'))]", [], "__import__('os'))]"),
        ("liquid", "Yes.<|tool_call_start|>[get(a=-1.5e3)]<|tool_call_end|>", [("get", {"a": -1500.0})], "Yes."),
        ("mistral", '[TOOL_CALLS][{"name": "get", "arguments": {}, "id": "a1b2c3d4e"}]', [("get", {})], ""),
        ("mistral_args", '[TOOL_CALLS]get[ARGS]{}[TOOL_CALLS]f-1[ARGS]{"a": 1}', [("get", {}), ("f-1", {"a": 1})], ""),
        ("mistral_ids", "[TOOL_CALLS]get[CALL_ID]a1b2c3d4e[ARGS]{}", [("get", {})], ""),
        ("qwen3_coder", "So.\n<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
         [("get", {"a": 1})], "So."),
        ("qwen3_coder", "<tool_call><function=get><parameter=a>\n\nx\n\n</parameter></function></tool_call> and",
         [("get", {"a": "\nx\n"})], " and"),
        ("qwen3_coder", "<tool_call>\n<function=get>\n</function>", [("get", {})], ""),
        ("qwen3_coder", "<tool_call>\n<function=no>\n</function>", [], "<tool_call>\n<function=no>\n</function>"),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n", [],
         "\n<parameter=a>\n"),
        ("glm", "<tool_call>get<arg_key>a</arg_key><arg_value>[1, {}]</arg_value></tool_call>",
         [("get", {"a": [1, {}]})], ""),
        ("deepseek", '<DSMLfunction_calls>\n<DSMLinvoke name="get">\n'
         '<DSMLparameter name="a" string="true">1</DSMLparameter>\n'
         '<DSMLparameter name="b" string="false">1</DSMLparameter>\n</DSMLinvoke>\n<DSMLinvoke name="f-1">\n'
         '</DSMLinvoke>\n</DSMLfunction_calls>', [("get", {"a": "1", "b": 1}), ("f-1", {})], ""),
        ("chatml", '{"response": "a \\"b\\" \\ud83d\\ude00\\n"}', [], 'a "b" \U0001f600\n'),
        ("chatml", '{"tool_calls": [{"name": "get", "arguments": {}}]}', [("get", {})], ""),
        ("chatml", '{"response": "a\\ud83d\\n"} b', [], 'a\\ud83d\\n"} b'),
        ("chatml", "Plain words", [], "Plain words"),
    ],
)  # fmt: skip
def test_what_models_write(
    forms: dict[str, ToolFormat], name: str, whole: str, expected: list[tuple[str, Any]], said: str
) -> None:
    for pieces in ([whole], list(whole.replace("DSML", DSML))):
        found = events(forms[name], [piece.replace("DSML", DSML) for piece in pieces])
        assert (calls(found), text(found)) == (expected, said)


def test_arguments_pass_before_the_call_is_complete(forms: dict[str, ToolFormat]) -> None:
    found = parser(forms["hermes"], TOOLS, ToolChoice())
    assert found.feed('<tool_call>\n{"name": "get_weather", "arg') == []
    assert found.feed('uments": {"city": "Pa') == [CallStart(0, "get_weather"), CallArguments(0, '{"city": "Pa')]
    assert found.feed('ris"}}') == [CallArguments(0, 'ris"}'), CallEnd(0)]
    assert found.feed("\n</tool_call>") == []
    assert found.close() == []


def test_without_a_choice_all_is_text(forms: dict[str, ToolFormat]) -> None:
    whole = '<tool_call>{"name": "get"}</tool_call>'
    for tools, choice in ((TOOLS, ToolChoice("none")), ((), ToolChoice())):
        assert parser(forms["hermes"], tools, choice).feed(whole) == [TextDelta(whole)]


def test_json_without_a_marker_is_text_where_a_call_is_required(forms: dict[str, ToolFormat]) -> None:
    whole = '{"name": "get", "arguments": {}}'
    found = parser(forms["hermes"], TOOLS, ToolChoice("required"))
    assert text([*found.feed(whole), *found.close()]) == whole


def test_little_is_held_back(forms: dict[str, ToolFormat]) -> None:
    for form in forms.values():
        found = parser(form, TOOLS, ToolChoice())
        shown = "".join(text(found.feed(piece)) for piece in ["x", *["<tool_cal \n``` " * 5] * 20, " " * 500])
        assert len(shown) >= 20 * 55 + 500 - 30
