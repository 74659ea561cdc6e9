"""`sampler.sample` for logits that lie on a GPU: the same choices, and one wait for all of them.

`sample` looks at what it has found several times on its way, which costs nothing where numbers are at hand. Here every
look would stop the device. So what the host decides it decides from parameters alone, everything else is computed for
every row, and tokens come back once, with the largest logit of each row, which says whether the row was fit to choose
from. Where `sample` picks candidates and sorts those, here whole rows are sorted: to the same tokens.

Sums along the vocabulary may be associated otherwise than on a CPU, so a draw that falls on the border of two tokens
may take the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attar.engine.sampler import BAD, BadLogits, Draw, Sampler, drawn
from attar.kernels import ops
from attar.model.cache import sent

AT_ONCE = 64  # rows that are sorted together: their float64 numbers take a gigabyte at the most common vocabularies


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Draw | BadLogits]:
    """As `sampler.sample`: of logits [B, V], one row a sampler, on any device."""
    assert logits.ndim == 2
    assert logits.shape[0] == len(samplers)
    found = []
    for start in range(0, len(samplers), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        found.append(_choose(logits[rows], samplers[rows]))
    wanting = [i for i, sampler in enumerate(samplers) if sampler.params.logprobs is not None]
    tokens, largest = torch.cat(found, 1).tolist()  # here the host waits
    scored = dict(zip(wanting, logits[wanting].cpu(), strict=True)) if wanting else {}
    return [
        drawn(scored[i] if i in scored else logits[i], int(token), samplers[i])
        if math.isfinite(top)
        else BadLogits(BAD)
        for i, (token, top) in enumerate(zip(tokens, largest, strict=True))
    ]


def _choose(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Each row's token and its largest logit, float64 [2, B]."""
    if all(sampler.plain for sampler in samplers):
        ids = ops.argmax(logits)
        return torch.stack((ids.double(), logits.gather(-1, ids[:, None]).squeeze(-1).double()))
    rows = torch.stack([sampler.penalize(row) for row, sampler in zip(logits.double(), samplers, strict=True)])
    largest = rows.amax(-1)  # NaN if any is
    places = torch.arange(rows.shape[1], device=rows.device)
    ids = torch.where(rows == largest[:, None], places, rows.shape[1] - 1).amin(-1)  # of equals the first
    random = [i for i, sampler in enumerate(samplers) if sampler.params.temperature > 0]
    if random:
        chosen = [samplers[i] for i in random]
        settings = [
            (p.temperature, float(p.top_k or rows.shape[1]), p.top_p, p.min_p, sampler.uniform())
            for p, sampler in ((sampler.params, sampler) for sampler in chosen)
        ]
        where, numbers = sent(rows.device, torch.tensor(random), torch.tensor(settings, dtype=torch.float64).T)
        temperature, top_k, top_p, min_p, uniforms = numbers[:, :, None]
        scaled = (rows[where] - largest[where, None]) / temperature
        if any(0 < s.params.top_k < rows.shape[1] or s.params.top_p < 1 for s in chosen):
            scaled = _top(scaled, top_k, top_p)
        if any(s.params.min_p > 0 for s in chosen):
            scaled = scaled.masked_fill(scaled < min_p.log(), -torch.inf)
        cumulative = scaled.exp().cumsum(-1)
        picked = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
        ids[where] = picked.squeeze(-1).clamp(max=rows.shape[1] - 1)  # past the end where a row is no good
    return torch.stack((ids.double(), largest))


def _top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf for the tokens [b, V] below the first k [b, 1], or below the first that hold the mass p [b, 1]."""
    size = scaled.shape[-1]
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    within = torch.arange(size, device=scaled.device) < top_k
    probabilities = ranked.exp() * within
    sums = probabilities.cumsum(-1)
    mass = torch.where(top_k < size, sums[:, -1:], scaled.exp().cumsum(-1)[:, -1:])
    keep = within & ((sums - probabilities < top_p * mass) | (top_p >= 1))
    return scaled.masked_fill(~torch.empty_like(keep).scatter_(-1, order, keep), -torch.inf)
