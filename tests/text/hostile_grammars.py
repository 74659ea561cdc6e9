"""Grammars made to do harm, and some that only look so."""

from __future__ import annotations

import json
from typing import Any

from attar.protocol.grammar import Grammar


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def chain(rules: int, define: str = ":", head: str = "start") -> str:
    lines = [f"{head}{define} r0", *(f"r{i}{define} r{i + 1}" for i in range(rules)), f'r{rules}{define} "a"']
    return "\n".join(lines)


def references(count: int) -> dict[str, Any]:
    steps = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**steps, f"d{count}": {}}, "$ref": "#/$defs/d0"}


def objects(count: int, keys: int) -> list[dict[str, Any]]:
    return [{"type": "object", "properties": {f"k{i}_{j}": {} for j in range(keys)}} for i in range(count)]


_SCHEMAS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "mutual references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "remote": {"$ref": "http://localhost/x"},
    "a file": {"$ref": "file:///etc/passwd"},
    "an own id": {"$id": "http://localhost/x", "$ref": "http://localhost/x"},
    "20,000 references": references(20_000),
    "300 x 100 constants": {"anyOf": [{"anyOf": [{"const": f"{i}-{j}"} for j in range(100)]} for i in range(300)]},
    "1,000 objects": {"anyOf": objects(1000, 20)},
    "2,000 optional keys": objects(1, 2000)[0],
    "65,536 values": {"enum": [f"v{i}" for i in range(65_536)]},
    "all of 20 choices": {
        "allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(20)]
    },
    "bounds that cross": {"type": "array", "minItems": 3, "maxItems": 1},
    "pattern and format": {"type": "string", "pattern": "^a+$", "format": "date"},
    "string and integer": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "a tiny step": {"type": "number", "multipleOf": 1e-308},
    "nothing": False,
    "a string": "x",
    "a number": 3,
    "a list": [],
    "a wrong type": {"type": "text"},
    "lenient": {"x-guidance": {"lenient": True}, "not": {}},
    "not": {"not": {}},
    "unique": {"uniqueItems": True},
    "if": {"if": {}, "then": {}},
    "contains": {"contains": {}},
    "overlapping oneOf": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
}

HOSTILE: dict[str, Grammar] = {
    "60,000 parentheses": Grammar("regex", "(" * 60_000),
    "60,000 pairs of parentheses": Grammar("regex", "(" * 60_000 + "a" + ")" * 60_000),
    "60,000 parentheses in GBNF": Grammar("gbnf", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "60,000 parentheses in Lark": Grammar("lark", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "a star of stars": Grammar("gbnf", 'root ::= ("a"*)*'),
    "chain of 5,000 rules": Grammar("lark", chain(5000)),
    "chain of 5,000 rules in GBNF": Grammar("gbnf", chain(5000, " ::=", "root")),
    "an undefined rule": Grammar("lark", "start: x"),
    "no rule": Grammar("lark", ""),
    "no root": Grammar("gbnf", 'a ::= "b"'),
    "bounds that cross": Grammar("regex", "a{5,3}"),
    "a range that crosses": Grammar("regex", "[z-a]"),
    "an unknown property": Grammar("regex", r"\p{Foo}"),
    "looking behind": Grammar("regex", "(?<=x)a"),
    "looking ahead": Grammar("regex", "(?=x)a"),
    "a back-reference": Grammar("regex", r"(a)\1"),
    "a megabyte of alternatives": Grammar("regex", "|".join(f"w{i:06d}" for i in range(120_000))),
    "35,000 rules": Grammar(
        "lark",
        "start: " + " | ".join(f"r{i}" for i in range(35_000)) + "".join(f'\nr{i}: "{i}"' for i in range(35_000)),
    ),
    "own options": Grammar("lark", '%llguidance {}\nstart: "a"'),
    "10,000 objects": Grammar("json_schema", nested(10_000)),
    "1,000 objects deep": Grammar("json_schema", nested(1000)),
    "no JSON": Grammar("json_schema", "{'a'}"),
    **{f"schema: {name}": Grammar("json_schema", json.dumps(schema)) for name, schema in _SCHEMAS.items()},
}
"""Refused, each within seconds."""

HEAVY: dict[str, Grammar] = {
    "(a|a)*": Grammar("regex", "(a|a)*"),
    "2^31 times": Grammar("regex", "a{0,2147483648}"),
    "a million": Grammar("regex", "(((a{100}){100}){100})"),
    "chain of 200 rules": Grammar("lark", chain(200)),
    "left recursion": Grammar("lark", 'start: start "a" | "b"'),
    "indirect": Grammar("lark", 'start: x "a" | "b"\nx: start "c" | ""'),
    "ambiguous": Grammar("lark", 'start: s\ns: s s | "a"'),
    "a long window": Grammar("regex", "(a|b)*a(a|b){200}"),
    "60 objects": Grammar("json_schema", nested(60)),
    "2^30 by references": Grammar.json_schema(
        {
            "$defs": {
                **{
                    f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2}
                    for i in range(30)
                },
                "d30": {"type": "null"},
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "a long string": Grammar.json_schema({"type": "string", "minLength": 10**9}),
    "strange names": Grammar.json_schema({"properties": {'a"b': {}, "n\nl": {}, "z\0": {}}, "required": ['a"b']}),
    "endless properties": Grammar.json_schema({"additionalProperties": {"$ref": "#"}}),
    "a list of kinds": Grammar.json_schema({"items": [{"type": "string"}]}),
    "comments": Grammar.json_schema({"description": 'http://x // # " %json {', "properties": {"a": {"const": "//"}}}),
}
"""Taken: limits are counts, and these stay below them."""
