"""Lookahead drafts: what is drafted is what the target said behind earlier drafts, against a plain oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from attar.kernels import dispatch
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.protocol.messages import Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling.drafters import lookahead
from attar.sampling.drafters.drafter import DraftRequest
from attar.sampling.drafters.lookahead import LookaheadDrafter
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence as Tokens
from tests.engine.conftest import make_engine, run

PARAMS = SamplingParams(max_tokens=40, temperature=0)


def ask(drafter: LookaheadDrafter, sequence: Tokens, limit: int) -> tuple[tuple[int, ...], int]:
    ((tokens, evidence, *_),) = drafter.draft([DraftRequest(sequence, Sampler(PARAMS, sequence.tokens, 97), limit)])
    return tokens, evidence


def of(*tokens: int) -> Tokens:
    return Tokens(id="a", prompt_ids=tokens, max_tokens=100)


def test_the_iterate_is_drafted_at_its_place() -> None:
    """Behind 1 2 with drafts 7 8 9 the target says 3 4 5 6: 3 stays, and 5 6 are guesses of the tokens behind 4."""
    drafter, sequence = LookaheadDrafter(), of(1, 2)
    assert ask(drafter, sequence, 2) == ((2, 1), lookahead.GUESSED)
    drafter.tried(sequence, (7, 8, 9), (3, 4, 5, 6))
    sequence.tokens.append(3)
    assert ask(drafter, sequence, 8) == ((4, 5), lookahead.GUESSED)
    assert ask(drafter, sequence, 1) == ((4,), lookahead.GUESSED)


def test_ngrams_are_those_of_chain_and_iterate() -> None:
    drafter, sequence = LookaheadDrafter(), of(1, 2)
    drafter.tried(sequence, (7, 8), (3, 4, 5))
    pool = drafter._trails[sequence].pool
    assert dict(pool) == {1: [(2, 3)], 2: [(7, 4)], 7: [(8, 5)]}
    sequence.tokens.append(3)
    assert ask(drafter, sequence, 2)[0] == (4, 5)  # sampled behind 7 and 8
    drafter.tried(sequence, (4, 5), (30, 40, 50))
    assert pool[7][-1] == (4, 40)  # 7 led to 4 in the last iterate, and 40 came behind 4 in this
    assert pool[8][-1] == (5, 50)
    assert pool[3] == [(4, 40)]


def test_the_newest_ngram_of_the_last_token_is_drafted_and_what_follows() -> None:
    drafter, sequence = LookaheadDrafter(), of(1, 2)
    drafter.tried(sequence, (7, 8), (3, 4, 5))
    for first, pair in ((3, (10, 11)), (3, (12, 13)), (3, (14, 15)), (15, (16, 17))):
        drafter._trails[sequence].learn(first, pair)
    sequence.tokens.append(3)
    assert drafter._trails[sequence].pool[3] == [(12, 13), (14, 15)]  # two are kept
    assert ask(drafter, sequence, 3) == ((14, 15, 16), lookahead.POOLED)
    drafter.forget(sequence)
    assert not drafter._trails


def test_a_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "POOL", 3)
    drafter, sequence = LookaheadDrafter(), of(1, 2)
    drafter.tried(sequence, (7, 8, 9, 10), (3, 4, 5, 6, 11))
    assert list(drafter._trails[sequence].pool) == [7, 8, 9]


def test_sampled_tokens_are_those_of_the_model(tiny_decoder: Callable[..., Decoder]) -> None:
    """Behind every row of a step, right and wrong ones, by the whole model run anew on text and drafts."""
    decoder = tiny_decoder(store=dispatch.store("exact"))
    told: list[tuple[list[int], tuple[int, ...], tuple[int, ...]]] = []

    class Told(LookaheadDrafter):
        def tried(self, sequence: Tokens, drafts: Sequence[int], sampled: Sequence[int]) -> None:
            told.append((list(sequence.tokens), tuple(drafts), tuple(sampled)))
            super().tried(sequence, drafts, sampled)

    made = make_engine(
        decoder, limits=SchedulerConfig(max_step_tokens=48, max_drafts=16), drafter=Told(), draft_tokens=3, context=64
    )
    run(made, [Submit("a", (5, 6, 7), PARAMS)])
    assert made.speculation is not None
    assert made.speculation.errors == 0
    assert made.speculation.accepted > 0
    assert len(told) > 5
    assert {len(drafts) for _, drafts, _ in told} >= {2, 3}
    for tokens, drafts, sampled in told:
        rows = len(tokens) + len(drafts)
        found = decoder.forward(torch.tensor([*tokens, *drafts]), ForwardBatch((rows,), 64))
        assert tuple(found[len(tokens) - 1 :].argmax(-1).tolist()) == sampled
