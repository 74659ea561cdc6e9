"""Rules of Lark for parameters between tags, by the schema of the tool.

Parameters come in the schema's order, optional ones or not, and no others. The text of a string cannot hold the tag
that ends it. Texts with a format cannot be kept, and neither can values that may be strings or not and
have further conditions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from attar.text.grammars import GrammarError, json_rule
from attar.text.tools.xml.finding import Tags
from attar.text.tools.xml.values import TEXT, fits, kinds, listed, resolved

MAX_NAME = 256

_NOTES = {"$comment", "$schema", "description", "examples", "title", "default", "deprecated", "readOnly", "writeOnly"}
_DEFINITIONS = ("$defs", "definitions")
_KEPT = _NOTES | {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_LENGTHS = {"minLength", "maxLength"}
_WORDS: dict[str, tuple[bool | None, ...]] = {"boolean": (True, False), "null": (None,)}
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"


class ParameterRules:
    """Writes the rules of parameters. `literal` makes terminals of a text, with the special tokens in it by their ids;
    `pattern` makes a regular expression of one text; `special` are the special tokens."""

    def __init__(
        self, tags: Tags, literal: Callable[[str], str], pattern: Callable[[str], str], special: Mapping[str, int]
    ) -> None:
        self._tags, self._literal, self._pattern, self._special = tags, literal, pattern, special

    def any(self, rule: str) -> list[str]:
        """Return the rules of parameters of any names and values, the first of which is `rule`."""
        text, rules = self._text(0, None)
        value = f"{self._literal(self._tags.middle)} {text}"
        if self._tags.json_middle != self._tags.middle:
            value = f"({value} | {self._json({})})"
        return [f"{rule}: ({self._literal(self._tags.begin)} XML_NAME {value})*", f"XML_NAME: {_ANY_NAME}", *rules]

    def of(self, rule: str, schema: dict[str, Any]) -> list[str]:
        """Return the rules of parameters by a schema. Raises GrammarError where they cannot be kept."""
        if other := sorted(schema.keys() - _KEPT):
            raise GrammarError(f"{other[0]} cannot be kept beside the parameters of a call in tags", f"/{other[0]}")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise GrammarError("properties is an object, and required a list", "")
        wanted = {**properties, **{name: {} for name in required if name not in properties}}
        names = [name for name in wanted if self._is_name(name)]
        if missing := [name for name in required if name not in names]:
            raise GrammarError(f"{str(missing[0])[:80]!r} cannot be the name of a parameter in tags", "/required")
        optional = ("" if name in required else "?" for name in names)
        parts = [f"{rule}_p{at}{sign}" for at, sign in enumerate(optional)]
        rules = [f"{rule}: {' '.join(parts) or _quoted('')}"]
        for at, name in enumerate(names):
            value, more = self._value(wanted[name], schema, f"/properties/{name}")
            rules += [f"{rule}_p{at}: {self._literal(self._tags.begin + name)} {value}", *more]
        return rules

    def _is_name(self, name: Any) -> bool:
        banned = {"<", "\n", self._tags.middle.strip()[0]}
        return isinstance(name, str) and 0 < len(name) <= MAX_NAME and banned.isdisjoint(name)

    def _value(self, schema: Any, root: dict[str, Any], pointer: str) -> tuple[str, list[str]]:
        """Return what stands behind a parameter's name, as alternatives, and rules that these need."""
        schema = resolved({} if schema is True else schema, root)
        if not isinstance(schema, dict):
            raise GrammarError("a parameter that has no value cannot be kept in a call in tags", pointer)
        said, found = schema.keys() - _NOTES, kinds(schema, root)
        if said <= {"enum", "type"} or said <= {"const", "type"}:
            types = kinds({"type": schema["type"]}, root) if "type" in schema else found
            if values := [each for each in listed(schema) or () if fits(each, types)]:
                return f"({' | '.join(self._fixed(each, pointer) for each in values)})", []
        if "string" not in found:
            definitions = {name: root[name] for name in _DEFINITIONS if name in root}
            value = self._json({**schema, **definitions})
            if said == {"type"} and found <= _WORDS.keys():
                value = f"({' | '.join(self._word(each) for kind in sorted(found) for each in _WORDS[kind])})"
            return value, []
        if said <= ({"type"} | _LENGTHS) and found == TEXT:
            text, rules = self._text(schema.get("minLength", 0), schema.get("maxLength"))
        elif said <= {"type", "pattern"} and found == TEXT and isinstance(schema["pattern"], str):
            text, rules = self._text(0, None, schema["pattern"])
        elif self._plain(schema, root):
            text, rules = self._text(0, None)
        else:
            raise GrammarError("this parameter cannot be kept in a call in tags", pointer)
        value = f"{self._literal(self._tags.middle)} {text}"
        if found != TEXT and self._tags.json_middle != self._tags.middle:
            value = f"({value} | {self._json({'type': sorted(found - TEXT)})})"
        return value, rules

    def _plain(self, schema: Any, root: dict[str, Any]) -> bool:
        """Return whether a schema has no conditions but types."""
        schema = resolved(schema, root)
        if schema is True or schema == {}:
            return True
        if not isinstance(schema, dict):
            return False
        said = schema.keys() - _NOTES
        if said == {"anyOf"} and isinstance(schema["anyOf"], list):
            return all(isinstance(e, dict) and e.keys() - _NOTES == {"type"} for e in schema["anyOf"])
        return said <= {"type"}

    def _json(self, schema: dict[str, Any]) -> str:
        return f"{self._literal(self._tags.json_middle)} {json_rule(schema)} {self._end}"

    def _word(self, value: bool | None) -> str:
        """Return a word in JSON's spelling or in Python's, which templates print."""
        return f'{self._literal(self._tags.json_middle)} ("{json.dumps(value)}" | "{value}") {self._end}'

    @property
    def _end(self) -> str:
        return self._literal(self._tags.end)

    def _fixed(self, value: Any, pointer: str) -> str:
        """Return one value of an enumeration."""
        if value is None or isinstance(value, bool):
            return self._word(value)
        if not isinstance(value, str):
            written = json.dumps(value, ensure_ascii=False)
            return self._literal(self._tags.json_middle + written + self._tags.end)
        if self._tags.end.strip() in value:
            raise GrammarError("a value that holds the tag of its end cannot be kept in a call in tags", pointer)
        return f"{self._literal(self._tags.middle)} {_quoted(value)} {self._end}" if value else (
            f"{self._literal(self._tags.middle)} {self._end}"
        )  # fmt: skip

    def _text(self, least: Any, most: Any, pattern: str | None = None) -> tuple[str, list[str]]:
        """Return what the text of a string is, up to its end, and the rules for it. With a pattern lengths are free."""
        if not _is_length(least) or not (most is None or _is_length(most)):
            raise GrammarError("a length is a whole number", "")
        said, name = "(?s:.*)", "XML_TEXT"
        if least or most is not None:
            said, name = f"(?s:.{{{least},{'' if most is None else most}}})", f"XML_TEXT_{least}_{most}"
        if pattern is not None:
            said, name = _whole(pattern), f"XML_TEXT_{hashlib.sha256(pattern.encode()).hexdigest()[:16].upper()}"
        stop = self._tags.end.strip()
        tail, _, behind = self._tags.end.partition(stop)
        cut = min((at for token in self._special if (at := stop.find(token)) >= 0), default=len(stop))
        # No text holds a special token: up to one the longest is the right one, and behind it nothing is text.
        text = f"/{said}{self._pattern(tail + stop[:cut])}/"
        without = f"/(?s:.*){self._pattern(stop)}(?s:.{'+' if cut == len(stop) else '*'})/"
        return f"{name} {self._literal(stop[cut:] + behind)}", [f"{name}: {text} & ~{without}"]


def _whole(pattern: str) -> str:
    """Return the expression of whole texts in which a pattern of JSON Schema matches somewhere."""
    inner = pattern.removeprefix("^")
    before = "" if inner != pattern else "(?s:.*)"
    ended = inner.endswith("$") and not inner.endswith("\\$")
    inner = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", inner[:-1] if ended else inner, flags=re.DOTALL)
    return f"{before}(?:{inner.replace(chr(10), chr(92) + 'n')}){'' if ended else '(?s:.*)'}"


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
