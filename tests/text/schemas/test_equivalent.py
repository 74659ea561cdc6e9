"""Rewritten schemas allow the same values as before, by another library, and need fewer keywords."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from attar.text.schemas import equivalent as module
from attar.text.schemas.equivalent import equivalent
from tests.text.test_schema_suites import lines


def valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


TEXT = {"type": "string"}
A, B = {"required": ["a"]}, {"required": ["b"]}
KINDS = [{"type": "object", "required": ["kind"], "properties": {"kind": {"const": each}}} for each in ("x", "y")]
REWRITTEN: list[tuple[Any, Any]] = [
    ({"uniqueItems": False, "minItems": 2.0}, {"minItems": 2}),
    ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    ({"if": TEXT}, {}),
    ({"then": TEXT, "else": TEXT, "minContains": 2, "maxContains": 1}, {}),
    ({"unevaluatedItems": True, "unevaluatedProperties": {}, "propertyNames": True, "not": False}, {}),
    ({"items": {"format": "int32"}}, {"items": {}}),
    ({"not": {"not": {"minLength": 1}}}, {"allOf": [{"minLength": 1}]}),
    ({"allOf": [{"not": {"allOf": [{"not": A}]}}]}, {"allOf": [{"allOf": [A]}]}),
    ({"not": {"not": TEXT}}, {"allOf": [{"type": ["string"]}]}),
    ({"not": {"type": ["number", "string"]}}, {"allOf": [{"type": ["array", "boolean", "null", "object"]}]}),
    ({"not": TEXT}, {"allOf": [{"type": ["array", "boolean", "null", "number", "object"]}]}),
    ({"dependentRequired": {"a": ["b"], "c": []}}, {"allOf": [{"anyOf": [{"properties": {"a": False}}, B]}]}),
    ({"dependencies": {"a": ["b"], "c": TEXT}},
     {"allOf": [{"anyOf": [{"properties": {"a": False}}, B]}, {"anyOf": [{"properties": {"c": False}}, TEXT]}]}),
    ({"dependentSchemas": {}}, {}),
    ({"oneOf": [TEXT]}, {"allOf": [TEXT]}),
    ({"oneOf": [TEXT, False]}, {"allOf": [TEXT]}),
    ({"oneOf": [TEXT, {"const": 1}, {"type": "null"}]}, {"allOf": [{"anyOf": [TEXT, {"const": 1}, {"type": "null"}]}]}),
    ({"oneOf": [{"enum": [1, "a"]}, {"enum": [2, "b"]}]},
     {"allOf": [{"anyOf": [{"enum": [1, "a"]}, {"enum": [2, "b"]}]}]}),
    ({"oneOf": KINDS}, {"allOf": [{"anyOf": KINDS}]}),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": TEXT}},
     {"allOf": [{"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}], "$defs": {"a": TEXT}}),
]  # fmt: skip
UNTOUCHED: list[Any] = [
    {"uniqueItems": True},
    {"uniqueItems": False, "unevaluatedItems": False},
    {"format": "iri"},
    {"not": {"type": "integer"}},
    {"not": {"type": "string", "minLength": 1}},
    {"oneOf": [A, B]},
    {"oneOf": [TEXT, {"minLength": 2}]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"oneOf": [{"enum": [1]}, {"enum": [1.0]}]},
    {"oneOf": [{"$ref": "#/$defs/a"}, TEXT], "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"oneOf": [{"$ref": "other.json"}, TEXT]},
    {"oneOf": [TEXT, {"type": "null"}], "properties": {"a": {"$ref": "#/oneOf/0"}}},
    {"oneOf": [{"type": 1}, {"type": [{}]}], "not": {"type": 1}},
    {"properties": {"x": {"$id": "x", "oneOf": [{"$ref": "#/$defs/a"}, TEXT]}}, "$defs": {"a": {"type": "null"}}},
    {"oneOf": [{"type": "object", "additionalProperties": False}, {"type": "object", "properties": {"a": {}}}]},
    {"properties": {"then": TEXT, "format": TEXT}, "const": {"if": 1}},
]


@pytest.mark.parametrize(("schema", "expected"), REWRITTEN, ids=lambda each: json.dumps(each)[:50])
def test_what_says_the_same_is_written_so(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert equivalent(schema) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize("schema", UNTOUCHED, ids=lambda each: json.dumps(each)[:50])
def test_what_has_no_equivalent_stays(schema: Any) -> None:
    assert equivalent(schema) == schema


def test_the_suite_says_the_same_of_rewritten_schemas(shared: Path) -> None:
    count = 0
    for file in lines(shared, "json_schema_test_suite_2020-12.jsonl.xz"):
        if not file["file"].startswith("tests/") or "/optional/" in file["file"]:
            continue
        for group in file["content"]:
            schema = group["schema"]
            if not isinstance(schema, dict) or "http" in json.dumps({**schema, "$schema": ""}):
                continue  # which another library would fetch
            made = equivalent(schema)
            if made == schema:
                continue
            for test in group["tests"]:
                count += 1
                assert valid(made, test["data"]) == test["valid"], (group["description"], test["description"])
    assert count > 100


VALUES: list[Any] = [None, True, 0, 1, 1.5, "", "x", "yz", [], [1], [1, 1], {}, {"a": 1}, {"b": "x"},
                     {"a": "x", "b": None}, {"kind": "x"}, {"kind": "y", "a": 1}, {"a": {"a": 1}},
                     [{"a": 1}, "x"]]  # fmt: skip


SIMPLE: list[Any] = [
    True, False, {}, TEXT, A, B, *KINDS, {"type": ["integer", "null"]}, {"const": 1.0}, {"enum": [1, "x", {"a": 1}]},
    {"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}, {"maxItems": 1.0, "uniqueItems": True}, {"format": "odd"},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
]  # fmt: skip


def some_schema(draw: random.Random, depth: int) -> Any:
    """A schema of the keywords that are rewritten, and of their neighbours."""
    if not depth or draw.random() < 0.2:
        return draw.choice(SIMPLE)

    def inner() -> Any:
        return some_schema(draw, depth - 1)

    made: dict[str, Any] = {}
    names = [
        "not", "oneOf", "oneOf", "allOf", "properties", "dependentSchemas", "dependentRequired", "if", "then", "items",
        "contains", "minContains", "propertyNames", "additionalProperties", "unevaluatedProperties",
    ]  # fmt: skip
    for name in draw.sample(names, draw.randrange(1, 4)):
        match name:
            case "oneOf":
                made[name] = [inner() for _ in range(draw.randrange(1, 4))]
            case "allOf":
                made[name] = [inner()]
            case "properties" | "dependentSchemas":
                made[name] = {"a": inner()}
            case "dependentRequired":
                made[name] = {"a": draw.choice([["b"], []])}
            case "minContains":
                made[name] = 0.0
            case "unevaluatedProperties":
                made[name] = draw.choice([True, True, True, False])
            case _:
                made[name] = inner()
    return made


@pytest.mark.parametrize("first", range(0, 1200, 200))
def test_random_schemas_allow_the_same_values(first: int) -> None:
    changed = 0
    for seed in range(first, first + 200):
        draw = random.Random(seed)
        schema = {"properties": {"it": some_schema(draw, 3)}, "required": ["it"], "$defs": {
            "one": draw.choice([TEXT, {"type": "null"}, KINDS[0]]),
            "two": draw.choice([{"$ref": "#/$defs/one"}, {"type": "array"}, A]),
        }}  # fmt: skip
        made = equivalent(schema)
        changed += made != schema
        for value in VALUES:
            assert valid(schema, {"it": value}) == valid(made, {"it": value}), (schema, value)
    assert changed > 100


def test_work_is_bounded() -> None:
    many = {"oneOf": [{"type": "object", "required": ["k"], "properties": {"k": {"const": i}}} for i in range(400)]}
    assert equivalent(many) == many  # 79,800 pairs, more than are compared
    assert module.COMPARED < 400 * 399 / 2
    loop = {"oneOf": [{"anyOf": [{"$ref": "#"}] * 30}, {"anyOf": [{"$ref": "#"}] * 30}]}
    assert equivalent(loop) == loop  # 30 to the power of 8
    deep: Any = {"not": False}
    for _ in range(module.DEPTH + 2):
        deep = {"items": deep}
    assert equivalent(deep) == deep
