"""Many requests with drafts, and nothing is left of them: blocks of the draft model, indexes, matches, past texts.

The draft model is a real one but for its arithmetic: its logits are random. `make soak-speculation` runs 100,000
requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import torch

from attar.model.decoder import Decoder
from attar.protocol.request import SamplingParams
from attar.sampling.drafters.drafter import DraftRequest
from attar.sampling.drafters.first_of import FirstOf
from attar.sampling.drafters.model import ModelDrafter
from attar.sampling.drafters.past_texts import TOTAL
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import ScheduledTokens

REQUESTS = int(os.environ.get("TEST_DRAFT_REQUESTS", "300"))
VOCABULARY = 97
TOGETHER = 4
BLOCKS = 3  # of the draft model: fewer than its sequences want


class Guessing(ModelDrafter):
    """A draft model of random logits: its blocks and its account of tokens are the real ones."""

    def _run(self, chunks: list[ScheduledTokens]) -> torch.Tensor:
        for chunk in chunks:
            assert len(chunk.sequence.blocks) >= self.pool.needed(chunk.start + chunk.rows), "rows without blocks"
            chunk.sequence.computed += chunk.rows
        return torch.randn(sum(chunk.samples for chunk in chunks), VOCABULARY)


def test_nothing_is_left_of_requests_that_were_drafted_for(tiny_decoder: Callable[..., Decoder]) -> None:
    draw = random.Random(25)
    model = Guessing(tiny_decoder(layers=1, vocab=VOCABULARY), 256, TOGETHER, VOCABULARY, blocks=BLOCKS)
    drafter = FirstOf(model)
    running: list[Sequence] = []
    started = matched = drafted = 0
    params = SamplingParams(temperature=0)
    while started < REQUESTS or running:
        while started < REQUESTS and len(running) < TOGETHER and draw.random() < 0.7:
            prompt = [draw.randrange(8) for _ in range(draw.randrange(1, 60))]
            salt = draw.choice((b"", b"a", b"b"))
            running.append(Sequence(id=f"{started}", prompt_ids=prompt, max_tokens=40, cache_salt=salt))
            started += 1
        asked = []
        for sequence in running:
            request = DraftRequest(sequence, Sampler(params, sequence.tokens, VOCABULARY), draw.randrange(1, 5))
            if drafter.matched(request).tokens:
                matched += 1
                if draw.random() < 0.5:
                    drafter.refuse(sequence)
            if draw.random() < 0.8:
                asked.append(request)
        for request, draft in zip(asked, drafter.draft(asked), strict=True):
            drafted += len(draft.tokens)
            assert len(draft.tokens) <= request.limit
            right = draft.tokens[: draw.randrange(len(draft.tokens) + 1)]
            request.sequence.tokens.extend((*right, draw.randrange(8)))
        model.pool.check()
        assert len(drafter.first._past) <= TOTAL
        for sequence in [each for each in running if draw.random() < 0.15]:
            running.remove(sequence)
            drafter.forget(sequence)
    assert model.pool.free == model.pool.total == BLOCKS
    kept = model._readings, drafter._matches, drafter.first._known, drafter.first._past._places
    assert not any(kept)
    assert min(matched, drafted) > REQUESTS
