"""The rows of a step with trees of drafts, as the model runs them: each branch is a sequence of its own.

A branch has the sequence's block table up to the first draft's block, and blocks of its own behind it
(`scheduling/draft_tree.py`). Rows that it shares with others are run once; their keys and values are written to its
blocks too. A step may run in pieces: rows of later ones find what earlier ones have written.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

import torch

from attar.model.cache import Repeated
from attar.scheduling import draft_tree
from attar.scheduling.step_plan import Copy, ScheduledTokens


class Rows(NamedTuple):
    """Rows of a call in one table: `rows` of them from slot `start` on, a position where nothing was evicted."""

    chunk: ScheduledTokens
    blocks: list[int]
    sliding: list[int]  # of layers with a sliding window, where those have blocks of their own
    start: int
    rows: int


def rows_of(chunks: List[ScheduledTokens], size: int) -> tuple[list[Rows], Repeated | None]:
    """Return the rows of chunks, in order, in blocks of `size` slots, and those that several branches read."""
    found: list[Rows] = []
    rows: list[int] = []
    slots: list[int] = []
    sliding: list[int] = []
    at = 0
    for chunk in chunks:
        if chunk.tree is None:
            found.append(Rows(chunk, chunk.sequence.blocks, chunk.sequence.sliding, chunk.slot, chunk.rows))
        else:
            own = _of_tree(chunk, chunk.tree, size)
            found += own.parts
            rows += [at + row for row in own.repeated]
            slots += own.slots
            sliding += own.sliding
        at += chunk.rows
    if not rows:
        return found, None
    return found, Repeated(torch.tensor(rows), torch.tensor(slots), torch.tensor(sliding) if sliding else None)


class _Tree(NamedTuple):
    parts: list[Rows]
    repeated: list[int]
    slots: list[int]
    sliding: list[int]


def _of_tree(chunk: ScheduledTokens, tree: draft_tree.DraftTree, size: int) -> _Tree:
    made = _Tree([], [], [], [])
    own_sliding = tree.sliding or ((),) * len(tree.blocks)
    last = len(chunk.sequence.tokens) - 1  # the position of row 0
    first, depths = chunk.start - last, draft_tree.depths(tree.parents)
    here = range(first, first + chunk.rows)
    for rows, own, beside in zip(
        draft_tree.branches(tree.parents), ((), *tree.blocks), ((), *own_sliding), strict=True
    ):
        table = [*chunk.sequence.blocks[: tree.first], *own] if own else chunk.sequence.blocks
        sliding = [*chunk.sequence.sliding[: tree.first], *beside] if beside else chunk.sequence.sliding
        if inside := range(max(rows.start, here.start), min(rows.stop, here.stop)):
            made.parts.append(Rows(chunk, table, sliding, last + depths[inside.start], len(inside)))
        for row in draft_tree.ancestors(tree.parents, rows.start) if own else ():
            position = last + depths[row]
            if row in here and position >= tree.first * size:
                made.repeated.append(row - first)
                made.slots.append(table[position // size] * size + position % size)
                if sliding:
                    made.sliding.append(sliding[position // size] * size + position % size)
    return made


def copies_of(chunks: List[ScheduledTokens], size: int, sliding: bool = False) -> list[Copy]:
    """Return the copies that branches begin with: of the slots before the first draft in its block. With `sliding` they
    are of layers with a sliding window."""
    found: list[Copy] = []
    for chunk in chunks:
        known = len(chunk.sequence.tokens)
        if chunk.tree is not None and chunk.start < known and known % size:
            table, others = chunk.sequence.blocks, chunk.tree.blocks
            if sliding:
                table, others = chunk.sequence.sliding, chunk.tree.sliding
            found += [Copy(table[chunk.tree.first], blocks[0], known % size, chunk.sequence) for blocks in others]
    return found
