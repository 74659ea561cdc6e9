"""`ops.linear` of weights that Triton's kernels read: the rounding of rows, and the choice of the product.

Linear layers that read the same rows in the same way are one product: a launch costs as much as 10 MB of weights, and
at batch 1 a third of the launches would be for q, k and v.

Shapes: N rows, I input columns, O output columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from attar.kernels.operands import Linear
from attar.kernels.triton import w4, w8
from attar.kernels.triton.rows import round_rows
from attar.kernels.triton.weights import TritonWeight, side_by_side


def linear(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """Run `ops.linear` on rows x [N, I] and prepared weights. Raises ValueError where the rows do not fit."""
    if x.shape[1] != linears[0].shape[1]:
        raise ValueError(f"{linears[0].name} takes rows of {linears[0].shape[1]} columns, not {x.shape[1]}")
    out, at = x.new_empty((len(x), sum(each.shape[0] for each in linears))), 0
    for _, alike in groupby(linears, lambda each: each.vectors):
        members = list(alike)
        rows = _rows(x, members[0])
        weight = side_by_side([_weight(each) for each in members])
        if weight is not None:
            width = weight.shape[0]
            _multiply(rows, weight, _bias(members, x), members[0], out[:, at : at + width])
            at += width
            continue
        for each in members:
            _multiply(rows, _weight(each), each.bias, each, out[:, at : at + each.shape[0]])
            at += each.shape[0]
    return out


def _multiply(x: Tensor, weight: TritonWeight, bias: Tensor | None, each: Linear, out: Tensor) -> None:
    if not len(x):
        return
    fixed = each.activation_scale if weight.static else None
    assert (fixed is not None) == weight.static, "a static scheme rounds rows by the linear's own scale"
    if weight.form == "w4a16":
        w4.product(x, weight, bias, out)
    elif weight.form in ("w4a8", "p4a8"):
        codes, scales = round_rows(x, torch.int8, fixed)
        w4.product(codes, weight, bias, out, scales)
    elif weight.form == "w8a8":
        codes, scales = round_rows(x, weight.codes.dtype, fixed, weight.group)
        w8.product(codes, scales, weight, bias, out)
    elif weight.form == "w8a16":
        w8.product(x, None, weight, bias, out)
    else:
        matrix = weight.codes.to(x.dtype)
        torch.mm(x, matrix.T, out=out) if bias is None else torch.addmm(bias.to(x.dtype), x, matrix.T, out=out)


def _rows(x: Tensor, each: Linear) -> Tensor:
    if each.permutation is not None:
        x = x[:, each.permutation]
    if each.input_scale is not None:
        x = x / each.input_scale.to(x.dtype)
    return x.contiguous()


def _bias(linears: Sequence[Linear], x: Tensor) -> Tensor | None:
    """Return the biases side by side."""
    if len(linears) == 1 or all(each.bias is None for each in linears):
        return linears[0].bias
    return torch.cat([x.new_zeros(each.shape[0]) if each.bias is None else each.bias.to(x.dtype) for each in linears])


def _weight(each: Linear) -> TritonWeight:
    assert isinstance(each.weight, TritonWeight), f"{each.name} is not prepared"
    return each.weight
