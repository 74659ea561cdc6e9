"""Formats of tool calls, found by differences between renderings of a model's own chat template.

A template says how its model was trained to call: it renders calls of earlier turns. `detect` renders a conversation
without a call, with one and with two, for tools with names that stand nowhere else. What is around the names is the
syntax, down to its spaces. So no model needs an entry in a list.

Known are calls as JSON behind a marker (Hermes, Qwen), as JSON alone (Llama 3), as a list of JSON behind a marker
(Mistral), as a name and JSON behind markers (later ones of Mistral), in Python's syntax (Llama 4, LFM2), and with each
parameter between tags (Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2: `xml/`). All other templates get the `generic` format,
which `generic.py` explains to the model in words.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attar.text.template import TemplateError, render_chat
from attar.text.tokenizer import Tokenizer
from attar.text.tools.xml import finding
from attar.text.tools.xml.finding import Tags

FormatName = Literal["hermes", "llama3_json", "pythonic", "mistral", "mistral_args", "xml", "generic"]

PYTHON_TAG = "<|python_tag|>"  # before calls of some Llama models
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"

_FIRST, _SECOND = "probe_alpha", "probe_beta"
_KEY, _VALUE = finding.KEYS[0], finding.VALUES[0]
_IDS = (("call_" + "a1b2c3d4" * 3, "call_" + "b2c3d4e5" * 3, 0), ("a1b2c3d4e", "b2c3d4e5f", 9))
_DAY = datetime.date(2025, 1, 1)
_MARK = r"<[^<>\s{}\"']{2,40}>|\[[A-Z_]{2,40}\]"
_JSON = re.compile(rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}"\s*\}}')
_PYTHON = re.compile(rf"\(\s*{_KEY}\s*=\s*([\"']){_VALUE}\1\s*\)")
_BEFORE = re.compile(rf'(?P<open>{_MARK})?(?P<gap>\s*)(?P<list>\[\s*)?(?P<begin>\{{\s*"name"\s*:\s*")')
_MIDDLE = re.compile(r'"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_END = re.compile(r'(?:\s*,\s*"id"\s*:\s*"[^"]*")?(?P<end>\s*\})')
_NAMED = re.compile(rf"(?P<open>{_MARK})(?P<gap>\s*)")
_ARGS = re.compile(r"(?:\[CALL_ID\][^\[]*)?\[ARGS\]")
_THOUGHT = re.compile(r"\s*((<think>\s*)?</think>\s*)?")


@dataclass(frozen=True)
class ToolFormat:
    """A model's syntax of calls: an answer's calls are `prefix`, calls joined by `separator`, and `suffix`.

    A call is `begin`, the name, `middle`, the arguments and `end`. `opening` is the marker behind which calls begin
    within a text, `closing` the one that ends a call or all of them; empty where there is none: then the whole answer
    is calls, or none of it. Without `parallel` the template renders no turn of several calls. `id_length` is the number
    of characters that ids must have, 0 for any. With `arguments_as_text` a template gets arguments as JSON text, else
    as an object. `special` has the special tokens within the syntax, with their ids. Models of a `bare` format also
    write a call as JSON alone, without the marker: at the beginning of an answer, or of a fenced block. With `tags` the
    arguments are parameters between these.
    """

    name: FormatName
    opening: str = ""
    closing: str = ""
    prefix: str = ""
    suffix: str = ""
    begin: str = ""
    middle: str = ""
    end: str = ""
    separator: str = ""
    call_id: bool = False
    parallel: bool = True
    id_length: int = 0
    arguments_as_text: bool = False
    bare: bool = False
    tags: Tags | None = None
    special: tuple[tuple[str, int], ...] = ()

    @property
    def visible(self) -> tuple[str, ...]:
        """Special tokens that must stay in the text for a parser to see the calls."""
        return tuple(token for token, _ in self.special)


GENERIC = ToolFormat(
    "generic", prefix='{"tool_calls": [', suffix="]}", begin='{"name": "', middle='", "arguments": ', end="}",
    separator=", ",
)  # fmt: skip


def detect(tokenizer: Tokenizer, template: str) -> ToolFormat:
    """Return the format of a model's calls by its chat template, rendered a few times. Never raises: a template that
    fails, prints no tools, or has calls in another syntax gets the generic format."""
    probe = _Probe(tokenizer, template)
    found = probe.find()
    return GENERIC if found is None else replace(found, special=tuple(_special(tokenizer, found)))


class _Probe:
    """The renderings of one template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer, self._template = tokenizer, template

    def find(self) -> ToolFormat | None:
        opened = self._render([], opened=True)
        if opened is None or _FIRST not in opened or _KEY not in opened:
            return None
        for ids in _IDS:
            for as_text in (False, True):
                one = self._render([_call(_FIRST, ids[0], as_text)])
                if one is None or (found := _one(_turn(opened, one))) is None:
                    continue
                found = replace(found, id_length=ids[2], arguments_as_text=as_text)
                calls = [_call(_FIRST, ids[0], as_text), _call(_SECOND, ids[1], as_text)]
                two = self._render(calls)
                between = None if two is None else _between(_turn(opened, two))
                return _with_separator(found, between)
        tagged = finding.find(lambda arguments: self._answer(opened, arguments), (_FIRST, _SECOND))
        return None if tagged is None else ToolFormat("xml", **tagged._asdict())

    def _answer(self, opened: str, arguments: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the answer that calls with these arguments render as; None where the template fails."""
        calls = [
            {**call, "function": {**call["function"], "arguments": dict(given)}}
            for call, given in zip((_call(_FIRST, _IDS[0][0]), _call(_SECOND, _IDS[0][1])), arguments, strict=False)
        ]
        text = self._render(calls)
        return None if text is None else _turn(opened, text)

    def _render(self, calls: list[dict[str, Any]], opened: bool = False) -> str | None:
        """Return the conversation with these calls as the answer; None where the template fails."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
        if calls:
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        try:
            return render_chat(
                self._template, messages, bos_token=self._tokenizer.bos_token, eos_token=self._tokenizer.eos_token,
                tools=[_tool(_FIRST), _tool(_SECOND)], add_generation_prompt=opened, date=_DAY,
            )  # fmt: skip
        except TemplateError:
            return None


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
    return {"type": "function", "function": {"name": name, "description": "Probe.", "parameters": parameters}}


def _call(name: str, id: str, as_text: bool = False) -> dict[str, Any]:
    arguments: Any = f'{{"{_KEY}": "{_VALUE}"}}' if as_text else {_KEY: _VALUE}
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def _turn(opened: str, text: str) -> str:
    """Return what a rendered text has behind an opened turn: the answer and the end of the turn."""
    same = next(
        (at for at, (a, b) in enumerate(zip(opened, text, strict=False)) if a != b), min(map(len, (opened, text)))
    )
    for start, end in (("<", ">"), ("[", "]")):  # not within a marker: <think> and <tool_call> begin alike
        if (last := text.rfind(start, 0, same)) > text.rfind(end, 0, same):
            same = last
    answer = text[same:]
    thought = _THOUGHT.match(answer)
    return answer[thought.end() :] if thought else answer


def _one(answer: str) -> ToolFormat | None:
    """Return the format of an answer with one call; None where its syntax is unknown."""
    before, found, behind = answer.partition(_FIRST)
    if not found:
        return None
    if match := _PYTHON.match(behind):
        return _pythonic(before, behind[match.end() :])
    if (match := _JSON.search(behind)) is None:
        return None
    middle, behind = behind[: match.start()], behind[match.end() :]
    if _ARGS.fullmatch(middle):
        opened = _NAMED.fullmatch(before)
        if opened is None or opened["open"] == ARGS:
            return None
        form = ToolFormat("mistral_args", opened["open"], begin=before, middle=ARGS)
        return replace(form, call_id=middle.startswith(CALL_ID))
    opened, ended = _BEFORE.fullmatch(before), _END.match(behind)
    if opened is None or ended is None or not _MIDDLE.fullmatch(middle):
        return None
    mark, begin, end, behind = opened["open"] or "", opened["begin"], ended["end"], behind[ended.end() :]
    if opened["list"]:
        close = re.match(r"\s*\]", behind)
        if close is None or not mark:
            return None
        closing, tail = _closed(mark, behind[close.end() :])
        prefix = mark + opened["gap"] + opened["list"]
        return ToolFormat("mistral", mark, closing, prefix, close[0] + tail, begin, middle, end)
    if not mark:
        return ToolFormat("llama3_json", begin=begin, middle=middle, end=end)
    closing, tail = _closed(mark, behind)
    if not closing:
        return None
    return ToolFormat(
        "hermes", mark, closing, begin=mark + opened["gap"] + begin, middle=middle, end=end + tail, bare=True
    )


def _pythonic(before: str, behind: str) -> ToolFormat | None:
    opened = re.fullmatch(rf"({_MARK})?(\s*)\[\s*", before)
    close = re.match(r"\s*\]", behind)
    if opened is None or close is None:
        return None
    mark = opened[1] or ""
    closing, tail = _closed(mark, behind[close.end() :])
    return ToolFormat("pythonic", mark, closing, before, close[0] + tail, "", "(", ")", ", ")


def _closed(mark: str, behind: str) -> tuple[str, str]:
    """Return the marker that ends what `mark` begins, and the same with the spaces before it; empty where none is."""
    for start, end in (("<|", "<|/"), ("<", "</"), ("[", "[/"), ("start", "end"), ("begin", "end")):
        closing = mark.replace(start, end, 1)
        if mark and closing != mark and behind.lstrip().startswith(closing):
            return closing, behind[: behind.index(closing) + len(closing)]
    return "", ""


def _between(answer: str) -> str | None:
    """Return what stands between the arguments of the first call and the name of the second, without ids."""
    start = answer.find(_FIRST)
    match = _JSON.search(answer, start) or _PYTHON.search(answer, start)
    at = answer.find(_SECOND)
    if match is None or not 0 <= match.end() <= at:
        return None
    return re.sub(r'^\s*,\s*"id"\s*:\s*"[^"]*"', "", answer[match.end() : at])


def _with_separator(form: ToolFormat, between: str | None) -> ToolFormat:
    """Return a format with what stands between its calls; without parallel calls where the template has none, or has
    them in another way than one call."""
    if form.name == "pythonic":
        return form if between is not None and between.strip() == "," else replace(form, parallel=False)
    inner = None if between is None else between.removeprefix(form.end).removesuffix(form.begin)
    if between is None or inner is None or between != form.end + inner + form.begin:
        return replace(form, parallel=False)
    wanted = {"mistral": ",", "llama3_json": ";", "hermes": "", "mistral_args": ""}
    if inner.strip() not in (wanted[form.name], ""):
        return replace(form, parallel=False)
    if form.name == "mistral" and not inner.strip():
        return replace(form, parallel=False)
    return replace(form, separator=inner)


def _special(tokenizer: Tokenizer, form: ToolFormat) -> Iterator[tuple[str, int]]:
    syntax = [form.prefix, form.begin, form.middle, form.end, form.separator, form.suffix]
    if form.tags is not None:
        syntax += [form.tags.begin, form.tags.middle, form.tags.json_middle, form.tags.end]
    for index in sorted(tokenizer.special_ids):
        token = tokenizer.id_to_token(index)
        known = any(token in text for text in syntax)
        if token and (
            known or (form.call_id and token == CALL_ID) or (form.name == "llama3_json" and token == PYTHON_TAG)
        ):
            yield token, index
