"""The process that holds the functions of a file: describes them as tools, or runs one call, and ends.

`python -m attar.cli.tool_use._functions_child FILE` reads one JSON object on stdin: empty to describe, or a `name` with
`arguments`. It answers with one JSON object on stdout: `tools`, `result`, or `error`. What functions print is dropped.
It imports the standard library alone.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

MODULE = "attar_chat_tools"
MAX_RESULT = 64 << 10  # bytes of UTF-8
CUT = "\n[cut: the result is longer than 64 KB]"

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"},
    list: {"type": "array"}, dict: {"type": "object"}, type(None): {"type": "null"}, Any: {},
}  # fmt: skip


def load(path: str) -> dict[str, Callable[..., Any]]:
    """Run the file, and return the functions that it defines, less those whose names begin with an underscore."""
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ValueError("it is no Python file")
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = vars(module).items()
    return {
        name: each for name, each in found if inspect.isfunction(each) and each.__module__ == MODULE and name[0] != "_"
    }


def described(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function as a tool: its docstring, and a schema of its parameters. Raises ValueError for a parameter
    that has none."""
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


def answer(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the tools, or the result of a call; what fails is an `error`."""
    try:
        functions = load(path)
        if "name" not in request:
            return {"tools": [described(name, each) for name, each in functions.items()]}
        result = functions[request["name"]](**request["arguments"])
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except SystemExit as end:
        return {"error": f"SystemExit: {end}"}
    except Exception as error:  # whatever a function raises is what the model is told
        return {"error": f"{type(error).__name__}: {error}"[:MAX_RESULT]}
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_RESULT:
        text = data[:MAX_RESULT].decode("utf-8", "ignore") + CUT
    return {"result": text}


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    out = os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    out.write(json.dumps(answer(sys.argv[1], request)).encode())
    out.flush()
    os._exit(0)  # threads of a function hold nothing up


if __name__ == "__main__":
    main()
