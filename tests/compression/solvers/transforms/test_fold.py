from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.compression.solvers.transforms import fold
from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels import ref
from attar.kernels.operands import Linear, Norm
from tests.errors import user_error

SAME = 1e-5  # max |difference| over max |output|, float32
ROUNDED = 2**-8  # of one element that went through bfloat16


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def norms(dtype: torch.dtype = torch.float32) -> list[Norm]:
    weight = 1 + 0.3 * torch.randn(64)
    return [
        Norm("rms", weight.to(dtype)),
        Norm("rms", (weight - 1).to(dtype), offset=1.0),
        Norm("layer", weight.to(dtype), torch.randn(64).to(dtype)),
    ]


def random_scales(columns: int = 64) -> Tensor:
    return torch.randn(columns).mul(2).exp()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["rms", "offset", "layer"])
def test_a_norm_takes_the_division(which: int) -> None:
    torch.manual_seed(which)
    norm, x = norms()[which], torch.randn(32, 64)
    linears = [Linear("a", torch.randn(48, 64), torch.randn(48)), Linear("b", torch.randn(16, 64))]
    before = ref.linear(ref.norm(x, None, norm)[1], linears)
    inputs = ref.norm(x, None, norm)[1]
    scales = random_scales()
    exact = fold.into_norm(norm, scales)
    fold.into_columns(linears, exact)
    torch.testing.assert_close(exact, scales, rtol=1e-3, atol=0)
    torch.testing.assert_close(ref.norm(x, None, norm)[1], inputs / scales, rtol=1e-3, atol=1e-5)
    assert relative(ref.linear(ref.norm(x, None, norm)[1], linears), before) < SAME


@pytest.mark.parametrize("which", [0, 1], ids=["rms", "offset"])
def test_scales_make_up_for_the_rounding_of_a_bfloat16_norm(which: int) -> None:
    torch.manual_seed(which)
    norm, x, weight = norms(torch.bfloat16)[which], torch.randn(32, 64), torch.randn(48, 64)

    def output(w: Tensor) -> Tensor:
        return ref.norm(x, None, Norm(norm.kind, norm.weight.float(), None, norm.eps, norm.offset))[1] @ w.T

    before, scales = output(weight), random_scales()
    exact = fold.into_norm(norm, scales)
    assert norm.weight.dtype == torch.bfloat16
    assert relative(output(weight * exact), before) < SAME
    assert relative(output(weight * scales), before) > 10 * SAME  # what the asked-for scales would have left


def test_zero_weights_of_a_norm_stay_zero() -> None:
    norm = Norm("rms", torch.tensor([0.0, 2.0]))
    exact = fold.into_norm(norm, torch.tensor([4.0, 4.0]))
    assert norm.weight.tolist() == [0.0, 0.5]
    assert exact.tolist() == [1.0, 4.0]


def test_a_quotient_that_rounds_to_zero_is_not_taken() -> None:
    norm = Norm("rms", torch.tensor([0.0, 0.0], dtype=torch.bfloat16), offset=1.0)
    exact = fold.into_norm(norm, torch.tensor([1e6, 2.0]))  # 1e-6 - 1 rounds to -1: the channel would be lost
    assert norm.weight.tolist() == [0.0, -0.5]
    assert exact.tolist() == [1.0, 2.0]


def test_overflow_is_refused() -> None:
    with user_error("not_finite"):
        fold.into_norm(Norm("rms", torch.ones(2, dtype=torch.float16)), torch.tensor([1e-6, 1.0]))


def test_up_takes_the_division_for_down() -> None:
    torch.manual_seed(0)
    gate, up = Linear("gate", torch.randn(96, 64)), Linear("up", torch.randn(96, 64), torch.randn(96))
    down, x = Linear("down", torch.randn(64, 96)), torch.randn(32, 64)

    def output() -> Tensor:
        return ref.linear(ref.activate(ref.linear(x, [gate, up]), "silu", True), [down])

    before = output()
    fold.into_columns([down], fold.into_rows(up, random_scales(96)))
    assert relative(output(), before) < SAME


def test_tensors_are_replaced_not_written_to() -> None:
    weight, gamma = torch.randn(8, 64).bfloat16(), torch.ones(64)
    kept, linear, norm = weight.clone(), Linear("a", weight), Norm("rms", gamma)
    linear.dense = weight.float()
    fold.into_columns([linear], fold.into_norm(norm, random_scales()))
    assert torch.equal(weight, kept)
    assert torch.equal(gamma, torch.ones(64))
    assert isinstance(linear.weight, Tensor)
    assert linear.weight.dtype == torch.bfloat16
    assert linear.dense is None


def test_a_compressed_linear_is_refused() -> None:
    scheme = Scheme.parse("w4g32")
    linear = Linear("model.x", codec("int").quantize(torch.randn(8, 64), scheme))
    with user_error("source_compressed"):
        fold.into_columns([linear], torch.ones(64))
