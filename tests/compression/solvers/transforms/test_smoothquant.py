from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.compression.recipe.parser import PRESETS
from attar.compression.solvers.transforms import smoothquant
from attar.compression.solvers.transforms.smoothquant import AbsMax
from attar.formats.packed import codec
from attar.formats.scheme import Grid, Scheme
from attar.kernels import ref
from attar.kernels.operands import Linear, Norm
from tests.errors import user_error

SAME = 1e-5  # max |difference| over max |output|, float32


def outlier_layer(seed: int = 0) -> tuple[Norm, list[Linear], Tensor]:
    """A norm with four outlier channels, three linears behind it, and inputs whose tokens differ in size."""
    generator = torch.Generator().manual_seed(seed)
    gamma = torch.ones(64)
    gamma[[3, 17, 40, 63]] = torch.tensor([60.0, 40.0, 80.0, 50.0])
    linears = [Linear(name, 0.1 * torch.randn(48, 64, generator=generator)) for name in "qkv"]
    return (
        Norm("layer", gamma, torch.randn(64, generator=generator)),
        linears,
        torch.randn(512, 64, generator=generator),
    )


def seen(x: Tensor) -> Tensor:
    statistic = AbsMax(x.shape[1])
    statistic.add(x)
    return statistic.value


def test_equation_4_by_hand() -> None:
    weights = [torch.tensor([[2.0, -0.25, 1.0]]), torch.tensor([[-1.0, 0.5, -4.0]])]  # maxima 2, 0.5, 4
    act_max = torch.tensor([8.0, 2.0, 1.0])
    assert smoothquant.scales(act_max, weights, 0.5).tolist() == pytest.approx([2.0, 2.0, 0.5])
    # 8^.75 / 2^.25 = 4, 2^.75 / .5^.25 = 2, 1 / 4^.25. The formula (x / w)^alpha would give 2.83 for the first.
    assert smoothquant.scales(act_max, weights, 0.75).tolist() == pytest.approx([4.0, 2.0, 4**-0.25])


@pytest.mark.parametrize("kind", ["rms", "offset", "layer"])
@pytest.mark.parametrize("alpha", [0.5, 0.85])
def test_the_function_stays_the_same(kind: str, alpha: float) -> None:
    norm, linears, x = outlier_layer()
    if kind != "layer":
        offset = float(kind == "offset")
        norm = Norm("rms", norm.weight - offset, offset=offset)
    before = ref.linear(ref.norm(x, None, norm)[1], linears)
    normed = ref.norm(x, None, norm)[1]
    scales = smoothquant.smooth(norm, linears, seen(normed), alpha)
    smoothed = ref.norm(x, None, norm)[1]
    assert float((ref.linear(smoothed, linears) - before).abs().max() / before.abs().max()) < SAME
    torch.testing.assert_close(seen(smoothed), seen(normed) / scales, rtol=1e-4, atol=1e-6)
    assert seen(smoothed).max() < 0.5 * seen(normed).max()


def test_half_equalises_the_maxima() -> None:
    norm, linears, x = outlier_layer()
    smoothquant.smooth(norm, linears, seen(ref.norm(x, None, norm)[1]), 0.5)
    weight_max = torch.cat([each.weight for each in linears if isinstance(each.weight, Tensor)]).abs().amax(0)
    torch.testing.assert_close(seen(ref.norm(x, None, norm)[1]), weight_max, rtol=1e-4, atol=0)


def test_silent_channels_are_left_alone() -> None:
    weights = [torch.tensor([[1.0, 0.0, 2.0]])]
    scales = smoothquant.scales(torch.tensor([0.0, 3.0, 2.0]), weights, 0.5)
    assert scales.tolist() == [1.0, 1.0, 1.0]
    tiny = smoothquant.scales(torch.tensor([1e-30, 1e30, 1.0]), [torch.tensor([[1e-30, 1e30, 1e30]])], 0.85)
    assert bool((tiny > 0).all() and tiny.isfinite().all())


def layer_errors(smooth: bool) -> dict[str, float]:
    """Relative squared output error of the three presets on batches of new tokens."""
    norm, linears, x = outlier_layer()
    clean = Norm("layer", norm.weight, norm.bias)
    originals = [Linear(each.name, each.weight) for each in linears]
    calibration = ref.norm(x, None, norm)[1]
    act_max = seen(calibration)
    if smooth:
        act_max = act_max / smoothquant.smooth(norm, linears, act_max, 0.5)
    errors = {}
    for preset in PRESETS:
        scheme = Scheme.parse(PRESETS[preset])
        assert isinstance(scheme.activation, Grid)
        packed = [codec("int").quantize(each.weight, scheme).dequantize() for each in linears]  # type: ignore[arg-type]
        fixed = act_max.max().reshape(1) / 127.5 if scheme.static else None
        wrong = whole = 0.0
        for batch in x.view(16, 32, 64):
            rounded = codec("int").fake_quantize(ref.norm(batch, None, norm)[1], scheme.activation, fixed)  # type: ignore[attr-defined]
            expected = ref.linear(ref.norm(batch, None, clean)[1], originals)
            wrong += float((torch.cat([rounded @ w.T for w in packed], 1) - expected).square().sum())
            whole += float(expected.square().sum())
        errors[preset] = wrong / whole
    return errors


def test_presets_order_by_how_finely_activations_are_scaled() -> None:
    errors = layer_errors(smooth=True)
    assert errors["w8a8-o1"] <= errors["w8a8-o2"] <= errors["w8a8-o3"]


def test_smoothing_repairs_what_outliers_break() -> None:
    broken, repaired = layer_errors(smooth=False), layer_errors(smooth=True)
    assert all(repaired[preset] < 0.2 * broken[preset] for preset in broken)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-atensor", "w8a8-static", "fp8", "w4g32"])
def test_the_search_takes_what_rounds_with_the_least_error(scheme: str) -> None:
    """By products that are made the way a model makes them: the reference, with packed weights and divided rows."""
    norm, linears, x = outlier_layer()
    x = ref.norm(x, None, norm)[1]
    parsed, peaks = Scheme.parse(scheme), seen(x)
    weights = [each.weight for each in linears if isinstance(each.weight, Tensor)]
    schemes: list[Scheme | None] = [parsed, None, parsed]  # the second stays as it is

    def error(alpha: float) -> float:
        s = smoothquant.scales(peaks, weights, alpha)
        total = 0.0
        for weight in (weights[0], weights[2]):
            rounded = Linear("l", codec(parsed.weight.kind).quantize(weight * s, parsed))
            if parsed.static:
                assert parsed.activation is not None
                rounded.activation_scale = codec("int").fixed_scale((peaks / s).amax().reshape(1), parsed.activation)
            total += float((ref.linear(x / s, [rounded]) - x @ weight.T).double().square().sum())
        return total

    alpha, errors = smoothquant.search(x, peaks, weights, schemes)
    assert errors == pytest.approx([error(each) for each in smoothquant.GRID], rel=1e-4)
    assert errors[smoothquant.GRID.index(alpha)] == min(errors)
    assert min(errors) < 0.99 * max(errors), "some are better than others"


def test_alpha_by_family() -> None:
    assert smoothquant.alpha_for("LlamaForCausalLM") == 0.85
    assert smoothquant.alpha_for("MistralForCausalLM") == 0.8
    assert smoothquant.alpha_for("OPTForCausalLM") == 0.5


def test_the_statistic_is_the_largest_over_all_rows() -> None:
    statistic = AbsMax(2)
    statistic.add(torch.tensor([[1.0, -3.0]]).bfloat16())
    statistic.add(torch.tensor([[-2.0, 0.5], [0.0, 0.0]]))
    assert statistic.value.tolist() == [2.0, 3.0]
    with user_error("not_finite"):
        statistic.add(torch.tensor([[0.0, torch.nan]]))
