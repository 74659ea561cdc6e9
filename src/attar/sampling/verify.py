"""The verifier: which tokens of a step with drafts belong to the text.

A sequence's step has the row of its last token and one more behind each draft. Behind every row the target's own token
is sampled, exactly as without drafts: logits, penalties, masks and noise of row j are those of plain decoding if all
drafts up to j are right. The walk goes on while the token equals the next draft. Its last token, whatever it is, is the
target's own, so there is no rule for rejected drafts and no bonus token. By induction a text is the same with any
drafts, or none, at every temperature. In a tree of drafts the walk goes to the child that equals the token.

This is the match rule. The ratio test of Leviathan et al. (arXiv 2211.17192) accepts more drafts, but there a text
depends on what was drafted, and with it on the load.

One exception is a request's own: drafts that it trusts stay, whatever the target draws in their place.

A row behind a wrong draft is never reached, and with a large vocabulary a draw costs time. So rows are drawn by depth
(`draw_reached`): the first of all sequences, then the second of those whose first was their draft, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attar.sampling.sampler import BadLogits, SampledToken, Sampler, sample
from attar.scheduling.draft_tree import child

Drawn = SampledToken | BadLogits | None  # outcome of a row: None where its sampling raised


def confirmed(
    drafts: Sequence[int], draws: Sequence[Drawn], parents: Sequence[int] = (), trusted: int = 0
) -> list[Drawn]:
    """Return the outcomes that count, in order: up to the first token that is no draft of its place, or no token.

    draws: those of the row before the first draft and of each draft's own row, one more than drafts. parents: the row
    that each draft of a tree follows (`scheduling/draft_tree.py`); none for a chain. The first `trusted` drafts, of a
    chain, are right whatever was drawn.
    """
    assert len(draws) == len(drafts) + 1
    kept: list[Drawn] = []
    row: int | None = 0
    while row is not None:
        draw = draws[row]
        if row < trusted and isinstance(draw, SampledToken):
            draw = SampledToken(drafts[row], None)
        kept.append(draw)
        row = child(drafts, parents, row, draw.token_id) if isinstance(draw, SampledToken) else None
    return kept


def draw_reached(logits: Tensor, samplers: Sequence[Sampler], chains: Sequence[tuple[int, ...] | None]) -> list[Drawn]:
    """Draw the rows of chains of drafts that `confirmed` reaches; the others are None.

    logits: [B, V], on a CPU, one row a sampler: those of each chain side by side, one more than its drafts. chains: the
    drafts of each, or None for a single row that is drawn in any case. Bits are those of `sample` of all rows.
    """
    draws: list[Drawn] = [None] * len(samplers)
    if all(sampler.plain for sampler in samplers):  # one look at each logit costs little
        return list(sample(logits, samplers))
    reached = list[tuple[int, tuple[int, ...]]]()  # rows, and the drafts behind each
    first = 0
    for chain in chains:
        reached.append((first, chain or ()))
        first += 1 + len(chain or ())
    assert first == len(samplers)
    while reached:
        rows = [row for row, _ in reached]
        few = logits if len(rows) == len(logits) else logits[rows]
        for row, draw in zip(rows, sample(few, [samplers[row] for row in rows]), strict=True):
            draws[row] = draw
        reached = [
            (row + 1, left[1:])
            for row, left in reached
            if left and isinstance(drawn := draws[row], SampledToken) and drawn.token_id == left[0]
        ]
    return draws
