"""Constraints of answers with tools: what they allow is what the parsers read, and arguments satisfy the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from attar.protocol.grammar import Grammar
from attar.text import grammars
from attar.text.grammar_proof import Unproven
from attar.text.grammars import GrammarError, Vocabulary
from attar.text.tokenizer import Tokenizer
from attar.text.tools.constraints import constraint
from attar.text.tools.formats import ToolFormat, detect
from attar.text.tools.parsers import parser
from attar.text.tools.tool import Tool, ToolChoice, ToolError
from tests.text.tools.families import ADDED, DSML, FAMILIES, SPECIAL, answer, call, with_markers
from tests.text.tools.test_parsers import calls, events, joined, text

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["C", "F", None, True]},
        "now": {"type": ["boolean", "null"]},
        "at": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
    },
    "required": ["city", "now"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOLS = (
    Tool("get_weather", parameters=WEATHER),
    Tool("get"),
    Tool("f-1", parameters={"properties": {}, "additionalProperties": False}),
)
UNMASKABLE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
MODES = (
    ToolChoice(),
    ToolChoice("required"),
    ToolChoice("named", "get_weather"),
    ToolChoice("required", parallel=False),
)


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return with_markers(Tokenizer.load(demo))


@pytest.fixture(scope="module")
def forms(tokenizer: Tokenizer) -> dict[str, ToolFormat]:
    return {name: detect(tokenizer, family.template) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    assert all(tokenizer.token_to_id(each) is not None for each in SPECIAL + ADDED)
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    return Vocabulary.of(tokenizer, tokenizer.vocab_size, [end])


@pytest.fixture(scope="module")
def prove(vocabulary: Vocabulary) -> Callable[[Grammar], None]:
    def check(grammar: Grammar) -> None:
        bits = grammars.mask(grammars.matcher(vocabulary, grammar))
        if bits is None or not any(bits):
            raise GrammarError("no text fulfils it")

    return check


def walk(vocabulary: Vocabulary, grammar: Grammar, source: random.Random, most: int = 150) -> str | None:
    """A text along random allowed tokens, those of calls preferred; None where it does not end."""
    found, tokens = grammars.matcher(vocabulary, grammar), list[int]()
    ends = set(vocabulary.ends)
    for at in range(most):
        bits = grammars.mask(found)
        assert bits is not None, found.get_error()
        number = int.from_bytes(bits, "little")
        choices = [each for each in range(len(vocabulary.tokens)) if number >> each & 1]
        assert choices
        if ends & set(choices) and (at > 30 or source.random() < 0.3):
            break
        going = [each for each in choices if each not in ends]
        if not going:
            break
        short = [each for each in going if len(vocabulary.tokens[each]) == 1]
        marked = [each for each in going if vocabulary.tokens[each].startswith((b"<tool", b"[TOOL", b"{", b"[", b'"'))]
        token = source.choice(marked if marked and source.random() < 0.5 else short or going)
        assert found.consume_token(token)
        tokens.append(token)
        if found.is_stopped():
            break
    if not found.is_accepting():
        return None
    return b"".join(vocabulary.tokens[token] for token in tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("choice", MODES, ids=["auto", "required", "named", "one"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_allowed_is_what_the_parser_reads(
    forms: dict[str, ToolFormat],
    vocabulary: Vocabulary,
    prove: Callable[[Grammar], None],
    name: str,
    choice: ToolChoice,
) -> None:
    form = forms[name]
    made = constraint(form, TOOLS, choice, prove)
    assert made is not None
    assert made.loosened == ()
    schemas = {tool.name: tool.schema for tool in TOOLS}
    ended = 0
    for seed in range(12):
        whole = walk(vocabulary, made.grammar, random.Random(seed), 150 if form.tags is None else 500)
        if whole is None:
            continue
        ended += 1
        found = joined(events(form, [whole]))
        said = calls(found)
        for tool, arguments in said:
            jsonschema.validate(arguments, schemas[tool])
        if choice.mode != "auto":
            assert said, whole
            assert text(found) == ""
        if choice.mode == "named":
            assert [tool for tool, _ in said] == [choice.name]
        if not choice.parallel:
            assert len(said) == 1
    assert ended >= 2


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_as_the_template_renders_them_are_allowed(
    forms: dict[str, ToolFormat],
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    prove: Callable[[Grammar], None],
    name: str,
) -> None:
    form, family = forms[name], FAMILIES[name]
    said: list[tuple[str, Any]] = [("get_weather", {"city": "Rome", "now": True}), ("get", {}), ("f-1", {})]
    if form.name == "generic":
        whole = json.dumps({"tool_calls": [{"name": tool, "arguments": given} for tool, given in said]})
    else:
        said = said if form.parallel else said[:1]
        whole = answer(
            family.template, [call(tool, json.dumps(a) if form.arguments_as_text else a) for tool, a in said]
        )
        whole = whole.replace(', "id": "a1b2c3d4e"', "").replace("=true", "=True")
    words = {True: '{"response": "Hello."}', False: "Hello, <b>you</b> [1] {x}"}[form.name == "generic"]
    for choice, texts in ((ToolChoice(), (whole, words)), (ToolChoice("required"), (whole,))):
        made = constraint(form, TOOLS, choice, prove)
        assert made is not None
        for each in texts:
            matcher = grammars.matcher(vocabulary, made.grammar)
            for token in tokenizer.encode_chat(each):
                assert matcher.consume_token(token), (each, tokenizer.id_to_token(token))
            assert matcher.is_accepting()


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_free_up_to_a_marker_and_no_further(
    forms: dict[str, ToolFormat],
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    prove: Callable[[Grammar], None],
    name: str,
) -> None:
    form = forms[name]
    made = constraint(form, TOOLS, ToolChoice(), prove)
    assert made is not None
    refused = {
        "hermes": "a <tool_call>x", "llama3_json": '{"name": x', "pythonic": "[get(a, b", "mistral": "[TOOL_CALLS]x",
        "mistral_args": "[TOOL_CALLS]x", "generic": "x", "xml": "a <tool_call>x",
    }[form.name]  # fmt: skip
    refused = {"liquid": "<|tool_call_start|>x", "deepseek": f"a <{DSML}function_calls>x"}.get(name, refused)
    matcher = grammars.matcher(vocabulary, made.grammar)
    assert not all(matcher.consume_token(token) for token in tokenizer.encode_chat(refused))


@pytest.mark.parametrize(
    "whole, refused",
    [
        ('{"name": "get", "arguments": {}}', ""),
        ('I call.\n```json\n{\n  "name": "f-1",\n  "arguments": {}\n}\n```', ""),
        ('```\n{"name": "get", "arguments": {}}\n{"name": "f-1", "parameters":{}}```', ""),
        ('```json\n{"name": "attar", "version": "1"}\n```\nIs that right?', ""),
        ('{"name": "get", "about": 3}, so far', ""),
        ('```json\n{"name": "', ""),
        ('Is {"name": "f-1", "arguments": 3}', ""),
        ('{"name": "f-1", "arguments": 3', "3"),
        ('```json\n{"name": "f-1", "arguments": {"a', '"a'),
        ('{"name": "get_weather", "arguments": {"city": "Rome", "now": 1', "1"),
        ('{"name": "get", "arguments": {}} and', "and"),
        ('```\n{"name": "get", "arguments": {}}\n``` and', " and"),
    ],
)
def test_calls_without_a_marker_are_enforced_from_their_arguments_on(
    forms: dict[str, ToolFormat],
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    prove: Callable[[Grammar], None],
    whole: str,
    refused: str,
) -> None:
    for name in ("hermes", "as_text"):
        made = constraint(forms[name], TOOLS, ToolChoice(), prove)
        assert made is not None
        matcher = grammars.matcher(vocabulary, made.grammar)
        taken = 0
        for byte in whole.encode():
            token = next(at for at, each in enumerate(vocabulary.tokens) if each == bytes([byte]))
            if not matcher.consume_token(token):
                break
            taken += 1
        assert whole[taken:] == refused
        assert refused or matcher.is_accepting()


def test_as_many_tools_as_a_request_may_have(
    forms: dict[str, ToolFormat], vocabulary: Vocabulary, prove: Callable[[Grammar], None]
) -> None:
    """The lexer of text and of calls without a marker stays within its limits, far into a text as well."""
    tools = [Tool(f"tool_number_{at}", parameters=WEATHER) for at in range(128)]
    made = constraint(forms["hermes"], tools, ToolChoice(), prove)
    assert made is not None
    matcher = grammars.matcher(vocabulary, made.grammar)
    single = {each[0]: at for at, each in enumerate(vocabulary.tokens) if len(each) == 1}
    for byte in b'A ``` <tool `{"name": "tool_number_9\n```json\n{"name": "tool_number_12"}``` ```json\n{"name": "x"':
        assert grammars.mask(matcher) is not None, matcher.get_error()
        assert matcher.consume_token(single[byte])


@pytest.mark.parametrize("name", ["hermes", "pythonic", "mistral_args", "qwen3_coder", "deepseek"])
def test_what_cannot_be_masked_is_named_or_refused(
    forms: dict[str, ToolFormat], prove: Callable[[Grammar], None], name: str
) -> None:
    made = constraint(forms[name], (*TOOLS, Tool("loose", parameters=UNMASKABLE)), ToolChoice(), prove)
    assert made is not None
    assert made.loosened == ("loose",)
    with pytest.raises(ToolError) as caught:
        constraint(forms[name], (*TOOLS, Tool("hard", parameters=UNMASKABLE, strict=True)), ToolChoice(), prove)
    assert caught.value.param == "tools[3].function.parameters"
    assert "#/properties/a" in str(caught.value)


@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder", "glm", "deepseek"])
def test_loosened_arguments_are_still_objects(
    forms: dict[str, ToolFormat], vocabulary: Vocabulary, prove: Callable[[Grammar], None], name: str
) -> None:
    tools = (Tool("get", parameters=UNMASKABLE),)
    made = constraint(forms[name], tools, ToolChoice("required"), prove)
    assert made is not None
    texts = [walk(vocabulary, made.grammar, random.Random(seed)) for seed in range(8)]
    found = [calls(events(forms[name], [each])) for each in texts if each is not None]
    assert found
    assert all(said and isinstance(said[0][1], dict) for said in found)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.format == "xml"])
def test_several_texts_between_tags(
    forms: dict[str, ToolFormat],
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    prove: Callable[[Grammar], None],
    name: str,
) -> None:
    texts = {"a": {"type": "string"}, "b": {"type": "string"}, "c": {"type": "string", "pattern": "^x/[0-9]+$"}}
    tools = [Tool("get", parameters={"properties": texts}), Tool("put", parameters={"properties": texts})]
    made = constraint(forms[name], tools, ToolChoice("required"), prove)
    assert made is not None
    assert made.loosened == ()
    for given, fits in (({"a": "1\n<b>", "b": "", "c": "x/12"}, True), ({"c": "x/"}, False), ({"b": "y"}, True)):
        whole = answer(FAMILIES[name].template, [call("put", given)])
        matcher = grammars.matcher(vocabulary, made.grammar)
        tokens = tokenizer.encode_chat(whole)
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits
        reader = parser(forms[name], tools, ToolChoice())
        assert calls([*reader.feed(whole), *reader.close()]) == [("put", given)]


def test_one_proof_where_all_can_be_kept(forms: dict[str, ToolFormat]) -> None:
    proven: list[Grammar] = []
    constraint(forms["hermes"], TOOLS, ToolChoice(), proven.append)
    assert len(proven) == 1
    assert constraint(forms["hermes"], TOOLS, ToolChoice("none"), proven.append) is None


def test_nothing_is_loosened_where_there_is_no_verdict(forms: dict[str, ToolFormat]) -> None:
    def starved(grammar: Grammar) -> None:
        raise Unproven("took longer")

    with pytest.raises(Unproven):
        constraint(forms["hermes"], TOOLS, ToolChoice(), starved)


def test_too_much_for_one_grammar_is_loosened_or_refused(forms: dict[str, ToolFormat]) -> None:
    """As `prove` refuses what is too large together, but no tool by itself."""

    def small(grammar: Grammar) -> None:
        if len(grammar.text) > 2500:
            raise GrammarError("too large")

    tools = [Tool(f"t{at}", parameters=WEATHER) for at in range(5)]
    made = constraint(forms["hermes"], tools, ToolChoice(), small)
    assert made is not None
    assert len(made.loosened) == 5
    with pytest.raises(ToolError) as caught:
        constraint(
            forms["hermes"], [Tool(f"t{at}", parameters=WEATHER, strict=True) for at in range(5)], ToolChoice(), small
        )
    assert caught.value.param == "tools"


def test_schemas_cannot_bring_options_of_the_compiler(
    forms: dict[str, ToolFormat], prove: Callable[[Grammar], None]
) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "x-guidance": {"lenient": True}}}}
    for name in ("hermes", "pythonic", "qwen3_coder"):
        with pytest.raises(ToolError):
            constraint(forms[name], [Tool("a", parameters=bad, strict=True)], ToolChoice(), prove)


def test_a_schema_in_another_script_takes_no_more_room(forms: dict[str, ToolFormat]) -> None:
    """As escapes these would be more than a grammar may have."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "日" * 80_000}}}
    for name in ("hermes", "pythonic"):
        made = constraint(forms[name], [Tool("a", parameters=schema, strict=True)], ToolChoice(), lambda _: None)
        assert made is not None
        assert made.loosened == ()
