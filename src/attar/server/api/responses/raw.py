"""Prompt and answer of the Responses API as the model has them: vLLM's `input_messages` and `output_messages`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attar.text.tokenizer import Detokenizer, Tokenizer


class RawMessages:
    """The tokens of a `prompt`, whose `text` is known, and those of its answer, which are added as they come. Texts
    have special tokens too."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> None:
        self._prompt, self._text = prompt, text
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._reader = Detokenizer(tokenizer, prompt, skip_special_tokens=False)

    def add(self, tokens: Iterable[int]) -> None:
        """Take more tokens of the answer."""
        for token in tokens:
            self._tokens.append(token)
            self._pieces.append(self._reader.push(token))

    def told(self) -> dict[str, Any]:
        """Return the fields of an answer that has ended."""
        return {
            "input_messages": [_message(self._text, self._prompt)],
            "output_messages": [_message("".join(self._pieces) + self._reader.flush(), self._tokens)],
        }  # fmt: skip


def _message(text: str, tokens: Sequence[int]) -> dict[str, Any]:
    return {"type": "raw_message_tokens", "message": text, "tokens": tokens}
