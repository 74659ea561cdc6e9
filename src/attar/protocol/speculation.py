"""Names and bounds of speculative decoding that server and engine share."""

from __future__ import annotations

from attar.errors import UserError

DRAFTERS = ("suffix", "lookahead")  # any other name is a path: of a draft model, or of a head
MATCH_FIRST = "suffix,"  # before such a path: it is asked where no long match is found
MAX_DRAFT_TOKENS = 16  # drafts of one sequence in a step
MAX_STEP_DRAFTS = 16  # drafts of all sequences in a step: memory is planned for their logits
FORCED_STEP_DRAFTS = 7  # the same on a CPU without a drafter: tokens that constraints force


def check_draft(name: str | None, tokens: int | None) -> None:
    """Check a drafter, one of `DRAFTERS` or a model, None for none, and its drafts in a step, None for what pays.

    Raises ValueError for a number out of range, or a number without a drafter.
    """
    if tokens is not None and name is None:
        raise UserError("option_unused", "draft-tokens has no effect without a drafter: set --draft")
    if tokens is not None and not 0 <= tokens <= MAX_DRAFT_TOKENS:
        raise UserError("option_out_of_range", f"draft-tokens is 0 to {MAX_DRAFT_TOKENS}, not {tokens}")
