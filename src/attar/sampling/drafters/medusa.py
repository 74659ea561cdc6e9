"""Drafts of Medusa-1 heads (`model/drafts/medusa.py`): one guess a depth, all from the last hidden state of the target.

Of each sequence the state of the last computed row is kept. The heads draw with the target's temperature, filters,
penalties and noise, as a draft model does (`drafters/model.py`). Drafts are a chain of one guess a depth, or with
`tree` a tree of several, whose shape is always the same (`branching.py`); the paper finds a shape for each model. A
head does not know which tokens the others guessed, so deep drafts are seldom right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.kernels import ops
from attar.kernels.operands import Norm
from attar.model.cache import KeptStates
from attar.model.drafts.medusa import MedusaHeads
from attar.sampling.drafters.branching import Node, candidates, static_tree
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, DraftRequest
from attar.sampling.sampler import SampledToken, Sampler, sample
from attar.scheduling.sequence import Sequence as Tokens


class MedusaDrafter:
    """Medusa heads for a target of `layers` layers with this final norm."""

    name, costly = "medusa", True

    def __init__(self, heads: MedusaHeads, final_norm: Norm, layers: int, tree: bool = False) -> None:
        self.heads, self.final_norm, self.layers, self.tree = heads, final_norm, (layers,), tree
        self._last: dict[Tokens, tuple[int, Tensor]] = {}  # position of a sequence's last row, and its state [1, I]

    def see(self, sequence: Tokens, start: int, states: KeptStates) -> None:
        self._last[sequence] = start + len(states) - 1, states.rows(slice(-1, None)).of(self.layers[0])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found, known = [NO_DRAFT] * len(requests), []
        for place, sequence in enumerate(request.sequence for request in requests):
            at, _ = self._last.get(sequence, (-1, None))
            if at == len(sequence.tokens) - 2:  # that of the row behind which the last token was sampled
                known.append(place)
        if known:
            drafts = (self._trees if self.tree else self._chains)([requests[place] for place in known])
            for place, draft in zip(known, drafts, strict=True):
                found[place] = draft
        return found

    def _logits(self, asked: Sequence[DraftRequest], depths: int) -> list[Tensor]:
        rows = torch.cat([self._last[request.sequence][1] for request in asked])
        return self.heads.logits(ops.norm(rows, None, self.final_norm)[1], depths)

    def _chains(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        depths = min(max(request.limit for request in asked), len(self.heads.heads))
        states: list[Sampler] = [request.sampler for request in asked]
        drafts: list[list[int]] = [[] for _ in asked]
        for logits in self._logits(asked, depths):
            for place, drawn in enumerate(sample(logits, states)):
                if not isinstance(drawn, SampledToken):
                    raise ValueError("the logits of a Medusa head hold no finite maximum")
                drafts[place].append(drawn.token_id)
                states[place] = states[place].along((drawn.token_id,))[1]
        return [Draft(tuple(tokens[: request.limit]), 1) for tokens, request in zip(drafts, asked, strict=True)]

    def _trees(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        """Return trees of the heads' best guesses. Those of a depth are drawn in the state behind the best ones."""
        shape = static_tree(max(request.limit for request in asked), len(self.heads.heads))
        widths = [1 + max(n.rank for n in shape if n.depth == at) for at in range(1 + max(n.depth for n in shape))]
        states: list[Sampler] = [request.sampler for request in asked]
        guesses: list[list[list[int]]] = []  # by depth, request and rank
        for logits, width in zip(self._logits(asked, len(widths)), widths, strict=True):
            guesses.append(candidates(logits, states, width))
            states = [state.along(own[:1])[1] for state, own in zip(states, guesses[-1], strict=True)]
        return [self._tree(shape[: request.limit], [of[i] for of in guesses]) for i, request in enumerate(asked)]

    def _tree(self, shape: Sequence[Node], guesses: Sequence[Sequence[int]]) -> Draft:
        rows, tokens, parents = {0: 0}, list[int](), list[int]()  # rows of the nodes that have a guess
        for number, node in enumerate(shape, 1):
            if node.parent in rows and node.rank < len(guesses[node.depth]):
                tokens.append(guesses[node.depth][node.rank])
                parents.append(rows[node.parent])
                rows[number] = len(tokens)
        return Draft(tuple(tokens), 1, parents=tuple(parents))

    def forget(self, sequence: Tokens) -> None:
        self._last.pop(sequence, None)

    def reset(self) -> None:
        self._last.clear()
