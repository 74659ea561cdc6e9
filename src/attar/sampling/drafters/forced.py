"""Drafts of what a constraint forces: where only one text can follow, its tokens are known without a model.

Compressed finite-state machines skip the model there (Zheng et al., "Fast JSON Decoding for Local LLMs with Compressed
Finite State Machine", LMSYS 2024). But the same text has several spellings, and what the model writes next depends on
the one that it reads: skipping changes answers. As drafts the tokens are a guess of the spelling, and the masked draw
decides, as it does without them.

The spelling is the tokenizer's own, behind the last tokens of the sequence. The last token of the run may be a longer
one that goes on past it, so it is right less often than those before.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence

from attar.sampling.drafters.drafter import NO_DRAFT, Draft, DraftRequest
from attar.scheduling.sequence import Sequence as Tokens
from attar.text.tokenizer import Tokenizer

SEAM = 8  # tokens before the run, behind which it is spelled
NEUTRAL = "\n"  # a text behind which the run is spelled where no tokenizer would spell the seam like that
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")  # a token that no text shows, as llguidance writes it among bytes


class ForcedDrafter:
    """Drafts the tokens of the bytes that a request's constraint forces, as `tokenizer` spells them."""

    name, costly = "forced", False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def forget(self, sequence: Tokens) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""

    def _draft(self, request: DraftRequest) -> Draft:
        mask = request.sampler.mask
        if mask is None or not (forced := mask.forced()):
            return NO_DRAFT
        tokens = tuple(self._spelled(request.sequence.tokens[-SEAM:], forced))
        return Draft(tokens[: request.limit], forced=len(tokens))

    def _spelled(self, before: Sequence[int], forced: bytes) -> Iterator[int]:
        """Yield the tokens of bytes behind other tokens, up to an unfinished character."""
        for at, piece in enumerate(_SPECIAL.split(forced)):
            if at % 2:
                yield int(piece)
                before = ()
                continue
            try:
                text = getincrementaldecoder("utf-8")().decode(piece)
            except UnicodeDecodeError:  # it begins within a character
                return
            yield from self._behind(before, text)
            if len(text.encode()) < len(piece):
                return

    def _behind(self, before: Sequence[int], text: str) -> list[int]:
        encode, special = self._tokenizer.encode, self._tokenizer.special_ids
        start = max((at for at, token in enumerate(before, 1) if token in special or token < 0), default=0)
        shown = b"".join(map(self._tokenizer.id_to_bytes, before[start:])).decode("utf-8", "ignore")
        for context in (shown, NEUTRAL):
            known = encode(context, add_special_tokens=False)
            whole = encode(context + text, add_special_tokens=False)
            if whole[: len(known)] == known:
                return whole[len(known) :]
        return []
