"""How much a row reads, and one-bit keys against a plain computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attar.kernels import ref_sparse
from attar.kernels.operands import AttentionForm
from attar.kv.signs import Signs
from attar.kv.sparse import SparseAttention
from tests.errors import user_error

BLOCK, BLOCKS, HEADS, SIZE = 32, 12, 2, 24
LINES = 0.07  # relative error of lines between powers of two, which weights follow
SCALE = 2**-8  # relative rounding of a bfloat16


@pytest.mark.parametrize("text", ["topk:512", "topk:1/16"])
def test_settings_are_read_and_written(text: str) -> None:
    assert str(SparseAttention.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("512", "option_malformed"),
        ("quest:512", "option_malformed"),
        ("topk:2/16", "option_malformed"),
        ("topk:-1", "option_malformed"),
        ("topk:1/", "option_malformed"),
        ("topk:" + "9" * 40, "option_malformed"),
        ("topk:16", "option_out_of_range"),
        ("topk:1/1", "option_out_of_range"),
    ],
)
def test_other_settings_are_refused(text: str, code: str) -> None:
    with user_error(code):
        SparseAttention.parse(text)


@given(st.integers(1, 20000), st.integers(32, 4000), st.integers(0, 4096))
def test_a_row_reads_its_budget_or_all(length: int, topk: int, below: int) -> None:
    settings = SparseAttention(topk=topk, dense_below=below)
    runs, read = settings.runs(length), settings.tokens_read(length)
    assert 0 < read <= length
    if length <= below or topk >= length + 16:
        assert runs is None
        assert read == length
    if runs is not None:
        assert 16 * (runs - 1) < read <= 16 * runs


def signs(seed: int, settings: SparseAttention) -> tuple[Signs, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One-bit keys of a sequence whose blocks lie in any order; its keys, table and slots."""
    numbers = torch.Generator().manual_seed(seed)
    means = torch.randn((HEADS, SIZE), generator=numbers)
    made = Signs.zeros(BLOCKS, BLOCK, means, torch.rand((HEADS, SIZE), generator=numbers) + 0.1, settings)
    keys = torch.randn((300, HEADS, SIZE), generator=numbers)
    table = torch.randperm(BLOCKS, generator=numbers)[:10].int()
    at = torch.arange(300)
    return made, keys, table, table[at // BLOCK].long() * BLOCK + at % BLOCK


def test_signs_are_those_of_centred_keys() -> None:
    made, keys, table, slots = signs(0, SparseAttention(topk=64))
    for rows in torch.arange(300).split(7):
        made.write(keys[rows], slots[rows], rows)
    bits, scales = made.read(table, 300)
    assert torch.equal(bits, keys - made.means > 0)
    centred, spreads = (keys - made.means).double().flatten(0, 1), made.spreads.double().repeat(300, 1)
    least = torch.stack([(s * c.abs()).sum() / (s @ s) for c, s in zip(centred, spreads, strict=True)])
    torch.testing.assert_close(scales.flatten().double(), least, rtol=SCALE, atol=0)


def test_means_turn_with_their_positions() -> None:
    settings = SparseAttention(topk=64)
    angle = torch.arange(8)[:, None] * torch.tensor([1.0, 0.1])
    made = Signs.zeros(1, 16, torch.randn(HEADS, 6), torch.ones(HEADS, 6), settings, (angle.cos(), angle.sin()))
    turned = made.means_at(torch.tensor([0, 5]))
    torch.testing.assert_close(turned[0], made.means)
    a, b = made.means[:, :2], made.means[:, 2:4]
    expected = torch.cat((a * angle[5].cos() - b * angle[5].sin(), b * angle[5].cos() + a * angle[5].sin()), -1)
    torch.testing.assert_close(turned[1, :, :4], expected)
    assert torch.equal(turned[1, :, 4:], made.means[:, 4:])


def test_products_with_means_follow_a_line_within_a_run() -> None:
    """Fast pairs turn to every slot; of slow ones a line is off by half the square of the angle from the middle."""
    speeds = torch.tensor([1.0, 0.2, 0.06, 0.03, 0.001])
    angle = torch.arange(1024)[:, None].double() * speeds.double()
    made = Signs.zeros(
        1, 16, torch.randn(HEADS, 12), torch.ones(HEADS, 12), SparseAttention(topk=64),
        (angle.cos().float(), angle.sin().float()),
    )  # fmt: skip
    assert (len(made.turns.lane_cos), len(made.turns.speeds)) == (2, 3)
    q = torch.randn(2 * HEADS, 12)
    means = made.means_at(torch.arange(300)).repeat_interleave(2, 1)
    exact, found = torch.einsum("hd,shd->hs", q, means), made.mean_products(q, 300)
    assert found.shape == exact.shape
    middle = torch.arange(8, 300, 16)
    torch.testing.assert_close(found[:, middle], exact[:, middle], rtol=1e-4, atol=1e-4)
    a, b = (q[:, i : i + 5].square() for i in (0, 5))
    c, d = (made.means[:, i : i + 5].square().repeat_interleave(2, 0) for i in (0, 5))
    amplitude = ((a + b) * (c + d)).sqrt()[:, 2:]
    assert ((found - exact).abs() <= (amplitude * (8 * speeds[2:]) ** 2 / 2).sum(1, keepdim=True) + 1e-4).all()


@given(st.integers(0, 1000), st.integers(65, 300), st.integers(32, 200))
def test_the_best_runs_are_chosen(seed: int, length: int, topk: int) -> None:
    made, keys, table, slots = signs(seed, SparseAttention(topk=topk, dense_below=0))
    made.write(keys, slots, torch.arange(300))  # later slots, as of drafts or another life, do not matter
    form = AttentionForm(2 * HEADS, HEADS, SIZE, SIZE**-0.5)
    q = torch.randn((2 * HEADS, SIZE), generator=torch.Generator().manual_seed(seed + 1))
    chosen = ref_sparse.choose(q, made, table, length, form)
    budget, total = made.settings.runs(length), -(-length // 16)
    if budget is None:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.shape == (HEADS, total)
    assert (chosen.sum(1) == budget).all()
    assert chosen[:, [0, -1]].all()
    bits, scales = made.read(table, length)
    expected = torch.zeros(HEADS, total, dtype=torch.float64)
    x = q * made.spreads.repeat_interleave(2, 0)
    codes = (x / x.abs().amax(1, keepdim=True) * 127).round() * x.abs().amax(1, keepdim=True) / 127
    for h in range(2 * HEADS):
        one = torch.where(bits[:, h // 2], 1.0, -1.0).double() * scales[:, h // 2, None]
        scores = one @ codes[h].double() + float(made.means[h // 2].double() @ q[h].double())
        weights = (scores * form.scale).softmax(0)
        for run in range(total):
            expected[h // 2, run] += weights[16 * run : 16 * run + 16].sum()
    inner = expected[:, 1:-1]
    for head, picked in zip(inner, chosen[:, 1:-1], strict=True):
        if picked.any() and not picked.all():
            assert head[picked].min() >= (1 - LINES) * head[~picked].max() - 1e-5


def test_a_broken_key_is_read() -> None:
    made, keys, table, slots = signs(3, SparseAttention(topk=48, dense_below=0))
    keys[100, 1, 3] = torch.nan
    made.write(keys, slots, torch.arange(300))
    form = AttentionForm(2 * HEADS, HEADS, SIZE, SIZE**-0.5)
    ranks = ref_sparse.ranks(torch.ones(2 * HEADS, SIZE), made, table, 300, form)
    assert ranks[1].isinf().all()
    assert not ranks[0].isinf().any()


@pytest.mark.parametrize("size", [24, 64, 20])
def test_bytes_of_a_block_are_those_of_its_arrays(size: int) -> None:
    made = Signs.zeros(3, BLOCK, torch.zeros(HEADS, size), torch.ones(HEADS, size), SparseAttention(topk=64))
    assert made.bits.nbytes + made.scales.nbytes == 3 * SparseAttention.bytes(HEADS, size, BLOCK)
