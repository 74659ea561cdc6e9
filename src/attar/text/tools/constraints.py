"""The grammar of an answer that may call tools: text is free up to a call, and calls are in the model's own syntax.

From the opening marker on nothing is left to chance: the envelope is the template's, names are those of the tools, and
arguments satisfy the tools' schemas. Some keywords of JSON Schema cannot be kept by a mask. Then a tool with `strict`
is refused. Arguments of others are any JSON object, and the answer to the client says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attar.protocol.grammar import MAX_GRAMMAR, Grammar
from attar.text.grammars import GrammarError, json_rule, schema_of
from attar.text.schemas import recursive
from attar.text.tools.formats import ARGS, CALL_ID, PYTHON_TAG, ToolFormat
from attar.text.tools.python_rules import python_rules
from attar.text.tools.reading import FENCE, KEYS, LANGUAGE, MAX_SPACE
from attar.text.tools.tool import Tool, ToolChoice, ToolError
from attar.text.tools.xml.rules import ParameterRules

ANY: dict[str, Any] = {"type": "object"}

_ALL = "(?s:.*)"
_SPACE = r"[ \t\n\r]*"
_FENCED = rf"{_ALL}{FENCE}({LANGUAGE})?[ \t\r]*\n{_SPACE}"  # up to the object of a block
_RESPONSE = '{"response": '
_INPUT, _INPUT_END = '{"input": "', '"}'

Prove = Callable[[Grammar], None]


@dataclass(frozen=True)
class ToolConstraint:
    """The grammar of an answer, and the tools whose arguments it only keeps to be JSON objects."""

    grammar: Grammar
    loosened: tuple[str, ...] = ()


def constraint(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, prove: Prove) -> ToolConstraint | None:
    """Return the constraint of an answer; None where no tool may be called.

    `prove` raises GrammarError for a grammar that cannot be kept, as `Prover.prove` does. It is called once where all
    can be kept, else about once a tool. Raises ToolError for a tool with `strict` that cannot be kept, with the place
    in its schema, and where calls of all tools together cannot be kept.
    """
    if choice.mode == "none" or not tools:
        return None
    used = choice.of(tools)
    loosened: set[str] = set()
    try:
        return _proven(form, used, choice, loosened, prove)
    except GrammarError:
        for tool in used:
            try:
                _proven(form, [tool], ToolChoice("named", tool.name), set(), prove)
            except GrammarError as error:
                if tool.strict:
                    raise _refusal(tools, tool, error, prove) from error
                loosened.add(tool.name)
    try:
        return _proven(form, used, choice, loosened, prove)
    except GrammarError:
        loosened |= {tool.name for tool in used if not tool.strict}
    try:
        return _proven(form, used, choice, loosened, prove)
    except GrammarError as error:
        raise ToolError(f"calls of these tools cannot be enforced together: {error}", "tools") from error


def _proven(
    form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, loosened: set[str], prove: Prove
) -> ToolConstraint:
    text = _Writer(form, loosened).write(tools, choice)
    if len(text.encode()) > MAX_GRAMMAR:
        raise GrammarError("the grammar is too large")
    grammar = Grammar("lark", text)
    prove(grammar)
    return ToolConstraint(grammar, tuple(tool.name for tool in tools if tool.name in loosened))


def _refusal(tools: Sequence[Tool], tool: Tool, error: GrammarError, prove: Prove) -> ToolError:
    """Make the refusal of a strict tool: that of its schema alone, which has a place, where it is refused as well."""
    param = f"tools[{list(tools).index(tool)}].function.parameters"
    try:
        prove(Grammar.json_schema(tool.schema))
    except GrammarError as other:
        return ToolError(f"strict: {other}", param)
    return ToolError(f"strict: the arguments cannot be enforced: {error}", param)


class _Writer:
    """Writes grammars in llguidance's dialect of Lark."""

    def __init__(self, form: ToolFormat, loosened: set[str]) -> None:
        self._form, self._loosened = form, loosened
        self._special = dict(form.special)
        self._rules: list[str] = []

    def write(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        """Return the grammar of an answer with these tools."""
        form = self._form
        for at, tool in enumerate(tools):
            self._arguments(f"args_{at}", tool)
        if form.call_id:
            self._rule("CALL_ID", "/[A-Za-z0-9]{9}/")
        call = self._either("call", tools, "")
        several = choice.parallel and form.parallel and choice.mode != "named"
        rest = f"({self._literal(form.separator + form.begin)} {call})*" if several else ""
        body = f"{rest} {self._literal(form.suffix)}"
        head = form.prefix + form.begin
        if choice.mode != "auto":
            self._rule("start", f"{self._tag()} {self._literal(head)} {call} {body}")
        elif form.name == "generic":
            words = f'{_quoted(_RESPONSE)} words "}}"'
            self._rule("start", f"{self._literal(head)} {call} {body} | {words}")
            self._rule("words", json_rule({"type": "string"}))
        elif not form.opening:
            # One lexeme up to where an answer cannot be text any more: a shorter one would be text as well.
            first = self._either("first", tools, head)
            self._rule("start", f"TEXT | {self._tag()} {first} {body}")
            self._rule("TEXT", _without(rf"[ \t\n\r]*{self._begins(tools)}{_ALL}", *self._tags()))
        elif form.opening in self._special:
            self._rule(self._bare(tools, several), f"TEXT | TEXT? {self._literal(head)} {call} {body}{self._block}")
            self._rule("TEXT", _without(f"{_ALL}{_pattern(form.opening)}{_ALL}"))
        elif cut := next((at for token in self._special if (at := form.opening.find(token)) > 0), 0):
            # A special token within the marker: no text goes on behind it.
            behind = self._literal(head[cut:])
            self._rule("start", f"TEXT | LEAD {behind} {call} {body}")
            self._rule("LEAD", _without(f"{_ALL}{_pattern(form.opening)}{_ALL}", all=_ALL + _pattern(head[:cut])))
            self._rule("TEXT", _without(f"{_ALL}{_pattern(form.opening)}{_ALL}"))
        else:
            # The marker is text: a lazy lexeme ends with it, and what goes on without one is the other.
            behind = self._literal(head.removeprefix(form.opening))
            self._rule(self._bare(tools, several), f"TEXT | lead {behind} {call} {body}{self._block}")
            self._rule("lead[lazy]", "LEAD")
            self._rule("LEAD", f"/{_ALL}{_pattern(form.opening)}/")
            self._rule("TEXT", _without(f"{_ALL}{_pattern(form.opening)}{_ALL}"))
        return "\n".join(self._rules) + "\n"

    def _rule(self, name: str, text: str) -> None:
        self._rules.append(f"{name}: {text}")

    def _either(self, rule: str, tools: Sequence[Tool], head: str) -> str:
        """Add a rule for a call of any of the tools, from its name on, with `head` before it; return its name."""
        form = self._form
        middle, behind = form.middle, ""
        if form.call_id:
            middle, behind = CALL_ID, f"CALL_ID {self._literal(ARGS)}"
        end = self._literal(form.end)
        calls = (
            f"{self._literal(head + tool.name + middle)} {behind} args_{at} {end}" for at, tool in enumerate(tools)
        )
        self._rule(rule, " | ".join(calls))
        return rule

    def _literal(self, text: str) -> str:
        """Return a text as terminals: special tokens by their ids, the rest quoted."""
        if not text:
            return ""
        found = ((text.find(token), token) for token in self._special)
        at, token = min((each for each in found if each[0] >= 0), default=(-1, ""))
        if at < 0:
            return _quoted(text)
        parts = (
            _quoted(text[:at]) if at else "",
            f"<[{self._special[token]}]>",
            self._literal(text[at + len(token) :]),
        )
        return " ".join(part for part in parts if part)

    def _tags(self) -> list[str]:
        """Return the markers of Llama models that may come before calls, as patterns of texts that hold one."""
        return [f"{_ALL}{_pattern(PYTHON_TAG)}{_ALL}"] if self._form.name == "llama3_json" else []

    def _tag(self) -> str:
        special = self._special.get(PYTHON_TAG)
        return "" if special is None or self._form.name != "llama3_json" else f"<[{special}]>?"

    def _bare(self, tools: Sequence[Tool], several: bool) -> str:
        """Add rules for calls without a marker, where the format has such; return the name of the rule for answers.

        An object that has come up to the arguments of a tool is a call: the lazy lexeme that ends there is taken before
        any other. Up to there all is free, since an answer in JSON, or a block of it, may have a name as well. Only
        the lexemes behind `"name": "` are one for each tool: with text before them they would be too many states.
        """
        if not self._form.bare:
            return "start"
        for at, tool in enumerate(tools):
            self._rule(f"name_{at}[lazy]", f"NAME_{at}")
            self._rule(f"NAME_{at}", f'/{_pattern(tool.name)}"{_SPACE},{_SPACE}"({"|".join(KEYS)})"{_SPACE}:/')
        one = f'({" | ".join(f"name_{at} ws? args_{at}" for at in range(len(tools)))}) ws? "}}"'
        for rule, before in (("alone", _SPACE), ("block", _FENCED), ("further", "")):
            self._rule(f"{rule}[lazy]", rule.upper())
            self._rule(rule.upper(), rf'/{before}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"/')
        self._rule("ws", rf"/[ \t\n\r]{{1,{MAX_SPACE}}}/")
        self._rule("one", one)
        self._rule("bare", "one (ws? further one)*" if several else "one")
        self._rule("start", "alone (bare | answer) | answer")
        return "answer"

    @property
    def _block(self) -> str:
        """The alternative of an answer that has a fenced block of JSON, which is a call or not."""
        return f" | block (bare ws? {_quoted(FENCE)} | answer)" if self._form.bare else ""

    def _begins(self, tools: Sequence[Tool]) -> str:
        """Return the pattern of what a parser takes for the beginning of a call."""
        if self._form.name == "llama3_json":
            return r'\{[ \t\n\r]*"(name|id|type)"'
        return r"\[[ \t\n\r]*(" + "|".join(_pattern(tool.name) for tool in tools) + r")\("

    def _arguments(self, rule: str, tool: Tool) -> None:
        """Add the rule of a tool's arguments. Raises GrammarError where they cannot be kept."""
        if tool.grammar is not None:
            if self._form.tags is not None or self._form.name == "pythonic":
                raise GrammarError("a grammar with recursion needs a model whose calls are JSON")
            self._rule(rule, f"{_quoted(_INPUT)} {rule}_start {_quoted(_INPUT_END)}")
            self._rules += recursive.rules(tool.grammar, rule)
            return
        schema = ANY if tool.name in self._loosened else schema_of(Grammar.json_schema(tool.schema))
        if self._form.tags is not None:
            tagged = ParameterRules(self._form.tags, self._literal, _pattern, self._special)
            rules = tagged.any(rule) if schema is ANY else tagged.of(rule, schema)
            self._rules += [each for each in dict.fromkeys(rules) if each not in self._rules]
        elif self._form.name != "pythonic":
            self._rule(rule, json_rule(schema))
        elif schema is ANY:
            self._rule(rule, f'({rule}_one (", " {rule}_one)*)?')
            self._rule(f"{rule}_one", f'{rule.upper()}_NAME "=" {rule}_any')
            self._rule(f"{rule.upper()}_NAME", "/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            self._rule(f"{rule}_any", f'{json_rule({})} | "True" | "False" | "None"')
        else:
            self._rules += python_rules(rule, schema)


def _without(*patterns: str, all: str = _ALL) -> str:
    """Return the terminal of texts that match `all` and none of the patterns."""
    return f"/{all}/" + "".join(f" & ~/{pattern}/" for pattern in patterns)


def _pattern(text: str) -> str:
    """Return a regular expression of one text, within slashes."""
    return re.sub(r"([\\/.+*?()|\[\]{}^$#&~-])", r"\\\1", text)  # not "<": with a backslash it means a word's edge


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
