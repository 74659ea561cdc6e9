"""Rewrites of JSON schemas to fewer keywords: llguidance refuses some by name that only say what others say.

Each rewrite keeps the set of valid values; what has no equivalent stays, and is refused. A keyword that forbids nothing
goes. `not` a `not` is the schema itself. A dependency of a property is a choice: the property is absent, or the rest
holds. `oneOf` is `anyOf` where no value satisfies two branches, which types, constants and required properties of the
branches may prove. A format that no draft of JSON Schema defines is a note, as the drafts say.

`unevaluatedItems` and `unevaluatedProperties` read what other keywords have looked at, and a reference may point into a
keyword that would go. In a schema with either, nothing is rewritten.

Work is bounded by counts: `DEPTH` levels, and `COMPARED` looks at branches of a schema.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

DEPTH = 64
COMPARED = 20_000
FOLLOWED = 8  # references and branches within branches
FORMATS = frozenset((
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
    "color", "phone", "host-name", "ip-address", "style", "utc-millisec",
))  # fmt: skip
"""Formats of all drafts. Some of them cannot be enforced."""

_ONE = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_COUNTS = ("maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength",
           "minProperties")  # fmt: skip
_GOING = frozenset((
    "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "not", "oneOf", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
_NOTES = frozenset(("$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"))
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))


def equivalent(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows the same values. The given one stays as it is."""
    for each in _within(schema):
        if any(key in each and each[key] not in (True, {}) for key in _ONE[-2:]):
            return schema
        if isinstance(reference := each.get("$ref"), str) and not _GOING.isdisjoint(reference.split("/")):
            return schema
    return _Rewriting(schema).of(schema, 0)  # type: ignore[no-any-return]


def _within(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a schema, its own included, whatever they stand for."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield each
            left += each.values()
        elif isinstance(each, list):
            left += each


class _Rewriting:
    """The rewriting of one schema, which references point into."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root, self.compared = root, 0
        self._known: dict[int, tuple[Any, frozenset[str]]] = {}  # types by identity of a schema, which is kept
        # Within a schema of another base, a reference means another place.
        self.based = any(
            isinstance(each.get(key), str) for each in _within(root) if each is not root for key in ("$id", "id")
        )

    def of(self, schema: Any, depth: int) -> Any:
        """Return a schema, rewritten with all schemas in it."""
        if not isinstance(schema, dict) or depth > DEPTH:
            return schema
        made = dict(schema)
        for key, value in schema.items():
            if key in _ONE and isinstance(value, dict):
                made[key] = self.of(value, depth + 1)
            elif key in _LISTS and isinstance(value, list):
                made[key] = [self.of(each, depth + 1) for each in value]
            elif key in _MAPS and isinstance(value, dict):
                made[key] = {name: self.of(each, depth + 1) for name, each in value.items()}
        for key in _COUNTS:
            if isinstance(count := made.get(key), float) and count.is_integer():
                made[key] = int(count)
        for key in [key for key in made if _idle(made, key)]:
            del made[key]
        rewrites: dict[str, Callable[[Any], list[Any] | None]] = {
            "not": _negated, "dependentRequired": _dependent, "dependentSchemas": _dependent,
            "dependencies": _dependent, "oneOf": self._exclusive,
        }  # fmt: skip
        for key, rewrite in rewrites.items():
            if key in made and (instead := rewrite(made[key])) is not None:
                del made[key]
                made["allOf"] = [*made.get("allOf", ()), *instead]
        if made.get("allOf") == []:
            del made["allOf"]
        return made

    def _exclusive(self, branches: Any) -> list[Any] | None:
        """Return what stands for `oneOf`, where no value satisfies two of the branches."""
        if not isinstance(branches, list):
            return None
        left = [each for each in branches if each is not False]
        if not left or not all(self._disjoint(a, b, 0) for a, b in itertools.combinations(left, 2)):
            return None
        return left if len(left) == 1 else [{"anyOf": left}]

    def _target(self, schema: Any) -> Any:
        """Follow references to the schema that they stand for; True, any value, where they cannot be followed."""
        for _ in range(FOLLOWED):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                return schema
            if self.based or not (reference == "#" or reference.startswith("#/")):
                return True
            schema = self.root
            for name in reference.split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name, True) if isinstance(schema, dict) else True
        return True

    def _disjoint(self, a: Any, b: Any, depth: int) -> bool:
        """Return whether it is certain that no value satisfies both schemas."""
        if self._spent() or depth > FOLLOWED:
            return False
        a, b = self._target(a), self._target(b)
        common = self._types_of(a) & self._types_of(b)
        if not common:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        if (ours := _values(a)) is not None and (theirs := _values(b)) is not None:
            return ours.isdisjoint(theirs)
        if common != {"object"}:
            return False
        (required, own, closed), (needed, other, shut) = _shape(a), _shape(b)
        if (closed and not needed <= own.keys()) or (shut and not required <= other.keys()):
            return True
        both = required & needed & own.keys() & other.keys()
        return any(self._disjoint(own[name], other[name], depth + 1) for name in sorted(both))

    def _spent(self) -> bool:
        """Count a look at a schema; return whether there were too many."""
        self.compared += 1
        return self.compared > COMPARED

    def _types_of(self, schema: Any) -> frozenset[str]:
        if id(schema) not in self._known:
            self._known[id(schema)] = schema, self._types(schema, 0)
        return self._known[id(schema)][1]

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        """Return types among which are those of all values that satisfy a schema."""
        schema = self._target(schema)
        if not isinstance(schema, dict):
            return frozenset() if schema is False else _TYPES
        found = _TYPES
        if self._spent():
            return found
        if (given := _named(schema.get("type"))) is not None:
            found &= given | ({"integer"} if "number" in given else set())
        if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
            found &= {_type(value) for value in values}
        if depth < FOLLOWED:
            for key in ("anyOf", "oneOf"):
                if isinstance(branches := schema.get(key), list):
                    found &= frozenset().union(*(self._types(each, depth + 1) for each in branches))
            for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
                found &= self._types(each, depth + 1)
        return found


def _idle(schema: dict[str, Any], key: str) -> bool:
    """Return whether a keyword of a schema forbids nothing."""
    value = schema[key]
    match key:
        case "uniqueItems":
            most = schema.get("maxItems")
            return value is False or (value is True and isinstance(most, int) and most <= 1)
        case "if":
            return not schema.keys() & {"then", "else"}
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "unevaluatedItems" | "unevaluatedProperties" | "propertyNames":
            return value is True or value == {}
        case "not":
            return value is False
        case "format":
            return isinstance(value, str) and value not in FORMATS
    return False


def _negated(schema: Any) -> list[Any] | None:
    """Return what stands for `not` the schema."""
    if not isinstance(schema, dict):
        return None
    said = schema.keys() - _NOTES
    if said == {"allOf"} and isinstance(within := schema["allOf"], list) and len(within) == 1:
        return _negated(within[0])
    if said == {"not"}:
        return [schema["not"]]
    if said == {"type"} and (given := _named(schema["type"])) and given <= _TYPES:
        if "integer" in given and "number" not in given:
            return None
        left = _TYPES - given - {"integer"}  # which is a number
        return [{"type": sorted(left)}]
    return None


def _named(types: Any) -> set[str] | None:
    """Return the types that `type` names; None where it is malformed."""
    several = types if isinstance(types, list) else [types]
    return set(several) if all(isinstance(each, str) for each in several) else None


def _dependent(entries: Any) -> list[Any] | None:
    """Return what stands for dependencies of properties: other properties, or schemas."""
    if not isinstance(entries, dict):
        return None
    found = []
    for name, needed in entries.items():
        if isinstance(needed, list):
            needed = {"required": needed} if needed else True
        if needed is not True and needed != {}:
            found.append({"anyOf": [{"properties": {name: False}}, needed]})
    return found


def _values(schema: dict[str, Any]) -> set[str] | None:
    """Return the values of a constant or an enumeration, as JSON; None where there is neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(_same(each), sort_keys=True) for each in values} if isinstance(values, list) else None


def _same(value: Any) -> Any:
    """Return a value in which equal numbers look alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_same(each) for each in value]
    return {name: _same(each) for name, each in value.items()} if isinstance(value, dict) else value


def _type(value: Any) -> str:
    value = _same(value)
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _shape(schema: dict[str, Any]) -> tuple[set[str], dict[str, Any], bool]:
    """Return the required properties of a schema, those with schemas, and whether there may be no others."""
    required, properties = schema.get("required"), schema.get("properties")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return (
        {each for each in required if isinstance(each, str)} if isinstance(required, list) else set(),
        properties if isinstance(properties, dict) else {},
        closed,
    )
