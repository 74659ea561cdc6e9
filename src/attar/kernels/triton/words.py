"""Words of 16 bits that hold two 8-bit codes or four 4-bit ones, widened to numbers of each column they hold.

Shared memory transposes 16-bit words on the way to the tensor cores, and no smaller ones. So attention reads cached
keys and values as such words. Compiled, two words lie in one register, and bfloat16 numbers are made by PTX on whole
registers. The interpreter, which knows no assembly, and other dtypes convert number by number.
"""

from __future__ import annotations

import torch

from attar.kernels.triton import nibbles
from attar.kernels.triton.language import COMPILED, kernel, tl
from attar.kv import bit_planes

INT8, FLOAT8, INT4 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # kinds of codes; 0 are plain numbers

_INT8 = """{
    .reg .b32 u, first, second, third, fourth;
    .reg .f32 a, b, c, d;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 first, u, 0x4b000000, 0x7540;
    prmt.b32 second, u, 0x4b000000, 0x7541;
    prmt.b32 third, u, 0x4b000000, 0x7542;
    prmt.b32 fourth, u, 0x4b000000, 0x7543;
    mov.b32 a, first;
    mov.b32 b, second;
    mov.b32 c, third;
    mov.b32 d, fourth;
    add.f32 a, a, 0fCB000080;
    add.f32 b, b, 0fCB000080;
    add.f32 c, c, 0fCB000080;
    add.f32 d, d, 0fCB000080;
    cvt.rn.bf16x2.f32 $0, c, a;
    cvt.rn.bf16x2.f32 $1, d, b;
}"""
_FLOAT8 = """{
    .reg .b32 pairs, low, high;
    .reg .b16 x, y, p, q, r, s;
    .reg .f32 a, b, c, d;
    prmt.b32 pairs, $2, 0, 0x3120;
    mov.b32 {x, y}, pairs;
    cvt.rn.f16x2.e4m3x2 low, x;
    cvt.rn.f16x2.e4m3x2 high, y;
    mov.b32 {p, q}, low;
    mov.b32 {r, s}, high;
    cvt.f32.f16 a, p;
    cvt.f32.f16 b, q;
    cvt.f32.f16 c, r;
    cvt.f32.f16 d, s;
    cvt.rn.bf16x2.f32 $0, b, a;
    cvt.rn.bf16x2.f32 $1, d, c;
}"""


def _table(shift: int) -> list[str]:
    """Return a byte of the bfloat16 of each of the 16 levels, four to a word."""
    bits = bit_planes.tables()[0][nibbles.BITS, :16].bfloat16().view(torch.int16).tolist()
    octets = [level >> shift & 0xFF for level in bits]
    return [f"0x{int.from_bytes(bytes(octets[at : at + 4]), 'little'):08x}" for at in range(0, 16, 4)]


_INT4 = """{{
    .reg .b32 place, second, which, other, l, h, m, n, low, high, lower, higher;
    and.b32 place, $4, 0x77777777;
    shr.u32 second, place, 16;
    shr.u32 which, $4, 1;
    lop3.b32 which, which, 0x44444444, 0x32103210, 0xea;
    shr.u32 other, which, 16;
    prmt.b32 l, {0}, {1}, place;
    prmt.b32 h, {2}, {3}, place;
    prmt.b32 low, l, h, which;
    prmt.b32 m, {4}, {5}, place;
    prmt.b32 n, {6}, {7}, place;
    prmt.b32 high, m, n, which;
    prmt.b32 l, {0}, {1}, second;
    prmt.b32 h, {2}, {3}, second;
    prmt.b32 lower, l, h, other;
    prmt.b32 m, {4}, {5}, second;
    prmt.b32 n, {6}, {7}, second;
    prmt.b32 higher, m, n, other;
    prmt.b32 l, low, high, 0x5140;
    prmt.b32 h, low, high, 0x7362;
    prmt.b32 m, lower, higher, 0x5140;
    prmt.b32 n, lower, higher, 0x7362;
    prmt.b32 $0, l, m, 0x5410;
    prmt.b32 $1, l, m, 0x7632;
    prmt.b32 $2, h, n, 0x5410;
    prmt.b32 $3, h, n, 0x7632;
}}""".format(*_table(0), *_table(8))
WORDS_OF_INT8, WORDS_OF_FLOAT8, WORDS_OF_INT4 = tl.constexpr(_INT8), tl.constexpr(_FLOAT8), tl.constexpr(_INT4)
"""Two words as bfloat16 numbers of each of their columns.

int8: 2^23 + n is the float32 with bits 0x4b000000 + n, for n < 256. int4: the two bytes of a level's bfloat16 are
looked up in registers, by three bits of a code in each half of the table, and the fourth bit chooses the half.
"""


@kernel
def pair(words: tl.tensor, dtype: tl.constexpr, CODES: tl.constexpr) -> tl.tensor:
    """Return the numbers of the columns 2 j and 2 j + 1 of int16 words j of 8-bit codes."""
    if COMPILED and dtype == tl.bfloat16 and CODES == INT8:
        return tl.inline_asm_elementwise(WORDS_OF_INT8, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), True, 2)
    elif COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(WORDS_OF_FLOAT8, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), True, 2)
    elif CODES == INT8:
        return ((words << 8) >> 8).to(dtype), (words >> 8).to(dtype)
    else:
        first = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return first.to(dtype), (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)


@kernel
def four(words: tl.tensor, levels: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the levels of the four nibbles of int16 words j: columns 2 j, D / 2 + 2 j, 2 j + 1, D / 2 + 2 j + 1."""
    if COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            WORDS_OF_INT4, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        wide = words.to(tl.int32)
        return (
            tl.load(levels + (wide & 15)).to(dtype), tl.load(levels + ((wide >> 4) & 15)).to(dtype),
            tl.load(levels + ((wide >> 8) & 15)).to(dtype), tl.load(levels + ((wide >> 12) & 15)).to(dtype),
        )  # fmt: skip


@kernel
def column(j: tl.tensor, part: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """Return the column that word j holds for a part."""
    if PARTS == 4:
        return (part % 2) * (D // 2) + 2 * j + part // 2
    else:
        return PARTS * j + part
