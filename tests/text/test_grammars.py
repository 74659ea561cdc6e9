"""Grammars: a mask is every token that keeps the text possible, and what cannot be kept is refused with its place."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from attar.protocol.grammar import Grammar
from attar.text import grammars
from attar.text.grammars import GrammarError, Vocabulary
from tests.errors import user_error

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [b'{"', b'": ', b"ab", b"aa", b"a1", b", ", b'"}', b"true", b"null", b"\xc3\xa9", b"12", b"", b"a" * 7]
TOKENS = [b"", b"<s>", b"</s>", b"<eot>", *BYTES, *WORDS]
ENDS = (2, 3)
VOCABULARY = Vocabulary.make(TOKENS, special=(1, 2, 3), ends=ENDS)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "kind": {"enum": ["a", "b\n", 3, None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 200}, "maxItems": 3},
        "more": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


def allowed(bits: bytes | None) -> set[int]:
    assert bits is not None
    return {at for at in range(len(VOCABULARY.tokens)) if bits[at // 8] >> at % 8 & 1}


def spelled(tokens: list[int]) -> str:
    return b"".join(VOCABULARY.tokens[token] for token in tokens).decode("utf-8")


def walk(grammar: Grammar, seed: int, most: int = 200) -> str | None:
    """A text along random allowed tokens; None where it is not complete after so many."""
    source, found, tokens = random.Random(seed), grammars.matcher(VOCABULARY, grammar), list[int]()
    while not found.is_stopped() and len(tokens) < most:
        choices = sorted(allowed(grammars.mask(found)))
        assert choices
        # Short texts are likelier to end.
        token = source.choice([each for each in choices if each in ENDS] or choices)
        if token in ENDS:
            break
        assert found.consume_token(token)
        tokens.append(token)
    return spelled(tokens) if found.is_accepting() else None


REGEX = r"[ab]{1,3}(1|12)?é?"


@pytest.mark.parametrize("seed", range(3))
def test_a_mask_holds_the_tokens_that_keep_the_text_possible_and_no_other(seed: int) -> None:
    """By brute force: all texts of the expression are known."""
    letters = ["".join(each) for size in (1, 2, 3) for each in itertools.product("ab", repeat=size)]
    texts = [(each + tail + end).encode() for each in letters for tail in ("", "1", "12") for end in ("", "é")]
    assert all(re.fullmatch(REGEX, each.decode()) for each in texts)
    source, found, so_far = random.Random(seed), grammars.matcher(VOCABULARY, Grammar("regex", REGEX)), b""
    while True:
        expected = {
            at for at, token in enumerate(VOCABULARY.tokens)
            if token and at not in VOCABULARY.special and any(text.startswith(so_far + token) for text in texts)
        }  # fmt: skip
        complete = so_far in texts
        assert allowed(grammars.mask(found)) == expected | (set(ENDS) if complete else set())
        assert found.is_accepting() == complete
        if not expected:
            assert found.is_stopped()
            break
        token = source.choice(sorted(expected))
        assert found.consume_token(token)
        so_far += VOCABULARY.tokens[token]


@pytest.mark.parametrize("whitespace", [None, "", "[ \\n]{0,2}"])
def test_json_along_random_tokens_is_valid_by_another_library(whitespace: str | None) -> None:
    texts = [walk(Grammar.json_schema(SCHEMA, whitespace), seed) for seed in range(60)]
    done = [text for text in texts if text is not None]
    assert len(done) > 20
    for text in done:
        jsonschema.validate(json.loads(text), SCHEMA, jsonschema.Draft202012Validator)


PAIR = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize(
    ("whitespace", "pattern"),
    [(None, r"\[1, 1\]"), ("", r"\[1,1\]"), ("[ \\n]{0,2}", r"\[[ \n]{0,2}1[ \n]{0,2},[ \n]{0,2}1[ \n]{0,2}\]")],
)
def test_white_space_is_what_was_asked_for_and_bounded(whitespace: str | None, pattern: str) -> None:
    texts = {walk(Grammar.json_schema(PAIR, whitespace), seed) for seed in range(20)}
    assert all(text is not None and re.fullmatch(pattern, text) for text in texts)
    assert (len(texts) > 1) == bool(whitespace)


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (Grammar.json_object(), lambda text: isinstance(json.loads(text), dict)),
        (Grammar.choice(['a"b\n', "é", "aa"]), lambda text: text in ('a"b\n', "é", "aa")),
        (Grammar("gbnf", 'root ::= "a" root | [1-2]'), lambda text: re.fullmatch("a*[12]", text)),
        (Grammar("lark", 'start: "a" start | /[1-2]/'), lambda text: re.fullmatch("a*[12]", text)),
        (Grammar("regex", "a/b\n?"), lambda text: re.fullmatch("a/b\n?", text)),
        (Grammar.of_text('root ::= "aa"'), lambda text: text == "aa"),
        (Grammar.json_schema(True), lambda text: json.loads(text) is not ...),
    ],
    ids=lambda each: each.kind if isinstance(each, Grammar) else "",
)
def test_every_kind_is_kept(grammar: Grammar, fits: Callable[[str], bool]) -> None:
    done = [text for seed in range(30) if (text := walk(grammar, seed, 60)) is not None]
    assert done
    assert all(fits(text) for text in done)


def test_without_a_token_that_ends_a_text_one_is_added_behind_all() -> None:
    made = Vocabulary.make(BYTES, (), ())
    assert made.ends == (256,)
    assert len(made.tokens) == 257
    bits = grammars.mask(grammars.matcher(made, Grammar("regex", "a?")))
    assert bits is not None
    assert bits[256 // 8] & 1


def test_a_vocabulary_survives_json() -> None:
    assert Vocabulary.from_json(VOCABULARY.to_json()) == VOCABULARY


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a/b~": {"type": "array", "uniqueItems": True}}}, "/properties/a~1b~0"),
        ({"anyOf": [{"type": "string"}, {"not": {"const": 1}}]}, "/anyOf/1"),
        ({"properties": {"x": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}, "/properties/x"),
        ({"items": {"type": "string", "format": "iri"}}, "/items"),
        ({"items": {"type": "string", "pattern": "(?<=a)b"}}, "/items"),
        ({"$defs": {"a": {"if": {}, "then": {}}}, "$ref": "#/$defs/a"}, "/$defs/a"),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, "/properties/x"),
        ({"properties": {"x": {"$ref": "http://localhost/x.json"}}}, "/properties/x/$ref"),
        ({"properties": {"x": {"$ref": "file:///etc/passwd"}}}, "/properties/x/$ref"),
        ({"properties": {"x": {"minimum": 1, "exclusiveMinimum": True}}}, "/properties/x/exclusiveMinimum"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "/x-guidance"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, ""),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ""),
        (False, ""),
        ([], ""),
    ],
    ids=str,
)
def test_what_cannot_be_kept_names_its_place(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars.matcher(VOCABULARY, Grammar.json_schema(schema))
    assert caught.value.pointer == pointer
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", '%llguidance {"no_forcing": false}\nstart: "a"'),
        Grammar("lark", "start: missing"),
        Grammar("lark", ""),
        Grammar("gbnf", 'start ::= "a"'),
        Grammar("gbnf", 'root ::= ("a"*)*'),
        Grammar("regex", r"(a)\1"),
        Grammar("regex", "[z-a]"),
        Grammar("json_schema", "{"),
    ],
    ids=lambda grammar: grammar.text[:30],
)
def test_what_cannot_be_read_is_refused(grammar: Grammar) -> None:
    with user_error("grammar_invalid"):
        grammars.matcher(VOCABULARY, grammar)
