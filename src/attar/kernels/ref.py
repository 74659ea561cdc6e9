"""The reference of every operation in `ops.py`: readable PyTorch, any device, the oracle of every test.

It favours being obviously right. A packed weight is dequantized on first use and kept (`Linear.dense`), so that the
reference is slow only once; the kernels that multiply by packed weights directly replace it behind the same door. Where
it may not be kept (`Linear.keep_dense`), and where a dense weight is stored in another dtype than the rows, a few rows
of the weight at a time take the dtype of the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Grid
from attar.kernels.operands import Activation, AttentionForm, Linear, Norm

QUERY_TILE = 512  # queries that share one mask: memory grows with the keys, not with their square
WEIGHTS_AT_ONCE = 1 << 21  # enough for a product at full speed
INT8_HALF_RANGE = 127.5  # (2^8 - 1) / 2: a symmetric scale is max|x| over it


def norm(stream: Tensor, delta: Tensor | None, spec: Norm) -> tuple[Tensor, Tensor]:
    if delta is not None:
        stream = stream + delta
    if spec.kind == "layer":
        return stream, F.layer_norm(stream, (stream.shape[-1],), spec.weight, spec.bias, spec.eps)
    x = stream.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps)
    if spec.offset:
        return stream, (x * (spec.weight.float() + spec.offset)).to(stream.dtype)
    return stream, x.to(stream.dtype) * spec.weight


def dense(each: Linear, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The weight [O, I] in the dtype of x, whole where it is at hand or kept, else some rows at a time.

    Such rows lie where those before them lay.
    """
    weight, dtype = each.weight, x.dtype
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
    """The rows [N, I] as the linear's scheme wants them: permuted, divided, rounded to the activation grid."""
    if each.permutation is not None:
        x = x[:, each.permutation]
    if each.input_scale is not None:
        x = x / each.input_scale
    grid = activation_grid(each)
    if grid is None:
        return x
    return codec(grid.kind).fake_quantize(x, grid, each.activation_scale)


def activation_grid(each: Linear) -> Grid | None:
    return each.weight.scheme.activation if isinstance(each.weight, PackedTensor) else None


def linear(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    shared: dict[tuple[object, ...], Tensor] = {}
    out, at = x.new_empty((len(x), sum(each.shape[0] for each in linears))), 0
    for each in linears:
        key = (id(each.permutation), id(each.input_scale), id(each.activation_scale), activation_grid(each))
        if key not in shared:
            shared[key] = rounded_input(x, each)
        for rows, weight in dense(each, x):
            target = out[:, at + rows.start : at + rows.stop]
            if each.bias is None:
                torch.mm(shared[key], weight.T, out=target)
            else:
                torch.addmm(each.bias[rows].to(x.dtype), shared[key], weight.T, out=target)
        at += each.shape[0]
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = 2 * cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b = x[..., :turned].float().chunk(2, -1)
    out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return out if turned == x.shape[-1] else torch.cat((out, x[..., turned:]), -1)


def attention(
    q: Tensor,
    keys: Sequence[Tensor] | Tensor,
    values: Sequence[Tensor] | Tensor,
    query_positions: Sequence[Tensor],
    key_positions: Sequence[Tensor],
    form: AttentionForm,
) -> Tensor:
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        alike = q.unflatten(0, (len(keys), -1))
        return _attend_tiled(alike, keys, values, query_positions[0], key_positions[0], form).reshape(q.shape[0], -1)
    queries = q.split([len(at) for at in query_positions])
    pieces = zip(queries, keys, values, query_positions, key_positions, strict=True)
    outputs = [_attend_tiled(one[None], k[None], v[None], at, key_at, form)[0] for one, k, v, at, key_at in pieces]
    return torch.cat(outputs).reshape(q.shape[0], -1)


def _attend_tiled(q: Tensor, k: Tensor, v: Tensor, at: Tensor, key_at: Tensor, form: AttentionForm) -> Tensor:
    """Sequences of the same positions, q [B, T, H, D], k and v [B, S, G, D], to [B, T, H, D], in memory O(T + S)."""
    if form.soft_cap is None and _is_triangle(at, key_at, form.window):
        return _attend(q, k, v, None, form)
    outputs = []
    for first in range(0, max(1, len(at)), QUERY_TILE):
        rows = slice(first, first + QUERY_TILE)
        mask = visible(at[rows], key_at, form.window)
        seen = mask.any(0)
        if seen.all():
            outputs.append(_attend(q[:, rows], k, v, mask, form))
        else:
            outputs.append(_attend(q[:, rows], k[:, seen], v[:, seen], mask[:, seen], form))
    return torch.cat(outputs, 1)


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys each query sees: bool [queries, keys]."""
    distance = query_positions[:, None] - key_positions[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _is_triangle(at: Tensor, key_at: Tensor, window: int | None) -> bool:
    """Whether each query sees just its own key and those before it, which needs no mask and memory O(N)."""
    if not torch.equal(at, key_at) or not (at.diff() > 0).all():
        return False
    return window is None or len(at) == 0 or int(at[-1] - at[0]) < window


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: AttentionForm) -> Tensor:
    """As `_attend_tiled`, by a mask [T, S] or, without, the lower triangle."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if form.soft_cap is None:
        grouped, scale = form.heads != form.kv_heads, form.scale
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    assert mask is not None
    k, v = (t.repeat_interleave(form.heads // form.kv_heads, 1) for t in (k, v))
    scores = form.soft_cap * torch.tanh((q.float() @ k.float().transpose(2, 3)) * form.scale / form.soft_cap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def activate(x: Tensor, kind: Activation, gated: bool) -> Tensor:
    a, b = x.chunk(2, -1) if gated else (x, None)
    if kind == "silu":
        a = F.silu(a)
    elif kind == "relu":
        a = F.relu(a)
    else:
        a = F.gelu(a, approximate="tanh" if kind == "gelu_tanh" else "none")
    return a if b is None else a.mul_(b)


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    finite = x.isfinite().all(-1)
    if not finite.all():
        raise ValueError(f"row {int((~finite).nonzero()[0, 0])} holds a NaN or an infinity: it cannot be quantized")
    scale = x.abs().amax(-1, keepdim=True) / INT8_HALF_RANGE
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return (x / scale).clamp(-128, 127).round().to(torch.int8), scale
