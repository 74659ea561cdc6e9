"""A known text as drafts: the share that is right is the one asked for, whatever their number."""

from __future__ import annotations

import pytest

from attar.protocol.request import SamplingParams
from attar.sampling.drafters.drafter import DraftRequest
from attar.sampling.drafters.replay import ReplayDrafter
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence

PROMPT = (1, 2, 3)
TEXT = [i * 7 % 97 for i in range(4000)]


def drafted(drafter: ReplayDrafter, output: int, count: int) -> tuple[int, ...]:
    sequence = Sequence(id="a", prompt_ids=PROMPT, max_tokens=5000)
    sequence.tokens.extend(TEXT[:output])
    (draft,) = drafter.draft([DraftRequest(sequence, Sampler(SamplingParams(), PROMPT, 97), count)])
    drafter.forget(sequence)
    return draft.tokens


@pytest.mark.parametrize("right", [0.0, 0.5, 0.8, 1.0])
def test_the_share_that_is_right(right: float) -> None:
    drafter = ReplayDrafter({PROMPT: TEXT}, right)
    whole = drafted(drafter, 0, len(TEXT))
    share = sum(map(int.__eq__, whole, TEXT)) / len(TEXT)
    assert abs(share - right) < 0.03
    assert drafted(drafter, 100, 8) == whole[100:108]
    assert not drafter._known


def test_another_prompt_has_no_drafts() -> None:
    assert drafted(ReplayDrafter({(9,): TEXT}, 1.0), 0, 4) == ()
