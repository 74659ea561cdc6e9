"""KV cache schemes: a `KvScheme` by its name, and the ledger of every byte that it takes. Torch-free.

    float32, bfloat16   unrounded
    int8                8 bits and a float32 scale per token and head
    fp8                 e4m3 and such a scale; no better than int8 where every token has its own scale
    int4                rotated by a Hadamard matrix, which makes numbers nearly normal, then 4 bits on a normal grid;
                        a bfloat16 scale per token and head, chosen by its rounding error
    klt4, klt2          like int4 in another basis, calibrated per layer and head (`model/kv_basis.py`): coordinates are
                        uncorrelated, their errors count alike, and those that vary more get more bits; 4.375 and 2.375
                        bits on average. Numbers of a usual size have a scale near one in it, so a byte is enough for a
                        scale (the upper half of a float16 without its sign): heads of 64 take as much as llama.cpp's
                        q4_0 and KIVI in groups of 64. klt2 keeps the unfinished block of each sequence in 16 bits
    kivi4, kivi2        KIVI's code (Liu et al. 2024): from minimum to maximum, keys per channel in groups of 32 tokens,
                        values per token in groups of 32 columns; the unfinished block in 16 bits. As published, besides
                        up to R unrounded keys (R = 128) the last R values always stay in 16 bits: here both sides are
                        rounded at a block's end, which takes less memory and is less precise
    nuq4, nuq3          KVQuant (Hooper et al. 2024): calibrated levels, keys per channel and values per token; of each
                        head the greatest coordinates, one in about a hundred, and of each block its first token, in 16
                        bits. At equal bits the embedded model loses more by it than by klt, and Qwen2.5-Coder-0.5B less

int4, klt4 and klt2 need no group of tokens, so a token is written once and for all. Where a block is first kept in 16
bits (`recent`), it is rounded when its last token comes. A token therefore always sees the tokens of its own block
unrounded, and those of earlier blocks rounded, however a prompt is cut into calls. For the same reason such caches
share whole blocks only (`round_to`), and the 16 bits belong to a sequence and not to a block.

None has a sliding window, like that of KIVI's values. A token's input would then depend on numbers that a shared prefix
no longer has. `published.py` has KIVI and KVQuant as published, for measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from attar.errors import UserError
from attar.formats.weight_formats import Part
from attar.kv.published import PUBLISHED

RUN = 16  # slots that stand side by side in the keys, and columns in the values
BUCKET = 8  # neighbouring coordinates of one number of bits
MOST_BITS = 6  # of a coordinate
ONE_IN = 100  # coordinates of a head of nuq is an outlier, and one at least
WRITTEN, RANDOM, LENGTH = 12, 4, 256  # calibration texts by source, and tokens of each


class Layout(StrEnum):
    """The layout of a block's numbers in memory. `csrc/attention.h` has the same names (`KvLayout`)."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FP8 = "fp8"
    BIT_PLANES = "bit_planes"
    KIVI = "kivi"
    KVQUANT = "kvquant"


@dataclass(frozen=True, slots=True)
class KvScheme:
    """A way to store keys and values.

    `bits` are those of a code, on average; `group` is KIVI's: tokens of keys, columns of values.
    """

    name: str
    layout: Layout
    bits: float
    calibrated: bool = False
    recent: bool = False
    group: int = 0

    @property
    def unscaled(self) -> bool:
        """Return whether numbers are stored as floats, without scales."""
        return self.layout in (Layout.FLOAT32, Layout.BFLOAT16)

    @property
    def byte_scales(self) -> bool:
        """Return whether a scale is a byte, the upper half of a float16 without its sign, rather than a bfloat16."""
        return self.layout == Layout.BIT_PLANES and self.calibrated

    def round_to(self, block: int) -> int:
        """Return the tokens of which a shared prefix holds a whole number."""
        return block if self.recent else 1

    def units(self, head_dim: int) -> int:
        """Return the bits of one coordinate of each bucket of a head, together: `divide` shares them among the
        buckets."""
        return round(self.bits * head_dim / BUCKET)

    def outliers(self, head_dim: int) -> int:
        """Return the coordinates of a head that are stored apart; for nuq."""
        return max(1, round(head_dim / ONE_IN))

    def check(self, head_dim: int, block: int) -> None:
        """Raise ValueError where the scheme does not support heads or blocks of such sizes."""
        if block < RUN or block % RUN:
            raise ValueError(f"a block holds a multiple of {RUN} slots, not {block}")
        kept = ""
        if self.layout == Layout.BIT_PLANES and head_dim % RUN:
            kept = f"heads of a multiple of {RUN} columns, not {head_dim}: int8 keeps any"
        elif self.layout == Layout.KIVI and (head_dim % self.group or block % self.group):
            kept = f"groups of {self.group} tokens and columns, not {block} and {head_dim}"
        elif self.layout == Layout.KVQUANT and (head_dim % BUCKET or head_dim > 256):
            kept = f"heads of a multiple of {BUCKET} columns, 256 at most, not {head_dim}"
        if kept:
            raise UserError("kv_unsupported", f"{self.name} keeps {kept}")

    def parts(self, kv_heads: int, head_dim: int, block: int) -> dict[str, Part]:
        """Return every array of one block of one layer; `Pages` has them with a first axis of blocks. Raises ValueError
        like `check`."""
        self.check(head_dim, block)
        padded, runs = -(-head_dim // RUN) * RUN, block // RUN
        if self.layout == Layout.BIT_PLANES:
            codes = Part("uint8", (kv_heads, runs, self.units(head_dim), 2 * BUCKET))
            scales = Part("uint8" if self.byte_scales else "bfloat16", (kv_heads, block))
            return {"keys": codes, "values": codes, "key_scales": scales, "value_scales": scales}
        if self.layout == Layout.KIVI:
            planes = round(self.bits) // 2
            by_channel = Part("float16", (kv_heads, block // self.group, head_dim))
            by_token = Part("float16", (kv_heads, block, head_dim // self.group))
            return {
                "keys": Part("uint8", (kv_heads, runs, planes * head_dim, RUN // 4)),
                "values": Part("uint8", (kv_heads, block, planes * head_dim // 4)),
                "key_scales": by_channel, "value_scales": by_token,
                "key_zeros": by_channel, "value_zeros": by_token,
            }  # fmt: skip
        if self.layout == Layout.KVQUANT:
            codes = Part("uint8", (kv_heads, block, round(self.bits), head_dim // BUCKET))
            apart = (kv_heads, block, self.outliers(head_dim))
            found = {"keys": codes, "values": codes, "value_scales": Part("bfloat16", (kv_heads, block))}
            for side in ("key", "value"):
                found[f"{side}_outliers"], found[f"{side}_columns"] = Part("bfloat16", apart), Part("uint8", apart)
                found[f"{side}_firsts"] = Part("bfloat16", (kv_heads, head_dim))
            return found
        together = 4 if self.layout == Layout.INT8 else 1
        dtype = "uint8" if self.layout == Layout.FP8 else self.name
        found = {
            "keys": Part(dtype, (kv_heads, runs, -(-head_dim // together), RUN, together)),
            "values": Part(dtype, (kv_heads, block // together, padded, together)),
        }
        if not self.unscaled:
            found |= {name: Part("float32", (kv_heads, block)) for name in ("key_scales", "value_scales")}
        return found

    def bytes(self, kv_heads: int, head_dim: int, block: int) -> int:
        """Return the bytes of one block of one layer. Raises ValueError like `check`."""
        return sum(part.bytes for part in self.parts(kv_heads, head_dim, block).values())

    def recent_bytes(self, kv_heads: int, head_dim: int, block: int) -> int:
        """Return the bytes of one unfinished block of one layer in 16 bits; 0 where there is none."""
        return 2 * 2 * block * kv_heads * head_dim if self.recent else 0

    def basis_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one layer's calibrated bases; others are shared. They are two matrices and three rows a
        head on either side (for nuq, two rows and the levels)."""
        if self.layout == Layout.KVQUANT:
            return 2 * 4 * (kv_heads * 2 * head_dim + (1 << round(self.bits)))
        return 2 * 4 * kv_heads * (2 * head_dim**2 + 3 * head_dim) if self.calibrated else 0

    def bits_per_value(self, head_dim: int, block: int, context: int | None = None) -> float:
        """Return the bits of a key's or value's number, scales included. With a `context`, they are those of a sequence
        of so many tokens, including its unfinished block."""
        stored = 8 * self.bytes(1, head_dim, block) / (2 * head_dim * block)
        if context is None:
            return stored
        return stored + 8 * self.recent_bytes(1, head_dim, block) / (2 * head_dim * context)


SCHEMES: Mapping[str, KvScheme] = {
    each.name: each
    for each in (
        KvScheme("float32", Layout.FLOAT32, 32),
        KvScheme("bfloat16", Layout.BFLOAT16, 16),
        KvScheme("int8", Layout.INT8, 8),
        KvScheme("fp8", Layout.FP8, 8),
        KvScheme("klt4", Layout.BIT_PLANES, 4.375, calibrated=True),
        KvScheme("int4", Layout.BIT_PLANES, 4),
        KvScheme("nuq4", Layout.KVQUANT, 4, calibrated=True),
        KvScheme("nuq3", Layout.KVQUANT, 3, calibrated=True),
        KvScheme("kivi4", Layout.KIVI, 4, recent=True, group=32),
        KvScheme("kivi2", Layout.KIVI, 2, recent=True, group=32),
        KvScheme("klt2", Layout.BIT_PLANES, 2.375, calibrated=True, recent=True),
    )
}


def check_name(name: str | None) -> None:
    """Raise ValueError, naming the existing schemes, for a name that none has. None leaves the choice open."""
    if name in PUBLISHED:
        served = ", ".join(SCHEMES)
        raise UserError("kv_unsupported", f"{name} is simulated by `attar eval --kv` alone; a KV cache can be {served}")
    if name is not None and name not in SCHEMES:
        message = (
            f"KV cache formats are {', '.join(SCHEMES)}, not {name!r}; for `attar eval` also {', '.join(PUBLISHED)}"
        )
        raise UserError("kv_unknown", message)


def scheme(name: str) -> KvScheme:
    """Return the scheme of a name. Raises ValueError as `check_name`."""
    check_name(name)
    return SCHEMES[name]


# Grids of nearly normal coordinates: Lloyd's (1982) levels for that distribution, in integers, so that they are
# multiplied as int8. `LEVELS` has the greater half of 2^b levels; the rest are their negatives.
UNIT = 33.92
"""The integer of one standard deviation, for any number of bits.

Coordinates then vary alike, and a scale that rounds them all to int8 serves them all (`kernels/native/attention.py`
reads recent blocks so).
"""
LEVELS: Mapping[int, tuple[int, ...]] = {
    1: (27,),
    2: (15, 51),
    3: (8, 26, 46, 73),
    4: (4, 13, 22, 32, 43, 55, 70, 93),
    5: (2, 7, 11, 16, 21, 25, 30, 36, 41, 47, 53, 61, 69, 79, 91, 111),
    6: (
        1, 3, 6, 8, 10, 13, 15, 17, 20, 22, 24, 27, 30, 32, 35, 38,
        40, 43, 46, 49, 53, 56, 60, 64, 68, 73, 78, 84, 91, 99, 110, 127,
    ),
}  # fmt: skip
DISTORTION = (1.0, 0.36338, 0.11753, 0.03461, 0.00953, 0.00256, 0.00069)
"""Mean squared error of a normal variable of variance 1, by number of bits."""


def divide(variances: Sequence[float], units: int) -> list[int]:
    """Return the bits of each bucket's coordinates, `units` together, given the buckets' variances.

    Each bit goes where it removes most error (reverse water-filling, in whole bits). Raises ValueError where the
    buckets cannot take so many.
    """
    bits = [0] * len(variances)
    if units > MOST_BITS * len(bits):
        raise ValueError(f"{units} bits are too many for {len(bits)} buckets of {MOST_BITS} at most")
    for _ in range(units):
        gain = [
            v * (DISTORTION[b] - DISTORTION[b + 1]) if b < MOST_BITS else -1.0
            for v, b in zip(variances, bits, strict=True)
        ]
        bits[gain.index(max(gain))] += 1
    return bits
