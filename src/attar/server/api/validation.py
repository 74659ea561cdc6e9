"""Parsing of request bodies by their schemas, with errors in terms of JSON."""

from __future__ import annotations

import re
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from attar import strict_json
from attar.server.api.body import Body
from attar.server.errors import APIError

BodyType = TypeVar("BodyType", bound=Body)


def read(kind: type[BodyType], body: bytes) -> BodyType:
    """Parse a request's body as `kind`. Raises APIError, which names the field."""
    try:
        value = strict_json.loads(body)
    except strict_json.JSONError as error:
        raise APIError("invalid_json", str(error)) from error
    if isinstance(value, dict):
        for name in [name for name in value if name in kind.neutral]:  # in the body's order: errors name the first
            if value[name] is None or any(_same(value[name], neutral) for neutral in kind.neutral[name]):
                del value[name]
            elif name not in kind.__struct_fields__:
                raise APIError("unsupported_field", f"{name}: not supported by this server", name)
        value = kind.completed(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from error


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)  # False is not 0 here, but 1.0 is 1


_CODES = (  # fragments of msgspec's messages; tests cover each
    ("unknown field", "unknown_field"),
    ("missing required field", "missing_field"),
    ("of length <= 0", "unsupported_field"),
    ("Expected `null`, got", "unsupported_field"),
    ("of length", "invalid_length"),
    ("enum value", "invalid_value"),
    (", got ", "invalid_type"),
    ("<", "out_of_range"),
    (">", "out_of_range"),
)
_NAMES = {"int": "a whole number", "float": "a number", "str": "a string", "array": "a list", "object": "an object",
          "bool": "true or false", "null": "null"}  # fmt: skip
_UNITS = {"str": "characters", "array": "entries", "object": "entries"}
_BOUND = re.compile(r"Expected `(\w+)`( of length)? ([<>]=?) (\S+)")
_TYPES = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_STEPS = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def _explained(sentence: str, kind: type[Body] = Body) -> APIError:
    """Translate msgspec's message, such as `Expected ... - at `$.field[0]`, for a `kind`, to an error in JSON's
    terms."""
    what, _, where = sentence.replace(" - at `key` in `$", " - at `$").rpartition(" - at `$")
    if not what:
        what, where = sentence, ""
    code = next((code for words, code in _CODES if words in what), "invalid_value")
    param = where.rstrip("`").lstrip(".")
    if code in ("unknown_field", "missing_field"):
        field = strict_json.shown(what.partition("`")[2].rpartition("`")[0])
        param = f"{param}.{field}" if param else field
        says = "unknown" if code == "unknown_field" else "is required"
    elif code == "unsupported_field":
        says = "not supported by this server"
    elif code == "invalid_value" and (values := _values(kind, param)):
        given = strict_json.shown(what.partition("value ")[2], 80)
        says = f"{given} is not supported by this server: it takes {' or '.join(map(repr, values))}"
    elif found := _BOUND.match(what):
        type_, length, sign, number = found.groups()
        bound = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}[sign] + " " + number
        says = f"{bound} {_UNITS[type_]}" if length else bound
    elif found := _TYPES.match(what):
        wanted = [_NAMES.get(name, name) for name in found[1].split(" | ")]
        says = strict_json.shown(f"{' or '.join(wanted)}, not {_NAMES.get(found[2], found[2])}", 160)
    else:
        says = strict_json.shown(what[0].lower() + what[1:], 160).replace("`", "")
    return APIError(code, f"{param or 'the body'}: {says}", param or None)


def _values(kind: type[Body], path: str) -> list[str]:
    """Return the allowed values of a field of a few strings; none where any other value is allowed."""
    kinds: list[Any] = [kind]
    for step in _STEPS.findall(path):
        kinds = [inner for outer in kinds for inner in _within(outer, step)]
    return [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]


def _within(outer: Any, step: str) -> list[Any]:
    """Return the types of a field, or of an entry where `step` is in brackets."""
    if step.startswith("["):
        return _flat(get_args(outer)[-1]) if get_origin(outer) in (list, dict) else []
    if not (isinstance(outer, type) and issubclass(outer, Struct)):
        return []
    if step == outer.__struct_config__.tag_field:
        return [Literal[outer.__struct_config__.tag]]
    fields = get_type_hints(outer)
    return _flat(fields[step]) if step in fields else []


def _flat(kind: Any) -> list[Any]:
    """Return the types of a union."""
    if get_origin(kind) in (Union, UnionType):
        return [inner for each in get_args(kind) for inner in _flat(each)]
    return [kind]
