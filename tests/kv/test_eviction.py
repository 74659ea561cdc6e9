"""Policies of KV eviction read, and keys and values moved between slots of pages as they were written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from attar.kernels import ref_attention
from attar.kv import moving, ranking
from attar.kv.bit_planes import Basis
from attar.kv.eviction import NEVER, Eviction, moves, parse_all
from attar.kv.pages import PARTS, Bases, PagedKV
from attar.kv.schemes import SCHEMES, Layout, divide, scheme
from tests.errors import user_error

HEADS, SIZE = 2, 20  # a head size that no vector register divides
MOVABLE = [name for name, each in SCHEMES.items() if moves(each)]
ROUNDING = 0.02  # of a share, where sums that are nearly equal change places
ULPS = 1e-6  # of numbers near 1 that are multiplied and added once


@pytest.mark.parametrize("text", ["sink:4+2044", "sink:0+1024", "snapkv:2048", "h2o:512", "expected:512"])
def test_a_policy_is_read_as_it_is_written(text: str) -> None:
    assert str(Eviction.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "sink", "sink:4", "sink:4+5+6", "snapkv:4+8", "snapkv:-1", "snapkv:1e9", "SINK:4+2044", "sink:٤+2044"]
)
def test_other_text_is_refused(text: str) -> None:
    with user_error("option_malformed"):
        Eviction.parse(text)


@pytest.mark.parametrize("text", ["sink:4+100", "sink:33+2000", "snapkv:127", "snapkv:999999999"])
def test_budgets_have_bounds(text: str) -> None:
    with user_error("option_out_of_range"):
        Eviction.parse(text)


def test_no_policy_is_named_twice() -> None:
    with user_error("option_conflict"):
        parse_all(("snapkv:256", "snapkv:256"))


def test_models_that_cannot_be_evicted_from() -> None:
    for windows, learned, grows in (((None, 64), 0, False), ((None,), 9, False), ((None,), 0, True)):
        with user_error("option_conflict"):
            Eviction.parse("snapkv:256").check_model(windows, learned, grows, 512)
    with user_error("option_conflict", "klt2"):
        Eviction.parse("snapkv:256").check(scheme("klt2"))
    refused = {name for name, each in SCHEMES.items() if not moves(each)}
    assert refused == {"nuq4", "nuq3", "kivi4", "kivi2", "klt2"}


def test_where_keys_are_dropped() -> None:
    sink, once = Eviction.parse("sink:4+252"), Eviction.parse("snapkv:256")
    assert (sink.cut(1000, 0), sink.cut(1000, 128), sink.plain(1000), sink.reusable(1000)) == (256, 384, 256, 255)
    assert (once.cut(1000, 0), once.cut(1000, 744), once.plain(1000)) == (1000, NEVER, 1000)
    assert once.watched(1000) == range(968, 1000)
    assert once.reusable(1000) == 968
    assert (once.cut(256, 0), len(once.watched(256))) == (NEVER, 0)  # the budget covers it


def filled(kind: str, blocks: int = 4) -> tuple[PagedKV, torch.Tensor, torch.Tensor]:
    """Pages with keys and values in them, and these as they are read [slots, G, D]."""
    made, own = torch.Generator().manual_seed(1), SCHEMES[kind]
    size, bases = 32 if own.layout == Layout.BIT_PLANES else SIZE, None
    if own.calibrated:
        turns = [torch.linalg.qr(torch.randn(HEADS, size, size, generator=made)).Q for _ in range(2)]
        bits = (tuple(divide([4.0, 2.0, 1.0, 0.5], own.units(size))),) * HEADS
        mean = torch.randn(HEADS, size, generator=made)
        bases = Bases(*(Basis(turn, turn.mT, mean, torch.ones(HEADS, size), bits) for turn in turns))
    pages = PagedKV.zeros(blocks, 64, HEADS, size, own, bases=bases)
    k, v = (torch.randn(blocks * 64, HEADS, size, generator=made) for _ in range(2))
    ref_attention.write_pages(k, v, pages, torch.arange(blocks * 64))
    return pages, *moving.read(pages, range(blocks), blocks * 64)


@pytest.mark.parametrize("kind", MOVABLE)
def test_pages_are_read_as_attention_reads_them(kind: str) -> None:
    pages, k, v = filled(kind)
    found = ref_attention.read_pages(pages, torch.arange(4), k.dtype)
    if pages.bases is not None:
        found = pages.bases.keys.turn_back(found[0]), pages.bases.values.turn_back(found[1])
        q = torch.randn(3, 2 * HEADS, k.shape[2], generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(moving.plain_queries(pages, pages.bases.keys.turn_queries(q)), q)
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)


@pytest.mark.parametrize("kind", MOVABLE)
def test_kept_slots_keep_their_bits_and_others_stay(kind: str) -> None:
    pages, k, v = filled(kind)
    kept = torch.stack([torch.randperm(128, generator=torch.Generator().manual_seed(g))[:70] for g in range(HEADS)])
    moving.keep(pages, [1, 0], [3, 2], kept := kept.sort(-1).values)
    sources = torch.cat((torch.arange(64, 128), torch.arange(64)))  # of the table's slots
    found, values = moving.read(pages, [3, 2], 70)
    for g in range(HEADS):
        assert torch.equal(found[:, g], k[sources[kept[g]], g])
        assert torch.equal(values[:, g], v[sources[kept[g]], g])
    assert torch.equal(moving.read(pages, [0, 1], 128)[0], k[:128])
    assert torch.equal(moving.read(pages, [2], 64)[1][6:], v[134:192])


@pytest.mark.parametrize("kind", MOVABLE)
def test_sinks_turn_with_their_new_place(kind: str) -> None:
    pages, k, v = filled(kind)
    angle = torch.linspace(0.1, 3.0, 6)  # of 12 columns
    moving.move_sinks(pages, 0, 2, 5, (angle.cos(), angle.sin()))
    found, values = moving.read(pages, [2], 64)
    turned = ref_attention.rope(k[:5].float(), angle.cos()[None], angle.sin()[None])
    fresh = replace(pages, **{name: part.clone() for name in PARTS if (part := getattr(pages, name)) is not None})
    ref_attention.write_pages(turned, v[:5].float(), fresh, torch.arange(5))
    torch.testing.assert_close(found[:5], moving.read_keys(fresh, [0], 5), atol=ULPS, rtol=0)
    assert torch.equal(values[:5], v[:5])
    assert torch.equal(found[5:], k[133:192])
    assert torch.equal(values[5:], v[133:192])
    moving.move_sinks(pages, 0, 2, 5, (angle.cos(), angle.sin()))  # from the first block again: nothing drifts
    assert torch.equal(moving.read(pages, [2], 64)[0], found)


def around(x: list[float]) -> list[float]:
    """The greatest of each one's neighbours."""
    return [max(x[max(0, n - ranking.POOL // 2) : n + ranking.POOL // 2 + 1]) for n in range(len(x))]


def kept_when_diffuse(sums: list[float], peaks: list[float], budget: int) -> list[int]:
    """The keys that a diffuse head keeps: the first, then those near a peak by their sums, then the newest."""
    peak, weight = around(peaks), around(sums)
    first = list(range(ranking.SINKS))
    high = [n for n in range(ranking.SINKS, len(sums)) if peak[n] >= ranking.PEAK]
    rest = [n for n in reversed(range(ranking.SINKS, len(sums))) if peak[n] < ranking.PEAK]
    return sorted([*first, *sorted(high, key=lambda n: (-weight[n], n)), *rest][:budget])


@given(
    seed=st.integers(0, 1000), count=st.integers(9, 60), group=st.integers(1, 3), rows=st.integers(1, 6),
    cap=st.sampled_from([None, 5.0]), scale=st.sampled_from([0.5, 2.0]),
)  # fmt: skip
def test_snapkv_keeps_what_sums_one_by_one_say(
    seed: int, count: int, group: int, rows: int, cap: float | None, scale: float
) -> None:
    made = torch.Generator().manual_seed(seed)
    q, keys = torch.randn(rows, HEADS * group, 4, generator=made), torch.randn(count, HEADS, 4, generator=made)
    budget = rows + (count - rows) // 2
    kept = ranking.snapkv(q, keys, budget, scale, cap)
    assert kept.shape == (HEADS, budget)
    assert (kept.diff() > 0).all()
    for g in range(HEADS):
        sums, peaks = [0.0] * count, [0.0] * count
        for row in range(rows):
            for head in range(g * group, (g + 1) * group):
                scores = [scale * float(q[row, head] @ keys[n, g]) for n in range(count - rows + row + 1)]
                scores = scores if cap is None else [cap * math.tanh(score / cap) for score in scores]
                total = sum(map(math.exp, scores))
                for n, score in enumerate(scores):
                    sums[n] += math.exp(score) / total
                    peaks[n] = max(peaks[n], math.exp(score) / total)
        early = sums[: count - rows]
        pooled = around(early)
        best = sorted(range(len(early)), key=lambda n, of=pooled: (-of[n], n))[: budget - rows]
        held = (sum(sums) - sum(early[n] for n in range(len(early)) if n not in best)) / (rows * group)
        assume(abs(held - ranking.LEAST) > ROUNDING)
        assume(all(abs(peak - ranking.PEAK) > ULPS for peak in peaks))
        if held < ranking.LEAST:
            assert kept[g].tolist() == kept_when_diffuse(sums, peaks, budget)
            continue
        lost = set(range(count)) - set(kept[g].tolist())
        assert lost <= set(range(count - rows))
        least = min((pooled[n] for n in kept[g].tolist() if n < count - rows), default=0.0)
        assert all(pooled[n] <= least + 1e-6 for n in lost)


def test_h2o_keeps_the_newest_half_and_what_all_rows_weighed_most() -> None:
    sums = torch.tensor([[5.0, 1, 9, 9, 2, 0, 0, 0], [0.0, 0, 0, 0, 0, 0, 9, 9]])
    assert ranking.h2o(sums, 5).tolist() == [[0, 2, 3, 6, 7], [0, 1, 2, 6, 7]]


def test_expected_attention_ranks_by_the_mean_weight_of_gaussian_queries() -> None:
    """For many draws of such queries in the positions to come, a key's mean weight is near its score's share."""
    made = torch.Generator().manual_seed(0)
    queries = torch.randn(4000, 2, 4, generator=made) * 0.4 + torch.randn(2, 4, generator=made)
    keys, values = torch.randn(40, 1, 4, generator=made), torch.randn(40, 1, 4, generator=made)
    angles = torch.tensor([0.3, 0.05])
    found = ranking.expected_scores(queries, keys, values, (angles.cos(), angles.sin()), 0.5)
    turned = ref_attention.rope(queries, angles.cos()[None], angles.sin()[None])
    weights = (0.5 * turned.transpose(0, 1) @ keys[:, 0].T).exp().mean(1)  # of one key beside no other
    scores = (weights / weights.sum(-1, keepdim=True)).mean(0) * values[:, 0].norm(dim=-1)
    best = scores.topk(12).indices.tolist()
    assert found.shape == (1, 40)
    assert len(set(found[0].topk(12).indices.tolist()) & set(best)) >= 11  # the draws are a sample


def test_expected_attention_keeps_the_first_the_newest_and_the_best() -> None:
    scores, even = torch.tensor([[0.0, 0, 0, 0, 5, 1, 9, 2, 0, 0]]), torch.full((1, 10), 0.1)
    held = torch.zeros(1, 10).index_fill(1, torch.tensor([4, 6]), 0.5)  # by keys that are kept
    assert ranking.expected(scores, ranking.Seen(held, even), 8).tolist() == [[0, 1, 2, 3, 4, 6, 8, 9]]
    assert ranking.expected(scores, ranking.Seen(even, 0.9 * even), 6).tolist() == [[0, 1, 2, 3, 8, 9]], "diffuse"


def test_a_diffuse_head_keeps_what_one_row_looks_up() -> None:
    """A question's row finds its key; the rows before it look at everything alike."""
    made = torch.Generator().manual_seed(3)
    keys = torch.randn(400, 1, 16, generator=made)
    q = 0.1 * torch.randn(8, 1, 16, generator=made)
    q[-1] = 10 * keys[123]
    (kept,) = ranking.snapkv(q, keys, 40, 1.0).tolist()
    assert kept == [0, 1, 2, 3, *range(120, 127), *range(400 - 29, 400)]
