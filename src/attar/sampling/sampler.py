"""From logits to the next token.

The steps, in this order, in float64:

0. the logit biases, added; where there is a mask, -inf for what it does not allow;
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

Rows go through each step together. Steps 0 to 2 change few logits of a row, so a sampler keeps the numbers of those
tokens alone, ready to be laid end to end with those of other rows, and one gather and one scatter change them all. A
prompt may name many tokens, to each of which a repetition penalty does the same: they are found once (`distinct`), and
all choices of a request share them. But a vocabulary of float64 fills a core's cache with a row or two: a batch is cut
into pieces that fit (`at_once`), each of which is through with all steps before the next begins. That is several times
as fast as whole batches, and bounds the memory, up to 150 bytes a logit where filters sort (`plan/steps.py` counts on
it): a gigabyte for 64 rows at once.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attar.faults import point
from attar.kernels import ops
from attar.model.cache import sent
from attar.plan.steps import SAMPLED
from attar.protocol.request import SamplingParams, TokenLogprob

AT_ONCE = SAMPLED  # rows at most
CACHED = 1 << 18  # logits: as float64 they fit the cache of a core
CHANGE = 5  # numbers
SORTED = 64  # of how many tokens one may be among the first, before finding these in order takes longer than without
_WORD = 2**64 - 1
BAD = "the model's logits hold NaN or no finite maximum, or its vector a number that is not finite"


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


def seed_of_choice(seed: int, number: int) -> int:
    """The seed of a request's choice: of the first the request's own, of others one that has nothing to do with it, so
    that requests of neighbouring seeds share no texts."""
    return philox4x64((number, 0, 0, 0), (seed, 1))[0] if number else seed


class BadLogits(ValueError):
    """A row of logits from which nothing can be chosen. It is the answer for that row alone."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The token chosen for one row, with its log probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprob | None


Asked = tuple[int, int, int]
"""(row, token, count): the log probabilities of the token and of the `count` most likely ones, by that row."""


class Mask(Protocol):
    """Which tokens may come next in one output: a grammar, say. One that allows nothing makes its row BadLogits."""

    def allowed(self) -> Tensor:
        """[V] bool, on the host."""

    def advance(self, token_id: int) -> None:
        """The token comes next."""

    def rewind(self, count: int) -> None:
        """The last `count` tokens did not come after all: whoever looks ahead along drafts goes back by this."""


def distinct(prompt_ids: Sequence[int], vocab_size: int) -> Tensor:
    """The tokens of a prompt, each once: int64 [n], ascending. ValueError for one beyond the vocabulary."""
    ids = np.fromiter(prompt_ids, np.int64, len(prompt_ids))
    if len(bad := ids[(ids < 0) | (ids >= vocab_size)]):
        raise ValueError(f"prompt token {bad[0]} is not in the vocabulary of {vocab_size}")
    there = np.zeros(vocab_size, dtype=bool)  # numpy's own `unique` takes twenty times as long
    there[ids] = True
    return torch.from_numpy(np.flatnonzero(there))


class Sampler:
    """One request's sampling state: its parameters, what is added to which logits, and how many tokens were drawn.

    `sample` reads it; `commit` records a token once it is part of the output. Tokens are counted only where a penalty
    uses them. A prompt that is a tensor is what `distinct` makes of it, shared with other choices. `vocab_size` is the
    width of the logits; ValueError for a token of `logit_bias`, or of a prompt that a penalty looks at, beyond it.
    `name`: of its sequence.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | Tensor,
        vocab_size: int,
        name: str = "",
        mask: Mask | None = None,
    ) -> None:
        self.name = name
        self.mask = mask
        self.params = params.seeded()
        assert self.params.seed is not None
        self.seed = self.params.seed
        self.index = 0
        """Tokens committed: the counter of the next draw."""
        self.seen = torch.empty(0, dtype=torch.int64)
        """Tokens of the prompt that a repetition penalty meets, ascending."""
        self.changes = array("d")
        """What steps 0 to 2 do to the logits of tokens of the output, and of those with a bias, `CHANGE` numbers each:
        the token, a bias to add, the repetition penalty or 1, and what presence and frequency take off."""
        self._places: dict[int, int] = {}  # where each token's begin
        self._times: Counter[int] = Counter()  # in the output
        # Rounded to float32, which is what torch makes of a number times a bool: seeded texts stay what they were.
        self._presence = torch.tensor(params.presence_penalty, dtype=torch.float32).item()
        for token, bias in params.logit_bias.items():
            if token >= vocab_size:
                raise ValueError(f"token {token} of logit_bias is not in the vocabulary of {vocab_size}")
            self.changes[self._place(token) + 1] = bias
        if params.repetition_penalty != 1.0:
            self.seen = prompt_ids if isinstance(prompt_ids, Tensor) else distinct(prompt_ids, vocab_size)
            seen, biased = self.seen.numpy(), np.array(list(params.logit_bias), np.int64)
            found = np.searchsorted(seen, biased) < np.searchsorted(seen, biased, "right")
            for token in biased[found].tolist():
                self.changes[self._place(token) + 2] = params.repetition_penalty

    def _place(self, token_id: int) -> int:
        at = self._places.setdefault(token_id, len(self.changes))
        if at == len(self.changes):
            self.changes.extend((token_id, 0.0, 1.0, 0.0, 0.0))
        return at

    def commit(self, token_id: int) -> None:
        """The token is part of the output."""
        point("sampler.commit", self.name)
        self.index += 1
        if self.mask is not None:
            self.mask.advance(token_id)
        params = self.params
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            self._times[token_id] += 1
            at = self._place(token_id)
            self.changes[at + 2] = params.repetition_penalty
            self.changes[at + 3] = self._presence
            self.changes[at + 4] = params.frequency_penalty * self._times[token_id]

    @property
    def plain(self) -> bool:
        """Whether the choice is just the largest logit."""
        return self.params.temperature == 0 and not self.changes and not len(self.seen) and self.mask is None

    def uniform(self) -> float:
        """The number that the next token is drawn with."""
        point("sampler.uniform", self.name)
        return uniform(self.seed, self.index)


def at_once(vocab_size: int) -> int:
    """How many rows go through the steps together on a CPU, whose threads each take some."""
    return min(AT_ONCE, torch.get_num_threads() * max(1, CACHED // vocab_size))


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Draw | BadLogits]:
    """Choose the next token of every row.

    logits: [B, V] floating, one row a sampler, unchanged on return. Nothing is committed: the caller commits what it
    keeps. A row with NaN, +inf, or nothing but -inf gives a BadLogits value, and the other rows do not notice.
    """
    assert logits.ndim == 2
    assert logits.shape[0] == len(samplers)
    if all(sampler.plain for sampler in samplers):  # most of a server's greedy requests: one look at each logit
        ids = ops.argmax(logits)
        tops = logits.gather(-1, ids[:, None]).squeeze(-1).tolist()
        return drawn(partial(logprobs_of, logits), ids.tolist(), tops, samplers)
    if len(samplers) > (few := at_once(logits.shape[1])):
        pieces = range(0, len(samplers), few)
        return [draw for i in pieces for draw in sample(logits[i : i + few], samplers[i : i + few])]
    rows = penalized(logits, samplers)
    tokens = ops.argmax(rows)  # of a NaN, where there is one
    largest = rows.gather(-1, tokens[:, None])  # [B, 1]
    tops = largest.squeeze(-1).tolist()
    random = [i for i, each in enumerate(samplers) if each.params.temperature > 0 and math.isfinite(tops[i])]
    if random:
        chosen = [samplers[i] for i in random]
        temperature = _column([sampler.params.temperature for sampler in chosen], rows)
        uniforms = _column([sampler.uniform() for sampler in chosen], rows)
        if len(random) < len(rows):
            rows, largest = rows[random], largest[random]
        # The largest becomes 0, so that no temperature can make an infinity of it.
        scaled = rows.sub_(largest).div_(temperature)
        tokens[random] = _pick(_filter(scaled, [sampler.params for sampler in chosen]), uniforms)
    return drawn(partial(logprobs_of, logits), tokens.tolist(), tops, samplers)


def penalized(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Steps 0 to 2: a float64 copy of the logits [B, V] with biases, masks and penalties, on the same device."""
    for sampler in samplers:
        point("sampler.penalties", sampler.name)
    rows = logits.to(torch.float64, copy=True)
    _repeat(rows, samplers)
    changes = bytearray().join(sampler.changes for sampler in samplers)
    if changes:
        owners = _owners([len(sampler.changes) // CHANGE for sampler in samplers])
        numbers = torch.frombuffer(changes, dtype=torch.float64).view(-1, CHANGE)
        owners, numbers = sent(rows.device, owners, numbers)
        ids = numbers[:, 0].long()
        _, bias, repetition, presence, frequency = numbers.unbind(-1)
        # Of the raw logits, whatever was done to those of the prompt.
        few = _penalty(logits[owners, ids].double() + bias, repetition)
        rows[owners, ids] = few - presence - frequency
    masks = {i: sampler.mask.allowed() for i, sampler in enumerate(samplers) if sampler.mask is not None}
    if masks:
        masked, allowed = sent(rows.device, torch.tensor(list(masks)), torch.stack(list(masks.values())))
        rows[masked] = rows[masked].masked_fill(~allowed, -torch.inf)
    return rows


def _repeat(rows: Tensor, samplers: Sequence[Sampler]) -> None:
    """Step 1 for tokens of the prompts, in place."""
    counts = [len(sampler.seen) for sampler in samplers]
    if any(counts):
        penalties = torch.tensor([sampler.params.repetition_penalty for sampler in samplers], dtype=torch.float64)
        seen = torch.cat([sampler.seen for sampler in samplers])
        owners, ids, penalties = sent(rows.device, _owners(counts), seen, penalties)
        rows[owners, ids] = _penalty(rows[owners, ids] + 0.0, penalties[owners])  # no bias: a -0 becomes a 0


def _penalty(few: Tensor, repetition: Tensor) -> Tensor:
    return torch.where(few > 0, few / repetition, few * repetition)


def _owners(counts: Sequence[int]) -> Tensor:
    """Which row each of so many numbers a row belongs to."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def drawn(
    logprobs: Callable[[Sequence[Asked]], Sequence[TokenLogprob]],
    tokens: Sequence[int],
    largest: Sequence[float],
    samplers: Sequence[Sampler],
) -> list[Draw | BadLogits]:
    """What is said of the tokens [B] that were chosen, where the largest number of a row is finite. `logprobs` is asked
    for those that somebody wants."""
    good = [math.isfinite(top) for top in largest]
    for sampler, fit in zip(samplers, good, strict=True):
        if fit:
            point("sampler.draw", sampler.name)
    wanted = [
        (i, tokens[i], count)
        for i, sampler in enumerate(samplers)
        if good[i] and (count := sampler.params.logprobs) is not None
    ]
    found = dict(zip((i for i, _, _ in wanted), logprobs(wanted), strict=True))
    return [Draw(token, found.get(i)) if good[i] else BadLogits(BAD) for i, token in enumerate(tokens)]


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Steps 4 to 6: -inf for the tokens [b, V] that are dropped. The largest of each row is 0."""
    size = scaled.shape[-1]
    ks = [p.top_k if p.top_k < size else 0 for p in params]  # 0: all
    if cut := [i for i, p in enumerate(params) if ks[i] and p.top_p == 1]:
        scaled = _with(scaled, cut, _largest(_rows(scaled, cut), [ks[i] for i in cut]))
    if cut := [i for i, p in enumerate(params) if p.top_p < 1]:
        scaled = _with(scaled, cut, _top(_rows(scaled, cut), [ks[i] for i in cut], [params[i].top_p for i in cut]))
    if any(p.min_p > 0 for p in params):
        floor = _column([p.min_p for p in params], scaled).log()  # min_p 0 is -inf: keeps all
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    return scaled


def _largest(scaled: Tensor, ks: Sequence[int]) -> Tensor:
    """Step 4 alone, which needs no order: -inf for the tokens [b, V] below the first k."""
    kth = _kth(scaled, ks)
    kept = scaled >= kth
    for row, (count, k) in enumerate(zip(kept.count_nonzero(-1).tolist(), ks, strict=True)):
        if count > k:  # equals at the edge, of which the last are too many
            equals = (scaled[row] == kth[row]).nonzero().squeeze(-1)
            kept[row, equals[k - count :]] = False
    return scaled.masked_fill(~kept, -torch.inf)


def _kth(scaled: Tensor, ks: Sequence[int]) -> Tensor:
    """The k-th largest of each row, [b, 1]."""
    size, kth = scaled.shape[-1], scaled.new_empty((len(ks), 1))
    few = [i for i, k in enumerate(ks) if k * SORTED <= size]
    if few:  # torch sorts them
        largest = _rows(scaled, few).topk(max(ks[i] for i in few)).values
        kth[few] = largest.gather(-1, torch.tensor([[ks[i] - 1] for i in few]))
    for i in set(range(len(ks))).difference(few):
        kth[i] = np.partition(scaled[i].numpy(), size - ks[i])[size - ks[i]].item()
    return kth


def _top(scaled: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """Steps 4 and 5: -inf for the tokens [b, V] below the first k, where k is not 0, or below the first that hold the
    mass p < 1.

    Sorting a whole vocabulary is slow, so only candidates are sorted: from the k-th value up, or without a k, the
    tokens with at least (1 - p) / V of the mass. All others together have less than 1 - p, so top-p drops them.
    Sums are prefix sums, which go left to right whatever the batch and the threads; torch's own sum does not.
    """
    size = scaled.shape[-1]
    k = torch.tensor([[top_k or size] for top_k in top_ks])  # [b, 1]
    p = _column(top_ps, scaled)
    mass = scaled.exp().cumsum(-1)[:, -1:]
    floor = ((1 - p) * mass / size).log()
    if cut := [i for i, top_k in enumerate(top_ks) if top_k]:
        floor[cut] = _kth(_rows(scaled, cut), [top_ks[i] for i in cut])
    few, rows, slots, ids = _candidates(scaled, floor)
    ranked, order = few.sort(dim=-1, descending=True, stable=True)
    within = torch.arange(few.shape[-1]) < k
    probabilities = ranked.exp() * within
    sums = probabilities.cumsum(-1)
    mass = torch.where(k < size, sums[:, -1:], mass)
    keep = within & (sums - probabilities < p * mass)  # the mass ranked before: 0 for the first
    kept = torch.empty_like(keep).scatter_(-1, order, keep)[rows, slots]
    rows, ids = rows[kept], ids[kept]
    result = torch.full_like(scaled, -torch.inf)
    result[rows, ids] = scaled[rows, ids]
    return result


def _rows(values: Tensor, wanted: Sequence[int]) -> Tensor:
    """These rows, in their order; all of them are not copied."""
    return values if len(wanted) == len(values) else values[wanted]


def _with(values: Tensor, places: Sequence[int], rows: Tensor) -> Tensor:
    """The values with these rows in their places."""
    return rows if len(rows) == len(values) else values.index_copy(0, torch.tensor(places), rows)


def _pick(scaled: Tensor, uniforms: Tensor) -> Tensor:
    """Step 7: [b] ids. The first token whose cumulative probability exceeds the uniform number; never one dropped.
    In the place of `scaled`: fresh pages for a vocabulary of doubles take longer than the numbers in them."""
    cumulative = scaled.exp_().cumsum_(-1)
    # u < 1 in float64 keeps u * total below total, so an id is always found, one with a probability of its own.
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True).squeeze(-1)


def _candidates(values: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What of values [b, V] is at least the floor of its row [b, 1]: side by side in order of id, with -inf behind,
    [b, n]; and of each its row, its place there and its id."""
    found = torch.from_numpy(np.flatnonzero((values >= floor).numpy()))  # by row, ids ascending; torch is slower at it
    rows, ids = found // values.shape[1], found % values.shape[1]
    counts = rows.bincount(minlength=len(values))
    slots = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    few = values.new_full((len(values), int(counts.max())), -torch.inf)
    few[rows, slots] = values[rows, ids]
    return few, rows, slots, ids


def logprobs_of(logits: Tensor, wanted: Sequence[Asked]) -> list[TokenLogprob]:
    """What is wanted of some rows of the raw logits [N, V], in float64."""
    few = at_once(logits.shape[1])
    pieces = (wanted[i : i + few] for i in range(0, len(wanted), few))
    return [found for piece in pieces for found in _logprobs(logits[[row for row, _, _ in piece]].cpu(), piece)]


def _logprobs(logits: Tensor, wanted: Sequence[Asked]) -> list[TokenLogprob]:
    """Of logits [b, V], one row each."""
    values = logits.double().log_softmax(-1)
    chosen = values.gather(-1, torch.tensor([[token] for _, token, _ in wanted])).squeeze(-1).tolist()
    counts = [min(count, values.shape[-1]) for _, _, count in wanted]
    if not any(counts):
        return [TokenLogprob(token, own) for (_, token, _), own in zip(wanted, chosen, strict=True)]
    count = torch.tensor(counts)[:, None]
    last = values.topk(max(counts)).values.gather(-1, (count - 1).clamp(min=0))
    few, rows, slots, ids = _candidates(values, torch.where(count > 0, last, torch.inf))  # all equals at the edge
    counts = torch.minimum(count.squeeze(-1), rows.bincount(minlength=len(values))).tolist()  # 0 in a row of NaNs
    names = torch.zeros(few.shape, dtype=torch.long).index_put_((rows, slots), ids)
    ranked, order = few.sort(dim=-1, descending=True, stable=True)
    most = max(counts)
    best = zip(names.gather(-1, order)[:, :most].tolist(), ranked[:, :most].tolist(), strict=True)
    return [
        TokenLogprob(token, own, tuple(zip(tops[:n], numbers[:n], strict=True)))
        for (_, token, _), own, n, (tops, numbers) in zip(wanted, chosen, counts, best, strict=True)
    ]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
