"""Random JSON schemas of the keywords that a grammar enforces."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("a", "name", "größe", "x y", 'q"', "type", "0")
PATTERNS = ("[a-z]{1,3}", "^(ab|cd)+$", "x", r"^\d{2}-\d{2}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def schema(draw: random.Random, depth: int = 3) -> Any:
    """A schema of random form, nested up to `depth` deep."""
    made = _any(draw, depth)
    if draw.random() < 0.2:
        made = {"$defs": {"more": _any(draw, 1)}, "type": "object", "properties": {"it": made}, "required": ["it"],
                "additionalProperties": {"$ref": "#/$defs/more"}}  # fmt: skip
    return made


def _any(draw: random.Random, depth: int) -> Any:
    kinds = [_string, _integer, _number, _fixed]
    if depth:
        kinds += [_object, _object, _array, _union]
    return draw.choice(kinds)(draw, depth)


def _object(draw: random.Random, depth: int) -> Any:
    names = draw.sample(WORDS, draw.randrange(4))
    made: dict[str, Any] = {"type": "object", "properties": {name: _any(draw, depth - 1) for name in names}}
    if draw.random() < 0.8:
        made["required"] = [name for name in names if draw.random() < 0.6]
    if draw.random() < 0.7:
        made["additionalProperties"] = draw.choice([False, False, {"type": "integer"}])
    return made


def _array(draw: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {"type": "array", "items": _any(draw, depth - 1)}
    if draw.random() < 0.3:
        made["prefixItems"] = [_any(draw, depth - 1) for _ in range(draw.randrange(1, 3))]
    if draw.random() < 0.7:
        made["minItems"] = draw.randrange(3)
        made["maxItems"] = made["minItems"] + draw.randrange(3)
    return made


def _union(draw: random.Random, depth: int) -> Any:
    return {"anyOf": [_any(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}


def _string(draw: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {"type": "string"}
    kind = draw.random()
    if kind < 0.3:
        made["minLength"] = draw.randrange(3)
        made["maxLength"] = made["minLength"] + draw.randrange(5)
    elif kind < 0.5:
        made["pattern"] = draw.choice(PATTERNS)
    elif kind < 0.6:
        made["format"] = draw.choice(FORMATS)
    return made


def _integer(draw: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {"type": draw.choice(["integer", ["integer", "null"]])}
    if draw.random() < 0.6:
        made["minimum"] = draw.randrange(-300, 300)
        made["maximum"] = made["minimum"] + draw.randrange(400)
    if draw.random() < 0.1:
        made["multipleOf"] = draw.randrange(1, 20)
    return made


def _number(draw: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {"type": "number"}
    if draw.random() < 0.5:
        made[draw.choice(["minimum", "exclusiveMinimum"])] = draw.choice([-10, 0, 0.5, 3.25])
    return made


def _fixed(draw: random.Random, depth: int) -> Any:
    values = [None, True, "b\n", 'say "x"', 3, -1.5, [1, "é"], {"k": False}, {}, "🙂"]
    return draw.choice([
        {"type": "boolean"}, {"type": "null"}, {"const": draw.choice(values)},
        {"enum": draw.sample(values, draw.randrange(1, 5))},
    ])  # fmt: skip
