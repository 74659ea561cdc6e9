"""Rounding to nearest into GGML blocks: one scale from a block's extreme values, each code the nearest to its value.

These encoders have one right answer. They equal the fixed recipe of GGML's Python package, to the bit:

* Q4_0 and Q5_0 divide the value of the largest magnitude, with its sign, by -8 or -16, the one code without a mirror
  image. That value is then exact, and the grid reaches one step further on its side;
* Q4_1 and Q5_1 span the block from its least to its largest value;
* Q8_0 divides the largest magnitude by 127;
* F16 and BF16 round to the nearest number, ties to even; a NaN stays one in BF16.

Codes are found with the scale in float32, before it is rounded to fp16: a scale's error then becomes a block's error.
The search of `ggml_search.py` avoids that by rounding codes again. Halves round up (away from zero in Q8_0), not to
even.

A block whose values are so small that 1 / scale overflows is stored as zeros, as its fp16 scale would make it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.codecs.ggml import GgmlType
from attar.formats.codecs.ggml_blocks import Blocks, pack
from attar.formats.packing import row_slices


def encode(kind: GgmlType, values: Tensor) -> Tensor:
    """Encode values [..., I] of any float dtype as rows of blocks, uint8 [..., bytes of a row]. Raises ValueError for a
    type that has no such recipe, for a row that is not whole blocks, and, except for F32 and BF16, for a NaN, an
    infinity, or a value that overflows the type."""
    if kind.name not in _ENCODE:
        raise UserError("scheme_unsupported", f"{kind.name} is not rounded to nearest: {', '.join(_ENCODE)} are")
    raw = torch.empty((*values.shape[:-1], kind.row_bytes(values.shape[-1])), dtype=torch.uint8, device=values.device)
    blocks, flat = values.reshape(-1, kind.elements), raw.view(-1, kind.block_bytes)
    for part in row_slices(len(blocks), kind.elements):
        flat[part] = _ENCODE[kind.name](kind, blocks[part].float())
    return raw


def coded(kind: GgmlType, x: Tensor) -> Blocks:
    """Round blocks x, float32 [N, E], like `encode`, to a type with codes (one of `CODED`). Raises ValueError."""
    return _CODED[kind.name](kind, x)


def checked(scale: Tensor, kind: GgmlType) -> Tensor:
    """Return a scale as fp16. Raises ValueError where it is not finite, as it is wherever a value was not."""
    half = scale.half()
    if not half.isfinite().all():
        raise UserError(
            "not_finite", f"cannot be stored as {kind.name}: a block holds a NaN, an infinity, or values beyond fp16"
        )
    return half


def inverse(d: Tensor) -> Tensor:
    """Return 1 / d, and zero where that is not finite."""
    found = 1 / d
    return found.where(found.isfinite(), 0.0)


def _symmetric(kind: GgmlType, x: Tensor, half_range: int) -> Blocks:
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))
    # A tensor: CUDA would turn division by a plain number into a product with its reciprocal.
    d = extreme / torch.tensor(-half_range, dtype=torch.float32, device=x.device)
    scale = checked(d, kind)
    codes = (x * inverse(d) + (half_range + 0.5)).trunc().clamp_(0, 2 * half_range - 1)
    return Blocks(codes.to(torch.int16) - half_range, scale)


def _affine(kind: GgmlType, x: Tensor, top: int) -> Blocks:
    low, high = x.aminmax(dim=1, keepdim=True)
    d = (high - low) / torch.tensor(top, dtype=torch.float32, device=x.device)
    scale, offset = checked(d, kind), checked(low, kind)
    return Blocks(((x - low) * inverse(d) + 0.5).trunc().clamp_(0, top).to(torch.int16), scale, offset)


def _q8_0(kind: GgmlType, x: Tensor) -> Blocks:
    d = x.abs().amax(1, keepdim=True) / torch.tensor(127.0, device=x.device)
    scale = checked(d, kind)
    scaled = x * inverse(d)
    magnitude = scaled.abs()
    whole = magnitude.floor()
    codes = scaled.sign() * (whole + (2 * (magnitude - whole)).floor())
    return Blocks(codes.to(torch.int16), scale)


def _bf16(_: GgmlType, x: Tensor) -> Tensor:
    # By integers: the NaN of a conversion differs between machines, and files should not.
    bits = x.contiguous().view(torch.int32)
    kept = bits >> 16
    rounded = (bits + (0x7FFF + (kept & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return torch.where(is_nan, kept | 0x40, rounded).to(torch.int16).view(torch.uint8)


_CODED: Mapping[str, Callable[[GgmlType, Tensor], Blocks]] = {
    "Q4_0": lambda kind, x: _symmetric(kind, x, 8),
    "Q4_1": lambda kind, x: _affine(kind, x, 15),
    "Q5_0": lambda kind, x: _symmetric(kind, x, 16),
    "Q5_1": lambda kind, x: _affine(kind, x, 31),
    "Q8_0": _q8_0,
}

CODED = frozenset(_CODED)
"""Names of the types that `coded` rounds."""


_ENCODE: Mapping[str, Callable[[GgmlType, Tensor], Tensor]] = {
    "F32": lambda _, x: x.contiguous().view(torch.uint8),
    "F16": lambda kind, x: checked(x, kind).view(torch.uint8),
    "BF16": _bf16,
    **dict.fromkeys(_CODED, lambda kind, x: pack(kind, coded(kind, x))),
}

ROUNDED = frozenset(_ENCODE)
"""Names of the types that `encode` rounds."""
