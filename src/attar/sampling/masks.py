"""Masks of grammars: the tokens that may come next in one output, as packed bits.

A mask is the state of a grammar behind an output's tokens. Grammars are compiled once: later outputs copy the state at
the beginning, which takes microseconds. Copies share what their grammar's lexer has learned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attar.errors import UserError
from attar.faults import point
from attar.protocol.grammar import Grammar
from attar.sampling.sampler import Mask
from attar.text.grammars import Vocabulary, mask, matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BITS = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int32)
KEPT = 16  # grammars
KEPT_BYTES = 128 << 20  # of compiled grammars, by `compiled_bytes`: room for one of the largest text


def compiled_bytes(grammar: Grammar) -> int:
    """Return an upper estimate of the memory of a compiled grammar; llguidance does not tell.

    Measured on MaskBench, enumerations and choices: 10 to 80 bytes for each of the text, and up to 100 KB besides. What
    its lexer learns along answers comes on top, and has a limit of its own (`grammars.LIMITS`).
    """
    return (128 << 10) + 100 * len(grammar.text.encode())


class GrammarMask:
    """A grammar along one output, called `name`. `matcher` is its state at the beginning, and becomes its own."""

    def __init__(self, matcher: LLMatcher, size: int, name: str = "") -> None:
        self.name = name
        self._matcher, self._words = matcher, -(-size // 32)
        self._walk: tuple[tuple[int, ...], LLMatcher] | None = None  # the last drafts, and a copy that took them

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor:
        """Return the tokens that may come next, behind `drafts` where there are some.

        They are bits of int32 [ceil(V/32)], the lowest first, on the host. None is set where the matcher has passed one
        of its limits.
        """
        point("grammar.mask", self.name)
        bits = mask(self._behind(tuple(drafts)) if drafts else self._matcher)
        if bits is None:
            return torch.zeros(self._words, dtype=torch.int32)
        return torch.frombuffer(bytearray(bits), dtype=torch.int32)[: self._words]

    def _behind(self, drafts: tuple[int, ...]) -> LLMatcher:
        """Return a copy of the matcher behind drafts. Rows of a step ask one after another, each for one draft more."""
        known, found = self._walk or ((), self._matcher.deep_copy())
        if drafts[: len(known)] != known:
            known, found = (), self._matcher.deep_copy()
        found.consume_tokens(list(drafts[len(known) :]))
        self._walk = drafts, found
        return found

    def forced(self) -> bytes:
        """Return the bytes that begin every text that may follow; a token that no text shows is `\\xff[ID]`."""
        return self._matcher.deep_copy().compute_ff_bytes()

    def consume(self, token_id: int) -> None:
        """Take the next token."""
        point("grammar.consume", self.name)
        self._walk = None
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        """True where the text is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failed(self) -> bool:
        """True where the matcher has passed one of its limits: it allows nothing any more."""
        return self._matcher.is_error()


class AllowedMask:
    """A mask that allows the same `tokens` at every place of an output, for logits of `size` columns; with `inner`,
    those of them that this mask allows. Raises ValueError for a token beyond the logits."""

    def __init__(self, tokens: Iterable[int], size: int, inner: Mask | None = None) -> None:
        self._inner = inner
        self._bits = torch.zeros(-(-size // 32), dtype=torch.int32)
        for token in tokens:
            if token >= size:
                message = f"token {token} of allowed_token_ids is not in the vocabulary of {size}"
                raise UserError("token_out_of_vocabulary", message)
            self._bits[token // 32] |= _BITS[token % 32]

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor:
        """Return the tokens that may come next: bits as `GrammarMask.allowed`."""
        return self._bits if self._inner is None else self._bits & self._inner.allowed(drafts)

    def forced(self) -> bytes:
        """Return the bytes that begin every text that may follow, as the mask inside tells."""
        return b"" if self._inner is None else self._inner.forced()

    def consume(self, token_id: int) -> None:
        """Take the next token."""
        if self._inner is not None:
            self._inner.consume(token_id)

    @property
    def finished(self) -> bool:
        """True where nothing can follow."""
        return self._inner is not None and self._inner.finished

    @property
    def failed(self) -> bool:
        """True where the mask inside has passed one of its limits."""
        return self._inner is not None and self._inner.failed


class GrammarMasks:
    """Makes masks for logits of `size` columns. `vocabulary` is called once, for the first.

    Compiled grammars are kept for later requests of the same salt, up to `KEPT` of them and `KEPT_BYTES`.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], size: int) -> None:
        self._make, self._size = vocabulary, size
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()

    def mask(self, grammar: Grammar, salt: bytes = b"", name: str = "") -> GrammarMask:
        """Return the mask of an output called `name` at its beginning. Raises GrammarError for a grammar that cannot be
        compiled: it must be proven (`text/grammar_proof.py`)."""
        point("grammar.compile", name)
        if self._vocabulary is None:
            self._vocabulary = self._make()
        key = grammar.digest(salt)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = matcher(self._vocabulary, grammar), compiled_bytes(grammar)
        self._known.move_to_end(key)  # the last to be forgotten
        found, _ = known
        while len(self._known) > KEPT or sum(size for _, size in self._known.values()) > KEPT_BYTES:
            self._known.popitem(last=False)
        return GrammarMask(found.deep_copy(), self._size, name)
