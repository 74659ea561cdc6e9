from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar.compression.solvers.rounding import awq
from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels import ref
from attar.kernels.operands import Linear, Norm
from tests.errors import user_error

FOLDED = 1e-4  # max |difference| over max |output| between the searched and the folded form, float32
NOT_WORSE = 1 + 1e-5  # slack of float32 sums


def salient(seed: int, tokens: int = 128, columns: int = 64) -> Tensor:
    """Inputs [N, I] of which three channels are large."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    x[:, [1, 20, 50]] *= torch.tensor([20.0, 40.0, 30.0])
    return x


def rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    return codec(scheme.weight.kind).quantize(weight, scheme).dequantize(torch.float32)


def mean_abs(x: Tensor) -> Tensor:
    return x.abs().mean(0)


def test_scales_by_hand() -> None:
    stat = torch.tensor([16.0, 1.0, 4.0])
    assert awq.scales_from(stat, 0.0).tolist() == [1.0, 1.0, 1.0]
    assert awq.scales_from(stat, 0.5).tolist() == pytest.approx([2.0, 0.5, 1.0])
    assert awq.scales_from(stat, 1.0).tolist() == pytest.approx([4.0, 0.25, 1.0])
    silent = awq.scales_from(torch.tensor([0.0, 1.0]), 1.0)
    assert silent.tolist() == pytest.approx([1e-2, 1e2])  # 0 counts as 1e-4


@pytest.mark.parametrize("name", ["w4g32", "w3g16-asym", "w4"])
def test_the_search_beats_rounding_where_channels_stand_out(name: str) -> None:
    x, scheme = salient(0), Scheme.parse(name)
    weights = [torch.randn(48, 64, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    calls: list[list[Tensor]] = []

    def loss(candidates: list[Tensor]) -> float:
        calls.append(candidates)
        return sum(float((x @ (c - w).T).square().mean()) for c, w in zip(candidates, weights, strict=True))

    found = awq.search_scales(weights, [scheme, scheme], mean_abs(x), loss)
    assert len(calls) == len(found.losses) == 20
    for at, alpha in ((0, 0.0), (19, 1.0)):
        for candidate, weight in zip(calls[at], weights, strict=True):
            s = awq.scales_from(mean_abs(x), alpha)
            assert torch.equal(candidate, rounded(weight * s, scheme) / s)
    assert found.losses[0] == loss([rounded(w, scheme) for w in weights])
    assert found.loss == min(found.losses) < 0.7 * found.losses[0]
    assert found.loss == loss([awq.scaled_rounding(w, found.scales, scheme) for w in weights])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(["w4g16", "w2g64", "w3-asym", "fp8"]))
def test_the_searched_loss_is_never_above_that_of_rounding(seed: int, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(16, 64, generator=generator), torch.randn(32, 64, generator=generator)
    found = awq.search_scales(
        [weight], [Scheme.parse(name)], mean_abs(x), lambda w: float((x @ (w[0] - weight).T).square().mean()), points=5
    )
    plain = float((x @ (rounded(weight, Scheme.parse(name)) - weight).T).square().mean())
    assert found.loss <= plain


def test_a_kept_linear_stays_dense_during_the_search() -> None:
    weights = [torch.randn(8, 32), torch.randn(8, 32)]

    def loss(candidates: list[Tensor]) -> float:
        assert candidates[1] is weights[1]
        return 1.0

    found = awq.search_scales(weights, [Scheme.parse("w4g32"), None], torch.rand(32) + 0.1, loss, points=3)
    assert found.alpha == 0.0  # of equal losses the first


def test_a_loss_that_is_not_finite_stops_the_search() -> None:
    with user_error("not_finite"):
        awq.search_scales([torch.ones(4, 32)], [None], torch.ones(32), lambda _: float("nan"))


@pytest.mark.parametrize("before", ["norm", "linear"])
def test_folding_computes_what_was_searched(before: str) -> None:
    torch.manual_seed(0)
    x, scheme = salient(3), Scheme.parse("w4g32")
    source: Norm | Linear = Norm("rms", torch.rand(64) + 0.5) if before == "norm" else Linear("up", torch.randn(64, 64))

    def inputs() -> Tensor:
        return ref.norm(x, None, source)[1] if isinstance(source, Norm) else ref.linear(x, [source])

    linears = [Linear("a", torch.randn(48, 64)), Linear("b", torch.randn(32, 64))]
    scales = awq.scales_from(mean_abs(inputs()), 0.6)
    searched = torch.cat([inputs() @ awq.scaled_rounding(e.weight, scales, scheme).T for e in linears], 1)  # type: ignore[arg-type]
    awq.apply(source, linears, scales)
    folded = torch.cat([inputs() @ rounded(each.weight, scheme).T for each in linears], 1)  # type: ignore[arg-type]
    assert float((folded - searched).abs().max() / searched.abs().max()) < FOLDED


def test_grouped_queries_do_not_fold() -> None:
    v, o = Linear("v", torch.ones(32, 64)), Linear("o", torch.ones(64, 64))
    assert not awq.foldable(v, o)
    assert awq.foldable(Linear("v", torch.ones(64, 64)), o)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(["w3g16", "w2g32-asym", "w4", "w3-tensor", "fp8"]),
    tokens=st.integers(1, 40),
)
def test_no_row_is_worse_for_clipping(seed: int, name: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(12, 64, generator=generator) ** 3
    x = torch.randn(tokens, 64, generator=generator)
    scheme = Scheme.parse(name)
    clipped = awq.clip(weight, x, scheme)
    before = (x @ (rounded(weight, scheme) - weight).T).square().sum(0)
    after = (x @ (rounded(clipped, scheme) - weight).T).square().sum(0)
    if scheme.weight.granularity == "tensor":
        before, after = before.sum(), after.sum()
    assert bool((after <= before * NOT_WORSE).all())


@pytest.mark.parametrize("name", ["w3g16", "w3g32-asym", "w3", "w3-tensor"])
def test_clipping_helps_heavy_tails(name: str) -> None:
    weight, x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) ** 3, salient(1, tokens=600) / 10
    scheme = Scheme.parse(name)
    clipped = awq.clip(weight, x, scheme)
    used = x[::2]
    before, after = ((used @ (rounded(w, scheme) - weight).T).square().sum() for w in (weight, clipped))
    assert after < 0.9 * before
    assert clipped.abs().max() <= weight.abs().max()


@pytest.mark.parametrize("name", ["w3g16", "w3"])
def test_clipping_in_pieces_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4)), salient(5)
    whole = awq.clip(weight, x, Scheme.parse(name))
    monkeypatch.setattr(awq, "CHUNK_ELEMENTS", 5 * 64)
    assert torch.equal(awq.clip(weight, x, Scheme.parse(name)), whole)


def test_clipping_keeps_the_dtype() -> None:
    weight = torch.randn(8, 64).bfloat16()
    assert awq.clip(weight, salient(6), Scheme.parse("w3g32").with_scale_dtype("bfloat16")).dtype == torch.bfloat16
