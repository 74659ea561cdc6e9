"""From logits to the next token.

The steps, in this order, in float64:

0. the logit biases, added;
1. repetition penalty r on every token of prompt and output: x / r where x > 0, else x * r (CTRL, arXiv 1909.05858);
2. presence and frequency penalties on tokens of the output: x - presence * (count > 0) - frequency * count (OpenAI's
   formula; the prompt does not count);
3. at temperature 0 the largest x, the lowest id among equals; that is all. Otherwise x / temperature;
4. top-k: the k largest;
5. top-p, over the probabilities left: the shortest run of the largest whose sum reaches p (at least one);
6. min-p: those with probability >= min_p times the largest;
7. one uniform number picks by inverse CDF over the tokens left, in order of id.

This is the order of transformers' processors. Equal logits are ranked by id everywhere, so that no sorting routine
decides a tie: top-k keeps exactly k, and top_k=1 is the greedy choice.

The uniform number is a function of (seed, index of the token in the output) alone, by the counter-based generator
Philox4x64-10: there is no generator state that another request, a batch mate, a preemption or a rejected draft could
advance. Each row is reduced on its own along the vocabulary, so on CPUs a row's choice is, to the bit, what it would be
alone. On a GPU a prefix sum may associate otherwise from run to run; a draw that falls on a rounding boundary may then
differ.

Log probabilities are those of the model itself: log softmax of the raw logits, before any of these steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.engine.request import SamplingParams, TokenLogprob
from attar.faults import point
from attar.kernels import ops

AT_ONCE = 8  # rows
_WORD = 2**64 - 1
BAD = "the model's logits hold NaN or no finite maximum"


def philox4x64(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four 64-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & _WORD, (low >> 64) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _WORD, (k1 + 0xBB67AE8584CAA73B) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, index: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, fixed by (seed, index, stream), each 0 to 2^64 - 1.

    `index` counts the tokens of one request's output. Token draws use stream 0; whoever needs further independent
    numbers for the same token takes another stream.
    """
    return (philox4x64((index, stream, 0, 0), (seed, 0))[0] >> 11) * 2.0**-53


class BadLogits(ValueError):
    """A row of logits from which nothing can be chosen. It is the answer for that row alone."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The token chosen for one row, with its log probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprob | None


class Sampler:
    """One request's sampling state: its parameters, the tokens penalties need, and how many tokens were drawn.

    `sample` reads it; `commit` records a token once it is part of the output. Counts are kept only where a penalty uses
    them. `vocab_size` is the width of the logits; ValueError for a prompt token beyond it. `name`: of its sequence.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
        name: str = "",
    ) -> None:
        self.name = name
        self.params = params.seeded()
        assert self.params.seed is not None
        self.seed = self.params.seed
        self.index = 0
        """Tokens committed: the counter of the next draw."""
        self._seen: Tensor | None = None  # [V] bool: in prompt or output
        self._counts: Tensor | None = None  # [V] float64: times in the output
        self._biased: tuple[Tensor, Tensor] | None = None  # ids and what is added to their logits
        if params.logit_bias:
            outside = next((token for token in params.logit_bias if token >= vocab_size), None)
            if outside is not None:
                raise ValueError(f"token {outside} of logit_bias is not in the vocabulary of {vocab_size}")
            ids = torch.tensor(list(params.logit_bias), device=device)
            self._biased = ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float64, device=device)
        if params.repetition_penalty != 1.0:
            outside = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
            if outside is not None:
                raise ValueError(f"prompt token {outside} is not in the vocabulary of {vocab_size}")
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(prompt_ids, dtype=torch.long, device=device)] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float64, device=device)

    def commit(self, token_id: int) -> None:
        """The token is part of the output."""
        point("sampler.commit", self.name)
        self.index += 1
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    @property
    def plain(self) -> bool:
        """Whether the choice is just the largest logit."""
        return self.params.temperature == 0 and self._seen is None and self._counts is None and self._biased is None

    def uniform(self) -> float:
        """The number that the next token is drawn with."""
        point("sampler.uniform", self.name)
        return uniform(self.seed, self.index)

    def penalize(self, logits: Tensor) -> Tensor:
        """Steps 0 to 2 on one row [V]."""
        point("sampler.penalties", self.name)
        params = self.params
        if self._biased is not None:
            ids, biases = self._biased
            logits = logits.index_add(0, ids, biases)
        if self._seen is not None:
            r = params.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits > 0, logits / r, logits * r), logits)
        if self._counts is not None:
            logits = logits - params.presence_penalty * (self._counts > 0) - params.frequency_penalty * self._counts
        return logits


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Draw | BadLogits]:
    """Choose the next token of every row.

    logits: [B, V] floating, one row a sampler, unchanged on return. Nothing is committed: the caller commits what it
    keeps. A row with NaN, +inf, or nothing but -inf gives a BadLogits value, and the other rows do not notice.
    """
    assert logits.ndim == 2
    assert logits.shape[0] == len(samplers)
    if all(sampler.plain for sampler in samplers):  # most of a server's greedy requests: one look at each logit
        ids = ops.argmax(logits)
        top = logits.gather(-1, ids[:, None]).squeeze(-1)
        return [
            drawn(row, token, sampler) if math.isfinite(largest) else BadLogits(BAD)
            for row, token, largest, sampler in zip(logits, ids.tolist(), top.tolist(), samplers, strict=True)
        ]
    if len(samplers) > AT_ONCE:  # they take up to 150 bytes a logit
        pieces = range(0, len(samplers), AT_ONCE)
        return [draw for i in pieces for draw in sample(logits[i : i + AT_ONCE], samplers[i : i + AT_ONCE])]
    rows = logits.double()
    penalized = torch.stack([sampler.penalize(row) for row, sampler in zip(rows, samplers, strict=True)])  # [B, V]
    largest = penalized.amax(-1)  # NaN if any is
    good = torch.isfinite(largest).tolist()
    tokens = ops.argmax(penalized)
    random = [i for i, sampler in enumerate(samplers) if good[i] and sampler.params.temperature > 0]
    if random:
        chosen = [samplers[i] for i in random]
        # The largest becomes 0, so that no temperature can make an infinity of it.
        temperature = _column([sampler.params.temperature for sampler in chosen], penalized)
        scaled = (penalized[random] - largest[random, None]) / temperature
        uniforms = _column([sampler.uniform() for sampler in chosen], scaled)
        tokens[random] = _pick(_filter(scaled, [sampler.params for sampler in chosen]), uniforms)
    return [
        drawn(rows[i], token, samplers[i]) if good[i] else BadLogits(BAD) for i, token in enumerate(tokens.tolist())
    ]


def drawn(row: Tensor, token: int, sampler: Sampler) -> Draw:
    """The token chosen for a row of logits [V], which are read only where somebody wants log probabilities."""
    point("sampler.draw", sampler.name)
    return Draw(token, logprobs_of(row, token, sampler.params.logprobs))


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Steps 4 to 6: -inf for the tokens [b, V] that are dropped. The largest of each row is 0."""
    cut = [i for i, p in enumerate(params) if 0 < p.top_k < scaled.shape[-1] or p.top_p < 1]
    if cut:
        kept = _top(scaled[cut], [params[i].top_k for i in cut], [params[i].top_p for i in cut])
        scaled = scaled.index_copy(0, torch.tensor(cut, device=scaled.device), kept)
    if any(p.min_p > 0 for p in params):
        floor = _column([p.min_p for p in params], scaled).log()  # min_p 0 is -inf: keeps all
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    return scaled


def _top(scaled: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """Steps 4 and 5: -inf for the tokens [b, V] below the first k, or below the first that hold the mass p.

    Sorting a whole vocabulary is slow, so only candidates are sorted: from the k-th value up, or without a k, the
    tokens with at least (1 - p) / V of the mass. All others together have less than 1 - p, so top-p drops them.
    Sums are prefix sums, which go left to right whatever the batch and the threads; torch's own sum does not.
    """
    size = scaled.shape[-1]
    k = torch.tensor([[top_k or size] for top_k in top_ks], device=scaled.device).clamp(max=size)  # [b, 1]
    p = _column(top_ps, scaled)
    mass = scaled.exp().cumsum(-1)[:, -1:]
    floor = ((1 - p) * mass / size).log()  # p = 1 is -inf
    largest_k = min(max(top_ks), size)
    if largest_k:
        kth = scaled.topk(largest_k).values.gather(-1, k.clamp(max=largest_k) - 1)
        floor = torch.where(k < size, kth, floor)
    rows, ids = (scaled >= floor).nonzero(as_tuple=True)  # by row, ids ascending
    counts = rows.bincount(minlength=len(scaled))
    slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    few = scaled.new_full((len(scaled), int(counts.max())), -torch.inf)
    few[rows, slots] = scaled[rows, ids]

    ranked, order = few.sort(dim=-1, descending=True, stable=True)
    within = torch.arange(few.shape[-1], device=few.device) < k
    probabilities = ranked.exp() * within
    sums = probabilities.cumsum(-1)
    mass = torch.where(k < size, sums[:, -1:], mass)
    keep = within & ((sums - probabilities < p * mass) | (p >= 1))  # the mass ranked before: 0 for the first
    kept = torch.empty_like(keep).scatter_(-1, order, keep)[rows, slots]
    rows, ids = rows[kept], ids[kept]
    result = torch.full_like(scaled, -torch.inf)
    result[rows, ids] = scaled[rows, ids]
    return result


def _pick(scaled: Tensor, uniforms: Tensor) -> Tensor:
    """Step 7: [b] ids. The first token whose cumulative probability exceeds the uniform number; never one dropped."""
    cumulative = scaled.exp().cumsum(-1)
    # u < 1 in float64 keeps u * total below total, so an id is always found, one with a probability of its own.
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True).squeeze(-1)


def logprobs_of(row: Tensor, token: int, count: int | None) -> TokenLogprob | None:
    """Log probabilities of the chosen token and of the `count` most likely, from the raw logits [V] in float64."""
    if count is None:
        return None
    values = row.double().log_softmax(-1)
    count = min(count, values.numel())
    top: list[tuple[int, float]] = []
    if count:
        among = (values >= values.topk(count).values[-1]).nonzero().squeeze(-1)  # ids ascending, all equals at the edge
        best = values[among].sort(dim=-1, descending=True, stable=True)
        top = list(zip(among[best.indices[:count]].tolist(), best.values[:count].tolist(), strict=True))
    return TokenLogprob(token, values[token].item(), tuple(top))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
