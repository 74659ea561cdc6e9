"""Four-bit floats in small groups: MXFP4 of the OCP's Microscaling specification and NVIDIA's NVFP4.

Both have E2M1 codes: sign, two bits of exponent, one of mantissa, and so the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two
codes share a byte, the first in its low half. They differ in the scale of a group:

    MXFP4   32 elements   2^(e - 127), e one byte (E8M0; 255 is NaN)        value = code * 2^(e - 127)         4.25 bits
    NVFP4   16 elements   an E4M3 number under one float32 for the tensor   value = code * (scale / global)    4.5 bits

Rounding is to the nearest value, ties to the even code, and keeps the sign of values that round to zero. The arithmetic
is float32 and equals compressed-tensors' bit for bit, except for MXFP4's exponent, which has two rules:

* `floor`, the specification's: e - 127 = floor(log2 max|x|) - 2. The largest magnitude of a group lies in [4, 8) steps,
  and values past 6 are clipped, by a quarter at worst;
* `nearest`, compressed-tensors': one more from 7 steps on, where clipping would cost more than the coarser grid.

The default is the specification's. On a normal distribution `nearest` has 5 % less squared error. NVFP4: global = 448 *
6 / max|W| uses all of E4M3's range, and scale = max|x| / 6 * global. A group whose scale would be zero gets an eighth,
as in compressed-tensors. The third rule, `mse`, is for both formats: each group takes the scale near its own that has
the least squared error. The widest gap of the grid lies between 4 and 6, and a group whose largest weights fall into it
is better off with another scale.

A tensor of activations has the same two forms, scaled group by group from its values; NVFP4's `global` is then fixed at
calibration, and is the linear layer's `activation_scale`.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.codecs.ggml import FP4_VALUES
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Fp4, WeightFormat

LARGEST = 6.0
SCALE_LARGEST = 448.0
SCALE_OF_ZEROS = 0.125
EXPONENT_OF_LARGEST = 2  # floor(log2 6)

SEARCHED = range(-2, 7)  # E4M3 codes around NVFP4's own that a search tries: an eighth of an octave apart

Rule = Literal["floor", "nearest", "mse"]
RULE: Rule = "floor"

# Midpoints between neighbouring values. A value exactly there goes to the even code: down from code 1's lower end, up
# from its upper one, and so on. `bucketize` sends ties down, so the midpoints that go up are a float32 lower.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@cache
def _boundaries() -> Tensor:
    middles = torch.tensor(_MIDDLES)
    odd = torch.arange(len(_MIDDLES)) % 2 == 1  # between an odd code and the even one above it
    return torch.where(odd, torch.nextafter(middles, torch.zeros(())), middles)


@cache
def _values() -> Tensor:
    return torch.tensor(FP4_VALUES, dtype=torch.float32) / 2


def to_codes(x: Tensor) -> Tensor:
    """Return E2M1 codes, uint8, of float32 values; values past 6 become 6."""
    codes = torch.bucketize(x.abs(), _boundaries().to(x.device), out_int32=True).to(torch.uint8)
    return codes | (x < 0).to(torch.uint8) << 3


def to_values(codes: Tensor) -> Tensor:
    """Return the float32 values of E2M1 codes."""
    return _values().to(codes.device)[codes.long()]


def global_scale(largest: Tensor) -> Tensor:
    """Return NVFP4's scale of a tensor whose largest magnitude is `largest`: float32 [1]; 1 for zeros."""
    wanted = SCALE_LARGEST * LARGEST / largest.float().reshape(1)
    return wanted.where(wanted.isfinite(), 1.0)


def _exponents(largest: Tensor, rule: Rule) -> Tensor:
    """Return E8M0 bytes for groups of these largest magnitudes."""
    fraction, exponent = torch.frexp(largest)  # largest = fraction * 2^exponent, fraction in [0.5, 1)
    shift = 1 + EXPONENT_OF_LARGEST - (fraction >= 0.875).to(torch.int32) * (rule == "nearest")
    return (exponent - shift + 127).where(largest > 0, 0).clamp(0, 254).to(torch.uint8)


def _power(exponents: Tensor) -> Tensor:
    """Return the values of E8M0 bytes: float32, 2^-127 .. 2^127, and NaN."""
    bits = exponents.to(torch.int32) << 23
    powers = bits.where(exponents > 0, 1 << 22).view(torch.float32)  # the smallest is subnormal
    return powers.where(exponents != 255, torch.nan)


def _scales(x: Tensor, divisor: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return scales of groups x [..., G, g] as stored, [..., G], and as multiplied, float32. Raises ValueError on a NaN
    or an infinity."""
    largest = x.abs().amax(-1)
    if not largest.isfinite().all():
        at = (~largest.isfinite()).nonzero()[0].tolist()
        raise UserError("not_finite", f"cannot quantize: row {at[:-1]}, group {at[-1]} holds a NaN or an infinity")
    if divisor is None:
        exponents = _exponents(largest, rule)
        return exponents, _power(exponents)
    scale = (divisor * (largest / LARGEST)).clamp(max=SCALE_LARGEST).to(torch.float8_e4m3fn)
    scale = torch.where(scale.float() == 0, torch.tensor(SCALE_OF_ZEROS, device=x.device), scale.float())
    return scale.to(torch.float8_e4m3fn), scale / divisor


def largest_of(weight: Tensor) -> Tensor:
    """Return max|W|, [1]."""
    low, high = weight.aminmax()
    return torch.maximum(low.abs(), high.abs()).reshape(1)


def _searched(x: Tensor, divisor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `_scales`, but for each group the candidate with the least squared error; among equals, the first."""
    stored, scale = _scales(x, divisor, "floor")
    codes = stored.view(torch.uint8).int()
    best, least = stored, torch.full_like(scale, torch.inf)
    for offset in (0, 1) if divisor is None else sorted(SEARCHED, key=abs):
        tried = (codes + offset).clamp(*((0, 254) if divisor is None else (1, 0x7E))).to(torch.uint8).view(stored.dtype)
        factor = _power(tried) if divisor is None else tried.float() / divisor
        error = (to_values(to_codes(x / factor[..., None])) * factor[..., None] - x).square().sum(-1)
        better = error < least
        best = torch.where(better, tried.view(torch.uint8), best.view(torch.uint8)).view(stored.dtype)
        scale, least = torch.where(better, factor, scale), torch.where(better, error, least)
    return best, scale


def quantize(weight: Tensor, scheme: Scheme, rule: Rule = RULE, largest: Tensor | None = None) -> PackedTensor:
    """Round a weight [O, I] to the nearest values of the scheme's format. NVFP4's scale of the tensor follows from
    `largest` [1], by default max|W|. Engines that fuse several weights into one need one scale for all of them. Raises
    ValueError on a NaN or an infinity, and where groups do not divide I."""
    form, (rows, columns) = _form(scheme.weight), weight.shape
    parts = {
        name: torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=weight.device)
        for name, part in scheme.parts((rows, columns)).items()
    }
    divisor = None
    if "global" in parts:
        divisor = global_scale(largest_of(weight) if largest is None else largest)
        parts["global"].copy_(divisor)
    for part in row_slices(rows, columns):
        groups = weight[part].float().unflatten(1, (-1, form.group))
        stored, scale = _searched(groups, divisor) if rule == "mse" else _scales(groups, divisor, rule)
        parts["scale"][part] = stored
        parts["codes"][part] = pairs(to_codes(groups / scale[..., None]).flatten(1))
    return PackedTensor(scheme, (rows, columns), parts)


def pairs(codes: Tensor) -> Tensor:
    """Pack codes [O, I] two a byte, [O, I/2], the first in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def factors(packed: PackedTensor, rows: slice = ALL) -> Tensor:
    """Return the factors of the codes' values: float32 [O, G]."""
    scales = packed.parts["scale"][rows]
    return scales.float() / packed.parts["global"] if "global" in packed.parts else _power(scales)


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: computed in float32, then rounded."""
    form, stored, scale = _form(packed.scheme.weight), packed.parts["codes"][rows], factors(packed, rows)
    weight = torch.empty((len(stored), packed.shape[1]), dtype=dtype, device=stored.device) if out is None else out
    for part in row_slices(*weight.shape):
        codes = torch.stack((stored[part] & 15, stored[part] >> 4), -1).view(len(stored[part]), -1, form.group)
        weight[part] = (to_values(codes) * scale[part][..., None]).flatten(1)
    return weight


def fake_quantize(x: Tensor, form: WeightFormat, scale: Tensor | None = None) -> Tensor:
    """Round x [..., I] to the format and back, in x's dtype. NVFP4 needs its fixed `global` [1] as `scale`. Raises
    ValueError on a NaN or an infinity."""
    form = _form(form)
    assert (scale is not None) == (form.name == "nvfp4"), "NVFP4 activations, and no others here, have a fixed number"
    groups = x.float().unflatten(-1, (-1, form.group))
    _, factor = _scales(groups, scale, "nearest")
    return (to_values(to_codes(groups / factor[..., None])) * factor[..., None]).flatten(-2).to(x.dtype)


def fixed_scale(largest: Tensor, form: WeightFormat) -> Tensor:
    """Return NVFP4's `global` [1] for activations whose largest magnitude is `largest` [1]."""
    return global_scale(largest)


def _form(form: WeightFormat) -> Fp4:
    assert isinstance(form, Fp4)
    return form
