"""The number formats of GGML, as GGUF files store them: a closed table of types. Torch-free.

A GGML tensor is rows of whole blocks. A block holds a fixed count of consecutive elements of one row in a fixed count
of bytes, so every size is a product of integers. Three families share this table:

* plain numbers (F32, F16, BF16), blocks of one element;
* one scale for 32 elements (Q4_0 ... Q8_0, IQ4_NL, MXFP4), 64 in NVFP4;
* k-quants and IQ4_XS: 256 elements with one or two fp16 scales, and small integers that scale groups of 16 or 32.

`fields` lists a block's bytes in the order of the file; `ggml_blocks.py` decodes them. Types that attar does not decode
(the IQ1 to IQ3 family, ternary ones, plain integers) are listed with their sizes. A parser must know how long a tensor
is before it can check the file. Bits per weight are those of a block; a file mixes types, and its average is higher
(Q2_K is 2.625 bits a block; files of that name exceed 3).

Left out on purpose: numbers that were withdrawn (4, 5, 31 to 33, 36 to 38), and Q8_1 and Q8_K, which exist only in the
memory of running programs. A file that names one of them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attar.errors import UserError

OPAQUE = "opaque"  # the only field of types that are not decoded


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A GGML type: its name, its number in files, the elements of a block, and the block's fields with their bytes."""

    name: str
    id: int
    elements: int
    fields: tuple[tuple[str, int], ...]

    @property
    def block_bytes(self) -> int:
        return sum(size for _, size in self.fields)

    @property
    def decoded(self) -> bool:
        """Return whether attar can compute the type's values."""
        return self.fields[0][0] != OPAQUE

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.elements

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` elements. Raises ValueError where blocks do not divide them."""
        if columns % self.elements:
            raise UserError(
                "group_size_indivisible",
                f"{self.name} stores rows in blocks of {self.elements}, which do not divide {columns}",
            )
        return columns // self.elements * self.block_bytes

    def bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor of `shape`, rows last (torch's order). Raises ValueError like `row_bytes`."""
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1]) if shape else self.row_bytes(1)


def _type(name: str, id: int, elements: int, **fields: int) -> GgmlType:
    return GgmlType(name, id, elements, tuple(fields.items()))


TYPES: Mapping[str, GgmlType] = {
    each.name: each
    for each in (
        _type("F32", 0, 1, values=4),
        _type("F16", 1, 1, values=2),
        _type("Q4_0", 2, 32, d=2, codes=16),
        _type("Q4_1", 3, 32, d=2, m=2, codes=16),
        _type("Q5_0", 6, 32, d=2, high=4, codes=16),
        _type("Q5_1", 7, 32, d=2, m=2, high=4, codes=16),
        _type("Q8_0", 8, 32, d=2, codes=32),
        _type("Q2_K", 10, 256, scales=16, codes=64, d=2, m=2),
        _type("Q3_K", 11, 256, high=32, codes=64, scales=12, d=2),
        _type("Q4_K", 12, 256, d=2, m=2, scales=12, codes=128),
        _type("Q5_K", 13, 256, d=2, m=2, scales=12, high=32, codes=128),
        _type("Q6_K", 14, 256, codes=128, high=64, scales=16, d=2),
        _type("IQ2_XXS", 16, 256, opaque=66),
        _type("IQ2_XS", 17, 256, opaque=74),
        _type("IQ3_XXS", 18, 256, opaque=98),
        _type("IQ1_S", 19, 256, opaque=50),
        _type("IQ4_NL", 20, 32, d=2, codes=16),
        _type("IQ3_S", 21, 256, opaque=110),
        _type("IQ2_S", 22, 256, opaque=82),
        _type("IQ4_XS", 23, 256, d=2, scales_high=2, scales=4, codes=128),
        _type("I8", 24, 1, opaque=1),
        _type("I16", 25, 1, opaque=2),
        _type("I32", 26, 1, opaque=4),
        _type("I64", 27, 1, opaque=8),
        _type("F64", 28, 1, opaque=8),
        _type("IQ1_M", 29, 256, opaque=56),
        _type("BF16", 30, 1, values=2),
        _type("TQ1_0", 34, 256, opaque=54),
        _type("TQ2_0", 35, 256, opaque=66),
        _type("MXFP4", 39, 32, d=1, codes=16),
        _type("NVFP4", 40, 64, d=4, codes=32),
        _type("Q1_0", 41, 128, opaque=18),
    )
}
"""Every type that a file may hold, by name."""

BY_ID: Mapping[int, GgmlType] = {each.id: each for each in TYPES.values()}

DECODED: tuple[GgmlType, ...] = tuple(each for each in TYPES.values() if each.decoded)
"""The types whose values attar can compute."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 16 codes of IQ4_NL and IQ4_XS: denser about zero, like weights, and not quite symmetric."""

FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the 16 codes of E2M1, so that they are whole; the scales of MXFP4 and NVFP4 are halved."""
