"""Sparse 2:4 weights: of every four consecutive weights of a row two are kept, and two bits store the position of each.

    kept       w0 0 0 w3   0 w5 w6 0     values [O, I/2]: w0 w3 w5 w6
    places     0 3 | 1 2                 a nibble for four columns, first | second << 2; two a byte, the first low

So 16-bit weights take 9 bits each instead of 16. The values may be on an integer grid in turn (`sparse24-w4g64`: a
group of 64 values spans 128 columns; 4 bits come to 3.125). Sparse tensor cores multiply by just this format; other
hardware gains memory and, where memory bounds a product, time.

The pruner decides which two to keep: `quantize` takes weights that are 2:4 already, and raises where they are not.
compressed-tensors had a bit-mask storage for them, which its later versions dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import ALL, PackedTensor, codec
from attar.formats.packing import row_slices
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Sparse24


def pack_24(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Split a 2:4 sparse weight [O, I] into (values [O, I/2] in its dtype, places uint8 [O, I/8]); 8 divides I. Groups
    with fewer than two nonzero weights keep zeros at their first places. Raises ValueError naming the first row that
    has three in a group."""
    rows, columns = dense.shape
    Sparse24().check(columns)
    values = dense.new_empty((rows, columns // 2))
    places = torch.empty((rows, columns // 8), dtype=torch.uint8, device=dense.device)
    for part in row_slices(rows, columns):
        groups = dense[part].unflatten(1, (-1, 4))
        kept = groups != 0
        if (many := kept.sum(-1) > 2).any():
            row, group = many.nonzero()[0].tolist()
            raise UserError(
                "sparsity_invalid",
                f"row {part.start + row} is not 2:4 sparse: {int(kept[row, group].sum())} of the four weights from "
                f"column {4 * group} on are not zero",
            )
        chosen = kept.byte().argsort(dim=-1, descending=True, stable=True)[..., :2].sort(-1).values
        values[part] = groups.gather(-1, chosen).flatten(1)
        nibbles = (chosen[..., 0] | chosen[..., 1] << 2).to(torch.uint8).unflatten(1, (-1, 2))
        places[part] = nibbles[..., 0] | nibbles[..., 1] << 4
    return values, places


def in_order(places: Tensor) -> bool:
    """Return whether each nibble names two places, the first before the second."""
    allowed = torch.tensor([(n & 3) < n >> 2 for n in range(16)], device=places.device)
    return bool((allowed[(places & 15).long()] & allowed[(places >> 4).long()]).all())


def unpack_24(values: Tensor, places: Tensor) -> Tensor:
    """Return the weight [R, I] of values [R, I/2] and places [R, I/8]; undoes `pack_24`."""
    nibbles = torch.stack((places & 15, places >> 4), -1).flatten(1)
    chosen = torch.stack((nibbles & 3, nibbles >> 2), -1).long()
    return values.new_zeros((*nibbles.shape, 4)).scatter_(-1, chosen, values.unflatten(1, (-1, 2))).flatten(1)


def quantize(weight: Tensor, scheme: Scheme) -> PackedTensor:
    """Store a 2:4 sparse weight [O, I], its values rounded to their format. Raises ValueError like `pack_24` and that
    format."""
    values, places = pack_24(weight)
    if (inner := _inner(scheme)) is None:
        parts = {"values": values.to(getattr(torch, scheme.scale_dtype))}
        if not parts["values"].isfinite().all():
            raise UserError(
                "not_finite", f"cannot be stored as {scheme.scale_dtype}: a NaN, an infinity, or values beyond it"
            )
    else:
        parts = dict(codec(inner.weight.kind).quantize(values, inner).parts)
    return PackedTensor(scheme, (weight.shape[0], weight.shape[1]), {**parts, "places": places})


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows."""
    places = packed.parts["places"][rows]
    if (inner := _inner(packed.scheme)) is None:
        values = packed.parts["values"][rows].to(dtype)
    else:
        half = (packed.shape[0], packed.shape[1] // 2)
        parts = {name: tensor for name, tensor in packed.parts.items() if name != "places"}
        values = PackedTensor(inner, half, parts).dequantize(dtype, rows)
    weight = torch.empty((len(places), packed.shape[1]), dtype=dtype, device=places.device) if out is None else out
    for part in row_slices(*weight.shape):
        weight[part] = unpack_24(values[part], places[part])
    return weight


def _inner(scheme: Scheme) -> Scheme | None:
    """Return the scheme of the values; None where they are plain numbers."""
    assert isinstance(scheme.weight, Sparse24)
    if scheme.weight.values is None:
        return None
    assert isinstance(scheme.weight.values, Grid)
    return Scheme(scheme.weight.values, scale_dtype=scheme.scale_dtype)
