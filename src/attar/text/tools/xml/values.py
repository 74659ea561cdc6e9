"""Values of parameters between tags: a string is its bare text, anything else JSON. The schema says which it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attar.text.tools.json_text import SPACE

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates print Python's values
_DEPTH = 16  # references that lead to references
_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
ALL = frozenset(("string", "boolean", "integer", "number", "null", "array", "object"))
TEXT = frozenset(("string",))


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema, or the one within `root` that it refers to and no more; itself where that cannot be found."""
    for _ in range(_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        if found is None:
            break
        schema = found
    return schema


def kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that values of a schema may have, or more."""
    found, left, seen = set[str](), [schema], set[int]()
    while left:
        each = resolved(left.pop(), root)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, dict):
            return ALL
        types = each.get("type")
        named = frozenset({types} if isinstance(types, str) else _names(types))
        if (values := listed(each)) is not None:
            found |= {_NAMES[type(value)] for value in values if fits(value, named)}
        elif types is not None:
            found |= named & ALL or ALL
        elif isinstance(several := each.get("anyOf", each.get("oneOf")), list) and several:
            left += several
        else:
            return ALL
    return frozenset(found) or ALL


def listed(schema: Any) -> list[Any] | None:
    """Return the values of an enumeration or a constant; None where a schema is neither."""
    if not isinstance(schema, dict):
        return None
    if isinstance(values := schema.get("enum"), list):
        return values
    return [schema["const"]] if "const" in schema else None


def as_json(text: str, wanted: frozenset[str], values: list[Any] | None = None) -> str:
    """Return the JSON of a value's text: a string that is one of the `values`, a value of a wanted type, else a
    string."""
    found = text.strip(SPACE)
    found = _WORDS.get(found, found)
    try:
        value = json.loads(found, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    named = any(isinstance(each, str) and each == text for each in values or ())
    return found if fits(value, wanted) and not named else json.dumps(text, ensure_ascii=False)


def fits(value: Any, wanted: frozenset[str]) -> bool:
    """Return whether a value has one of the types."""
    own = _NAMES[type(value)]
    whole = own == "number" and value.is_integer()
    return own in wanted or (own == "integer" and "number" in wanted) or (whole and "integer" in wanted)


def _names(types: Any) -> frozenset[str]:
    names = isinstance(types, list) and all(isinstance(each, str) for each in types)
    return frozenset(types) if names else ALL


def _refuse(word: str) -> None:
    raise ValueError(word)
