"""Names and bounds of speculative decoding that server and engine share."""

from __future__ import annotations

from attar.errors import UserError

DRAFTERS = ("suffix", "lookahead")  # any other name is a path: of a draft model, or of a head
MATCH_FIRST = "suffix,"  # before such a path: it is asked where no long match is found
MAX_DRAFT_TOKENS = 16  # drafts of one sequence in a step
MAX_STEP_DRAFTS = 16  # drafts of all sequences in a step: memory is planned for their logits
TREES = "trees are made by heads of Medusa, EAGLE and EAGLE-3"
FORCED_STEP_DRAFTS = 7  # the same on a CPU without a drafter: tokens that constraints force


def check_draft(name: str | None, tokens: int | None, tree: int | None = None) -> None:
    """Check a drafter, one of `DRAFTERS` or a model, None for none, and its drafts in a step, None for what pays.

    `tree` is the number of nodes of a tree of drafts, None for chains.
    Raises ValueError for a number out of range, a number without a drafter, and a tree of a drafter that makes none.
    """
    if tokens is not None and name is None:
        raise UserError("option_unused", "draft-tokens has no effect without a drafter: set --draft")
    if tokens is not None and not 0 <= tokens <= MAX_DRAFT_TOKENS:
        raise UserError("option_out_of_range", f"draft-tokens is 0 to {MAX_DRAFT_TOKENS}, not {tokens}")
    if tree is None:
        return
    if name is None:
        raise UserError("option_unused", "draft-tree has no effect without a drafter: set --draft")
    if not 2 <= tree <= MAX_DRAFT_TOKENS:
        raise UserError("option_out_of_range", f"draft-tree is 2 to {MAX_DRAFT_TOKENS} nodes, not {tree}")
    if tokens is not None:
        raise UserError("option_conflict", "draft-tree has as many drafts as nodes: leave draft-tokens out")
    if name in DRAFTERS:
        raise UserError("option_conflict", f"draft {name} makes chains: {TREES}")
