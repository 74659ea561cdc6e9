"""The reader of calls whose parameters stand between tags: a generator that is sent a character at a time.

White space between tags is as the model likes it. A value is cut as the template writes it: a line break behind its
first tag and one before its last belong to the tags, where they do in the template.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Generator, Mapping, Sequence

from attar.text.tools.formats import ToolFormat
from attar.text.tools.json_text import SPACE
from attar.text.tools.reading import MAX_NAME, MAX_SPACE, NotACall, Output, Reader
from attar.text.tools.tool import Tool
from attar.text.tools.xml import rules
from attar.text.tools.xml.values import ALL, TEXT, as_json, kinds, listed, resolved

_NAMES = frozenset(string.ascii_letters + string.digits + "_-")


def read_tagged(form: ToolFormat, tools: Mapping[str, Tool], out: Output) -> Reader:
    """Return the reader of an answer's calls behind the opening marker."""
    return _Tagged(form, tools, out).read()


class _Tagged:
    """One stretch of calls."""

    def __init__(self, form: ToolFormat, tools: Mapping[str, Tool], out: Output) -> None:
        assert form.tags is not None
        self._form, self._tags, self._tools, self._out = form, form.tags, tools, out

    def read(self) -> Reader:
        form = self._form
        if head := _squeezed((form.prefix + form.begin).removeprefix(form.opening)):
            yield from self._choose([head])
        while True:
            yield from self._call()
            if not form.suffix:
                return ""
            if (yield from self._choose([form.separator + form.begin, form.suffix])) == 1:
                return ""

    def _call(self) -> Generator[None, str, None]:
        """Read a call behind `begin`."""
        name = ""
        while (char := (yield)) in _NAMES:
            name += char
            if len(name) > MAX_NAME:
                raise NotACall
        if (tool := self._tools.get(name)) is None:
            raise NotACall
        begin, first, last = self._tags.begin, *self._ends()
        more = (yield from self._choose([self._form.middle + begin, self._form.middle + first], char)) == 0
        self._out.start(name)
        self._out.arguments("{")
        seen: set[str] = set()
        while more:
            yield from self._parameter(tool, seen)
            more = (yield from self._choose([begin, first])) == 0
        self._out.arguments("}")
        self._out.end()
        if last:
            yield from self._choose([last])

    def _ends(self) -> tuple[str, str]:
        """Return the first tag of a call's end, with which its arguments are complete, and the others."""
        end = _squeezed(self._form.end)
        at = end.index(">") + 1
        return end[:at], end[at:]

    def _parameter(self, tool: Tool, seen: set[str]) -> Generator[None, str, None]:
        """Read a parameter behind `begin`."""
        stop, name = _squeezed(self._tags.middle)[0], ""
        while (char := (yield)) != stop:
            name += char
            if char in "<\n" or len(name) > rules.MAX_NAME:
                raise NotACall
        if not name or name in seen:
            raise NotACall
        comma = ", " if seen else ""
        seen.add(name)
        middles = list(dict.fromkeys((self._tags.middle, self._tags.json_middle)))
        chosen = middles[(yield from self._choose(middles, char))]
        self._out.arguments(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
        properties = tool.schema.get("properties")
        schema = properties.get(name, True) if isinstance(properties, dict) else True
        wanted = kinds(schema, tool.schema)
        if split := len(middles) == 2:
            wanted = TEXT if chosen == self._tags.middle else ALL
        lead = chosen[len(chosen.rstrip()) :]
        if wanted == TEXT:
            self._out.arguments('"')
            yield from self._text(lead, lambda text: self._out.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
            self._out.arguments('"')
        else:
            parts = list[str]()
            yield from self._text(lead, parts.append)
            self._out.arguments(
                as_json("".join(parts), wanted, None if split else listed(resolved(schema, tool.schema)))
            )

    def _text(self, lead: str, say: Callable[[str], None]) -> Generator[None, str, None]:
        """Read a value up to the tag of its end."""
        stop = self._tags.end.strip()
        tail = self._tags.end.partition(stop)[0]
        held = ""
        while True:
            char = yield
            if lead:
                if char == lead[0]:
                    lead = lead[1:]
                    continue
                lead = ""
            held += char
            if held in (stop, tail + stop):
                return
            while held and not (stop.startswith(held) or (tail + stop).startswith(held)):
                say(held[0])
                held = held[1:]

    def _choose(self, options: Sequence[str], char: str = "") -> Generator[None, str, int]:
        """Read one of several texts, of which `char` may be the first character; return its number. White space is not
        compared."""
        wanted, read, spaces = [_squeezed(each) for each in options], "", 0
        while True:
            char = char or (yield)
            if char in SPACE:
                spaces += 1
                if spaces > MAX_SPACE:
                    raise NotACall
            else:
                read += char
                if read in wanted:
                    return wanted.index(read)
                if not any(each.startswith(read) for each in wanted):
                    raise NotACall
            char = ""


def _squeezed(text: str) -> str:
    return "".join(text.split())
