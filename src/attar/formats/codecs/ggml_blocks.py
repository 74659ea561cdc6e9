"""GGML blocks and the numbers they hold: bytes to integers, integers to values, and integers back to bytes.

Reading goes in two steps, because they fail in different ways. `unpack` splits a block into small integers. That is
only a matter of bit order and exactly reversible: `pack` restores the same bytes. `decode` then turns the integers into
weights by a few float operations, in the order of GGML and its Python package. So values agree to the bit (a NaN with
any NaN: its bits depend on the processor).

    value = d * code                        Q4_0, Q5_0, Q8_0, IQ4_NL
    value = d * code + m                    Q4_1, Q5_1
    value = (d * scale) * code              Q3_K, Q6_K, IQ4_XS
    value = (d * scale) * code - m * min    Q2_K, Q4_K, Q5_K

Every order of codes in these formats is one rule with two numbers. A run of `run` bytes holds 8 / bits slices of `run`
elements, the first in the lowest bits of each byte, the next above: `_spread` and `_gather`. So a nibble's neighbour in
a byte is not its neighbour in the row, which lets a vector unit unpack by one mask and one shift.

Blocks of a tensor [..., I] are the last dimension's, so that raw bytes are [..., bytes of a row]. Work goes in slices
of rows; what is needed beside the result stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.codecs.ggml import FP4_VALUES, IQ4_VALUES, TYPES, GgmlType
from attar.formats.packing import row_slices


@dataclass(frozen=True, eq=False)
class Blocks:
    """N blocks of E elements in G groups: integers, and the fp16 scales stored beside them. `codes` int16 [N, E] are
    the factors of the scales: offsets are subtracted and tables looked up. `scales` and `mins` int16 [N, G] exist where
    a type scales its groups; `m` is Q4_1's offset or the scale of `mins`."""

    codes: Tensor
    d: Tensor  # float16 [N, 1]
    m: Tensor | None = None  # float16 [N, 1]
    scales: Tensor | None = None
    mins: Tensor | None = None


# Bit orders


def _spread(data: Tensor, run: int, bits: int) -> Tensor:
    """Return codes uint8 [N, B * 8 / bits] of bytes [N, B], each run of `run` bytes holding slices of `run` codes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    return (data.reshape(data.shape[0], -1, 1, run) >> shifts).bitwise_and_((1 << bits) - 1).flatten(1)


def _gather(codes: Tensor, run: int, bits: int) -> Tensor:
    """Return bytes [N, B] of codes of any integer dtype, of which the lowest `bits` count; undoes `_spread`."""
    slices = (codes.to(torch.uint8) & ((1 << bits) - 1)).reshape(codes.shape[0], -1, 8 // bits, run)
    data = slices[:, :, 0].clone()
    for i in range(1, 8 // bits):
        data |= slices[:, :, i] << (i * bits)
    return data.flatten(1)


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)


Fields = dict[str, Tensor]  # a block type's fields, uint8 [N, bytes of the field]


def _joined(low: Tensor, high: Tensor, bits: int, offset: int = 0) -> Tensor:
    """Return int16 codes whose lowest `bits` are `low`, less `offset`."""
    return (low | (high << bits)).to(torch.int16) - offset


def _six_bit_pairs(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and mins, int16 [N, 8], of Q4_K's twelve bytes. Four scales and four mins have their six bits to
    themselves. For the other four of each, four bits share a byte and two lie above those of the first."""
    first, second, rest = data.view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], 1)
    mins = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], 1)
    return scales.to(torch.int16), mins.to(torch.int16)


def _from_six_bit_pairs(scales: Tensor, mins: Tensor) -> Tensor:
    (s0, s1), (m0, m1) = (each.to(torch.uint8).split(4, 1) for each in (scales, mins))
    return torch.cat([s0 | (s1 >> 4 << 6), m0 | (m1 >> 4 << 6), (s1 & 15) | (m1 << 4)], 1)


@cache
def _values(table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.int16)


def _looked_up(codes: Tensor, table: tuple[int, ...]) -> Tensor:
    return _values(table).to(codes.device)[codes.long()]


def iq4_code(values: Tensor) -> Tensor:
    """Return the codes of `IQ4_VALUES`, uint8; a value between two of them gets the code of the larger."""
    return torch.bucketize(values, _values(IQ4_VALUES).to(values.device)).to(torch.uint8)


# The fields of each type


def unpack(kind: GgmlType, data: Tensor) -> Blocks:
    """Split blocks, uint8 [N, block_bytes], of a type with codes and fp16 scales into integers."""
    f: Fields = dict(zip((n for n, _ in kind.fields), data.split([s for _, s in kind.fields], 1), strict=True))
    codes, *integers = _UNPACK[kind.name](f)
    return Blocks(codes, _half(f["d"]), _half(f["m"]) if "m" in f else None, *integers)


def pack(kind: GgmlType, blocks: Blocks) -> Tensor:
    """Join blocks into bytes, uint8 [N, block_bytes]; undoes `unpack`."""
    fields = {"d": blocks.d.view(torch.uint8)} | _PACK[kind.name](blocks)
    if blocks.m is not None:
        fields["m"] = blocks.m.view(torch.uint8)
    data = torch.cat([fields[name] for name, _ in kind.fields], 1)
    assert data.shape[1] == kind.block_bytes, kind
    return data


_UNPACK: Mapping[str, Callable[[Fields], tuple[Tensor, ...]]] = {
    "Q4_0": lambda f: (_spread(f["codes"], 16, 4).to(torch.int16) - 8,),
    "Q4_1": lambda f: (_spread(f["codes"], 16, 4).to(torch.int16),),
    "Q5_0": lambda f: (_joined(_spread(f["codes"], 16, 4), _spread(f["high"], 1, 1), 4, 16),),
    "Q5_1": lambda f: (_joined(_spread(f["codes"], 16, 4), _spread(f["high"], 1, 1), 4),),
    "Q8_0": lambda f: (f["codes"].view(torch.int8).to(torch.int16),),
    "Q2_K": lambda f: (
        _spread(f["codes"], 32, 2).to(torch.int16),
        f["scales"].to(torch.int16) & 15,
        f["scales"].to(torch.int16) >> 4,
    ),
    "Q3_K": lambda f: (
        _joined(_spread(f["codes"], 32, 2), _spread(f["high"], 32, 1), 2, 4),
        _joined(_spread(f["scales"][:, :8], 8, 4), _spread(f["scales"][:, 8:], 4, 2), 4, 32),
    ),
    "Q4_K": lambda f: (_spread(f["codes"], 32, 4).to(torch.int16), *_six_bit_pairs(f["scales"])),
    "Q5_K": lambda f: (_joined(_spread(f["codes"], 32, 4), _spread(f["high"], 32, 1), 4), *_six_bit_pairs(f["scales"])),
    "Q6_K": lambda f: (
        _joined(_spread(f["codes"], 64, 4), _spread(f["high"], 32, 2), 4, 32),
        f["scales"].view(torch.int8).to(torch.int16),
    ),
    "IQ4_NL": lambda f: (_looked_up(_spread(f["codes"], 16, 4), IQ4_VALUES),),
    "IQ4_XS": lambda f: (
        _looked_up(_spread(f["codes"], 16, 4), IQ4_VALUES),
        _joined(_spread(f["scales"], 1, 4), _spread(f["scales_high"], 1, 2), 4, 32),
    ),
}
"""Codes of each type, and the integers of its groups: scales, then mins."""

CODED = frozenset(_UNPACK)
"""Types of codes under float16 scales, which `unpack` splits."""


def numbers(blocks: Blocks) -> Tensor:
    """Return the float16 scales of N blocks, [N, 1 or 2]: d, and m where the type has one."""
    return blocks.d if blocks.m is None else torch.cat([blocks.d, blocks.m], 1)


def with_numbers(kind: GgmlType, raw: Tensor, found: Tensor) -> Tensor:
    """Replace the float16 scales of rows of blocks, uint8 [O, bytes of a row], by `found` [O, blocks of a row,
    1 or 2]."""
    blocks = unpack(kind, raw.reshape(-1, kind.block_bytes))
    d, *m = found.reshape(len(blocks.d), -1).split(1, 1)
    return pack(kind, replace(blocks, d=d.contiguous(), m=m[0].contiguous() if m else None)).view(raw.shape)


def _both(blocks: Blocks) -> tuple[Tensor, Tensor]:
    assert blocks.scales is not None
    assert blocks.mins is not None
    return blocks.scales, blocks.mins


def _scales(blocks: Blocks) -> Tensor:
    assert blocks.scales is not None
    return blocks.scales


_PACK: Mapping[str, Callable[[Blocks], Fields]] = {
    "Q4_0": lambda b: {"codes": _gather(b.codes + 8, 16, 4)},
    "Q4_1": lambda b: {"codes": _gather(b.codes, 16, 4)},
    "Q5_0": lambda b: {"codes": _gather(b.codes + 16, 16, 4), "high": _gather(b.codes + 16 >> 4, 1, 1)},
    "Q5_1": lambda b: {"codes": _gather(b.codes, 16, 4), "high": _gather(b.codes >> 4, 1, 1)},
    "Q8_0": lambda b: {"codes": b.codes.to(torch.int8).view(torch.uint8)},
    "Q2_K": lambda b: {"codes": _gather(b.codes, 32, 2), "scales": (_both(b)[0] | (_both(b)[1] << 4)).to(torch.uint8)},
    "Q3_K": lambda b: {
        "codes": _gather(b.codes + 4, 32, 2),
        "high": _gather(b.codes + 4 >> 2, 32, 1),
        "scales": torch.cat([_gather(_scales(b) + 32, 8, 4), _gather(_scales(b) + 32 >> 4, 4, 2)], 1),
    },
    "Q4_K": lambda b: {"codes": _gather(b.codes, 32, 4), "scales": _from_six_bit_pairs(*_both(b))},
    "Q5_K": lambda b: {
        "codes": _gather(b.codes, 32, 4),
        "high": _gather(b.codes >> 4, 32, 1),
        "scales": _from_six_bit_pairs(*_both(b)),
    },
    "Q6_K": lambda b: {
        "codes": _gather(b.codes + 32, 64, 4),
        "high": _gather(b.codes + 32 >> 4, 32, 2),
        "scales": _scales(b).to(torch.int8).view(torch.uint8),
    },
    "IQ4_NL": lambda b: {"codes": _gather(iq4_code(b.codes), 16, 4)},
    "IQ4_XS": lambda b: {
        "codes": _gather(iq4_code(b.codes), 16, 4),
        "scales": _gather(_scales(b) + 32, 1, 4),
        "scales_high": _gather(_scales(b) + 32 >> 4, 1, 2),
    },
}


# Values


def decode(kind: GgmlType, raw: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
    """Return the values [..., I] of rows of blocks, raw uint8 [..., bytes of a row]: computed in float32, rounded to
    `dtype`. `out` (contiguous, of that shape and any float dtype) receives them if given. Raises ValueError for a type
    that is not decoded, and for rows that are not whole blocks."""
    if not kind.decoded:
        raise UserError(
            "quantization_unsupported", f"{kind.name} is not decoded: attar computes with {', '.join(_DECODE)}"
        )
    assert raw.dtype == torch.uint8
    if raw.ndim == 0 or raw.shape[-1] % kind.block_bytes:
        raise ValueError(f"{list(raw.shape)} bytes are not rows of {kind.name}'s blocks of {kind.block_bytes} bytes")
    shape = (*raw.shape[:-1], raw.shape[-1] // kind.block_bytes * kind.elements)
    values = torch.empty(shape, dtype=dtype, device=raw.device) if out is None else out
    assert tuple(values.shape) == shape
    assert values.is_contiguous()
    blocks, flat = raw.reshape(-1, kind.block_bytes), values.view(-1, kind.elements)
    for part in row_slices(len(blocks), kind.elements):
        flat[part] = _DECODE[kind.name](kind, blocks[part])
    return values


def _decode_plain(kind: GgmlType, data: Tensor) -> Tensor:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
    return data.contiguous().view(dtype).float()


def to_values(blocks: Blocks) -> Tensor:
    """Return the values of blocks: float32 [N, E]."""
    codes, d = blocks.codes.float(), blocks.d.float()
    m = None if blocks.m is None else blocks.m.float()
    if blocks.scales is None:
        return codes.mul_(d) if m is None else codes.mul_(d).add_(m)
    grouped = codes.view(*blocks.scales.shape, -1)
    grouped *= (d * blocks.scales.float())[..., None]
    if m is not None and blocks.mins is not None:
        grouped -= (m * blocks.mins.float())[..., None]
    return codes


def _decode_mxfp4(_: GgmlType, data: Tensor) -> Tensor:
    """Decode a power of two a block (E8M0, halved) times doubled E2M1: 2^-128 .. 2^127, the two smallest subnormal."""
    scale, codes = data.split((1, 16), 1)
    exponent = scale.to(torch.int32)
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return _looked_up(_spread(codes, 16, 4), FP4_VALUES).float() * bits.view(torch.float32)


@cache
def _unsigned_e4m3() -> Tensor:
    """Return half the value of each E4M3 byte, ignoring its sign; 0x7F is zero here."""
    codes = torch.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).float()
    value = torch.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * torch.exp2(exponent.float() - 7))
    return torch.where(codes == 0x7F, 0.0, value / 2)


def _decode_nvfp4(_: GgmlType, data: Tensor) -> Tensor:
    """Decode four groups of 16, doubled E2M1 under an E4M3 scale each. The tensor's own scale is a separate tensor."""
    scale, codes = data.split((4, 32), 1)
    values = _looked_up(_spread(codes, 8, 4), FP4_VALUES).float().view(-1, 4, 16)
    values *= _unsigned_e4m3().to(data.device)[scale.long()][..., None]
    return values.flatten(1)


_DECODE: Mapping[str, Callable[[GgmlType, Tensor], Tensor]] = {
    **dict.fromkeys(("F32", "F16", "BF16"), _decode_plain),
    **dict.fromkeys(_UNPACK, lambda kind, data: to_values(unpack(kind, data))),
    "MXFP4": _decode_mxfp4,
    "NVFP4": _decode_nvfp4,
}
assert all(name in TYPES for name in _DECODE)
