"""Per-channel scales that change no output: divide the input of a group of linears, multiply their columns.

y = (x diag(s)^-1) (diag(s) W^T) for any s > 0 (SmoothQuant, eq. 3). SmoothQuant and AWQ differ only in how they choose
s; the division goes to the producer of x in both:

* a norm, before q/k/v and before gate/up: its weight and bias are divided (`into_norm`);
* a linear whose output columns are x's columns, up before down (the gate is multiplied in afterwards) and v before o
  where every query head has its own value head: its rows and bias are divided (`into_rows`).

Under grouped-query attention one row of v feeds several columns of o, which would have to share one scale: not done.

The arithmetic is float32 and the results go back to the dtype they came in. Dividing a bfloat16 norm rounds it, so
`into_norm` returns the scales that the *rounded* norm stands for, and columns multiplied by those leave the function
as exact as the weights' own dtype allows. Tensors are replaced, never written to: they may be views of a mapped file.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices
from attar.kernels.operands import Linear, Norm


def dense_weight(linear: Linear) -> Tensor:
    """Return the weight [O, I] of a linear that is not compressed yet. Raises ValueError on one that is."""
    if isinstance(linear.weight, PackedTensor):
        raise UserError("source_compressed", f"{linear.name} is compressed already: start from the original checkpoint")
    assert isinstance(linear.weight, Tensor)
    return linear.weight


def into_norm(norm: Norm, scales: Tensor) -> Tensor:
    """Divide the norm's outputs by `scales` [I]; return the scales [I], float32, for the linears. They differ from
    `scales` by the rounding of the norm's dtype, and are 1 where the norm's weight is zero. Raises ValueError where the
    dtype cannot hold the quotient."""
    original = norm.weight.float() + norm.offset
    stored = (original / scales - norm.offset).to(norm.weight.dtype)
    divided = stored.float() + norm.offset
    exact = torch.where((original == 0) | (divided == 0), 1.0, original / divided)
    stored = torch.where((original != 0) & (divided == 0), norm.weight, stored)
    if not stored.isfinite().all():
        raise UserError(
            "not_finite", f"scales from {scales.min():.3g} to {scales.max():.3g} overflow a {norm.weight.dtype} norm"
        )
    norm.weight = stored
    if norm.bias is not None:
        norm.bias = (norm.bias.float() / exact).to(norm.bias.dtype)
    return exact


def into_rows(linear: Linear, scales: Tensor) -> Tensor:
    """Divide the outputs of a dense linear by `scales` [O]; return the scales [O], float32, for its consumers."""
    weight = dense_weight(linear)
    divided = torch.empty_like(weight)
    for part in row_slices(*weight.shape):
        divided[part] = weight[part].float() / scales[part, None]
    linear.weight = divided
    if linear.bias is not None:
        linear.bias = (linear.bias.float() / scales).to(linear.bias.dtype)
    linear.dense = None
    return scales.float()


def into_columns(linears: Iterable[Linear], scales: Tensor) -> None:
    """Multiply the input columns of dense linears by `scales` [I]."""
    for linear in linears:
        weight = dense_weight(linear)
        multiplied = torch.empty_like(weight)
        for part in row_slices(*weight.shape):
            multiplied[part] = weight[part].float() * scales
        linear.weight = multiplied
        linear.dense = None


def between(source: Linear, reader: Linear, turn: Tensor, back: Tensor) -> None:
    """Multiply the last outputs of a dense linear, G heads of D, by matrices T [G, D, D]. The columns of `reader`,
    several heads for each in turn, are multiplied by their inverses, `back`."""
    groups, size, _ = turn.shape
    weight, dtype = dense_weight(source), dense_weight(source).dtype
    first = len(weight) - groups * size
    heads = weight[first:].double().unflatten(0, (groups, size))
    source.weight = torch.cat((weight[:first], torch.einsum("gde,gdi->gei", turn, heads).flatten(0, 1).to(dtype)))
    if source.bias is not None:
        heads = source.bias[first:].double().unflatten(0, (groups, size))
        turned = torch.einsum("gde,gd->ge", turn, heads).flatten().to(source.bias.dtype)
        source.bias = torch.cat((source.bias[:first], turned))
    columns = dense_weight(reader)
    turned = torch.empty_like(columns)
    for part in row_slices(*columns.shape):
        heads = columns[part].double().unflatten(1, (groups, -1, size))
        turned[part] = torch.einsum("ogrd,ged->ogre", heads, back).flatten(1).to(columns.dtype)
    reader.weight = turned
    source.dense = reader.dense = None
