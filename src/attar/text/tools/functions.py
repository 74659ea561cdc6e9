"""Python functions as tools: names and docstrings describe them, signatures give the schemas of their arguments.

It imports the standard library alone: a child process of `attar chat` begins with it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"},
    list: {"type": "array"}, dict: {"type": "object"}, type(None): {"type": "null"}, Any: {},
}  # fmt: skip


def described(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """Return a function as a tool: its docstring, and a schema of its parameters. Raises ValueError for a parameter
    that has none, and for what has no signature. `name` is that of the tool, by default the function's own."""
    name = name or function.__name__
    hints = typing.get_type_hints(function, include_extras=True)
    properties: dict[str, Any] = {}
    required = []
    for each in inspect.signature(function).parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ValueError(f"{name}: the parameter {each.name} cannot be given by name")
        if each.name not in hints:
            raise ValueError(f"{name}: the parameter {each.name} has no type")
        properties[each.name] = schema(hints[each.name], f"{name}: the parameter {each.name}")
        if each.default is each.empty:
            required.append(each.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": name, "description": inspect.getdoc(function), "parameters": parameters}


def schema(kind: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type. Raises ValueError for one that has none here."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if origin is typing.Annotated:
        notes = [each for each in parts[1:] if isinstance(each, str)]
        return schema(parts[0], where) | ({"description": notes[0]} if notes else {})
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema(each, where) for each in parts]}
    if origin is list:
        return {"type": "array", "items": schema(parts[0], where)}
    if origin is dict and parts[0] is str:
        return {"type": "object", "additionalProperties": schema(parts[1], where)}
    message = "str, int, float, bool, list, dict, None, Literal, unions and Annotated of these"
    raise ValueError(f"{where}: its type is none of {message}")
