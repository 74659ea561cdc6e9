"""Drafts of Medusa-1 heads (`model/drafts/medusa.py`): one guess a depth, all from the last hidden state of the target.

Of each sequence the state of the last computed row is kept. The heads draw with the target's temperature, filters,
penalties and noise, as a draft model does (`drafters/model.py`). The paper samples greedily and verifies a tree of the
best guesses; here it is the chain of one guess a depth. A head does not know which tokens the others guessed, so deep
drafts are seldom right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.kernels import ops
from attar.kernels.operands import Norm
from attar.model.cache import KeptStates
from attar.model.drafts.medusa import MedusaHeads
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, DraftRequest
from attar.sampling.sampler import SampledToken, Sampler, sample
from attar.scheduling.sequence import Sequence as Tokens


class MedusaDrafter:
    """Medusa heads for a target of `layers` layers with this final norm."""

    name, costly = "medusa", True

    def __init__(self, heads: MedusaHeads, final_norm: Norm, layers: int) -> None:
        self.heads, self.final_norm, self.layers = heads, final_norm, (layers,)
        self._last: dict[Tokens, tuple[int, Tensor]] = {}  # position of a sequence's last row, and its state [1, I]

    def see(self, sequence: Tokens, start: int, states: KeptStates) -> None:
        self._last[sequence] = start + len(states) - 1, states.rows(slice(-1, None)).of(self.layers[0])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found, known = [NO_DRAFT] * len(requests), []
        for place, (sequence, _, _) in enumerate(requests):
            at, _ = self._last.get(sequence, (-1, None))
            if at == len(sequence.tokens) - 2:  # that of the row behind which the last token was sampled
                known.append(place)
        if known:
            drafts = self._drafts([requests[place] for place in known])
            for place, tokens in zip(known, drafts, strict=True):
                found[place] = Draft(tuple(tokens), 1)
        return found

    def _drafts(self, asked: Sequence[DraftRequest]) -> list[list[int]]:
        rows = torch.cat([self._last[sequence][1] for sequence, _, _ in asked])
        _, x = ops.norm(rows, None, self.final_norm)
        depths = min(max(limit for _, _, limit in asked), len(self.heads.heads))
        states: list[Sampler] = [sampler for _, sampler, _ in asked]
        drafts: list[list[int]] = [[] for _ in asked]
        for logits in self.heads.logits(x, depths):
            for place, drawn in enumerate(sample(logits, states)):
                if not isinstance(drawn, SampledToken):
                    raise ValueError("the logits of a Medusa head hold no finite maximum")
                drafts[place].append(drawn.token_id)
                states[place] = states[place].along((drawn.token_id,))[1]
        return [tokens[:limit] for tokens, (_, _, limit) in zip(drafts, asked, strict=True)]

    def forget(self, sequence: Tokens) -> None:
        self._last.pop(sequence, None)

    def reset(self) -> None:
        self._last.clear()
