"""Rules of Lark for arguments in Python's syntax, by the schema of the tool.

Parameters come in the schema's order, optional ones or not. At the top of a value True, False and None are Python's;
within lists and dictionaries they are spelled as in JSON, which the parser reads as well.
"""

from __future__ import annotations

import json
from typing import Any

from attar.text.grammars import GrammarError, json_rule, subschemas
from attar.text.tools.python_text import MAX_NAME, NOT_IN_NAMES

_NOTES = {"$comment", "$schema", "description", "examples", "title", "default"}
_KEPT = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_DEFINITIONS = ("$defs", "definitions")
_SCALARS = (str, int, float, bool, type(None))


def python_rules(rule: str, schema: dict[str, Any]) -> list[str]:
    """Return the rules of arguments by a schema, the first of which is `rule`. Raises GrammarError where they cannot be
    kept in this syntax."""
    if other := sorted(schema.keys() - _KEPT):
        raise GrammarError(f"{other[0]} cannot be kept beside the parameters of a call in Python", f"/{other[0]}")
    for pointer, each in subschemas(schema):
        reference = each.get("$ref")
        if isinstance(reference, str) and not reference.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)):
            raise GrammarError("$ref may only point to definitions in a call in Python", f"{pointer}/$ref")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise GrammarError("properties is an object, and required a list", "")
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    wanted = {**properties, **{name: {} for name in required if name not in properties}}
    names = [name for name in wanted if _is_name(name)]
    if missing := [name for name in required if name not in names]:
        raise GrammarError(f"{str(missing[0])[:80]!r} cannot be the name of a parameter in Python", "/required")
    rules = [f"{rule}: {rule}_f0"]
    for at, name in enumerate(names):
        rules.append(f"{rule}_p{at}: {json.dumps(name + '=', ensure_ascii=False)} {_value(wanted[name], definitions)}")
        for kind, comma in (("f", ""), ("r", '", " ')):
            without = "" if name in required else f" | {rule}_{kind}{at + 1}"
            rules.append(f"{rule}_{kind}{at}: {comma}{rule}_p{at} {rule}_r{at + 1}{without}")
    return [*rules, f'{rule}_f{len(names)}: ""', f'{rule}_r{len(names)}: ""']


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and NOT_IN_NAMES.isdisjoint(name)


def _value(schema: Any, definitions: dict[str, Any]) -> str:
    """Return what a value may be, as alternatives of a rule."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a parameter that has no value cannot be kept in a call in Python", "/properties")
    said = schema.keys() - _NOTES
    if said == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
        return f"({' | '.join(_value(each, definitions) for each in schema['anyOf'])})"
    if isinstance(types := schema.get("type"), list) and types:
        return f"({' | '.join(_value({**schema, 'type': each}, definitions) for each in types)})"
    if said == {"enum"} and (values := _scalars(schema["enum"])):
        return f"({' | '.join(values)})"
    if said == {"type"} and types == "boolean":
        return '("True" | "False")'
    if said == {"type"} and types == "null":
        return '"None"'
    return json_rule({**schema, **definitions})


def _scalars(values: Any) -> list[str]:
    """Return the terminals of an enumeration; none where it has lists or objects."""
    if not isinstance(values, list) or not all(isinstance(each, _SCALARS) for each in values):
        return []
    texts = (repr(v) if v is None or isinstance(v, bool) else json.dumps(v, ensure_ascii=False) for v in values)
    return [json.dumps(text, ensure_ascii=False) for text in texts]
