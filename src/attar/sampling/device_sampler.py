"""`sampler.sample` for logits on a GPU: the same choices, and one wait for all of them.

`sample` reads intermediate results several times, which is free on a CPU. Here every read would stop the device. So the
host decides from parameters alone, and everything else is computed for every row. Tokens come back once, with the
largest logit of each row, which shows whether the row was fit to choose from, and with the requested log probabilities.
Where `sample` picks candidates and sorts those, here whole rows are sorted: to the same tokens.

`choose` returns before the device has chosen. Its results are then on their way to the host, ahead of the device's
later work, and its tokens are on the device for the next step to begin with (`Chosen`).

Sums along the vocabulary may associate differently than on a CPU, so top-p may keep or drop a token on its border.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.execution.cuda_graphs import mark
from attar.kernels import ops
from attar.kernels.noise import draws
from attar.model.cache import sent
from attar.protocol.request import TokenLogprob
from attar.sampling.sampler import Asked, BadLogits, SampledToken, Sampler, counted, drawn, penalized

AT_ONCE = 64  # rows that are sorted together: their float64 numbers take a gigabyte at the most common vocabularies


class Chosen:
    """Tokens [B] chosen by the device, one a sampler, with up to `most` log probabilities for the rows in `counts`."""

    def __init__(
        self, chosen: Tensor, asked: Tensor, samplers: Sequence[Sampler], counts: dict[int, int], most: int
    ) -> None:
        self.tokens = chosen[0].long()
        """Tokens int64 [B], on the device; any token for a row from which nothing can be chosen."""
        self._samplers, self._counts, self._most = samplers, counts, most
        # Only work queued before this copy is waited for, not the step that is launched after it.
        self._sent = torch.cat((chosen.flatten(), asked.flatten())).to("cpu", non_blocking=True)
        self._there = mark(chosen.device)
        self._there.set()
        self._numbers: list[float] | None = None

    def draws(self, first: int = 0, last: int | None = None) -> list[SampledToken | BadLogits]:
        """Return the draws of all rows, or of some. The first call makes the host wait."""
        if self._numbers is None:
            self._there.wait()
            self._numbers = self._sent.tolist()
        count, width, own = len(self._samplers), 1 + 2 * self._most, slice(first, last)
        rest = self._numbers[2 * count :]
        tokens, largest = self._numbers[:count], self._numbers[count : 2 * count]
        named = [(i, token) for i, sampler in enumerate(self._samplers) for token in sampler.params.logprob_token_ids]
        known = {
            (i, token): [value] for (i, token), value in zip(named, rest[len(self._counts) * width :], strict=True)
        }
        for at, i in enumerate(self._counts):
            known[i, int(tokens[i])] = rest[at * width : (at + 1) * width]

        def logprobs(wanted: Sequence[Asked]) -> list[TokenLogprob]:
            return [_told(known[first + row, token], token, n, self._most) for row, token, n in wanted]

        return drawn(logprobs, [int(token) for token in tokens[own]], largest[own], self._samplers[own])


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> Chosen:
    """Begin to choose from logits [B, V], one row a sampler, on any device, without waiting."""
    assert logits.ndim == 2
    assert logits.shape[0] == len(samplers)
    pieces = (slice(start, start + AT_ONCE) for start in range(0, len(samplers), AT_ONCE))
    chosen = torch.cat([_choose(logits[rows], samplers[rows]) for rows in pieces], 1)
    counts = {i: count for i, sampler in enumerate(samplers) if (count := counted(sampler.params)) is not None}
    most = min(max(counts.values(), default=0), logits.shape[1])
    asked = _logprobs(logits, chosen[0], list(counts), most) if counts else chosen.new_empty(0, 1)
    named = [(i, token) for i, sampler in enumerate(samplers) for token in sampler.params.logprob_token_ids]
    return Chosen(chosen, torch.cat((asked.flatten(), _named(logits, named))), samplers, counts, most)


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[SampledToken | BadLogits]:
    """Choose like `sampler.sample` from logits [B, V], one row a sampler, on any device."""
    return choose(logits, samplers).draws()


def _choose(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return each row's token and its largest logit, float64 [2, B]."""
    if all(sampler.plain for sampler in samplers):
        ids = ops.argmax(logits)
        return torch.stack((ids.double(), logits.gather(-1, ids[:, None]).squeeze(-1).double()))
    rows = penalized(logits, samplers)
    largest = rows.amax(-1)  # NaN if any is
    places = torch.arange(rows.shape[1], device=rows.device)
    ids = torch.where(rows == largest[:, None], places, rows.shape[1] - 1).amin(-1)  # the first among equals
    random = [i for i, sampler in enumerate(samplers) if sampler.params.temperature > 0]
    if random:
        chosen = [samplers[i] for i in random]
        settings = [
            (p.temperature, float(p.top_k or rows.shape[1]), p.top_p, p.min_p) for p in (s.params for s in chosen)
        ]
        noise = draws(*zip(*(sampler.draw() for sampler in chosen), strict=True))
        where, numbers, noise = sent(
            rows.device, torch.tensor(random), torch.tensor(settings, dtype=torch.float64).T, noise
        )
        temperature, top_k, top_p, min_p = numbers[:, :, None]
        scaled = (rows[where] - largest[where, None]) / temperature
        if any(0 < s.params.top_k < rows.shape[1] or s.params.top_p < 1 for s in chosen):
            scaled = _top(scaled, top_k, top_p)
        if any(s.params.min_p > 0 for s in chosen):
            scaled = scaled.masked_fill(scaled < min_p.log(), -torch.inf)
        ids[where] = ops.gumbel_max(scaled, noise)
    return torch.stack((ids.double(), largest))


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[int], most: int) -> Tensor:
    """Return log probabilities of some rows of logits [B, V], float64 [n, 1 + 2 most].

    A row holds the log probability of its token, from tokens [B]; those of the most probable ones, the first among
    equals; and their ids.
    """
    pieces = []
    for start in range(0, len(rows), AT_ONCE):
        (where,) = sent(logits.device, torch.tensor(rows[start : start + AT_ONCE]))
        values = logits[where].double().log_softmax(-1)
        own = values.gather(-1, tokens[where].long()[:, None])
        if most:
            ranked, order = values.sort(dim=-1, descending=True, stable=True)
            own = torch.cat((own, ranked[:, :most], order[:, :most].double()), 1)
        pieces.append(own)
    return torch.cat(pieces)


def _named(logits: Tensor, named: Sequence[tuple[int, int]]) -> Tensor:
    """Return the log probabilities of tokens named by (row, token), of logits [B, V], float64 [n]."""
    if not named:
        return logits.new_empty(0, dtype=torch.float64)
    places, tokens = sent(logits.device, torch.tensor([row for row, _ in named]), torch.tensor([t for _, t in named]))
    owners = sorted({row for row, _ in named})
    (rows,) = sent(logits.device, torch.tensor(owners))
    values = logits[rows].double().log_softmax(-1)
    return values[torch.searchsorted(rows, places), tokens]


def _told(numbers: Sequence[float], token: int, count: int, most: int) -> TokenLogprob:
    """Convert a row's numbers to a `TokenLogprob` with `count` of the most probable tokens."""
    values, ids = numbers[1 : 1 + most][:count], numbers[1 + most :][:count]
    return TokenLogprob(token, numbers[0], tuple((int(id), value) for id, value in zip(ids, values, strict=True)))


def _top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf the tokens [b, V] below the first k [b, 1], or below the first that hold the mass p [b, 1]."""
    size = scaled.shape[-1]
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    within = torch.arange(size, device=scaled.device) < top_k
    probabilities = ranked.exp() * within
    sums = probabilities.cumsum(-1)
    mass = torch.where(top_k < size, sums[:, -1:], scaled.exp().cumsum(-1)[:, -1:])
    keep = within & ((sums - probabilities < top_p * mass) | (top_p >= 1))
    return scaled.masked_fill(~torch.empty_like(keep).scatter_(-1, order, keep), -torch.inf)
