"""The reference of sparse attention: which runs of slots a row reads (`ops.paged_attention`).

Scores of one-bit keys are turned into softmax weights per query head, and summed over the heads of a group and the 16
slots of a run. Summing raw scores instead loses the ranking: a run with one sharp key among 15 others would be missed.
Powers of two have straight lines between them here: a scan takes four operations for one, and ranks hardly change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.kernels import ref_attention
from attar.kernels.operands import AttentionForm
from attar.kv.pages import AttentionMetadata, PagedKV
from attar.kv.schemes import RUN
from attar.kv.signs import Signs

LOG2E = 1.44269504088896341
MOST = 127.0  # the largest code of a query


def scores(q: Tensor, signs: Signs, table: Tensor, length: int, form: AttentionForm) -> Tensor:
    """Return the approximate scores of one row's queries [H, D] with the first `length` slots of a sequence, [H, S].

    Queries times the spreads are rounded to int8 by head: scale = max|x| / 127, code = round-half-even(x / scale).
    """
    bits, scales = signs.read(table, length)
    q = q.float()
    spread = q * signs.spreads.repeat_interleave(form.heads // form.kv_heads, 0)
    top = spread.abs().amax(-1, keepdim=True)
    codes = (spread * (MOST / top.clamp_min(1e-30))).round()
    plus_and_minus = (2 * bits.float() - 1).repeat_interleave(form.heads // form.kv_heads, 1)
    sums = torch.einsum("hd,shd->hs", codes, plus_and_minus)
    found = sums * (top / MOST * form.scale) * scales.T.repeat_interleave(form.heads // form.kv_heads, 0)
    found += signs.mean_products(q, length) * form.scale
    return found if form.soft_cap is None else form.soft_cap * torch.tanh(found / form.soft_cap)


def weights(scores: Tensor) -> Tensor:
    """Return shares [H, S] of scores [H, S]: 2^x with straight lines between powers of two, x = score / ln 2."""
    x = scores * LOG2E
    below = x - x.amax(-1, keepdim=True).ceil()
    powers = torch.ldexp(1 + below - below.floor(), below.floor().clamp_min(-100))
    return powers / powers.sum(-1, keepdim=True)


def ranks(q: Tensor, signs: Signs, table: Tensor, length: int, form: AttentionForm) -> Tensor:
    """Return what each run is ranked by, [G, runs]; +inf where a score is not a number, so that it is read."""
    shares = weights(scores(q, signs, table, length, form))
    by_run = F.pad(shares, (0, -length % RUN)).unflatten(-1, (-1, RUN)).sum(-1)
    found: Tensor = by_run.unflatten(0, (form.kv_heads, -1)).sum(1)
    return found.nan_to_num(nan=torch.inf)


def choose(q: Tensor, signs: Signs, table: Tensor, length: int, form: AttentionForm) -> Tensor | None:
    """Return the runs that one row with `length` visible slots reads, bool [G, runs]; None where it reads all.

    The first run and the newest are always read, because keys there are attention sinks and neighbours. The others are
    the highest-ranked; of equal ones the lower.
    """
    budget = signs.settings.runs(length)
    if budget is None:
        return None
    found = ranks(q, signs, table, length, form)
    found[:, 0] = found[:, -1] = torch.inf
    best = torch.sort(found, stable=True, dim=-1, descending=True).indices
    # Runs whose rank is not a number tie with the first and the newest, which go before them.
    fixed = torch.tensor([0, found.shape[1] - 1], device=q.device)
    chosen = torch.zeros_like(found, dtype=torch.bool)
    chosen[:, fixed] = True
    rest = best[(best != fixed[0]) & (best != fixed[1])].view(len(best), -1)[:, : budget - 2]
    return chosen.scatter_(1, rest, True)


def replace_rows(mixed: Tensor, q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm) -> Tensor:
    """Return the output of full attention [N, H * D] with each row replaced that chooses what it reads."""
    assert pages.signs is not None
    assert place.dense_until is not None
    mixed = mixed.clone()
    starts, repeat = place.row_starts.tolist(), form.heads // form.kv_heads
    for b, until in enumerate(place.dense_until.tolist()):
        table, keys, values = place.block_tables[b], None, None
        for n in range(starts[b], starts[b + 1]):
            length = int(place.positions[n]) + 1
            chosen = None if length <= until else choose(q[n], pages.signs, table, length, form)
            if chosen is None:
                continue
            if keys is None or values is None:
                whole = ref_attention.read_sequence(pages, table, int(place.lengths[b]), None, torch.float32)
                keys, values = (each.repeat_interleave(repeat, 1) for each in whole)  # [S, H, D]
            read = chosen.repeat_interleave(RUN, 1)[:, :length].repeat_interleave(repeat, 0)
            found = torch.einsum("hd,shd->hs", q[n].float(), keys[:length]) * form.scale
            if form.soft_cap is not None:
                found = form.soft_cap * torch.tanh(found / form.soft_cap)
            weights = found.masked_fill(~read, -torch.inf).softmax(-1)
            mixed[n] = torch.einsum("hs,shd->hd", weights, values[:length]).flatten().to(mixed.dtype)
    return mixed
