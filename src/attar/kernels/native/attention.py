"""Attention over KV cache pages and the writing of pages, in C++.

Properties of tensors (dtype, shape, strides, device) are checked here, their contents (block numbers, slots, lengths)
in C++ at every call: both before memory is touched. Shapes as in `kv.pages`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attar.kernels.native import extension
from attar.kernels.operands import AttentionForm, Norm
from attar.kv.bit_planes import Basis
from attar.kv.kvquant import Channels
from attar.kv.pages import PARTS, AttentionMetadata, PagedKV, Rotation
from attar.kv.schemes import BUCKET, RUN, Layout
from attar.kv.signs import Signs


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: PagedKV,
    place: AttentionMetadata,
    rotation: Rotation | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    out: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """Run `ops.write_kv` on float32 rows; the two norms are RMSNorms that differ in the weight alone. `level` is for
    tests. Raises ValueError where shapes, dtypes, strides, slots or angles do not fit."""
    rows, heads, size = q.shape
    for name, heads_of, count in (("q", q, heads), ("k", k, pages.kv_heads), ("v", v, pages.kv_heads)):
        _check(name, heads_of, torch.float32, (rows, count, pages.head_dim), rows_apart=True)
    _check("slots", place.slot_mapping, torch.int64, (rows,))
    sequences = 0
    if pages.recent is not None:
        sequences = len(place.lengths)
        _check("row_starts", place.row_starts, torch.int32, (sequences + 1,))
    out = extension.empty((rows, heads, size)) if out is None else out
    _check("out", out, torch.float32, (rows, heads, size))
    eps = offset = 0.0
    weights = (0, 0)
    if q_norm is not None and k_norm is not None:
        if (q_norm.kind, q_norm.eps, q_norm.offset) != ("rms", k_norm.eps, k_norm.offset) or k_norm.kind != "rms":
            raise ValueError("queries and keys are normed by RMSNorms of one epsilon and one offset")
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            _check(name, norm.weight, torch.float32, (size,))
        eps, offset, weights = q_norm.eps, q_norm.offset, (q_norm.weight.data_ptr(), k_norm.weight.data_ptr())
    elif q_norm is not None or k_norm is not None:
        raise ValueError("queries and keys are normed both or neither")
    angles = turned = 0
    rotary = (0, 0, 0)
    if rotation is not None:
        angles, half = rotation.cos.shape
        turned = 2 * half
        _check("cos", rotation.cos, torch.float32, (angles, half))
        _check("sin", rotation.sin, torch.float32, (angles, half))
        _check("rows of angles", rotation.rows, torch.int32, (rows,))
        rotary = (rotation.cos.data_ptr(), rotation.sin.data_ptr(), rotation.rows.data_ptr())
    extension.call(
        extension.library.write_kv, *_pages(pages),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), *(t.stride(0) if rows > 1 else t.shape[1] * size for t in (q, k, v)),
        rows, heads, *weights, eps, offset, *rotary[:2], angles, turned, rotary[2],
        place.slot_mapping.data_ptr(), out.data_ptr(), *_tails(pages, place), sequences, level or extension.cpu_level(),
    )  # fmt: skip
    return out


def paged_attention(
    q: Tensor,
    pages: PagedKV,
    place: AttentionMetadata,
    form: AttentionForm,
    want_mass: bool = False,
    out: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run `ops.paged_attention` on float32 rows. The bits are the same at every level, thread count, batch and
    chunking.

    `level` is for tests. Raises ValueError where shapes, dtypes, strides, lengths or block tables do not fit.
    """
    rows, sequences = q.shape[0], len(place.lengths)
    if pages.kv_heads != form.kv_heads or pages.head_dim != form.head_dim:
        raise ValueError(
            f"the pages hold {pages.kv_heads} heads of {pages.head_dim} columns, not {form.kv_heads} of {form.head_dim}"
        )
    _check("q", q, torch.float32, (rows, form.heads, form.head_dim))
    _check("row_starts", place.row_starts, torch.int32, (sequences + 1,))
    _check("lengths", place.lengths, torch.int32, (sequences,))
    _check("positions", place.positions, torch.int32, (rows,))
    width = place.block_tables.shape[-1]
    _check("tables", place.block_tables, torch.int32, (sequences, width))
    key_positions = tree = tree_size = 0
    if place.key_positions is not None:
        _check("key_positions", place.key_positions, torch.int32, (pages.blocks, pages.block))
        key_positions = place.key_positions.data_ptr()
    if place.tree is not None:
        tree, tree_size = place.tree.data_ptr(), place.tree.numel()
        _check("tree", place.tree, torch.bool, (tree_size,))
    dense_until = 0
    if place.dense_until is not None and pages.signs is not None:
        _check("dense_until", place.dense_until, torch.int32, (sequences,))
        dense_until = place.dense_until.data_ptr()
    few: tuple[float, ...] = (0, 0, 0, 0.0, 0, 0)
    if place.prompts is not None:
        settings, until, skipped = place.prompts.settings, place.prompts.until, place.prompts.skipped
        _check("until", until, torch.int32, (sequences,))
        _check("skipped", skipped, torch.int64, (sequences,))
        few = (
            until.data_ptr(), settings.sinks, settings.window, settings.lost, settings.whole, skipped.data_ptr(),
        )  # fmt: skip
    if (form.window is not None and form.window < 1) or (form.soft_cap is not None and not form.soft_cap > 0):
        raise ValueError("a window and a soft cap are greater than zero")
    out = extension.empty((rows, form.heads * form.head_dim)) if out is None else out
    _check("out", out, torch.float32, (rows, form.heads * form.head_dim))
    mass = extension.empty((sequences, form.kv_heads, width * pages.block)) if want_mass else None
    extension.call(
        extension.library.attention, *_pages(pages), q.data_ptr(), rows, form.heads, sequences,
        place.row_starts.data_ptr(), place.lengths.data_ptr(), place.block_tables.data_ptr(), width,
        place.positions.data_ptr(), key_positions, tree, tree_size, form.window or 0, form.scale, form.soft_cap or 0.0,
        out.data_ptr(), 0 if mass is None else mass.data_ptr(), _tails(pages, place)[1], dense_until,
        *few, level or extension.cpu_level(),
    )  # fmt: skip
    return out, mass


def _pages(pages: PagedKV) -> tuple[Any, ...]:
    """Return the pages as arguments of the extension."""
    scheme, bases, recent = pages.scheme, 0, (0, 0, 0)
    if scheme.layout == Layout.KVQUANT:
        _check_channels(pages)
        bases = pages.channels.data_ptr()
    elif pages.bases is not None:
        _check_bases(pages)
        bases = pages.bases.addresses.data_ptr()
    if pages.recent is not None:
        shape = (len(pages.recent.keys), pages.kv_heads, pages.block, pages.head_dim)
        _check("recent keys", pages.recent.keys, torch.bfloat16, shape)
        _check("recent values", pages.recent.values, torch.bfloat16, shape)
        recent = (pages.recent.keys.data_ptr(), pages.recent.values.data_ptr(), shape[0])
    sizes = (pages.blocks, pages.block, pages.kv_heads, pages.head_dim)
    expected = pages.scheme.parts(pages.kv_heads, pages.head_dim, pages.block)
    addresses = dict.fromkeys(PARTS, 0)
    for name in addresses:
        if (each := getattr(pages, name)) is not None and name in expected:
            part = expected[name]
            _check(name, each, getattr(torch, part.dtype), (pages.blocks, *part.shape))
            addresses[name] = each.data_ptr()
        elif each is not None or name in expected:
            raise ValueError(f"{pages.scheme.name} pages have {', '.join(expected)}")
    units = scheme.units(pages.head_dim) if scheme.layout == Layout.BIT_PLANES else scheme.group
    outliers = scheme.outliers(pages.head_dim) if scheme.layout == Layout.KVQUANT else 0
    layout = extension.library.KvLayout[scheme.layout.value]
    signs = 0 if pages.signs is None else _signs(pages, pages.signs)
    codes = units, round(scheme.bits)
    return layout, *addresses.values(), *sizes, bases, *codes, *recent, scheme.byte_scales, outliers, signs


def _signs(pages: PagedKV, signs: Signs) -> int:
    """Return the address of the one-bit keys' arrays and sizes."""
    heads, size, blocks, block = pages.kv_heads, pages.head_dim, pages.blocks, pages.block
    _check("bits of one-bit keys", signs.bits, torch.uint8, (blocks, heads, block // RUN, -(-size // 8), RUN))
    _check("scales of one-bit keys", signs.scales, torch.bfloat16, (blocks, heads, block))
    _check("means of keys", signs.means, torch.float32, (heads, size))
    _check("spreads of keys", signs.spreads, torch.float32, (heads, size))
    return signs.numbers.data_ptr()


def _tails(pages: PagedKV, place: AttentionMetadata) -> tuple[int, int]:
    """Return the addresses of row_starts and of the numbers of sequences' recent blocks; 0 where there are none."""
    if pages.recent is None:
        return 0, 0
    if place.tails is None:
        raise ValueError("pages with recent blocks want to know which is whose (Placement.tails)")
    _check("tails", place.tails, torch.int64, (len(place.lengths),))
    return place.row_starts.data_ptr(), place.tails.data_ptr()


def _check_bases(pages: PagedKV) -> None:
    assert pages.bases is not None
    heads, size = pages.kv_heads, pages.head_dim
    for side, each in (("queries", pages.bases.keys), ("back", pages.bases.values)):
        assert isinstance(each, Basis)
        for name, matrix in (("into", each.into), (side, getattr(each, side))):
            _check(f"{name} of a basis", matrix, torch.float32, (heads, size, size))
        for name, row in (("mean", each.mean), ("weights", each.weights), ("shares", each.shares)):
            _check(f"{name} of a basis", row, torch.float32, (heads, size))
        _check("bits of a basis", each.buckets, torch.uint8, (heads, size // BUCKET))


def _check_channels(pages: PagedKV) -> None:
    assert pages.bases is not None
    heads, size, bits = pages.kv_heads, pages.head_dim, round(pages.scheme.bits)
    for each, scaled in ((pages.bases.keys, False), (pages.bases.values, True)):
        if not isinstance(each, Channels) or each.scaled != scaled:
            raise ValueError("channels of values have a scale of each token, and those of keys have none")
        for name, row in (("mean", each.mean), ("spread", each.spread)):
            _check(f"{name} of channels", row, torch.float32, (heads, size))
        _check("levels of channels", each.levels, torch.float32, (1 << bits,))
    for name, part in pages.scheme.parts(heads, size, pages.block).items():
        if name not in PARTS:
            if name not in pages.more:
                raise ValueError(f"{pages.scheme.name} pages have {name}")
            _check(name, pages.more[name], getattr(torch, part.dtype), (pages.blocks, *part.shape))


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], rows_apart: bool = False) -> None:
    """Raise ValueError unless `tensor` is dense with this dtype and shape; with `rows_apart` its rows may lie apart."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: it must be {dtype} {list(shape)} on cpu"
        )
    if not (tensor[0] if rows_apart and len(tensor) else tensor).is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}: it must be contiguous")
