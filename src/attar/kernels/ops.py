"""The one door to every kernel: the operations a decoder is made of. These docstrings are the specification.

Each operation exists first in `ref.py`, readable PyTorch and the oracle of every test, then, where it pays, as C++ for
CPUs (`native/`). The door takes the first backend that gives no reason against; `ATTAR_KERNELS=ref` forces the
oracle. `candidates` shows the choice with every reason, which is what `attar doctor` prints.

Rows are tokens, of any number of sequences, one after another: no operation knows of padding. The residual is added
only by the next `norm`, so projections return plain outputs, where an all-reduce, a post-norm or an adapter has its
place. Legend: N rows, I input and O output columns, H query heads, G key-value heads, D head size, S keys of one
sequence.

What is promised: `ref` promises the values within rounding, not the same bits for another batch or thread count. The
engine therefore runs one sequence a call until the native kernels, which do promise it, take over.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from attar import env
from attar.kernels import ref
from attar.kernels.native import extension, quantize
from attar.kernels.operands import Activation, AttentionForm, Linear, Norm, Tap

OPS = ("norm", "linear", "rope", "attention", "activate", "quantize_rows_int8")


def candidates(op: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[tuple[str, str | None]]:
    """Every backend in order of preference with the reason against it, or None where it would run."""
    forced = env.get().kernels
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}: known are {', '.join(OPS)}")
    against = "ATTAR_KERNELS=ref forces the reference" if forced == "ref" else extension.supports(op, device, dtype)
    return [("native", against), ("ref", None)]


def _backend(op: str, x: Tensor) -> ModuleType:
    name = next(name for name, reason in candidates(op, x.device.type, x.dtype) if reason is None)
    return {"native": quantize, "ref": ref}[name]


def norm(stream: Tensor, delta: Tensor | None, spec: Norm) -> tuple[Tensor, Tensor]:
    """Add `delta` [N, I] to the residual `stream` [N, I], then normalise. Returns (stream, normed), both [N, I].

    RMSNorm (Zhang and Sennrich 2019) is computed in float32 and rounded to the stream's dtype before the weight is
    applied, unless the weight has an offset (Gemma), which is applied in float32. LayerNorm is torch's.
    """
    return ref.norm(stream, delta, spec)


def linear(x: Tensor, linears: Sequence[Linear], tap: Tap | None = None) -> Tensor:
    """The products of rows x [N, I] with each of `linears`, side by side: [N, sum of O].

    Weights may be of any schemes, mixed. Where a scheme quantizes activations, x is rounded to that grid first, once
    for all linears that want the same.
    """
    if tap is not None:
        for each in linears:
            tap(each, x)
    return ref.linear(x, linears)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of heads x [N, heads, D], half-split pairs (i, i + R/2).

    cos and sin are [N, R/2] float32; the first R of D columns turn, the rest pass (partial rotary).
    """
    return ref.rope(x, cos, sin)


def attention(
    q: Tensor,
    keys: Sequence[Tensor] | Tensor,
    values: Sequence[Tensor] | Tensor,
    query_positions: Sequence[Tensor],
    key_positions: Sequence[Tensor],
    form: AttentionForm,
) -> Tensor:
    """Causal attention of queries [N, H, D] with each sequence's keys and values [S, G, D]: [N, H * D].

    A query at position p sees the keys at positions <= p and, with a window w, > p - w. Key positions are data, not
    implied by the slot. Query head h reads key-value head h * G // H. Where all B sequences have the same positions,
    keys and values may come as one tensor [B, S, G, D] each.
    """
    return ref.attention(q, keys, values, query_positions, key_positions, form)


def activate(x: Tensor, kind: Activation, gated: bool) -> Tensor:
    """act(x) [N, I], or, gated, act(a) * b of rows laid out as [a | b]: [N, I / 2]."""
    return ref.activate(x, kind, gated)


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row: x [N, I] float32 or bfloat16 to (codes int8 [N, I], scale float32 [N, 1]).

    scale = max|x| / 127.5, float32's epsilon where a row is all zero; code = round-half-even(x / scale) in -128 .. 127.
    Raises ValueError naming the first row that holds a NaN or an infinity.
    """
    codes, scale = _backend("quantize_rows_int8", x).quantize_rows_int8(x)
    return codes, scale
