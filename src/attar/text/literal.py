"""Encoding of conversations whose messages cannot contain special tokens.

A chat template marks speakers with special tokens, and a rendered template is encoded with them recognised. So a
message that contains `<|im_end|>` would end its own turn and begin another's, even the system's. Here such text in
messages stays text. Before rendering each occurrence is replaced by a placeholder. The rendered text around it, up to
the template's own special tokens, is encoded by a copy of the tokenizer that recognises none. All the rest, and every
conversation without such text, is encoded as usual.

Some tokenizers look for special tokens in normalized text, where fullwidth letters, capitals or accents may spell one
too. For these the tokenizer itself finds the parts of a message that would become one.

Added tokens that are not special (`<think>` in many models) are words of the model like any other, and are left alone.
Where a tokenizer puts a space before the first word of a text, such a stretch gets one.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from attar.errors import UserError
from attar.text.tokenizer import Tokenizer, check_unicode

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters, which Unicode reserves for programs

Messages = Sequence[Mapping[str, Any]]


class LiteralChat:
    """An encoder of conversations for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = [tokenizer.id_to_bytes(token).decode("utf-8", "replace") for token in tokenizer.special_ids]
        self._specials = sorted((name for name in names if name), key=lambda name: (-len(name), name))
        self._literal: Backend | None = None
        self._lock = threading.Lock()

    def encode(self, messages: Messages, render: Callable[..., str], more: Any = None) -> list[int]:
        """Return token ids of `render(messages)`; with `more`, of `render(messages, more)`. Raises what `render`
        raises, and ValueError for lone surrogates.

        Texts of a message may be in lists and mappings, such as parts of a content and the arguments of a tool call.
        `more` is any other JSON value whose texts stay text too: tools, or variables of the template.
        """
        texts: list[str] = []
        given = (messages,) if more is None else (messages, more)

        def noted(text: str) -> str:
            texts.append(text)
            return text

        try:
            _mapped(given, noted)
        except RecursionError as error:
            raise UserError("template_failed", "a message is nested too deeply") from error
        if not self._speaks(texts):
            return self._tokenizer.encode_chat(render(*given))
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise UserError(
                "template_failed", "a message holds all of the 32 noncharacters from U+FDD0 on, which are no text"
            )
        words = {special: number for number, special in enumerate(self._specials)}
        quoted = _mapped(given, lambda text: self._quoted(text, mark, words))
        return self._ids(render(*quoted), mark, list(words))

    def _speaks(self, texts: Sequence[str]) -> bool:
        """Return whether any text would become a special token, either directly or once normalized."""
        if any(special in text for special in self._specials for text in texts):
            return True
        return self._tokenizer.specials_respelled and any(self._tokenizer.special_spans(texts))

    def _quoted(self, text: str, mark: str, words: dict[str, int]) -> str:
        """Return the text with placeholders for parts that would become special tokens.

        Spellings that differ from the tokens' own are added to `words`, which are numbered.
        """
        for special in self._specials:
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
        spans = self._tokenizer.special_spans([rendered])[0]  # found once: messages may be thousands
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
                self._literal = Backend.from_str(self._tokenizer._backend.to_str())
                self._literal.encode_special_tokens = True
        return list(self._literal.encode_batch_fast([text], add_special_tokens=False)[0].ids)


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
