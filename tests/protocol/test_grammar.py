"""Constraints as values: what they are made of, and what contradicts them."""

from __future__ import annotations

from typing import Any

import pytest

from attar.protocol.grammar import MAX_GRAMMAR, Grammar
from attar.protocol.request import SamplingParams
from tests.errors import user_error

SCHEMA = {"type": "object", "properties": {"é": {}}}


class Model:
    """Like a Pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


def test_a_schema_comes_as_a_dict_a_model_or_a_grammar() -> None:
    made = Grammar.json_schema(SCHEMA)
    assert made.kind == "json_schema"
    assert Grammar.of(SCHEMA) == Grammar.of(Model) == Grammar.of(made) == made
    with user_error("grammar_invalid"):
        Grammar.of("[a-z]")  # type: ignore[arg-type]


@pytest.mark.parametrize("space", ["", "[ ]", "[ ]?", "[ \\n\\t]{0,8}", "[\n]{0,64}"])
def test_bounded_white_space_is_taken(space: str) -> None:
    assert Grammar("json_object", "", space).whitespace == space


@pytest.mark.parametrize(
    "space", ["[ ]*", "[ ]+", " ", "[ ]{0,65}", "[ ]{3,1}", "[ ]{0,}", "[ a]?", "[^a]?", "[", "[]?"]
)
def test_other_white_space_is_refused(space: str) -> None:
    with user_error("grammar_invalid"):
        Grammar("json_object", "", space)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar("xml", ""),  # type: ignore[arg-type]
        lambda: Grammar("regex", "é" * MAX_GRAMMAR),
        lambda: Grammar("regex", "\ud800"),
        lambda: Grammar.json_schema({"a": object()}),
        lambda: Grammar.choice([]),
        lambda: Grammar.choice([""]),
        lambda: Grammar.choice("ab"),
    ],
)
def test_what_is_no_constraint_is_refused(make: Any) -> None:
    with user_error("grammar_invalid"):
        make()


def test_a_digest_tells_all_parts_apart() -> None:
    values = [Grammar("regex", "a"), Grammar("lark", "a"), Grammar("regex", "ab"), Grammar("regex", "a", "")]
    digests = [value.digest(*parts) for value in values for parts in ((), (b"",), (b"s",), (b"s", b""))]
    assert len(set(digests)) == len(digests)


def test_what_decides_on_the_end_contradicts_a_constraint() -> None:
    Grammar("regex", "a").check(SamplingParams())
    for params in (SamplingParams(ignore_eos=True), SamplingParams(min_tokens=1)):
        with user_error("option_conflict"):
            Grammar("regex", "a").check(params)
