"""The one door to every kernel: the operations a decoder is made of. These docstrings are the specification.

Each operation exists first in `ref.py`, readable PyTorch and the oracle of every test, then, where it pays, as C++ for
CPUs (`native/`). The door takes the first backend that gives no reason against; `ATTAR_KERNELS=ref` forces the
oracle. `candidates` shows the choice with every reason, which is what `attar doctor` prints.

A model is native or it is not: native products read weights in a layout of their own, so a model is loaded into a
`store` for them, and its norms, activations and embedding go with it. One that is not, such as one being compressed or
evaluated, is computed by the reference, in torch's arithmetic, which is transformers'; only a KV cache of float32 rows
is native for both.

Rows are tokens, of any number of sequences, one after another: no operation knows of padding. The residual is added
only by the next `norm`, so projections return plain outputs, where an all-reduce, a post-norm or an adapter has its
place. Legend: N rows, I input and O output columns, H query heads, G key-value heads, D head size, S keys of one
sequence.

What is promised. Native kernels: a row's result is the same bits whatever rows are beside it, on whatever threads, in
one piece or in chunks. `ref`, which is torch's matrix products, promises the values within rounding and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar import env
from attar.formats.packed import PackedTensor
from attar.kernels import ref, ref_attention
from attar.kernels.native import attention as native_attention
from attar.kernels.native import extension, quantize, rows
from attar.kernels.native import linear as products
from attar.kernels.native.linear import Activations as Activations
from attar.kernels.native.rows import Table as Table
from attar.kernels.native.store import Store as Store
from attar.kernels.operands import Activation, AttentionForm, Linear, Norm, Tap
from attar.kernels.pages import Pages, Placement, Rotation

OPS = ("embed", "norm", "linear", "rope", "attention", "write_kv", "paged_attention", "activate", "quantize_rows_int8")


def candidates(op: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[tuple[str, str | None]]:
    """Every backend in order of preference with the reason against it, or None where it would run."""
    forced = env.get().kernels
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}: known are {', '.join(OPS)}")
    against = "ATTAR_KERNELS=ref forces the reference" if forced == "ref" else extension.supports(op, device, dtype)
    return [("native", against), ("ref", None)]


def store(activations: str = "int8g128") -> Store | None:
    """Where a CPU model's weights go to be multiplied natively; None where the reference is what runs."""
    if candidates("linear")[0][1] is not None:
        return None
    extension.fit_threads()
    return Store(activations)


def argmax(rows: Tensor) -> Tensor:
    """The index [B] of the largest number of each row [B, V], of equals the first; of a NaN, where there is one.

    On CPUs by numpy: torch takes 2 ms for a vocabulary of 152,000, a hundred times as long as reading it.
    """
    return torch.from_numpy(rows.numpy().argmax(-1)) if rows.device.type == "cpu" else rows.argmax(-1)


def release() -> None:
    """Give back what backends keep for results to come: for whoever is short of memory between models."""
    extension.release()


def embed(
    table: Tensor | PackedTensor | Table,
    ids: Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
    position_table: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Rows `ids` [N] of a table [vocab, I] in `dtype`, times `scale`, which is rounded to that dtype, as models that
    have one were trained; plus rows `positions + offset` of a table of learned positions, where there is one."""
    if isinstance(table, Table):
        return rows.embed(table, ids, scale, position_table, positions, offset)
    return ref.embed(table, ids, dtype, scale, position_table, positions, offset)


def _is_native(op: str, x: Tensor) -> bool:
    return candidates(op, x.device.type, x.dtype)[0][1] is None


def norm(stream: Tensor, delta: Tensor | None, spec: Norm) -> tuple[Tensor, Tensor]:
    """Add `delta` [N, I] to the residual `stream` [N, I], then normalise. Returns (stream, normed), both [N, I].

    RMSNorm (Zhang and Sennrich 2019) is computed in float32 and rounded to the stream's dtype before the weight is
    applied, unless the weight has an offset (Gemma), which is applied in float32. LayerNorm is torch's.
    """
    if spec.prepared:
        return rows.norm(stream.contiguous(), None if delta is None else delta.contiguous(), spec)
    return ref.norm(stream, delta, spec)


def linear(x: Tensor, linears: Sequence[Linear], tap: Tap | None = None) -> Tensor:
    """The products of rows x [N, I] with each of `linears`, side by side: [N, sum of O].

    Weights may be of any schemes, mixed. Where a scheme quantizes activations, x is rounded to that grid first, once
    for all linears that want the same.
    """
    if tap is not None:
        for each in linears:
            tap(each, x)
    prepared = [isinstance(each.weight, products.KernelWeight) for each in linears]
    if all(prepared):
        return products.linear(x, linears)
    if any(prepared):  # some schemes have no kernel
        return torch.cat([linear(x, (each,)) for each in linears], 1)
    return ref.linear(x, linears)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of heads x [N, heads, D], half-split pairs (i, i + R/2).

    cos and sin are [N, R/2] float32; the first R of D columns turn, the rest pass (partial rotary).
    """
    return ref_attention.rope(x, cos, sin)


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
    keys and values may come as one tensor [B, S, G, D] each. For whole sequences at hand; a cache has pages.
    """
    return ref_attention.attention(q, keys, values, query_positions, key_positions, form)


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    place: Placement,
    rotation: Rotation | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> Tensor:
    """Write keys and values [N, G, D] to the slots of their rows; returns queries [N, H, D] as attention wants them.

    First `norm` of each head of q and k where norms are given, then `rope` where a rotation is. int8 pages are rounded
    symmetrically per token and head: scale = max|x| / 127, code = round-half-even(x / scale); what is not finite makes
    the scale NaN, for the reader to see. q, k and v may be columns of one matrix. Raises ValueError on slots or angles
    outside their arrays.
    """
    native = _is_native("write_kv", q)
    if q_norm is not None and k_norm is not None and not (native and q_norm.kind == "rms"):
        q, k = norm(q, None, q_norm)[1], norm(k, None, k_norm)[1]
        q_norm = k_norm = None
    if native:
        return native_attention.write_kv(q, k, v, pages, place, rotation, q_norm, k_norm)
    return ref_attention.write_kv(q, k, v, pages, place, rotation)


def paged_attention(
    q: Tensor, pages: Pages, place: Placement, form: AttentionForm, want_mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries [N, H, D] over the pages of their sequences: ([N, H * D], mass).

    Who sees what is as in `attention`, with positions as `Placement` says; a query that sees nothing gives zeros. The
    mass, float32 [B, G, slots of a table], is how much of the softmax each slot received, summed over the sequence's
    rows of this call and over the H / G query heads that read its head; None unless wanted.

    `native` gives a row the same bits whatever else is in the call, however its prompt was cut into calls, whichever
    blocks hold its slots, and on any number of threads: scores are merged in splits of fixed slots, in their order.
    Raises ValueError on lengths or block numbers outside their arrays.
    """
    if _is_native("paged_attention", q):
        return native_attention.paged_attention(q, pages, place, form, want_mass)
    return ref_attention.paged_attention(q, pages, place, form, want_mass)


def feed_forward_in(
    x: Tensor, up: Sequence[Linear], kind: Activation, gated: bool, reader: Linear, tap: Tap | None = None
) -> Tensor:
    """What `reader` multiplies in a feed-forward: `activate` of the products of rows x [N, I] with `up`."""
    if gated and tap is None and products.gateable(up) and isinstance(reader.weight, products.KernelWeight):
        return products.gated_linear(x, up, kind)
    return activate(linear(x, up, tap), kind, gated, reader)


def activate(x: Tensor, kind: Activation, gated: bool, reader: Linear) -> Tensor:
    """act(x) [N, I], or, gated, act(a) * b of rows laid out as [a | b]: [N, I / 2], for `reader` to multiply."""
    if isinstance(reader.weight, products.KernelWeight):
        return rows.activate(x.contiguous(), kind, gated)
    return ref.activate(x, kind, gated)


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row: x [N, I] float32 or bfloat16 to (codes int8 [N, I], scale float32 [N, 1]).

    scale = max|x| / 127.5, float32's epsilon where a row is all zero; code = round-half-even(x / scale) in -128 .. 127.
    Raises ValueError naming the first row that holds a NaN or an infinity.
    """
    if candidates("quantize_rows_int8", x.device.type, x.dtype)[0][1] is None:
        return quantize.quantize_rows_int8(x)
    return ref.quantize_rows_int8(x)
