"""Encoding of conversations whose messages cannot contain special tokens.

A chat template marks speakers with special tokens, and a rendered template is encoded with them recognised. So a
message that contains `<|im_end|>` would end its own turn and begin another's, even the system's. Here such text in
messages stays text. Before rendering each occurrence is replaced by a placeholder. The rendered text around it, up to
the template's own special tokens, is encoded by a copy of the tokenizer that recognises none. All the rest, and every
conversation without such text, is encoded as usual.

Some tokenizers look for special tokens in normalized text, where fullwidth letters, capitals or accents may spell one
too. For these the tokenizer itself finds the parts of a message that would become one.

Some added tokens are no special ones and still mean something to the model: `<tool_call>`, `<think>`, `<|fim_prefix|>`.
They stay text like special tokens where they look like markup and a template or a prompt may use them. Others, such as
runs of spaces, are words of the model and left alone. An assistant's own text keeps its markers of reasoning, by which
templates find what to leave out.

Where a tokenizer puts a space before the first word of a text, such a stretch gets one.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from attar.errors import UserError
from attar.text.tokenizer import Tokenizer, check_unicode

REASONING = ("think", "reason")  # parts of the names of markers
OWN = ("content", "reasoning_content", "reasoning", "thinking")  # an assistant's own texts in a message
_MARKUP = (("<", ">"), ("[", "]"))
_KNOWN = frozenset((
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[ARGS]", "[INST]",
    "[/INST]", "[CALL_ID]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
))  # fmt: skip
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters, which Unicode reserves for programs

Messages = Sequence[Mapping[str, Any]]


class LiteralChat:
    """An encoder of conversations for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = [tokenizer.id_to_bytes(token).decode("utf-8", "replace") for token in tokenizer.special_ids]
        self._markers = dict(_markers(tokenizer))
        self._specials = _longest_first([*names, *self._markers.values()])
        kept = {name for name in self._markers.values() if any(part in name.lower() for part in REASONING)}
        self._in_own = [name for name in self._specials if name not in kept]
        self._literal: Backend | None = None
        self._lock = threading.Lock()

    def encode(self, messages: Messages, render: Callable[..., str], more: Any = None) -> list[int]:
        """Return token ids of `render(messages)`; with `more`, of `render(messages, more)`. Raises what `render`
        raises, and ValueError for lone surrogates.

        Texts of a message may be in lists and mappings, such as parts of a content and the arguments of a tool call.
        `more` is any other JSON value whose texts stay text too: tools, or variables of the template.
        """
        given = (messages,) if more is None else (messages, more)
        texts: list[str] = []
        own: list[str] = []
        try:
            _changed(given, _noting(texts), _noting(own))
        except RecursionError as error:
            raise UserError("template_failed", "a message is nested too deeply") from error
        if not self._speaks(texts, own):
            return self._tokenizer.encode_chat(render(*given))
        texts += own
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise UserError(
                "template_failed", "a message holds all of the 32 noncharacters from U+FDD0 on, which are no text"
            )
        words = {special: number for number, special in enumerate(self._specials)}
        quoted = _changed(
            given,
            lambda text: self._quoted(text, self._specials, mark, words),
            lambda text: self._quoted(text, self._in_own, mark, words),
        )
        return self._ids(render(*quoted), mark, list(words))

    def _speaks(self, texts: Sequence[str], own: Sequence[str]) -> bool:
        """Return whether any text, or an assistant's own, would become a special token, either directly or once
        normalized."""
        for specials, where in ((self._specials, texts), (self._in_own, own)):
            if any(special in text for special in specials for text in where):
                return True
        return self._tokenizer.specials_respelled and any(self._tokenizer.special_spans([*texts, *own]))

    def _quoted(self, text: str, specials: Sequence[str], mark: str, words: dict[str, int]) -> str:
        """Return the text with placeholders for parts that would become one of `specials`.

        Spellings that differ from the tokens' own are added to `words`, which are numbered.
        """
        for special in specials:
            text = text.replace(special, f"{mark}{words[special]}{mark}")
        if not self._tokenizer.specials_respelled:
            return text
        parts, at = [], 0
        for start, end in self._tokenizer.special_spans([text])[0]:
            if mark in (word := text[start:end]):  # a normalizer drops marks: the text around one stays text anyhow
                continue
            parts += [text[at:start], f"{mark}{words.setdefault(word, len(words))}{mark}"]
            at = end
        return "".join(parts) + text[at:]

    def _ids(self, rendered: str, mark: str, words: Sequence[str]) -> list[int]:
        ids: list[int] = []
        spans = self._tokenizer.special_spans([rendered], self._markers)[0]  # found once: messages may be thousands
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        plain = at = 0  # rendered[plain:at] is to be encoded as usual
        while (found := rendered.find(mark, at)) >= 0:
            last = bisect_right(ends, found) - 1
            start = max(plain, ends[last]) if last >= 0 else plain
            following = bisect_left(starts, found)
            at = starts[following] if following < len(starts) else len(rendered)
            ids += self._tokenizer.encode_chat(rendered[plain:start])
            ids += self._literally(_restored(rendered[start:at], mark, words))
            plain = at
        return ids + self._tokenizer.encode_chat(rendered[plain:])

    def text_ids(self, text: str) -> list[int]:
        """Return token ids of a text in which nothing is a special token. Raises ValueError for a lone surrogate."""
        check_unicode(text)
        return self._literally(text)

    def _literally(self, text: str) -> list[int]:
        with self._lock:
            if self._literal is None:
                self._literal = _with_special(self._tokenizer._backend, self._markers)
        return list(self._literal.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _markers(tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Yield ids and spellings of added tokens that are not special, and that a model takes for markup."""
    templates = list(tokenizer.chat_templates.values())
    for index, name in tokenizer.added_words.items():
        if not any(name.startswith(start) and name.endswith(end) for start, end in _MARKUP):
            continue
        if name.startswith(("<|", "<｜")) or name in _KNOWN or any(name in template for template in templates):  # noqa: RUF001
            yield index, name


def _longest_first(names: Sequence[str]) -> list[str]:
    return sorted((name for name in names if name), key=lambda name: (-len(name), name))


def _with_special(backend: Backend, markers: Mapping[int, str]) -> Backend:
    """Return a copy of a tokenizer that recognises no special tokens, the markers among them."""
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] or token["id"] in markers
    made = Backend.from_str(json.dumps(state))
    made.encode_special_tokens = True
    return made


def _noting(texts: list[str]) -> Callable[[str], str]:
    def noted(text: str) -> str:
        texts.append(text)
        return text

    return noted


def _changed(given: Sequence[Any], change: Callable[[str], str], change_own: Callable[[str], str]) -> list[Any]:
    """Return messages, and what comes with them, with every text changed: the assistant's own in its own way."""
    messages, *more = given
    made = [
        {
            _mapped(name, change): _mapped(value, change_own if name in OWN else change)
            for name, value in message.items()
        }
        if isinstance(message, Mapping) and message.get("role") == "assistant"
        else _mapped(message, change)
        for message in messages
    ]
    return [made, *(_mapped(each, change) for each in more)]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every text changed, names in mappings included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(name, change): _mapped(each, change) for name, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, Sequence) else value


def _restored(text: str, mark: str, words: Sequence[str]) -> str:
    parts = text.split(mark)  # text, number, text, number, ..., text
    parts[1::2] = [words[int(number)] for number in parts[1::2]]
    return "".join(parts)
