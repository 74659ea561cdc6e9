"""Drafts of an EAGLE or EAGLE-3 head (`model/drafts/`): it runs ahead of the target, on hidden states of the target.

The head draws with the target's temperature, filters, penalties and noise, as a draft model does (`drafters/model.py`).
Drafts are a chain, or with `tree` a tree (below). Behind a draft the head reads its own output in the place of the
target's states; once tokens are verified, their keys and values are written anew from the true states, so no
approximation stays.

The head has a cache of its own, of a fixed number of blocks. It begins where states begin: the prefix cache keeps keys
of the target only, so of tokens that it had the head knows nothing. Rotary angles depend on distances alone, so the
first known token is position 0. Where blocks are short, the sequence that was drafted for the longest ago loses its
own, and begins anew with the next state.

*Trees* are EAGLE-2's (Li et al., arXiv 2406.16858). Of each depth the `BEAM` nodes with the largest product of the
head's probabilities are continued, each by `BEAM` candidates (`branching.py`); then the best of all nodes are taken.
Each node that is continued has blocks of its own for the keys of drafts, a copy of those of the node before, so its
bits are those of a chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.kv.schemes import KvScheme
from attar.model import cache
from attar.model.cache import BLOCK, ForwardBatch, KeptStates, KVCache
from attar.model.drafts.eagle import EagleHead
from attar.model.drafts.eagle1 import Eagle1Head
from attar.sampling.drafters.branching import candidates
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, DraftRequest
from attar.sampling.sampler import SampledToken, Sampler, sample
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.sequence import Sequence as Tokens

BEAM, DEPTH = 4, 5  # nodes continued at each depth, and depths of a tree
SCRATCH = 4 * BEAM  # blocks of two depths' nodes, two each
ROWS = 256  # states of a sequence that wait for a draft; more are read as they come


@dataclass(eq=False, slots=True)
class _Reading:
    """What the head has of a sequence: keys of positions `first` to `read` - 1, then states that wait to be read."""

    first: int
    read: int
    waiting: list[Tensor] = field(default_factory=list)  # [n, 3 T] each, of positions from `read` on
    blocks: list[int] = field(default_factory=list)

    @property
    def seen(self) -> int:
        return self.read + sum(map(len, self.waiting))


@dataclass(eq=False, slots=True)
class _Round:
    """A request whose drafts are being made."""

    request: DraftRequest
    reading: _Reading
    state: Sampler
    hidden: Tensor  # [1, I]
    drafts: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Node:
    """A node of a tree that is being made."""

    token: int
    parent: int  # row that it follows
    depth: int
    value: float  # logarithm of the product of probabilities
    state: Sampler
    blocks: list[int] = field(default_factory=list)  # table of what is behind it, once it is continued


class EagleDrafter:
    """An EAGLE or EAGLE-3 head for sequences of up to `context` tokens, with a cache of `blocks` blocks in `scheme`;
    it makes trees with `tree`."""

    costly = True

    def __init__(
        self, head: EagleHead | Eagle1Head, context: int, blocks: int, scheme: KvScheme, tree: bool = False
    ) -> None:
        self.name, self.head, self.layers, self.context, self.tree = head.name, head, head.layers, context, tree
        self.pages = cache.pool(head.config, blocks + (SCRATCH if tree else 0), scheme, "cpu")
        self.pool = BlockPool(blocks, self.pages[0].block)
        self._readings: OrderedDict[Tokens, _Reading] = OrderedDict()  # the last one drafted for comes last

    @torch.inference_mode()
    def see(self, sequence: Tokens, start: int, states: KeptStates) -> None:
        known = self._readings.get(sequence)
        if known is None or not known.first <= start <= known.seen:
            self.forget(sequence)
            known = self._readings[sequence] = _Reading(start, start)
        elif start < known.read:  # computed again, after a preemption
            known.read, known.waiting = start, []
        elif start < known.seen:
            known.waiting = [torch.cat(known.waiting)[: start - known.read]]
        known.waiting.append(torch.cat([states.of(layer) for layer in self.layers], 1))
        while known.seen - known.read > ROWS and (ready := min(ROWS, len(sequence.tokens) - 1 - known.read)) > 0:
            if not self._room(sequence, known, ready, {sequence}):
                self.forget(sequence)
                return
            self._read([(sequence, known, ready)])

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        taken: set[Tokens] = set()
        asked: dict[int, tuple[DraftRequest, _Reading, int]] = {}
        for place, request in enumerate(requests):
            sequence, known = request.sequence, self._readings.get(request.sequence)
            if known is None or known.seen != len(sequence.tokens) - 1 or not known.waiting:
                continue
            count = known.seen - known.read
            if self._room(sequence, known, count + request.limit, {*taken, sequence}):
                taken.add(sequence)
                self._readings.move_to_end(sequence)
                asked[place] = request, known, count
        if not asked:
            return [NO_DRAFT] * len(requests)
        hidden, x = self._read([(request.sequence, known, count) for request, known, count in asked.values()])
        rounds = [
            _Round(request, known, request.sampler, row[None])
            for (request, known, _), row in zip(asked.values(), hidden, strict=True)
        ]
        if self.tree:
            made = [self._tree(each, x[i : i + 1]) for i, each in enumerate(rounds)]
            trees = dict(zip(asked, made, strict=True))
            return [trees.get(place, NO_DRAFT) for place in range(len(requests))]
        going = rounds
        while going:
            for each, drawn in zip(going, sample(self.head.logits(x), [each.state for each in going]), strict=True):
                if not isinstance(drawn, SampledToken):
                    raise ValueError("the logits of the EAGLE head hold no finite maximum")
                each.drafts.append(drawn.token_id)
                each.state = each.state.along((drawn.token_id,))[1]
            going = [each for each in going if len(each.drafts) < each.request.limit]
            if going:
                x = self._ahead(going)
        drafts = {place: Draft(tuple(each.drafts), 1) for place, each in zip(asked, rounds, strict=True)}
        return [drafts.get(place, NO_DRAFT) for place in range(len(requests))]

    def forget(self, sequence: Tokens) -> None:
        if (known := self._readings.pop(sequence, None)) is not None:
            self.pool.drop(known.blocks)

    def reset(self) -> None:
        for sequence in list(self._readings):
            self.forget(sequence)

    def _room(self, sequence: Tokens, known: _Reading, rows: int, kept: set[Tokens]) -> bool:
        """Give a sequence blocks for so many rows behind those read; return False where there are none beside the
        sequences `kept`."""
        end = known.read - known.first + rows
        if end > self.context or (needed := self.pool.needed(end)) > self.pool.total:
            return False
        while (missing := needed - len(known.blocks)) > self.pool.free:
            oldest = next((each for each, of in self._readings.items() if of.blocks and each not in kept), None)
            if oldest is None:
                return False
            self.forget(oldest)
        if missing > 0:
            known.blocks += self.pool.allocate(missing)
        return True

    def _read(self, rows: Sequence[tuple[Tokens, _Reading, int]]) -> tuple[Tensor, Tensor]:
        """Read so many of each sequence's states that wait; return the next states behind the last of each, and the LM
        head's inputs there, [n, I] each."""
        ids: list[int] = []
        states: list[Tensor] = []
        for sequence, known, count in rows:
            waiting = torch.cat(known.waiting)
            ids += sequence.tokens[known.read + 1 : known.read + count + 1]
            states.append(waiting[:count])
            known.waiting = [waiting[count:]] if len(waiting) > count else []
        places = [known.read - known.first for _, known, _ in rows]
        lengths = tuple(count for _, _, count in rows)
        hidden, x = self._run(ids, self.head.fuse(torch.cat(states)), [k.blocks for _, k, _ in rows], places, lengths)
        for _, known, count in rows:
            known.read += count
        last = torch.tensor(lengths).cumsum(0) - 1
        return hidden[last], x[last]

    def _ahead(self, going: Sequence[_Round]) -> Tensor:
        """Run the head on the last draft of each; return the LM head's inputs [n, I]."""
        places = [each.reading.read - each.reading.first + len(each.drafts) - 1 for each in going]
        hidden, x = self._run(
            [each.drafts[-1] for each in going], torch.cat([each.hidden for each in going]),
            [each.reading.blocks for each in going], places, (1,) * len(going),
        )  # fmt: skip
        for each, row in zip(going, hidden, strict=True):
            each.hidden = row[None]
        return x

    def _tree(self, begun: _Round, x: Tensor) -> Draft:
        """Return the tree behind a sequence's last token, given the LM head's input [1, I] there."""
        start = begun.reading.read - begun.reading.first  # position of the first draft's row
        limit, hidden = begun.request.limit, begun.hidden
        nodes = [_Node(-1, -1, 0, 0.0, begun.state, begun.reading.blocks)]
        beam = [0]  # rows
        for depth in range(1, min(DEPTH, limit) + 1):
            logits = self.head.logits(x)
            values = logits.double().log_softmax(-1)
            behind: list[tuple[float, int, int]] = []  # value, place of the parent in the beam, row
            drawn = candidates(logits, [nodes[row].state for row in beam], min(BEAM, limit))
            for place, tokens in enumerate(drawn):
                before = nodes[beam[place]]
                for token in tokens:
                    value = before.value + values[place, token].item()
                    behind.append((value, place, len(nodes)))
                    nodes.append(_Node(token, beam[place], depth, value, before.state))
            best = sorted(behind, key=lambda each: (-each[0], each[2]))[:BEAM]
            if depth == min(DEPTH, limit):
                break
            for number, (_, _, row) in enumerate(best):
                node = nodes[row]
                node.state = node.state.along((node.token,))[1]
                node.blocks = self._copied(nodes[node.parent].blocks, start, depth, number)
            hidden = hidden[[place for _, place, _ in best]]
            beam = [row for _, _, row in best]
            tables = [nodes[row].blocks for row in beam]
            places, ones = [start + depth - 1] * len(beam), (1,) * len(beam)
            hidden, x = self._run([nodes[row].token for row in beam], hidden, tables, places, ones)
        taken = sorted(range(1, len(nodes)), key=lambda row: (-nodes[row].value, row))[:limit]
        rows = {0: 0} | {row: number for number, row in enumerate(taken, 1)}
        return Draft(
            tuple(nodes[row].token for row in taken), 1, parents=tuple(rows[nodes[row].parent] for row in taken)
        )

    def _copied(self, blocks: list[int], start: int, depth: int, number: int) -> list[int]:
        """Return a table like `blocks` with blocks of its own from position `start` on, for a node of this number and
        depth."""
        size = self.pool.size
        first, end = start // size, (start + depth - 1) // size + 1
        scratch = self.pool.total + 2 * (BEAM * (depth % 2) + number)
        own = list(range(scratch, scratch + end - first))
        for source, target in zip(blocks[first:end], own, strict=False):
            for part in self.pages[0].parts():
                part[target] = part[source]
        return [*blocks[:first], *own]

    def _run(
        self,
        ids: Sequence[int],
        states: Tensor,
        blocks: Sequence[Sequence[int]],
        places: list[int],
        lengths: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        tables = torch.zeros((len(blocks), max(map(len, blocks))), dtype=torch.int32)
        for row, own in enumerate(blocks):
            tables[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        step = ForwardBatch(lengths, self.context, KVCache.over(self.pages, tables, places))
        return self.head.forward(torch.tensor(ids), states, step)


def blocks_for(context: int, sequences: int) -> int:
    """Return the default number of blocks: enough for one sequence of the whole context, or a short one of each."""
    return max(-(-context // BLOCK), 512 // BLOCK * sequences)
