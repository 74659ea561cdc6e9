"""Names and numbers of drafts: what is refused before anything starts."""

from __future__ import annotations

import pytest

from attar.protocol.request import SamplingParams
from attar.protocol.settings import Settings
from attar.protocol.speculation import FORCED_STEP_DRAFTS, MAX_DRAFT_TOKENS, MAX_STEP_DRAFTS, check_draft
from tests.errors import user_error


@pytest.mark.parametrize("tokens", [None, 0, 3, MAX_DRAFT_TOKENS])
def test_a_known_drafter_with_a_possible_number(tokens: int | None) -> None:
    check_draft("suffix", tokens)
    assert Settings("m", "s", draft="suffix", draft_tokens=tokens).limits().max_drafts == MAX_STEP_DRAFTS


def test_without_a_drafter_there_are_no_drafts() -> None:
    check_draft(None, None)
    assert Settings("m", "s").limits().max_drafts == FORCED_STEP_DRAFTS  # of constraints
    assert Settings("m", "s", device="cuda").limits().max_drafts == 0


def test_what_is_refused() -> None:
    with user_error("option_unused"):
        check_draft(None, 3)
    for tokens in (-1, MAX_DRAFT_TOKENS + 1):
        with user_error("option_out_of_range", f"{tokens}"):
            check_draft("suffix", tokens)
        with user_error("option_out_of_range", "draft_tokens"):
            SamplingParams(draft_tokens=tokens)
