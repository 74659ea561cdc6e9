"""Queries of the rows of a prompt that rank its keys, until eviction has used them.

They are kept by position: a step that is run again, or in pieces, writes the same ones once more. Where all rows of a
prompt count, they are summed tile by tile. A tile is added once, when its last row is there. So which keys stay
depends on the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kv import moving, ranking
from attar.kv.eviction import NEVER, ONCE, Eviction
from attar.kv.pages import PagedKV
from attar.model.config import Rope
from attar.model.decoder import Decoder
from attar.model.rope import far_rotation
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import Evicted, ScheduledTokens

TILE = 64  # rows whose weights are summed together
FUTURE = 512  # positions behind a prompt that Expected Attention looks at


def watched(chunk: ScheduledTokens) -> range:
    """Return the positions of a chunk's rows that rank the keys of its prompt."""
    eviction, sequence = chunk.sequence.eviction, chunk.sequence
    if eviction is None or sequence.dropped:
        return range(0)
    rows = eviction.watched(sequence.prompt)
    return range(max(rows.start, chunk.start), min(rows.stop, chunk.start + chunk.rows))


@dataclass(eq=False)
class _Seen:
    """Queries of rows, [layers, w, H, D]; where tiles are summed, those of the present tile."""

    queries: Tensor
    sums: Tensor | None = None  # float32 [layers, G, prompt], of the tiles before
    tiles: int = 0  # that are summed


class Watched:
    """The queries of `decoder`'s sequences over `pages` whose prompts are being computed."""

    def __init__(self, decoder: Decoder, pages: List[PagedKV]) -> None:
        self.decoder, self.pages = decoder, pages
        self.layers = range(len(pages))
        self._seen: dict[Sequence, _Seen] = {}

    def rows(self, chunks: List[ScheduledTokens]) -> Tensor | None:
        """Return the rows of a step, counted from its first, whose queries `take` is to be given; None where none."""
        over = [s for s in self._seen if s.status in (Status.PREEMPTED, Status.ENDED) or s.computed > s.prompt]
        for sequence in over:
            del self._seen[sequence]
        found, at = [], 0
        for chunk in chunks:
            found += [at + row - chunk.start for row in watched(chunk)]
            at += chunk.rows
        return torch.tensor(found) if found else None

    def take(self, chunks: List[ScheduledTokens], queries: dict[int, Tensor]) -> None:
        """Take the queries [M, H, D] of these rows, by layer, once their keys are written."""
        whole, at = torch.stack([queries[layer] for layer in range(len(queries))]), 0
        for chunk in chunks:
            if not (rows := watched(chunk)):
                continue
            sequence, eviction = chunk.sequence, chunk.sequence.eviction
            assert eviction is not None
            own, at = whole[:, at : at + len(rows)], at + len(rows)
            if ONCE[eviction.policy] == NEVER:
                self._add(sequence, rows, own)
                continue
            place = eviction.watched(sequence.prompt)
            if sequence not in self._seen:
                shape = len(own), len(place), *own.shape[2:]
                self._seen[sequence] = _Seen(own.new_zeros(shape))
            self._seen[sequence].queries[:, rows.start - place.start : rows.stop - place.start] = own

    def _add(self, sequence: Sequence, rows: range, queries: Tensor) -> None:
        """Sum the weights of those tiles that are complete with these rows."""
        if sequence not in self._seen:
            sums = torch.zeros(len(queries), self.pages[0].kv_heads, sequence.prompt)
            self._seen[sequence] = _Seen(queries.new_zeros(len(queries), TILE, *queries.shape[2:]), sums)
        seen = self._seen[sequence]
        assert seen.sums is not None
        for first in range(rows.start - rows.start % TILE, rows.stop, TILE):
            end = min(first + TILE, sequence.prompt)
            if first // TILE != seen.tiles:
                assert first // TILE < seen.tiles, "rows of a tile are missing"
                continue
            here = range(max(rows.start, first), min(rows.stop, end))
            own = queries[:, here.start - rows.start : here.stop - rows.start]
            seen.queries[:, here.start - first : here.stop - first] = own
            if here.stop == end:
                found = [
                    self._weights(sequence, layer, seen.queries[layer, : end - first], end) for layer in self.layers
                ]
                seen.sums[:, :, :end] += torch.stack(found)  # all or none
                seen.tiles += 1

    def _weights(self, sequence: Sequence, layer: int, queries: Tensor, end: int) -> Tensor:
        """Return the weights [G, end] that the rows before `end` with these queries [w, H, D] give each key, summed."""
        pages, form = self.pages[layer], self.decoder.blocks[layer].attention.form
        keys = moving.read_keys(pages, sequence.blocks[: -(-end // pages.block)], end)
        return ranking.weights(moving.plain_queries(pages, queries), keys, form.scale, form.soft_cap).sum((1, 2))

    def evict(self, evicted: Evicted, context: int) -> None:
        """Fill the targets of an eviction with what each head keeps; `context` is the model's."""
        sequence, eviction, seen = evicted.sequence, evicted.sequence.eviction, self._seen[evicted.sequence]
        assert eviction is not None
        for layer, pages in enumerate(self.pages):
            one = self.decoder.blocks[layer].attention
            form = one.form
            keys, values = moving.read(pages, evicted.sources, sequence.prompt)
            queries = moving.plain_queries(pages, seen.queries[layer])
            if seen.sums is not None:
                kept = ranking.h2o(seen.sums[layer], eviction.budget)
            elif eviction.policy == "snapkv":
                kept = ranking.snapkv(queries, keys, eviction.budget, form.scale, form.soft_cap)
            else:
                before, turn = _turned_back(queries, one.rope, sequence, eviction, context)
                last = ranking.Seen.by(queries[-ranking.ROWS :], keys, form.scale, form.soft_cap)
                scores = ranking.expected_scores(before, keys, values, turn, form.scale)
                kept = ranking.expected(scores, last, eviction.budget)
            moving.keep(pages, evicted.sources, evicted.targets, kept)


def _turned_back(
    queries: Tensor, rope: Rope | None, sequence: Sequence, eviction: Eviction, context: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a prompt's last queries before rotation, and the mean rotation of the positions behind it."""
    if rope is None:
        return queries, (torch.empty(0), torch.empty(0))
    rows = eviction.watched(sequence.prompt)
    cos, sin = far_rotation(rope, torch.arange(rows.start, rows.stop + FUTURE), context)
    cos, sin = cos / rope.attention_factor, sin / rope.attention_factor
    own, to_come = slice(0, len(rows)), slice(len(rows), None)
    half = cos.shape[1]
    a, b = queries[..., :half].float(), queries[..., half : 2 * half].float()
    c, s = cos[own, None], sin[own, None]
    before = torch.cat((a * c + b * s, b * c - a * s, queries[..., 2 * half :].float()), -1)
    return before, (cos[to_come].mean(0), sin[to_come].mean(0))
