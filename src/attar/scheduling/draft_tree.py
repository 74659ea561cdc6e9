"""Trees of drafts: several guesses for one place, as rows of one step.

Row 0 is that of a sequence's last token, and row i + 1 that of draft i. `parents[i]` is the row that draft i follows, a
smaller one; without parents each draft follows the one before, which is a chain.

In a plan a tree stands in preorder, so that it is cut into *branches*: runs of rows, each of which follows the row
before. The first branch lies in the sequence's own blocks. Each other one has blocks of its own from that of the first
draft's slot on, in which the drafts that it shares with others stand once more. So every draft stands at the slot of
its position, behind the tokens that it follows, as it does without drafts. A mask over one run of slots would need no
blocks, but sums of attention go by slot, and a draft's last bits would depend on where it stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class DraftTree(NamedTuple):
    """The shape of a planned tree, in preorder, and the blocks of its branches."""

    parents: tuple[int, ...]
    first: int  # place in the sequence's table of the block that holds the first draft's slot
    blocks: tuple[tuple[int, ...], ...]  # of each branch but the first, from that place on
    sliding: tuple[tuple[int, ...], ...] = ()  # the same of the layers with a sliding window (`sliding.py`)


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each row: 0 of row 0, and 1 of the drafts that follow it."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def depth_of(drafts: Sequence[int], parents: Sequence[int]) -> int:
    """Return the depth of the deepest draft."""
    return max(depths(parents)) if parents else len(drafts)


def child(drafts: Sequence[int], parents: Sequence[int], row: int, token: int) -> int | None:
    """Return the row of the draft that follows `row` and is this token; None where there is none."""
    if not parents:
        return row + 1 if row < len(drafts) and drafts[row] == token else None
    return next(
        (i for i, (draft, of) in enumerate(zip(drafts, parents, strict=True), 1) if of == row and draft == token), None
    )


def path(drafts: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return the rows of the tokens of an outcome: row 0, and the drafts that all of them but the last are."""
    rows = [0]
    for token in tokens[:-1]:
        row = child(drafts, parents, rows[-1], token)
        assert row is not None, "a token that was no draft"
        rows.append(row)
    return rows


def is_tree(count: int, parents: Sequence[int]) -> bool:
    """Return whether the parents are those of `count` drafts: none at all, or an earlier row for each."""
    return not parents or (len(parents) == count and all(0 <= parent <= i for i, parent in enumerate(parents)))


def in_preorder(drafts: Sequence[int], parents: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return drafts and parents in preorder, children in the order that they have; no parents where it is a chain.

    Of equal children of one row only the first stays, with the children of all.
    """
    same: list[int] = [0]  # the row that each row stands for
    children: list[dict[int, int]] = [{}]
    for draft, parent in zip(drafts, parents or range(len(drafts)), strict=True):
        of, row = same[parent], len(same)
        same.append(children[of].setdefault(draft, row))
        children.append({})
    made: list[int] = []
    behind: list[int] = []
    left = [(0, token, row) for token, row in reversed(children[0].items())]
    while left:
        parent, token, row = left.pop()
        made.append(token)
        behind.append(parent)
        left += [(len(made), each, other) for each, other in reversed(children[row].items())]
    return tuple(made), () if behind == list(range(len(made))) else tuple(behind)


def cut(
    drafts: tuple[int, ...], parents: tuple[int, ...], count: int, depth: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return at most `count` drafts, the first of those that are not deeper than `depth`; parents as in
    `in_preorder`."""
    if not parents:
        return drafts[: max(0, min(count, depth))], ()
    of, rows = depths(parents), [0]
    kept = [i for i in range(len(drafts)) if of[i + 1] <= depth][: max(0, count)]
    rows += [i + 1 for i in kept]
    number = {row: place for place, row in enumerate(rows)}
    own = [number[parents[i]] for i in kept]
    return tuple(drafts[i] for i in kept), () if own == list(range(len(own))) else tuple(own)


def branches(parents: Sequence[int]) -> list[range]:
    """Return the rows of each branch of a tree in preorder, row 0 in the first."""
    starts = [0, *(i for i, parent in enumerate(parents, 1) if parent != i - 1), len(parents) + 1]
    return [range(first, end) for first, end in itertools.pairwise(starts)]


def ancestors(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows that a row follows, the last first, row 0 among them."""
    found = []
    while row:
        row = parents[row - 1]
        found.append(row)
    return found
