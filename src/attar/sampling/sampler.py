"""From logits to the next token.

The steps, in this order, in float64:

0. the logit biases, added; -inf for tokens that would end the output before min_tokens; with a mask, -inf for
disallowed tokens; 1. repetition penalty r on every token of prompt
and output: x / r where x > 0, else x * r (CTRL, arXiv 1909.05858); 2. presence and frequency penalties on tokens of the
output: x - presence * (count > 0) - frequency * count (OpenAI's formula; the prompt does not count);
3. at temperature 0 the largest x, the lowest id among equals, ends the steps. Otherwise x / temperature; 4. top-k: the
k largest; 5. top-p, over the probabilities left: the shortest run of the largest whose sum reaches p (at least one); 6.
min-p: those with probability >= min_p times the largest; 7. Gumbel-max: of the tokens left, the largest x + noise, the
lowest id among equals.

This is the order of transformers' processors. Equal logits are ranked by id everywhere, so that no sorting routine
decides a tie: top-k keeps exactly k, and top_k=1 is the greedy choice.

The noise is a function of (seed, index of the token in the output, id) alone (`kernels/noise.py`): there is no
generator state that another request, another row of the batch, a preemption or a rejected draft could advance. A draft
model that draws with the same noise agrees with its target more often than by any draw of its own (Daliri et al., arXiv
2408.07978), which is why the draw is not by inverse CDF. Each row is reduced on its own along the vocabulary, so on
CPUs a row's choice equals, to the bit, its choice alone. On a GPU the sums of top-p may associate otherwise from run to
run; a token on its border may then differ.

Log probabilities are those of the model itself: log softmax of the raw logits, before any of these steps.

Rows go through each step together. Steps 0 to 2 change few logits of a row. A sampler keeps the numbers of those tokens
alone, ready to be concatenated with those of other rows, and one gather and one scatter change them all. A prompt may
name many tokens, on which a repetition penalty acts alike: they are found once (`distinct`), and all choices of a
request share them. But a vocabulary of float64 fills a core's cache with a row or two. A batch is therefore cut into
pieces that fit (`at_once`), and each goes through all steps before the next begins. That is several times as fast as
whole batches, and bounds the memory, up to 150 bytes a logit where filters sort (`plan/steps.py` relies on it): a
gigabyte for 64 rows at once.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attar.errors import UserError
from attar.faults import point
from attar.kernels import ops
from attar.kernels.noise import draws
from attar.model.cache import sent
from attar.plan.steps import SAMPLED
from attar.protocol.request import SamplingParams, TokenLogprob

AT_ONCE = SAMPLED  # rows at most
CACHED = 1 << 18  # logits: as float64 they fit the cache of a core
CHANGE = 5  # numbers
SORTED = 64  # one of how many tokens may be among the first, before partial sorting is slower than partitioning
BAD = "the model's logits hold NaN or no finite maximum, or its vector a number that is not finite"


class BadLogits(ValueError):
    """The result for a row of logits from which nothing can be chosen. Other rows are unaffected."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for one row, with its log probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprob | None


Asked = tuple[int, int, int]
"""A request for log probabilities, (row, token, count): of the token and of the `count` most probable ones in
that row."""


class Mask(Protocol):
    """The tokens that may come next in one output, by a grammar for example (`masks.py`).

    A mask that allows nothing makes its row BadLogits.
    """

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor:
        """Return the tokens allowed behind `drafts`: bits of int32 [ceil(V/32)], the lowest first, on the host."""

    def forced(self) -> bytes:
        """Return the bytes that begin every text that may follow; nothing where several may."""

    def consume(self, token_id: int) -> None:
        """Take the token as the next one."""

    @property
    def finished(self) -> bool:
        """True where the output is complete and nothing can follow."""

    @property
    def failed(self) -> bool:
        """True where it allows nothing any more, since a limit was passed."""


def distinct(prompt_ids: Sequence[int], vocab_size: int) -> Tensor:
    """Return the tokens of a prompt, each once: int64 [n], ascending. Raises ValueError for a token beyond the
    vocabulary."""
    ids = np.fromiter(prompt_ids, np.int64, len(prompt_ids))
    if len(bad := ids[(ids < 0) | (ids >= vocab_size)]):
        raise UserError("token_out_of_vocabulary", f"prompt token {bad[0]} is not in the vocabulary of {vocab_size}")
    there = np.zeros(vocab_size, dtype=bool)  # numpy's own `unique` takes twenty times as long
    there[ids] = True
    return torch.from_numpy(np.flatnonzero(there))


class Sampler:
    """One request's sampling state: its parameters, the changes to its logits, and the number of its tokens.

    `sample` reads it; `commit` records a token once it is part of the output. Tokens are counted only where a penalty
    uses them. A prompt that is a tensor is the result of `distinct`, shared with other choices. `vocab_size` is the
    width of the logits. `ending` are the tokens that end the output. `name` is its sequence's. Raises ValueError for a
    token beyond the vocabulary in `logit_bias`, or in a prompt that a penalty reads.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | Tensor,
        vocab_size: int,
        name: str = "",
        mask: Mask | None = None,
        ending: frozenset[int] = frozenset(),
    ) -> None:
        self.name, self.mask, self.params = name, mask, params.seeded()
        assert self.params.seed is not None
        self.seed = self.params.seed
        self.index = 0  # tokens committed: the counter of the next draw
        self.ahead: tuple[int, ...] = ()  # drafts behind them, which the mask has not taken
        self.seen = torch.empty(0, dtype=torch.int64)  # prompt tokens under the repetition penalty, ascending
        self.changes = array("d")
        """Changes of steps 0 to 2 to the logits of output tokens and biased ones, `CHANGE` numbers each.

        They are the token, a bias to add, the repetition penalty or 1, and what presence and frequency subtract.
        """
        self._places: dict[int, int] = {}  # where each token's numbers begin
        self._times: Counter[int] = Counter()  # in the output
        # Rounded to float32, like torch's product of a number and a bool: seeded texts stay unchanged.
        self._presence = torch.tensor(params.presence_penalty, dtype=torch.float32).item()
        self._held = sorted(token for token in ending if token < vocab_size) if params.min_tokens else []
        for token, bias in params.logit_bias.items():
            if token >= vocab_size:
                raise UserError(
                    "token_out_of_vocabulary", f"token {token} of logit_bias is not in the vocabulary of {vocab_size}"
                )
            self.changes[self._place(token) + 1] = bias
        for token in params.logprob_token_ids:
            if token >= vocab_size:
                message = f"token {token} of logprob_token_ids is not in the vocabulary of {vocab_size}"
                raise UserError("token_out_of_vocabulary", message)
        for token in self._held:
            self.changes[self._place(token) + 1] = -math.inf
        if params.repetition_penalty != 1.0:
            self.seen = prompt_ids if isinstance(prompt_ids, Tensor) else distinct(prompt_ids, vocab_size)
            seen, biased = self.seen.numpy(), np.array([*params.logit_bias, *self._held], np.int64)
            found = np.searchsorted(seen, biased) < np.searchsorted(seen, biased, "right")
            for token in biased[found].tolist():
                self.changes[self._place(token) + 2] = params.repetition_penalty

    def _place(self, token_id: int) -> int:
        at = self._places.setdefault(token_id, len(self.changes))
        if at == len(self.changes):
            self.changes.extend((token_id, 0.0, 1.0, 0.0, 0.0))
        return at

    def commit(self, token_id: int) -> None:
        """Record the token as part of the output."""
        point("sampler.commit", self.name)
        if self.mask is not None:
            self.mask.consume(token_id)
        self._count(token_id)

    def along(self, drafts: Sequence[int], parents: Sequence[int] = ()) -> list[Sampler]:
        """Return the states in which the next tokens are sampled if they are the drafts: this one, and one behind each
        draft. `parents` are the states that drafts of a tree follow; a chain's follow one another. Nothing here
        changes."""
        states = [self]
        for before, token in zip(parents or range(len(drafts)), drafts, strict=True):
            state = copy.copy(states[before])
            if self._counts or state.index < self.params.min_tokens:
                state.changes, state._places = array("d", state.changes), dict(state._places)
                state._times = Counter(state._times)
            state._count(token)
            state.ahead = (*state.ahead, token)
            states.append(state)
        return states

    @property
    def _counts(self) -> bool:
        """Return whether a penalty reads the tokens of the output."""
        params = self.params
        return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)

    def _count(self, token_id: int) -> None:
        self.index += 1
        params = self.params
        if self.index == params.min_tokens:
            for held in self._held:
                self.changes[self._place(held) + 1] = params.logit_bias.get(held, 0.0)
        if self._counts:
            self._times[token_id] += 1
            at = self._place(token_id)
            self.changes[at + 2] = params.repetition_penalty
            self.changes[at + 3] = self._presence
            self.changes[at + 4] = params.frequency_penalty * self._times[token_id]

    @property
    def greedy(self) -> bool:
        """Return whether the choice is just the largest logit, of those that the mask allows where there is one."""
        return self.params.temperature == 0 and not self.changes and not len(self.seen)

    @property
    def plain(self) -> bool:
        """Return whether the choice is just the largest logit."""
        return self.greedy and self.mask is None

    def draw(self) -> tuple[int, int]:
        """Return the seed and the index of the noise that samples the next token."""
        point("sampler.noise", self.name)
        return self.seed, self.index


def at_once(vocab_size: int) -> int:
    """Return how many rows go through the steps together on a CPU, whose threads each take some."""
    return min(AT_ONCE, torch.get_num_threads() * max(1, CACHED // vocab_size))


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[SampledToken | BadLogits]:
    """Choose the next token of every row.

    logits: [B, V] floating, one row a sampler, unchanged on return. Nothing is committed: the caller commits the tokens
    it keeps. A row with NaN, +inf, or nothing but -inf gives a BadLogits value, and the other rows are unaffected.
    """
    assert logits.ndim == 2
    assert logits.shape[0] == len(samplers)
    if all(sampler.greedy for sampler in samplers):  # most greedy requests of a server: one look at each logit
        return _largest_allowed(logits, samplers)
    if len(samplers) > (few := at_once(logits.shape[1])):
        pieces = range(0, len(samplers), few)
        return [draw for i in pieces for draw in sample(logits[i : i + few], samplers[i : i + few])]
    greedy = {i for i, each in enumerate(samplers) if each.params.temperature == 0 and each.mask is not None}
    rows = penalized(logits, samplers, unmasked=greedy)
    tokens = ops.argmax(rows)  # a NaN's, where there is one
    for i, allowed in _not_allowed(tokens.tolist(), samplers, greedy):
        ops.mask(rows, *sent(rows.device, torch.tensor([i]), allowed[None]))
        tokens[i] = ops.argmax(rows[i : i + 1])[0]
    largest = rows.gather(-1, tokens[:, None])  # [B, 1]
    tops = largest.squeeze(-1).tolist()
    random = [i for i, each in enumerate(samplers) if each.params.temperature > 0 and math.isfinite(tops[i])]
    if random:
        chosen = [samplers[i] for i in random]
        temperature = _column([sampler.params.temperature for sampler in chosen], rows)
        noise = draws(*zip(*(sampler.draw() for sampler in chosen), strict=True))
        if len(random) < len(rows):
            rows, largest = rows[random], largest[random]
        # The largest becomes 0, so no temperature can turn it into an infinity.
        scaled = rows.sub_(largest).div_(temperature)
        tokens[random] = ops.gumbel_max(_filter(scaled, [sampler.params for sampler in chosen]), noise)
    return drawn(partial(logprobs_of, logits), tokens.tolist(), tops, samplers)


def _largest_allowed(logits: Tensor, samplers: Sequence[Sampler]) -> list[SampledToken | BadLogits]:
    """Choose the largest allowed logit of every row."""
    ids = ops.argmax(logits)
    tops: list[float] = logits.gather(-1, ids[:, None]).squeeze(-1).tolist()
    tokens: list[int] = ids.tolist()
    masked = [i for i, sampler in enumerate(samplers) if sampler.mask is not None]
    for i, allowed in _not_allowed(tokens, samplers, masked):
        row = logits[i : i + 1].to(torch.float64, copy=True)
        ops.mask(row, *sent(row.device, torch.tensor([0]), allowed[None]))
        tokens[i] = int(ops.argmax(row))
        tops[i] = float(row[0, tokens[i]])
    return drawn(partial(logprobs_of, logits), tokens, tops, samplers)


def _not_allowed(
    tokens: Sequence[int], samplers: Sequence[Sampler], rows: Iterable[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield those of the masked `rows` whose largest number is of a token [B] that is not allowed, with their masks.

    It mostly is, which one bit tells. Masking a whole row takes longer than to find its largest number.
    """
    for i in rows:
        mask, token = samplers[i].mask, tokens[i]
        assert mask is not None
        allowed = mask.allowed(samplers[i].ahead)
        if not int(allowed[token // 32]) >> token % 32 & 1:
            yield i, allowed


def penalized(logits: Tensor, samplers: Sequence[Sampler], unmasked: Collection[int] = ()) -> Tensor:
    """Apply steps 0 to 2: return a float64 copy of the logits [B, V] with biases, masks and penalties, on the same
    device. The masks of the rows `unmasked` are left out."""
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
        # From the raw logits, whatever step 1 did to those of the prompt.
        rows[owners, ids] = _penalty(logits[owners, ids].double() + bias, repetition) - presence - frequency
    masks = {
        i: sampler.mask.allowed(sampler.ahead)
        for i, sampler in enumerate(samplers)
        if sampler.mask is not None and i not in unmasked
    }
    if masks:
        ops.mask(rows, *sent(rows.device, torch.tensor(list(masks)), torch.stack(list(masks.values()))))
    return rows


def _repeat(rows: Tensor, samplers: Sequence[Sampler]) -> None:
    """Apply step 1 to tokens of the prompts, in place."""
    counts = [len(sampler.seen) for sampler in samplers]
    if any(counts):
        penalties = torch.tensor([sampler.params.repetition_penalty for sampler in samplers], dtype=torch.float64)
        seen = torch.cat([sampler.seen for sampler in samplers])
        owners, ids, penalties = sent(rows.device, _owners(counts), seen, penalties)
        rows[owners, ids] = _penalty(rows[owners, ids] + 0.0, penalties[owners])  # no bias: a -0 becomes a 0


def _penalty(few: Tensor, repetition: Tensor) -> Tensor:
    return torch.where(few > 0, few / repetition, few * repetition)


def _owners(counts: Sequence[int]) -> Tensor:
    """Return the row of each number, given the count of numbers of each row."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def drawn(
    logprobs: Callable[[Sequence[Asked]], Sequence[TokenLogprob]],
    tokens: Sequence[int],
    largest: Sequence[float],
    samplers: Sequence[Sampler],
) -> list[SampledToken | BadLogits]:
    """Return the draws of chosen tokens [B], or BadLogits where the largest number of a row is not finite. `logprobs`
    is called once, for the rows that request them."""
    good = [math.isfinite(top) for top in largest]
    for sampler, fit in zip(samplers, good, strict=True):
        if fit:
            point("sampler.draw", sampler.name)
    params = {i: sampler.params for i, sampler in enumerate(samplers) if good[i]}
    wanted = [(i, tokens[i], count) for i, each in params.items() if (count := counted(each)) is not None]
    named = [(i, token, 0) for i, each in params.items() for token in each.logprob_token_ids]
    told = logprobs([*wanted, *named])
    found = dict(zip((i for i, _, _ in wanted), told, strict=False))
    tops: dict[int, list[tuple[int, float]]] = {}
    for (i, token, _), one in zip(named, told[len(wanted) :], strict=True):
        tops.setdefault(i, []).append((token, one.logprob))
    found |= {i: TokenLogprob(found[i].token_id, found[i].logprob, tuple(top)) for i, top in tops.items()}
    return [SampledToken(token, found.get(i)) if good[i] else BadLogits(BAD) for i, token in enumerate(tokens)]


def counted(params: SamplingParams) -> int | None:
    """Return how many of the most probable tokens a request wants log probabilities of; None where it wants none."""
    return 0 if params.logprob_token_ids else params.logprobs


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities, float64 [B, V], from which tokens are drawn by parameters without penalties, biases and
    masks."""
    rows = logits.double()
    if params.temperature == 0:
        return torch.zeros_like(rows).scatter_(-1, ops.argmax(rows)[:, None], 1.0)
    scaled = rows.sub(rows.amax(-1, keepdim=True)).div_(params.temperature)
    return _filter(scaled, [params] * len(rows)).softmax(-1)


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply steps 4 to 6: -inf for the dropped tokens [b, V]. The largest of each row is 0."""
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
    """Apply step 4 alone, which needs no order: -inf for the tokens [b, V] below the first k."""
    kth = _kth(scaled, ks)
    kept = scaled >= kth
    for row, (count, k) in enumerate(zip(kept.count_nonzero(-1).tolist(), ks, strict=True)):
        if count > k:  # equals at the edge, of which the last are too many
            equals = (scaled[row] == kth[row]).nonzero().squeeze(-1)
            kept[row, equals[k - count :]] = False
    return scaled.masked_fill(~kept, -torch.inf)


def _kth(scaled: Tensor, ks: Sequence[int]) -> Tensor:
    """Return the k-th largest of each row, [b, 1]."""
    size, kth = scaled.shape[-1], scaled.new_empty((len(ks), 1))
    few = [i for i, k in enumerate(ks) if k * SORTED <= size]
    if few:  # torch sorts them
        largest = _rows(scaled, few).topk(max(ks[i] for i in few)).values
        kth[few] = largest.gather(-1, torch.tensor([[ks[i] - 1] for i in few]))
    for i in set(range(len(ks))).difference(few):
        kth[i] = np.partition(scaled[i].numpy(), size - ks[i])[size - ks[i]].item()
    return kth


def _top(scaled: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """Apply steps 4 and 5: -inf for the tokens [b, V] below the first k, where k is not 0, or below the mass p < 1.

    Sorting a whole vocabulary is slow, so only candidates are sorted: from the k-th value up, or without a k, the
    tokens with at least (1 - p) / V of the mass. All others together have less than 1 - p, so top-p drops them. Sums
    are prefix sums, which go left to right for any batch and threads; torch's own sum does not.
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
    """Return these rows, in their order; all of them are not copied."""
    return values if len(wanted) == len(values) else values[wanted]


def _with(values: Tensor, places: Sequence[int], rows: Tensor) -> Tensor:
    """Return the values with these rows in their places."""
    return rows if len(rows) == len(values) else values.index_copy(0, torch.tensor(places), rows)


def _candidates(values: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the values [b, V] that are at least the floor of their row [b, 1].

    They lie side by side in order of id, with -inf behind, [b, n]; then come the row, the place in it and the id of
    each.
    """
    found = torch.from_numpy(np.flatnonzero((values >= floor).numpy()))  # by row, ids ascending; torch is slower at it
    rows, ids = found // values.shape[1], found % values.shape[1]
    counts = rows.bincount(minlength=len(values))
    slots = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    few = values.new_full((len(values), int(counts.max())), -torch.inf)
    few[rows, slots] = values[rows, ids]
    return few, rows, slots, ids


def logprobs_of(logits: Tensor, wanted: Sequence[Asked]) -> list[TokenLogprob]:
    """Return the requested log probabilities of some rows of the raw logits [N, V], in float64."""
    few = at_once(logits.shape[1])
    pieces = (wanted[i : i + few] for i in range(0, len(wanted), few))
    return [found for piece in pieces for found in _logprobs(logits[[row for row, _, _ in piece]].cpu(), piece)]


def _logprobs(logits: Tensor, wanted: Sequence[Asked]) -> list[TokenLogprob]:
    """Return log probabilities of logits [b, V], one row for each request."""
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
