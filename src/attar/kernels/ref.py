"""The reference of every operation in `ops.py`: readable PyTorch, any device, the oracle of every test.

It favours being obviously right. A packed weight is dequantized on first use and kept (`Linear.dense`), so that the
reference is slow only once; kernels that multiply by packed weights directly replace it through the same dispatch. Some
weights may not be kept (`Linear.keep_dense`), and some dense ones have another dtype than the rows. A few rows of these
at a time are converted to the dtype of the product.

It is differentiable: where torch records gradients of the rows, products, norms, rotations, activations and attention
do. A weight that learns is `Linear.weight`, or `Linear.dense` of a packed one, that requires its gradient; any other is
read again in the backward pass, so that no copy of it is kept. Rounding of rows to an activation grid is skipped by the
gradient (the straight-through estimate).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import PackedTensor, codec
from attar.formats.weight_formats import WeightFormat
from attar.kernels.noise import gumbel
from attar.kernels.operands import Activation, Linear, Norm

WEIGHTS_AT_ONCE = 1 << 21  # enough for a product at full speed
INT8_HALF_RANGE = 127.5  # (2^8 - 1) / 2: a symmetric scale is max|x| over it


def embed(table: Tensor | PackedTensor, ids: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if isinstance(table, PackedTensor):
        hidden = torch.cat([table.dequantize(dtype, slice(i, i + 1)) for i in ids.tolist()] or [torch.empty(0)])
    else:
        hidden = table[ids].to(dtype)
    return hidden if scale == 1.0 else hidden * torch.tensor(scale, dtype=dtype)


def norm(stream: Tensor, delta: Tensor | None, spec: Norm) -> tuple[Tensor, Tensor]:
    if delta is not None:
        stream = stream + delta
    if spec.kind == "layer":
        weight, bias = (None if each is None else each.to(stream.dtype) for each in (spec.weight, spec.bias))
        return stream, F.layer_norm(stream, (stream.shape[-1],), weight, bias, spec.eps)
    x = stream.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps)
    if spec.offset:
        return stream, (x * (spec.weight.float() + spec.offset)).to(stream.dtype)
    return stream, x.to(stream.dtype) * spec.weight


def dense(each: Linear, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight [O, I] in the dtype of x: whole where it has that dtype or is kept, else some rows at a time.
    The rows of each step overwrite those before them."""
    weight, dtype = each.weight, x.dtype
    assert isinstance(weight, Tensor | PackedTensor), f"{each.name} is laid out for the kernels"
    if isinstance(weight, PackedTensor):
        if each.keep_dense and (each.dense is None or each.dense.dtype != dtype):
            each.dense = weight.dequantize(dtype)
        if each.dense is not None:
            weight = each.dense
    if isinstance(weight, Tensor) and weight.dtype == dtype:
        yield slice(0, weight.shape[0]), weight
        return
    step = max(1, WEIGHTS_AT_ONCE // weight.shape[1])
    buffer = x.new_empty((min(step, weight.shape[0]), weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        rows = slice(start, min(start + step, weight.shape[0]))
        part = buffer[: rows.stop - start]
        yield rows, part.copy_(weight[rows]) if isinstance(weight, Tensor) else weight.dequantize(dtype, rows, part)


def rounded_input(x: Tensor, each: Linear) -> Tensor:
    """Return the rows [N, I] as the linear layer's scheme needs them: permuted, divided, rounded to the activation
    grid."""
    if each.permutation is not None:
        x = x[:, each.permutation]
    if each.input_scale is not None:
        x = x / each.input_scale
    grid = activation_grid(each)
    if grid is None:
        return x
    rounded = codec(grid.kind).fake_quantize(x.detach(), grid, each.activation_scale)
    return rounded + (x - x.detach()) if x.requires_grad else rounded  # plus zero, whose gradient is that of x


def activation_grid(each: Linear) -> WeightFormat | None:
    return each.weight.scheme.activation if isinstance(each.weight, PackedTensor) else None


def linear(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    shared: dict[tuple[object, ...], Tensor] = {}

    def rows_for(each: Linear) -> Tensor:
        key = (id(each.permutation), id(each.input_scale), id(each.activation_scale), activation_grid(each))
        if key not in shared:
            shared[key] = rounded_input(x, each)
        return shared[key]

    if torch.is_grad_enabled() and (x.requires_grad or any(_learns(each) for each in linears)):
        return torch.cat([_differentiable(rows_for(each), each) for each in linears], 1)
    out, at = x.new_empty((len(x), sum(each.shape[0] for each in linears))), 0
    for each in linears:
        if each.product_dtype is None:
            _multiply(rows_for(each), each, out[:, at : at + each.shape[0]])
        else:
            _multiply_in(each.product_dtype, rows_for(each), each, out[:, at : at + each.shape[0]])
        at += each.shape[0]
    return out


def _multiply(x: Tensor, each: Linear, out: Tensor) -> None:
    """Write the products of rounded rows x [N, I] into `out` [N, O]."""
    for rows, weight in dense(each, x):
        if each.bias is None:
            torch.mm(x, weight.T, out=out[:, rows])
        else:
            torch.addmm(each.bias[rows].to(x.dtype), x, weight.T, out=out[:, rows])


def _multiply_in(dtype: torch.dtype, x: Tensor, each: Linear, out: Tensor) -> None:
    """Write products like `_multiply`, with factors and sums rounded to `dtype`; the bias is added in the rows'."""
    x = x.to(dtype)
    for rows, weight in dense(each, x):
        part = out[:, rows].copy_(x @ weight.T)
        if each.bias is not None:
            part += each.bias[rows].to(out.dtype)


def _learns(each: Linear) -> bool:
    tensors = (each.weight, each.dense, each.bias)
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _differentiable(x: Tensor, each: Linear) -> Tensor:
    """Return the products of rounded rows x [N, I], with their gradient recorded."""
    if not _learns(each):
        product: Tensor = _Frozen.apply(x, each)  # type: ignore[no-untyped-call]
        return product
    assert each.on_gradient is None, "gradients are shown at weights that do not learn"
    weight = each.weight if each.dense is None else each.dense
    if isinstance(weight, PackedTensor):  # only its bias learns
        weight = weight.dequantize(x.dtype)
    assert isinstance(weight, Tensor), f"{each.name} is laid out for the kernels"
    return F.linear(x, weight.to(x.dtype), None if each.bias is None else each.bias.to(x.dtype))


class _Frozen(torch.autograd.Function):
    """A product with a weight that does not learn, which is read twice rather than kept in the dtype of the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, each: Linear) -> Tensor:
        out = x.new_empty((len(x), each.shape[0]))
        _multiply(x, each, out)
        ctx.each = each
        if each.on_gradient is not None:
            ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), each = gradients, ctx.each
        if each.on_gradient is not None:
            each.on_gradient(ctx.saved_tensors[0], gradient)
        back = gradient.new_zeros((len(gradient), each.shape[1]))
        for rows, weight in dense(each, gradient):
            back.addmm_(gradient[:, rows], weight)
        return back, None


def activate(x: Tensor, kind: Activation, gated: bool) -> Tensor:
    a, b = x.chunk(2, -1) if gated else (x, None)
    if kind == "silu":
        a = F.silu(a)
    elif kind == "relu":
        a = F.relu(a)
    elif kind == "quick_gelu":
        a = a * torch.sigmoid(1.702 * a)
    else:
        a = F.gelu(a, approximate="tanh" if kind == "gelu_tanh" else "none")
    if b is None:
        return a
    return a * b if a.requires_grad else a.mul_(b)  # gradients need both factors


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    finite = x.isfinite().all(-1)
    if not finite.all():
        raise UserError(
            "not_finite", f"row {int((~finite).nonzero()[0, 0])} holds a NaN or an infinity: it cannot be quantized"
        )
    scale = x.abs().amax(-1, keepdim=True) / INT8_HALF_RANGE
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return (x / scale).clamp(-128, 127).round().to(torch.int8), scale


def mask(rows: Tensor, places: Tensor, bits: Tensor) -> None:
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> shifts & 1).flatten(1)[:, : rows.shape[1]].bool()
    rows[places] = rows[places].masked_fill(~allowed, -torch.inf)


def gumbel_max(scaled: Tensor, draws: Tensor) -> Tensor:
    size = scaled.shape[1]
    chosen = []
    for row, draw in zip(scaled, draws.T, strict=True):  # the noise of a vocabulary takes memory
        total = row + gumbel(draw[:, None], size)[0]
        places = torch.arange(size, device=scaled.device)
        chosen.append(torch.where(total == total.amax(), places, size - 1).amin())
    return torch.stack(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=scaled.device)
