"""FP8: one byte an element, E4M3 for precision (largest value 448), E5M2 for range (largest value 57344).

The two are often confused. E4M3 here is the `fn` variant of Micikevicius et al. 2022 (arXiv 2209.05433): no infinities,
one NaN per sign, S.1111.111, which gains the values 256 to 448. The `fnuz` variant of some hardware ends at 240 and is
not read. E5M2 follows IEEE 754: exponent 11111 is infinity (mantissa 0) or NaN.

`encode` and `decode` are written from that definition alone. The tests compare torch's conversions with them, code by
code; weights and activations go through torch's, which are faster. The two differ past the largest value, where torch
gives NaN or infinity: attar always clamps first, like compressed-tensors.

Scales follow the integers' rule (`affine.qparams`): half the span of the grid is its largest value, so scale = max|x| /
448 or max|x| / 57344. compressed-tensors has no E5M2; attar's applies its E4M3 arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from attar.formats.affine import by_scale, min_max, qparams, to_values
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import FLOAT8, Grid, Scheme

Float8 = Literal["e4m3", "e5m2"]

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
BIAS = {"e4m3": 7, "e5m2": 15}
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
"""Code of the largest finite value; the codes above it are E4M3's NaN, and E5M2's infinity and NaNs."""
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F}


@cache
def _table(kind: Float8) -> Tensor:
    """Return the value of each of the 256 codes, float32 [256]."""
    mantissa_bits, bias, largest = MANTISSA_BITS[kind], BIAS[kind], LARGEST_CODE[kind]
    magnitudes = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        if kind == "e5m2" and code == largest + 1:
            magnitudes.append(float("inf"))
        elif code > largest:
            magnitudes.append(float("nan"))
        elif exponent == 0:  # subnormal
            magnitudes.append(fraction * 2.0 ** (1 - bias))
        else:
            magnitudes.append((1 + fraction) * 2.0 ** (exponent - bias))
    return torch.tensor(magnitudes + [-magnitude for magnitude in magnitudes])


def decode(codes: Tensor, kind: Float8) -> Tensor:
    """Return the values of uint8 codes, float32, of the same shape."""
    return _table(kind).to(codes.device)[codes.long()]


def encode(x: Tensor, kind: Float8, saturate: bool = True) -> Tensor:
    """Return the nearest code to each value of x, float32, ties to the even code; uint8, of the same shape.

    Values beyond the largest become the largest, infinities too; without `saturate`, the NaN of E4M3 or the infinity of
    E5M2. NaN stays NaN. The sign is kept, zero's too.
    """
    assert x.dtype == torch.float32, "any narrower float converts to float32 exactly; a wider one would round twice"
    mantissa_bits, bias, largest = MANTISSA_BITS[kind], BIAS[kind], LARGEST_CODE[kind]
    magnitude = x.abs().clamp(max=1e6).nan_to_num(0.0)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=1 - bias)  # subnormals share the smallest exponent
    exponent = exponent.where(magnitude > 0, 1 - bias)
    # In units of the last place every neighbour is a whole number, so rounding is exact. A carry out of the mantissa
    # moves into the exponent field, which correctly gives the next binade's first value.
    units = torch.ldexp(magnitude, mantissa_bits - exponent).round().to(torch.int32)
    codes = ((exponent + bias) << mantissa_bits) + units - (1 << mantissa_bits)
    codes = codes.clamp(max=largest if saturate else largest + 1)
    codes = codes.where(~x.isnan(), NAN_CODE[kind])
    return (codes + 128 * x.signbit()).to(torch.uint8)


def quantize(weight: Tensor, scheme: Scheme) -> PackedTensor:
    """Round a weight [O, I] to the nearest float8 after scaling each part's largest magnitude to the largest value.

    The arithmetic is done in the wider of the weight's dtype and the scheme's scale dtype. Raises ValueError on a NaN
    or an infinity, on a group size that does not divide I and on a scale that overflows.
    """
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
    """Round x [..., I] to the float8 grid and back, in x's dtype; see `affine.fake_quantize`."""
    low, high = min_max(x, grid)
    if scale is None:
        scale, _ = qparams(low, high, grid)
    rounded = _round(x, scale, grid)
    return (rounded.to(torch.promote_types(x.dtype, scale.dtype)) * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


def fixed_scale(largest: Tensor, form: Grid) -> Tensor:
    """Return the scale [1] of static activations whose largest magnitude is `largest` [1]."""
    return qparams(-largest, largest, form)[0]


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
