"""The reference operations against naive formulas in float64, one row and one head at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels import dispatch, ops, ref
from attar.kernels.operands import Linear, Norm
from tests.errors import user_error

FLOAT32 = 2e-6  # of values around 1, sums of a few hundred terms
BFLOAT16 = 2**-7  # two roundings to 8 bits

READER = Linear("down", torch.empty(1, 1))  # that is not laid out for the native kernels


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, expected: Tensor, tolerance: float = FLOAT32) -> None:
    assert ours.shape == expected.shape
    assert (ours.double() - expected.double()).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


# norm


def naive_norm(x: Tensor, spec: Norm) -> Tensor:
    rows = []
    for row in x.double():
        if spec.kind == "layer":
            row = row - row.mean()
        row = row / math.sqrt(float(row.square().mean()) + spec.eps) * (spec.weight.double() + spec.offset)
        rows.append(row if spec.bias is None else row + spec.bias.double())
    return torch.stack(rows)


@pytest.mark.parametrize(
    "spec",
    [
        Norm("rms", randn(48, seed=1), eps=1e-2),
        Norm("rms", randn(48, seed=1), eps=1e-6, offset=1.0),
        Norm("layer", randn(48, seed=1), randn(48, seed=2), eps=1e-2),
    ],
    ids=["rms", "gemma", "layer"],
)
def test_norm(spec: Norm) -> None:
    stream, delta = randn(5, 48, seed=3), randn(5, 48, seed=4)
    untouched = stream.clone()
    after, normed = ops.norm(stream, delta, spec)
    assert torch.equal(after, stream + delta)
    assert torch.equal(stream, untouched)
    close(normed, naive_norm(stream + delta, spec))
    after, normed = ops.norm(stream, None, spec)
    assert torch.equal(after, stream)
    close(normed, naive_norm(stream, spec))


@pytest.mark.parametrize("theirs, offset", [(LlamaRMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_norm_rounds_bfloat16_where_the_families_do(theirs: type[torch.nn.Module], offset: float) -> None:
    module = theirs(64, eps=1e-6).to(torch.bfloat16)
    weight = randn(64, seed=1).bfloat16()
    module.load_state_dict({"weight": weight})
    x = randn(40, 64).bfloat16() * 3
    assert torch.equal(ops.norm(x, None, Norm("rms", weight, eps=1e-6, offset=offset))[1], module(x))


# linear


def test_linear_side_by_side() -> None:
    x, a, b = randn(3, 16), randn(5, 16, seed=1), randn(2, 16, seed=2)
    bias = randn(2, seed=3)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(4))
    divisor = randn(16, seed=5).abs() + 0.5
    ours = ops.linear(x, (Linear("a", a), Linear("b", b, bias, permutation=order, input_scale=divisor)))
    expected_b = (x.double()[:, order] / divisor.double()) @ b.double().T + bias.double()
    close(ours, torch.cat([x.double() @ a.double().T, expected_b], -1))


def test_linear_shows_its_input_to_the_tap() -> None:
    x, linears = randn(3, 16), (Linear("a", randn(5, 16)), Linear("b", randn(2, 16)))
    seen: list[tuple[str, Tensor]] = []
    ops.linear(x, linears, lambda linear, rows: seen.append((linear.name, rows)))
    assert [name for name, _ in seen] == ["a", "b"]
    assert all(rows is x for _, rows in seen)


# gradients


def gradient(out: Tensor, of: Tensor) -> Tensor:
    """Of the sum of squares, which weighs every element differently."""
    return torch.autograd.grad(out.square().sum(), of, retain_graph=True)[0]


@pytest.mark.parametrize("scheme", [None, "w4g8", "w8a8"])
@pytest.mark.parametrize("keep", [True, False])
def test_linear_has_the_gradient_of_its_product(
    scheme: str | None, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that meet frozen weights, dense and packed, some rows of the weight at a time; rounding rows to a grid
    passes the gradient on."""
    monkeypatch.setattr(ref, "WEIGHTS_AT_ONCE", 3 * 16)
    dense = randn(5, 16, seed=1)
    packed = None if scheme is None else codec("int").quantize(dense, Scheme.parse(scheme))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(4))
    bias = randn(5, seed=3)
    frozen = Linear("a", dense.bfloat16() if packed is None else packed, bias, order, keep_dense=keep)
    weight = dense.bfloat16().float() if packed is None else packed.dequantize()
    seen: list[tuple[Tensor, Tensor]] = []
    frozen.on_gradient = lambda x, g: seen.append((x, g))
    x = randn(3, 16).requires_grad_()
    out = ops.linear(x, (frozen, frozen))
    with torch.no_grad():
        assert torch.equal(out, ops.linear(x, (frozen, frozen)))
    back = 2 * out.detach()[:, :5] @ weight
    close(gradient(out, x), torch.zeros_like(x).index_copy_(1, order, 2 * back))
    assert len(seen) == 2
    for rows, slope in seen:
        close(slope @ weight, back)
        assert torch.equal(rows, x.detach()[:, order]) == (scheme != "w8a8")


@pytest.mark.parametrize("scheme", [None, "w4g8"])
def test_weights_and_biases_learn(scheme: str | None) -> None:
    x, dense, bias = randn(3, 16), randn(5, 16, seed=1).requires_grad_(), randn(5, seed=3).requires_grad_()
    linear = Linear("a", dense, bias)
    if scheme is not None:
        linear = Linear("a", codec("int").quantize(dense.detach(), Scheme.parse(scheme)), bias, dense=dense)
    out = ops.linear(x, (linear, Linear("b", randn(2, 16, seed=2))))
    close(out.detach()[:, :5], (x @ dense.T + bias).detach())
    out_too = out.detach()
    close(gradient(out, dense), (2 * out_too[:, :5]).T @ x)
    close(gradient(out, bias), 2 * out_too[:, :5].sum(0))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"])
def test_activate_has_a_gradient(kind: ops.Activation, gated: bool) -> None:
    x = randn(4, 12).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: ops.activate(rows, kind, gated, READER), (x,))


# activate


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"])
def test_activate(kind: ops.Activation, gated: bool) -> None:
    x = randn(4, 12) * 3
    act = {
        "silu": lambda t: t / (1 + math.exp(-t)),
        "gelu": lambda t: t * (1 + math.erf(t / math.sqrt(2))) / 2,
        "quick_gelu": lambda t: t / (1 + math.exp(-1.702 * t)),
        "gelu_tanh": lambda t: t * (1 + math.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))) / 2,
        "relu": lambda t: max(t, 0.0),
    }[kind]
    wide = x[:, :6] if gated else x
    expected = torch.tensor([[act(t) for t in row] for row in wide.double().tolist()], dtype=torch.float64)
    close(ops.activate(x, kind, gated, READER), expected * x[:, 6:].double() if gated else expected)


# rows


def test_rows_do_not_see_each_other() -> None:
    """Changing one row of a call leaves every other row as it was."""
    x = randn(6, 32)
    other = x.clone()
    other[2] = randn(32, seed=9) * 100
    rest = [0, 1, 3, 4, 5]
    linears = (Linear("w", randn(8, 32, seed=1)),)
    for op in (
        lambda rows: ops.norm(rows, None, Norm("rms", torch.ones(32)))[1],
        lambda rows: ops.norm(rows, None, Norm("layer", torch.ones(32), torch.zeros(32)))[1],
        lambda rows: ops.linear(rows, linears),
        lambda rows: ops.activate(rows, "silu", True, READER),
        lambda rows: ops.rope(rows.view(6, 4, 8), torch.ones(6, 4), torch.ones(6, 4)),
    ):
        assert torch.equal(op(x)[rest], op(other)[rest])
        assert not torch.equal(op(x)[2], op(other)[2])


# int8 rows


def test_quantize_rows_int8_by_hand() -> None:
    x = torch.tensor([[127.5, -127.5, 0.5, 1.5, 2.5], [0.0] * 5, [-1.0, 0.25, 0.5, -0.75, 1.0]])
    codes, scale = ref.quantize_rows_int8(x)
    assert scale[:, 0].tolist() == [1.0, torch.finfo(torch.float32).eps, pytest.approx(1 / 127.5)]
    assert codes[0].tolist() == [127, -128, 0, 2, 2]  # halves go to the even code, 127.5 to the largest
    assert codes[1].tolist() == [0] * 5
    assert (codes * scale - x).abs().max() <= scale.max() / 2 + FLOAT32
    with user_error("not_finite"):
        ref.quantize_rows_int8(torch.tensor([[1.0], [math.nan]]))


def test_the_door_knows_its_operations() -> None:
    assert [name for name, _ in dispatch.candidates("attention")] == ["native", "ref"]
    assert dispatch.candidates("norm")[-1] == ("ref", None)
    with pytest.raises(ValueError, match="unknown op 'atention'"):
        dispatch.candidates("atention")


@pytest.mark.parametrize("columns", [1, 32, 70])
def test_masked_rows_keep_the_numbers_whose_bits_are_set(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randn(4, columns, generator=generator, dtype=torch.float64)
    allowed = torch.rand(2, columns, generator=generator) < 0.5
    words = [[sum(1 << i for i, bit in enumerate(row[at : at + 32]) if bit) for at in range(0, columns, 32)]
             for row in allowed.tolist()]  # fmt: skip
    bits = torch.tensor(words).to(torch.int32)
    expected = rows.clone()
    expected[[2, 0]] = expected[[2, 0]].masked_fill(~allowed, -torch.inf)
    for masked in (ops.mask, ref.mask):
        found = rows.clone()
        masked(found, torch.tensor([2, 0]), bits)
        assert torch.equal(found, expected)
