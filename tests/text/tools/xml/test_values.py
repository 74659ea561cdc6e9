"""What the text of a parameter between tags is as JSON, by the schema of the parameter."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.text.tools.xml.values import ALL, as_json, kinds, listed

ROOT: dict[str, Any] = {
    "$defs": {
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 40 + [{"type": "null"}]},
        "first": {"$ref": "#/$defs/second"}, "second": {"type": "integer"}, "circle": {"$ref": "#/$defs/circle"},
    }
}  # fmt: skip


@pytest.mark.parametrize(
    "schema, expected",
    [
        ({}, ALL), (True, ALL), ({"type": "string"}, {"string"}), ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}), ({"const": True}, {"boolean"}),
        ({"type": "string", "enum": ["a", 1]}, {"string"}), ({"type": "number", "enum": [1, "a"]}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "array"}]}]}, {"string", "array"}),
        ({"anyOf": [{"type": "string"}, {}]}, ALL), ({"$ref": "#/$defs/first"}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, {"null"}), ({"$ref": "#/$defs/circle"}, ALL), ({"$ref": "#/nowhere"}, ALL),
        ({"type": "unheard"}, ALL), ({"type": 3}, ALL), ({"anyOf": []}, ALL),
    ],
)  # fmt: skip
def test_the_types_of_a_schema(schema: Any, expected: set[str]) -> None:
    assert kinds(schema, ROOT) == expected


SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer"}, {"type": ["boolean", "null"]}, {"enum": ["5", 2, None]}, {"type": ["string", "null"]},
    {"type": "array", "items": {"type": "integer"}}, {"enum": ["true", 1.5]},
]  # fmt: skip


@given(st.sampled_from(SCHEMAS), st.data())
def test_values_as_templates_print_them_are_valid(schema: dict[str, Any], data: st.DataObject) -> None:
    value = data.draw(
        st.sampled_from(schema["enum"])
        if "enum" in schema
        else st.sampled_from([7, -1, True, None, "x", "x\ny", [1, 2], []])
    )
    if not jsonschema.Draft202012Validator(schema).is_valid(value):
        return
    text = value if isinstance(value, str) else str(value) if not isinstance(value, list) else json.dumps(value)
    assert json.loads(as_json(text, kinds(schema, {}), listed(schema))) == value


@given(st.text())
def test_any_text_is_json_afterwards(text: str) -> None:
    for wanted in (ALL, frozenset({"integer"}), frozenset({"string"})):
        json.loads(as_json(text, wanted), parse_constant=lambda word: pytest.fail(word))
    deep = "[" * 100_000
    assert json.loads(as_json(deep, ALL)) == deep
    assert json.loads(as_json("NaN", ALL)) == "NaN"
