"""How many tokens a text has at least, by its bytes alone, where the tokenizer allows to say so.

A tokenizer takes a second for a megabyte, and a text of a megabyte may be far beyond the model's context: no token
spells more than so many bytes, so a text of more than that for every token of the context is refused without a look at
it. That is true only of tokenizers that lose nothing of a text. Many do: one that lowers case or strips accents, one
with a word for all that it does not know, one whose special tokens swallow the blanks around them. Of those, and of any
that is not understood, nothing is said.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

from tokenizers.models import BPE

from attar.text.tokenizer import Tokenizer

_SPLITTING = frozenset({"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"})  # what only cuts, or adds a blank
_BYTES = 256


class TokenBounds:
    """Lower bounds of the tokens of texts, by one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._composes = False
        self.longest = _longest(tokenizer)  # bytes of a token; None: nothing can be said
        if self.longest is not None:
            self._composes = any(part["type"] == "NFC" for part in _parts(tokenizer._backend.normalizer))

    def at_least(self, text: str) -> int:
        """Tokens that `text` has at least."""
        if self.longest is None or (self._composes and not unicodedata.is_normalized("NFC", text)):
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self.longest)


def _longest(tokenizer: Tokenizer) -> int | None:
    """Bytes of a text that a token stands for at most; None where a text may lose some."""
    backend = tokenizer._backend
    added = backend.get_added_tokens_decoder().values()
    if not isinstance(backend.model, BPE) or any(token.lstrip or token.rstrip for token in added):
        return None
    pre = list(_parts(backend.pre_tokenizer))
    if any(part["type"] not in _SPLITTING or part.get("behavior") == "Removed" for part in pre):
        return None
    if backend.model.continuing_subword_prefix or backend.model.end_of_word_suffix:  # then one byte has several names
        return None
    names = backend.get_vocab(with_added_tokens=False)
    contents = [len(token.content.encode()) for token in added]
    if tokenizer._byte_of is not None:  # a character of a token is a byte
        bytewise = any(part["type"] == "ByteLevel" for part in pre)
        whole = bytewise and len(names.keys() & tokenizer._byte_of.keys()) == _BYTES
        if not whole or any(part["type"] != "NFC" for part in _parts(backend.normalizer)):
            return None
        return max([*map(len, names), *contents])
    spelt = backend.model.byte_fallback and all(f"<0x{byte:02X}>" in names for byte in range(_BYTES))
    if not spelt or any(not _adds(part) for part in _parts(backend.normalizer)):
        return None
    return max([*(len(name.encode()) for name in names), *contents])


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """What a normalizer or a pre-tokenizer is made of, as the library writes it."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for part in state.get("pretokenizers", state.get("normalizers", ())):
        yield from _flat(part)


def _adds(part: dict[str, Any]) -> bool:
    """Whether it puts something in front, or writes blanks as sentencepiece does, whose sign is longer."""
    blanks = part["type"] == "Replace" and part["pattern"] == {"String": " "} and part["content"] == "▁"
    return bool(part["type"] == "Prepend" or blanks)
