"""Log probabilities as JSON, in the shapes of /v1/completions and of chat.

A batch of prompts to be scored has a million of them. So they are written as they come, never kept as values. After
every `SLICE` of them the event loop gets a turn: no other request waits longer than one slice takes to write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from attar.faults import point
from attar.protocol.request import TokenLogprob
from attar.text.tokenizer import Detokenizer, Tokenizer

LEAST = -9999.0  # JSON has no infinity; OpenAI's number for it
SLICE = 512  # values: less than a millisecond's work

encode = msgspec.json.encode
_rows = msgspec.msgpack.Decoder(list[msgspec.Raw])
_row = msgspec.msgpack.Decoder(TokenLogprob)


class Turns:
    """Yields to the event loop after every `SLICE` values written, and then calls `had`, which may raise to end the
    writing."""

    def __init__(self, had: Callable[[], None]) -> None:
        self._had = had
        self._values = 0

    async def after(self, values: int) -> None:
        """Count `values` more as written, and yield to the event loop where a slice is full."""
        self._values += values
        if self._values >= SLICE:
            self._values = 0
            await asyncio.sleep(0)
            self._had()


def values(logprobs: Sequence[TokenLogprob]) -> int:
    """Return the number of values for these tokens, alternatives included."""
    return sum(1 + len(each.top) for each in logprobs)


def rows(raw: msgspec.Raw) -> Iterator[TokenLogprob]:
    """Yield the tokens of an event's array, each decoded when it is asked for."""
    return map(_row.decode, _rows.decode(raw))


class TokenNames:
    """Tokens by their texts; with `as_ids` by their ids, `token_id:ID`, as vLLM's clients ask."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self.tokenizer, self._as_ids = tokenizer, as_ids

    def __call__(self, token: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token}" if self._as_ids else token_text(self.tokenizer, token)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text; one that is part of a character only as `bytes:` and escapes, as OpenAI writes it."""
    point("openai.logprobs")
    raw = tokenizer.id_to_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Content:
    """The tokens of a chat choice, as the items of a JSON array. With `own` the tokens beside each have it too."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False, own: bool = False) -> None:
        self._tokenizer, self._name, self._own = tokenizer, TokenNames(tokenizer, as_ids), own
        self._items = bytearray()

    def add(self, each: TokenLogprob) -> None:
        """Add one token."""
        top = [self._token(token, logprob) for token, logprob in each.top]
        if self._own and all(token != each.token_id for token, _ in each.top):
            top.append(self._token(each.token_id, each.logprob))
        _append(self._items, encode(self._token(each.token_id, each.logprob) | {"top_logprobs": top}))

    def json(self) -> list[bytes | bytearray]:
        """Return the pieces of the answer's `logprobs` object."""
        return [b'{"content":[', self._items, b'],"refusal":null}']

    def take(self) -> bytes:
        """Return the items written so far, without brackets, and forget them."""
        items = bytes(self._items)
        self._items.clear()
        return items

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.id_to_bytes(token)
        return {"token": self._name(token), "logprob": max(logprob, LEAST), "bytes": list(raw)}


class Offsets:
    """Where the text of each generated token begins: `at` characters of text, and those that the tokens before it
    completed behind the prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], at: int) -> None:
        self._text, self._at = Detokenizer(tokenizer, prompt), at

    def __call__(self, token: int) -> int:
        """Take the next token; return where it begins."""
        at = self._at
        self._at += len(self._text.push(token))
        return at


class Columns:
    """The tokens of a completion, each a value in every one of its columns, as the items of JSON arrays.

    `offset` is called with each token, in order, and returns where its text begins.
    """

    NAMES = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")

    def __init__(self, tokenizer: Tokenizer, offset: Callable[[int], int], as_ids: bool = False) -> None:
        self._name, self._offset = TokenNames(tokenizer, as_ids), offset
        self._columns = self._none()

    def add(self, each: TokenLogprob) -> None:
        """Add one token."""
        top: dict[str, float] = {}
        for token, logprob in each.top:  # most probable first: of two tokens with one text the first stays
            top.setdefault(self._name(token), max(logprob, LEAST))
        text, own = self._name(each.token_id), max(each.logprob, LEAST)
        top.setdefault(text, own)  # always included
        self._row(each.token_id, text, own, top)

    def add_first(self, token: int) -> None:
        """Add the first token of a prompt, which nothing before it predicts."""
        self._row(token, self._name(token), None, None)

    def clear(self) -> None:
        """Discard the items written so far; offsets go on."""
        self._columns = self._none()

    def json(self, before: Columns | None = None) -> list[bytes | bytearray]:
        """Return the pieces of the answer's `logprobs` object, the tokens of `before` first."""
        pieces: list[bytes | bytearray] = []
        of_before = self._none() if before is None else before._columns
        for name, first, column in zip(self.NAMES, of_before, self._columns, strict=True):
            pieces += [b'%b"%b":[' % (b"," if pieces else b"{", name), first]
            pieces += [b"," if first and column else b"", column, b"]"]
        return [*pieces, b"}"]

    def _none(self) -> tuple[bytearray, ...]:
        return tuple(bytearray() for _ in self.NAMES)

    def _row(self, token: int, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        for column, value in zip(self._columns, (text, logprob, top, self._offset(token)), strict=True):
            _append(column, encode(value))


def _append(items: bytearray, item: bytes) -> None:
    if items:
        items += b","
    items += item
