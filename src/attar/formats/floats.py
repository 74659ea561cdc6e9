"""FP8: one byte an element, E4M3 for precision (largest value 448), E5M2 for range (largest value 57344).

The two are often confused. E4M3 here is the `fn` variant of Micikevicius et al. 2022 (arXiv 2209.05433): no infinities,
one NaN per sign, S.1111.111, which gains the values 256 to 448. The `fnuz` variant of some hardware ends at 240 and is
not read. E5M2 follows IEEE 754: exponent 11111 is infinity (mantissa 0) or NaN.

Conversions are torch's, which the tests compare, code by code, with others that are written from that definition alone.
Past the largest value torch gives NaN or infinity: attar always clamps first, like compressed-tensors.

Scales follow the integers' rule (`affine.qparams`): half the span of the grid is its largest value, so scale = max|x| /
448 or max|x| / 57344. compressed-tensors has no E5M2; attar's applies its E4M3 arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.formats.affine import by_scale, min_max, qparams, to_values
from attar.formats.affine import fixed_scale as fixed_scale
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import FLOAT8, Grid, Scheme


def quantize(weight: Tensor, scheme: Scheme) -> PackedTensor:
    """Round a weight [O, I] to the nearest float8 after scaling each part's largest magnitude to the largest value. The
    arithmetic is done in the wider of the weight's dtype and the scheme's scale dtype. Raises ValueError on a NaN or an
    infinity, on a group size that does not divide I and on a scale that overflows."""
    grid, scale_dtype = scheme.grid, getattr(torch, scheme.scale_dtype)
    wide = torch.promote_types(weight.dtype, scale_dtype)
    low, high = min_max(weight, grid)
    scale, _ = qparams(low.to(wide), high.to(wide), grid, scale_dtype)
    codes = torch.empty(weight.shape, dtype=_dtype(grid), device=weight.device)
    for part in row_slices(*weight.shape):
        codes[part] = _round(weight[part].to(wide), _rows(scale, part), grid).flatten(-2)
    return PackedTensor(scheme, (weight.shape[0], weight.shape[1]), {"codes": codes, "scale": scale})


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: code * scale, computed in the wider of the two
    dtypes."""
    codes, scale = packed.parts["codes"][rows], _rows(packed.parts["scale"], rows)
    wide = scale.to(torch.promote_types(dtype, scale.dtype))
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device) if out is None else out
    for part in row_slices(*weight.shape):
        weight[part] = to_values(codes[part], _rows(wide, part), None)
    return weight


def fake_quantize(x: Tensor, grid: Grid, scale: Tensor | None = None) -> Tensor:
    """Round x [..., I] to the float8 grid and back, in x's dtype; see `affine.fake_quantize`. The last group may be
    smaller than the others."""
    if grid.group_size is not None and (missing := -x.shape[-1] % grid.group_size):
        padded = torch.nn.functional.pad(x, (0, missing))
        return fake_quantize(padded, grid, scale)[..., : x.shape[-1]]
    low, high = min_max(x, grid)
    if scale is None:
        scale, _ = qparams(low, high, grid)
    rounded = _round(x, scale, grid)
    return (rounded.to(torch.promote_types(x.dtype, scale.dtype)) * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


def _round(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Return float8 codes of x [..., I] for scales [..., G] or [1]: [..., G, I/G]."""
    scaled = by_scale(x, scale.shape[-1]) / scale.unsqueeze(-1)
    scaled += 0.0  # a zero of x is stored as code 0, whatever its sign
    return scaled.clamp_(grid.qmin, grid.qmax).to(_dtype(grid))


def _rows(scale: Tensor, part: slice) -> Tensor:
    return scale if scale.ndim == 1 else scale[part]


def _dtype(grid: Grid) -> torch.dtype:
    dtype = getattr(torch, FLOAT8[grid.kind])
    assert isinstance(dtype, torch.dtype)
    return dtype
