"""Forced bytes become the tokens that the tokenizer would write, and the last of them counts by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from attar.protocol.grammar import Grammar
from attar.protocol.request import SamplingParams
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, DraftRequest
from attar.sampling.drafters.forced import ForcedDrafter
from attar.sampling.masks import GrammarMasks
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence as Tokens
from attar.text.grammars import Vocabulary
from attar.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo: Any) -> Tokenizer:
    return Tokenizer.load(demo)


class Forcing:
    """A mask that forces given bytes, and is asked for nothing else."""

    finished = failed = False

    def __init__(self, given: bytes) -> None:
        self.given = given

    def forced(self) -> bytes:
        return self.given

    def allowed(self, drafts: Sequence[int] = ()) -> torch.Tensor:
        raise AssertionError

    def consume(self, token_id: int) -> None:
        raise AssertionError


def draft(tokenizer: Tokenizer, before: Sequence[int], forced: bytes | None, limit: int = 50) -> Draft:
    mask = None if forced is None else Forcing(forced)
    sampler = Sampler(SamplingParams(), [], tokenizer.vocab_size, mask=mask)
    sequence = Tokens(id="a", prompt_ids=tuple(before), max_tokens=50)
    return ForcedDrafter(tokenizer).draft([DraftRequest(sequence, sampler, limit)])[0]


@pytest.mark.parametrize("text", ['{"name": "', " of the morning, and", "é\n", "ab"])
def test_the_spelling_is_the_tokenizers_behind_what_is_there(tokenizer: Tokenizer, text: str) -> None:
    before = tokenizer.encode("It was the best.")
    whole = tokenizer.encode("It was the best." + text)
    assert whole[: len(before)] == before
    found = draft(tokenizer, before, text.encode())
    assert list(found.tokens) == whole[len(before) :]
    assert found.forced == len(found.tokens)
    short = draft(tokenizer, before, text.encode(), 1)
    assert short.tokens == found.tokens[:1]
    assert short.forced == found.forced  # the first of several is not the last


def test_a_seam_that_no_tokenizer_makes_does_not_change_what_is_there(tokenizer: Tokenizer) -> None:
    """The model has written `mor`, and the run `ning` is spelled by itself."""
    merged = tokenizer.encode("a morning")
    before = tokenizer.encode("a mor")
    assert merged[: len(before)] != before
    found = draft(tokenizer, before, b"ning")
    assert found.tokens
    assert b"".join(map(tokenizer.id_to_bytes, found.tokens)) == b"ning"


def test_tokens_that_no_text_shows_stand_for_themselves(tokenizer: Tokenizer) -> None:
    (end,) = list(tokenizer.eos_ids)[:1]
    found = draft(tokenizer, tokenizer.encode("a"), b" b\xff[%d] c" % end)
    own = tokenizer.encode("a b")[len(tokenizer.encode("a")) :]
    assert list(found.tokens[: len(own) + 1]) == [*own, end]
    assert b"".join(map(tokenizer.id_to_bytes, found.tokens[len(own) + 1 :])) == b" c"


def test_unfinished_characters_are_left_and_a_run_within_one_is_not_spelled(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode("It")
    cut = draft(tokenizer, before, b"ab\xc3")
    assert cut.tokens == draft(tokenizer, before, b"ab").tokens != ()
    assert draft(tokenizer, before, b"\xa9ab") == Draft()


def test_where_nothing_is_forced_there_is_no_draft(tokenizer: Tokenizer) -> None:
    assert draft(tokenizer, [3], None) is NO_DRAFT
    assert draft(tokenizer, [3], b"") is NO_DRAFT


def test_a_mask_forces_what_every_text_begins_with(tokenizer: Tokenizer) -> None:
    vocab = tokenizer.vocab_size
    masks = GrammarMasks(lambda: Vocabulary.of(tokenizer, vocab, tokenizer.eos_ids), vocab)
    assert masks.mask(Grammar.json_schema(True)).forced() == b""
    mask = masks.mask(Grammar("regex", '{"kind": "aa[bc]"}'.replace("{", r"\{").replace("}", r"\}")))
    before = mask.allowed()
    assert mask.forced() == b'{"kind": "aa'
    assert mask.allowed().equal(before)
    tokens = tokenizer.encode('{"kind": "aab"}')
    behind = [mask.allowed(tokens[:count]) for count in range(len(tokens))]
    # Asked in any order, and again: rows of a step may be sampled one by one.
    for count in (5, 2, 3, 0, 4):
        assert mask.allowed(tokens[:count]).equal(behind[count])
    for count, token in enumerate(tokens):
        assert mask.allowed().equal(behind[count])
        assert not mask.allowed([token ^ 1, token]).any()  # a draft that the grammar forbids
        mask.consume(token)
    assert mask.finished
    assert mask.forced() == b""
