"""Kernel dispatch: the operations of a decoder. These docstrings are the specification.

Each operation exists first in `ref.py`, readable PyTorch and the oracle of every test. Where it pays, it also exists as
C++ for CPUs (`native/`) and in Triton for NVIDIA's GPUs (`triton/`). The dispatcher selects the first backend that
supports the call; `ATTAR_KERNELS=ref` forces the oracle. `candidates` shows the choice with every reason, which `attar
doctor` prints.

A model is native or it is not. A backend's products read weights in a layout of their own, so a model is loaded into a
`store` for them, and its norms, activations and embedding go with it. Any other model, such as one being compressed or
evaluated, is computed by the reference, in torch's arithmetic, which is transformers'. On CPUs, a KV cache of float32
rows is native for both. A cache belongs to the backend that its `pages` were made for.

Rows are tokens, of any number of sequences, one after another: no operation knows of padding. The residual is added
only by the next `norm`, so projections return plain outputs, where an all-reduce, a post-norm or an adapter has its
place. Legend: N rows, I input and O output columns, H query heads, G key-value heads, D head size, S keys of one
sequence.

Guarantees. Native kernels: a row's bits depend neither on the other rows, nor on the threads, nor on chunking. Triton
kernels: equal calls give equal bits, but the rows of a call decide how a product or a softmax is shared out among
programs, and rounding with it. `ref` uses torch's matrix products and guarantees the values within rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attar.formats.packed import PackedTensor
from attar.kernels import dispatch, hadamard, operands, ref, ref_attention, ref_prefill, ref_spans, ref_sparse
from attar.kernels import ref_published as published
from attar.kernels.dispatch import BackendWeights, Table
from attar.kernels.native import attention as native_attention
from attar.kernels.native import linear as products
from attar.kernels.native import rows
from attar.kernels.native.rows import Table as NativeTable
from attar.kernels.native.store import CpuWeights
from attar.kernels.operands import Activation, ActivationHook, Adapter, AttentionForm, Linear, Norm, Routes
from attar.kernels.triton import backend as gpu
from attar.kernels.triton import store as gpu_store
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.kernels.triton.store import TritonTable
from attar.kernels.triton.weights import TritonWeight
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation


def argmax(rows: Tensor) -> Tensor:
    """Return the index [B] of the largest number of each row [B, V]: the first among equals, and a NaN's if there is
    one.

    CPUs use numpy: torch takes 2 ms for a vocabulary of 152,000, a hundred times as long as reading it. torch's argmax
    on a GPU does not define ties.
    """
    if dispatch.candidates("argmax", rows.device.type, torch.float32)[0] == ("triton", None):
        found: Tensor = dispatch.triton("rows").argmax(rows)
        return found
    return torch.from_numpy(rows.numpy().argmax(-1)) if rows.device.type == "cpu" else rows.argmax(-1)


def gumbel_max(scaled: Tensor, draws: Tensor) -> Tensor:
    """Return a random index [B] of each row of scaled logits [B, V], float64: index i with probability softmax(row)_i.

    draws: int64 [2, B] on the same device, the bits of each row's seed and index (`noise.draws`). The choice is the
    first index of the largest row_i + noise_i, with the noise of `noise.gumbel(seed, index, V)`. -inf drops an index.
    All backends agree to the bit on rows without NaN and +inf; other rows get any index.
    """
    scaled = scaled.contiguous()
    if dispatch.candidates("gumbel_max", scaled.device.type, scaled.dtype)[0] == ("triton", None):
        found: Tensor = dispatch.triton("noise").gumbel_max(scaled, draws)
        return found
    if dispatch.is_native("gumbel_max", scaled):
        return rows.gumbel_max(scaled, draws)
    return ref.gumbel_max(scaled, draws)


def mask(rows: Tensor, places: Tensor, bits: Tensor) -> None:
    """Set to -inf, in place, the numbers of some rows [B, V], float64, whose bits are not set.

    places: int64 [n], the rows. bits: int32 [n, ceil(V/32)], a bit for each number, the lowest first. Both are on the
    rows' device.
    """
    if dispatch.candidates("mask", rows.device.type, rows.dtype)[0] == ("triton", None):
        dispatch.triton("rows").mask(rows, places, bits)
    elif rows.device.type == "cpu":  # numpy takes a fifth of torch's time
        flags = np.unpackbits((~bits).numpy().view(np.uint8), axis=1, count=rows.shape[1], bitorder="little")
        for row, banned in zip(places.tolist(), flags.view(np.bool_), strict=True):
            rows[row].numpy()[banned] = -np.inf
    else:
        ref.mask(rows, places, bits)


def embed(
    table: Tensor | PackedTensor | Table,
    ids: Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
    position_table: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return rows `ids` [N] of a table [vocab, I] in `dtype`, times `scale`.

    The scale is rounded to that dtype, as models that have one were trained. Rows `positions + offset` of a table of
    learned positions are added, where there is one. Raises ValueError where tables or positions do not fit.
    """
    if isinstance(table, NativeTable):
        return rows.embed(table, ids, scale, position_table, positions, offset)
    if isinstance(table, TritonTable):
        hidden = gpu_store.embed(table, ids, dtype, scale)
    else:
        hidden = ref.embed(table, ids, dtype, scale)
    if position_table is not None and positions is not None:
        hidden = hidden + position_table[positions + offset].to(dtype)
    return hidden


def norm(stream: Tensor, delta: Tensor | None, spec: Norm) -> tuple[Tensor, Tensor]:
    """Add `delta` [N, I] to the residual `stream` [N, I], then normalise. Returns (stream, normed), both [N, I].

    RMSNorm (Zhang and Sennrich 2019) is computed in float32 and rounded to the stream's dtype before the weight is
    applied, unless the weight has an offset (Gemma), which is applied in float32. LayerNorm is torch's.
    """
    if spec.prepared and gpu.takes(stream.device):
        both: tuple[Tensor, Tensor] = dispatch.triton("rows").norm(stream, delta, spec)
        return both
    if spec.prepared:
        return rows.norm(stream.contiguous(), None if delta is None else delta.contiguous(), spec)
    return ref.norm(stream, delta, spec)


def linear(
    x: Tensor, linears: Sequence[Linear], hook: ActivationHook | None = None, routes: Routes | None = None
) -> Tensor:
    """Return the products of rows x [N, I] with each of `linears`, side by side: [N, sum of O].

    Weights may be of any schemes, mixed. Where a scheme quantizes activations, x is first rounded to that grid, once
    for all linear layers with the same grid. An adapter adds its product of the unrounded x to every row, and numbered
    ones to the rows that `routes` give them; prepared adapters keep the backend's guarantees. Where the linear layers
    rotate x, all of them in the same way, activation hooks and adapters see the rotated rows.
    """
    if linears[0].hadamard:
        x = hadamard.rotate(x, linears[0].hadamard)
    if hook is not None:
        for each in linears:
            hook(each, x)
    out = _products(x, linears)
    if any(each.adapter is not None for each in linears):
        _adapt(out, x, slice(None), [(each, each.adapter) for each in linears])
    for number, group in () if routes is None else routes.groups:
        if any(number in each.adapters for each in linears):
            every = len(group) == len(x)
            where = slice(None) if every else group
            _adapt(out, x if every else x[where], where, [(each, each.adapters.get(number)) for each in linears])
    return out


def _adapt(
    out: Tensor, x: Tensor, where: slice | Tensor, linears: Sequence[tuple[Linear, operands.AnyAdapter | None]]
) -> None:
    """Add to rows `where` of `out` the products of each linear layer's adapter with x, which are these rows."""
    at = 0
    for each, adapter in linears:
        if isinstance(adapter, operands.PreparedAdapter):
            out[where, at : at + each.shape[0]] += _products(_products(x, (adapter.down,)), (adapter.up,))
        elif adapter is not None:
            out[where, at : at + each.shape[0]] += adapter.product(x)
        at += each.shape[0]


def prepare_adapter(adapter: Adapter, into: BackendWeights | None, device: torch.device) -> operands.AnyAdapter:
    """Prepare an adapter for a model on `device` whose weights are in `into`. On CPUs it takes the layout of the
    kernels; a GPU multiplies by it in float32, like the reference."""
    if not isinstance(into, CpuWeights):
        return adapter.to(device)
    made = operands.PreparedAdapter(Linear("adapter's A", adapter.down), Linear("adapter's B", adapter.up))
    into.take(made.down)
    into.take(made.up)
    return made


def _products(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    prepared = [isinstance(each.weight, products.PackedWeight) for each in linears]
    if all(prepared):
        return products.linear(x, linears)
    on_gpu = [isinstance(each.weight, TritonWeight) for each in linears]
    if all(on_gpu):
        out: Tensor = dispatch.triton("linear").linear(x, linears)
        return out
    if any(prepared) or any(on_gpu):  # some schemes have no kernel
        return torch.cat([_products(x, (each,)) for each in linears], 1)
    return ref.linear(x, linears)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021) to heads x [N, heads, D], half-split pairs (i, i + R/2). cos and
    sin are [N, R/2] float32; the first R of D columns turn, the rest pass (partial rotary)."""
    return ref_attention.rope(x, cos, sin)


def attention(
    q: Tensor,
    keys: Sequence[Tensor] | Tensor,
    values: Sequence[Tensor] | Tensor,
    query_positions: Sequence[Tensor],
    key_positions: Sequence[Tensor],
    form: AttentionForm,
    spans: Tensor | None = None,
) -> Tensor:
    """Return causal attention of queries [N, H, D] over each sequence's keys and values [S, G, D]: [N, H * D].

    A query at position p sees the keys at positions <= p and, with a window w, > p - w. Key positions are data, not
    implied by the slot. Query head h reads key-value head h * G // H. Where all B sequences have the same positions,
    keys and values may come as one tensor [B, S, G, D] each. It is for whole sequences without a cache; a cache has
    pages.

    With `spans` [N, 2] int32, first position and end, rows of an image see each other in both directions; 0 and 0 for
    other rows.
    """
    mixed = ref_attention.attention(q, keys, values, query_positions, key_positions, form)
    return mixed if spans is None else ref_spans.replace_rows_without_cache(mixed, q, keys, values, spans, form)


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: PagedKV,
    place: AttentionMetadata,
    rotation: Rotation | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> Tensor:
    """Write keys and values [N, G, D] to the slots of their rows, and return queries [N, H, D] ready for attention.

    First `norm` is applied to each head of q and k where norms are given, then `rope` where a rotation is, then the
    pages' own basis where they have one (`kv/bit_planes.py`). int8 pages are rounded symmetrically per token and head:
    scale = max|x| / 127, code = round-half-even(x / scale); others follow `kv/schemes.py`. A value that is not finite
    makes its scale NaN, which the reader sees. q, k and v may be columns of one matrix. One-bit keys are written beside
    them where the pages have such (`kv/signs.py`). Raises ValueError on slots or angles outside their arrays.
    """
    assert pages.keys_rotated, "keys that are rotated when they are read must be written as they are"
    if pages.signs is not None and not dispatch.is_native("write_kv", q):
        turned_k = k if k_norm is None else norm(k, None, k_norm)[1]
        if rotation is not None:
            at = rotation.rows.long()
            turned_k = rope(turned_k, rotation.cos[at], rotation.sin[at])
        pages.signs.write(turned_k, place.slot_mapping, place.positions)
    fused = pages.published is None and (isinstance(pages, PlainPages) or dispatch.is_native("write_kv", q))
    if q_norm is not None and k_norm is not None and not (fused and q_norm.kind == "rms"):
        q, k = norm(q, None, q_norm)[1], norm(k, None, k_norm)[1]
        q_norm = k_norm = None
    if pages.published is not None:
        return published.write_kv(q, k, v, pages, place, rotation)
    if isinstance(pages, PlainPages):
        turned: Tensor = dispatch.triton("kv_write").write_kv(q, k, v, pages, place, rotation, q_norm, k_norm)
        return turned
    if fused:
        return native_attention.write_kv(q, k, v, pages, place, rotation, q_norm, k_norm)
    return ref_attention.write_kv(q, k, v, pages, place, rotation)


def paged_attention(
    q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm, want_mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return attention of queries [N, H, D] over the pages of their sequences: ([N, H * D], mass).

    Visibility is that of `attention`, with positions from `AttentionMetadata`. A query that sees nothing gives zeros
    (of coordinates: the mean of values where the pages' basis has one). The mass, float32 [B, G, slots of a table], is
    how much of the softmax each slot received, summed over the sequence's rows of this call and over the H / G query
    heads that read its head; None unless wanted.

    `native` gives a row the same bits for any batch, chunking of its prompt, blocks of its slots and number of threads:
    scores are merged in splits of fixed slots, in their order. Raises ValueError on lengths or block numbers outside
    their arrays; Triton's kernels do not check them, because they would have to wait for the device. They have no mass
    yet, and raise ValueError where it is wanted.

    Where the pages have one-bit keys, rows at positions from `AttentionMetadata.dense_until` on read the runs that
    `ref_sparse.choose` names, each key-value head its own. What a row reads depends on its own query and on the keys
    that it sees, and not on other rows.

    With `AttentionMetadata.spans`, rows of an image see each other in both directions; no kernel of a GPU has that.

    With `AttentionMetadata.prompts`, rows of prompts before their last read what `ref_prefill.attend` names. Layers
    with a window read as ever.
    """
    assert pages.keys_rotated, "no kernel rotates keys as it reads them"
    if pages.published is not None and pages.published.format.method == "kivi":
        if want_mass or place.spans is not None or place.prompts is not None:
            raise ValueError("a cache as published has no mass, images or rows that read few keys")
        return published.attend_kivi(q, pages, place, form), None
    if place.spans is not None:
        if want_mass or place.tree is not None or place.key_positions is not None or pages.signs is not None:
            raise ValueError("rows that see later rows have no mass, tree, positions of keys or one-bit keys")
        if isinstance(pages, PlainPages):
            raise ValueError("no kernel of a GPU has rows that see later rows")
        dense, _ = paged_attention(q, pages, replace(place, spans=None, prompts=None), form)
        return ref_spans.replace_rows(dense, q, pages, place, form), None
    if place.prompts is not None and form.window is not None:
        place = replace(place, prompts=None)
    if place.prompts is not None:
        if want_mass or place.tree is not None or place.key_positions is not None:
            raise ValueError("rows of prompts that read few keys have no mass, tree or positions of keys")
        if not dispatch.is_native("paged_attention", q):
            dense, _ = paged_attention(q, pages, replace(place, prompts=None), form)
            return ref_prefill.replace_rows(dense, q, pages, place, form), None
    if pages.signs is not None and place.dense_until is not None:
        if want_mass or place.tree is not None or place.key_positions is not None or form.window is not None:
            raise ValueError("rows that choose keys have no mass, tree, positions of keys or window")
        if dispatch.is_native("paged_attention", q):
            return native_attention.paged_attention(q, pages, place, form)
        dense, _ = paged_attention(q, pages, replace(place, dense_until=None), form)
        return ref_sparse.replace_rows(dense, q, pages, place, form), None
    if isinstance(pages, PlainPages):
        if want_mass:
            raise ValueError("no kernel of this device tells the mass of a softmax yet: what evicts by it runs on CPUs")
        mixed: Tensor = dispatch.triton("attention").paged_attention(q, pages, place, form)
        if isinstance(pages, NibblePages):
            mixed = dispatch.triton("nibbles").turn_back(mixed, pages)
        return mixed, None
    if dispatch.is_native("paged_attention", q):
        return native_attention.paged_attention(q, pages, place, form, want_mass)
    return ref_attention.paged_attention(q, pages, place, form, want_mass)


def feed_forward_in(
    x: Tensor,
    up: Sequence[Linear],
    kind: Activation,
    gated: bool,
    reader: Linear,
    hook: ActivationHook | None = None,
    routes: Routes | None = None,
) -> Tensor:
    """Return the rows that `reader` multiplies in a feed-forward: `activate` of the products of rows x [N, I] with
    `up`."""
    plain = hook is None and routes is None and all(each.adapter is None for each in up)
    if gated and plain and products.gateable(up) and isinstance(reader.weight, products.PackedWeight):
        return products.gated_linear(x, up, kind)
    return activate(linear(x, up, hook, routes), kind, gated, reader)


def activate(x: Tensor, kind: Activation, gated: bool, reader: Linear) -> Tensor:
    """Return act(x) [N, I], or, gated, act(a) * b of rows laid out as [a | b]: [N, I / 2], for `reader` to multiply.

    quick_gelu is x sigmoid(1.702 x) (Hendrycks and Gimpel 2016, section 2).
    """
    if isinstance(reader.weight, TritonWeight):
        out: Tensor = dispatch.triton("rows").activate(x, kind, gated)
        return out
    if isinstance(reader.weight, products.PackedWeight):
        return rows.activate(x.contiguous(), kind, gated)
    return ref.activate(x, kind, gated)


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [N, I], float32 or bfloat16, to symmetric int8 per row: (codes int8 [N, I], scale float32 [N, 1]).

    scale = max|x| / 127.5, float32's epsilon where a row is all zero; code = round-half-even(x / scale) in -128 .. 127.
    Raises ValueError naming the first row that holds a NaN or an infinity.
    """
    if dispatch.is_native("quantize_rows_int8", x):
        return rows.quantize_rows_int8(x)
    return ref.quantize_rows_int8(x)
