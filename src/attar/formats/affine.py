"""Integer grids of 2 to 8 bits: value = (code - zero) * scale, with signed codes.

The arithmetic is that of compressed-tensors 0.20 to the bit, because its files are what we write, and a scale that
differs in its last bit moves codes. Three choices follow from that, and each is the source of a common error:

* symmetric scale = max|x| / ((2^b - 1) / 2), so that 4 bits span 7.5 steps to either side. The largest positive value
  is then clipped by half a step, no more than any other rounding, and the grid is 7 % finer than with 2^(b-1) - 1;
* ranges always hold zero, so that zero is exact and the zero point is itself a code;
* everything is computed in the input's dtype: x / scale of bfloat16 is a bfloat16, and is rounded as such. Where weight
  and scale differ in dtype, the wider of the two is used, and the scale is first rounded to its own.

Scales of x [..., I] are [..., G]: G groups of I/G consecutive elements share one; G = 1 for a channel or a token, and
one scale for the whole tensor is [1]. This one shape rule serves every granularity, down to the single column that
GPTQ rounds at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import pack_words, row_slices, unpack_words
from attar.formats.scheme import Grid, Scheme


def by_scale(x: Tensor, groups: int) -> Tensor:
    """Return x [..., I] as [..., G, I/G]: the elements that share a scale get a dimension of their own."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def min_max(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of each part of x [..., I] that shares a scale. Each is [..., G], or [1]
    for a tensor. Raises ValueError where x holds a NaN or an infinity, and where the group size does not divide I."""
    if grid.granularity == "tensor":
        low, high = (extreme.reshape(1) for extreme in x.aminmax())
    else:
        low, high = by_scale(x, grid.groups(x.shape[-1])).aminmax(dim=-1)
    finite = low.isfinite() & high.isfinite()
    if not finite.all():
        at = (~finite).nonzero()[0].tolist()
        where = "the tensor" if grid.granularity == "tensor" else f"row {at[:-1]}, group {at[-1]}"
        raise UserError("not_finite", f"cannot quantize: {where} holds a NaN or an infinity")
    return low, high


def qparams(
    minimum: Tensor, maximum: Tensor, grid: Grid, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero point for values between `minimum` and `maximum`, both of one shape and dtype.

    Both results have that shape. The scale is in `scale_dtype` (by default the inputs'); zero is int8, or None on a
    symmetric grid. A scale that comes out as zero becomes its dtype's epsilon. The zero point is computed from the
    scale before it is rounded to `scale_dtype`, as compressed-tensors does.

    Raises ValueError where a scale overflows its dtype.
    """
    low, high = minimum.clamp(max=0), maximum.clamp(min=0)
    # A tensor on the device: CUDA would turn division by a plain number into a product with its reciprocal.
    steps = torch.tensor(grid.qmax - grid.qmin, dtype=low.dtype, device=low.device)
    zero = None
    if grid.symmetric:
        scale = torch.maximum(low.abs(), high) / (steps / 2)
    else:
        scale = (high - low) / steps
        shift = (grid.qmin - low / scale).clamp(grid.qmin, grid.qmax)
        zero = shift.nan_to_num(0.0).round().to(torch.int8)  # NaN is 0/0: a part that is all zero
    stored = scale.to(scale_dtype or scale.dtype)
    if not stored.isfinite().all():
        raise UserError(
            "not_finite", f"a scale overflows {str(stored.dtype).removeprefix('torch.')}: store scales as float32"
        )
    return stored.masked_fill(stored == 0, torch.finfo(stored.dtype).eps), zero


def round_to_grid(x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """Return codes of x [..., I], int8: round-half-even(clamp(x / scale + zero)), scale and zero [..., G] or [1]."""
    return _scaled(x, scale, zero, grid).to(torch.int8).flatten(-2)


def to_values(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return (codes - zero) * scale for codes [..., I], scale and zero [..., G] or [1]; in the scale's dtype."""
    values = by_scale(codes, scale.shape[-1]).to(scale.dtype)
    if zero is not None:
        values -= zero.unsqueeze(-1).to(scale.dtype)
    return values.mul_(scale.unsqueeze(-1)).flatten(-2)


def _scaled(x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """Return codes as floats, [..., G, I/G]."""
    scaled = by_scale(x, scale.shape[-1]) / scale.unsqueeze(-1)
    if zero is not None:
        scaled += zero.unsqueeze(-1).to(x.dtype)
    return scaled.clamp_(grid.qmin, grid.qmax).round_()


def quantize(weight: Tensor, scheme: Scheme) -> PackedTensor:
    """Round a weight [O, I] to nearest on grids that span each part's own minimum and maximum. The arithmetic is done
    in the wider of the weight's dtype and the scheme's scale dtype; give the scheme the weight's dtype
    (`Scheme.with_scale_dtype`) to get compressed-tensors' bits. Raises ValueError on a NaN or an infinity, on a group
    size that does not divide I and on a scale that overflows."""
    grid, scale_dtype = scheme.grid, getattr(torch, scheme.scale_dtype)
    wide = torch.promote_types(weight.dtype, scale_dtype)
    low, high = min_max(weight, grid)
    scale, zero = qparams(low.to(wide), high.to(wide), grid, scale_dtype)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for part in row_slices(*weight.shape):
        codes[part] = round_to_grid(weight[part].to(wide), *_rows(scale, zero, part), grid)
    return encode(codes, scale, zero, scheme, (weight.shape[0], weight.shape[1]))


def fitted(weight: Tensor, scheme: Scheme, scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]) -> PackedTensor:
    """Round a weight [O, I] of any float dtype to nearest on the scales and zero points that `scales` finds for rows of
    it, float32 [R, I]. The rows go in slices, unless one scale is for the whole tensor: no float32 copy is made of a
    matrix with a row for each token of a vocabulary."""
    rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    found, zeros = list[Tensor](), list[Tensor]()
    for part in [slice(None)] if scheme.grid.granularity == "tensor" else row_slices(rows, columns):
        some = weight[part].float()
        scale, zero = scales(some)
        codes[part] = round_to_grid(some, scale, zero, scheme.grid)
        found.append(scale)
        zeros += [] if zero is None else [zero]
    return encode(codes, torch.cat(found), torch.cat(zeros) if zeros else None, scheme, (rows, columns))


def encode(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, shape: tuple[int, int]) -> PackedTensor:
    """Store codes [O, I], scale and zero ([O, G], or [1]; zero None on a symmetric grid) as `scheme` lays them out.
    Codes and zero points are signed. Raises ValueError where dtypes or shapes are not those of the scheme."""
    grid, packed = scheme.grid, scheme.layout == "packed"
    assert (zero is None) == grid.symmetric, "a zero point goes with an asymmetric grid, and only with it"
    parts = {"codes": pack_words(codes, grid.bits) if packed else codes.to(torch.int8), "scale": scale}
    if zero is not None:
        across = packed and grid.granularity != "tensor"  # packed down the output dimension
        parts["zero"] = pack_words(zero.t(), grid.bits).t().contiguous() if across else zero.to(torch.int8)
    if packed:
        parts["shape"] = torch.tensor(shape, dtype=torch.int64)
    return PackedTensor(scheme, shape, parts)


def decode(packed: PackedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (codes int8 [O, I], scale, zero int8 or None); undoes `encode`. Scale and zero are [O, G], or [1] for a
    tensor."""
    codes, grid = packed.parts["codes"], packed.scheme.grid
    if packed.scheme.layout == "packed":
        codes = unpack_words(codes, grid.bits, packed.shape[1])
    return codes, packed.parts["scale"], _zero(packed)


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: (code - zero) * scale. The arithmetic is done in the
    wider of `dtype` and the scale's dtype. In the scale's own dtype the values are compressed-tensors', bit for bit:
    integer and product fit float32's 24 bits, so either way rounds once."""
    columns, grid, stored = packed.shape[1], packed.scheme.grid, packed.parts["codes"][rows]
    scale, zero = _rows(packed.parts["scale"], _zero(packed), rows)
    wide = scale.to(torch.promote_types(dtype, scale.dtype))
    weight = torch.empty((len(stored), columns), dtype=dtype, device=stored.device) if out is None else out
    for part in row_slices(*weight.shape):
        codes = stored[part]
        if packed.scheme.layout == "packed":
            codes = unpack_words(codes, grid.bits, columns)
        weight[part] = to_values(codes, *_rows(wide, zero, part))
    return weight


def fake_quantize(x: Tensor, grid: Grid, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """Round x [..., I] to the grid and back, in x's dtype: the input of a linear layer with quantized activations.
    Without `scale` the range is taken from x itself (dynamic), per token, group or tensor; with a scale [1] (and a zero
    point, on an asymmetric grid) it is fixed (static). Values are compressed-tensors' for the same arguments. Raises
    ValueError on a NaN or an infinity in x: a static range would otherwise clip an infinity silently."""
    low, high = min_max(x, grid)
    if scale is None:
        scale, zero = qparams(low, high, grid)
    assert (zero is None) == grid.symmetric, "a zero point goes with an asymmetric grid, and only with it"
    values = _scaled(x, scale, zero, grid)
    if zero is not None:
        values -= zero.unsqueeze(-1).to(values.dtype)
    return (values * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


def fixed_scale(largest: Tensor, form: Grid) -> Tensor:
    """Return the scale [1] of static activations whose largest magnitude is `largest` [1]."""
    return qparams(-largest, largest, form)[0]


def _zero(packed: PackedTensor) -> Tensor | None:
    grid, zero = packed.scheme.grid, packed.parts.get("zero")
    return zero if zero is None or zero.dtype == torch.int8 else unpack_words(zero.t(), grid.bits, packed.shape[0]).t()


def _rows(scale: Tensor, zero: Tensor | None, part: slice) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero of some rows; a scale of the whole tensor is returned unchanged."""
    if scale.ndim == 1:
        return scale, zero
    return scale[part], None if zero is None else zero[part]
