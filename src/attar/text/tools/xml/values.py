"""Values of parameters between tags: a string is its bare text, anything else JSON. The schema says which it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attar.text.tools.json_text import SPACE

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates print Python's values
_DEPTH = 16  # references and alternatives within each other
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


def kinds(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> frozenset[str]:
    """Return the types that values of a schema may have, or more."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or not depth:
        return ALL
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(_NAMES[type(value)] for value in values)
    if isinstance(types := schema.get("type"), str | list):
        return frozenset([types] if isinstance(types, str) else map(str, types)) & ALL or ALL
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return frozenset().union(*(kinds(each, root, depth - 1) for each in schema[key]))
    return ALL


def as_json(text: str, wanted: frozenset[str]) -> str:
    """Return the JSON of a value's text: a value of a wanted type, else a string."""
    found = text.strip(SPACE)
    found = _WORDS.get(found, found)
    try:
        value = json.loads(found, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return found if _fits(value, wanted) else json.dumps(text, ensure_ascii=False)


def _fits(value: Any, wanted: frozenset[str]) -> bool:
    own = _NAMES[type(value)]
    whole = own == "number" and value.is_integer()
    return own in wanted or (own == "integer" and "number" in wanted) or (whole and "integer" in wanted)


def _refuse(word: str) -> None:
    raise ValueError(word)
