"""Memory layouts of each scheme's weights for the CPU kernels, which `csrc/matrix.h` calls forms. Torch-free.

A layout holds a weight's values exactly, in one of three ways:
* `codes` of 2 to 8 bits in groups of 16, of a multiple of 32, or of a whole row: a grid's code less its zero point
  times a scale; or times a scale plus an offset; or looked up in a table of 16 numbers and scaled. Scales and offsets
  may be products of a float that several groups share and a small integer of each, as in GGML's blocks of 256. Where
  the numbers are whole, products with int8 rows are sums of integers;
* bytes that are numbers (float8, int8) in groups of any size, multiplied in float32;
* floats of 16 or 32 bits without a scale; for 2:4 sparse weights half of them, with their places.

A layout may take more bits than the file: GGML's six-bit scales become bytes, scales of eight bits become floats, and
2:4 sparse codes get their zeros back, because codes and places together are hardly fewer bits than codes alone. Codes
of two levels (`progressive`) and tables for each row (`lookup`) have layouts of their own.

`weight_against` tells from a scheme alone whether the kernels multiply by it, so that a plan can ask what will run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from attar.formats import weight_formats
from attar.formats.codecs.ggml import FP4_VALUES, IQ4_VALUES
from attar.formats.scheme import FLOAT8, ITEM_BITS, Grid, Scheme
from attar.formats.weight_formats import Fp4, Fp8Blocks, GgmlBlocks, Int8Rows, Lookup, Nf4, Progressive, Sparse24

LANES = 16  # outputs that lie together
RUN = 32  # columns that codes are packed together in
Number = Literal["codes", "int8", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"]
FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Layout:
    """One memory layout of weights."""

    number: Number = "codes"
    bits: int = 0  # of a code
    group: int | None = None  # columns that share a scale; None: the whole row
    scale: str = "float32"  # dtype of scales and offsets
    zeros: bool = False
    offsets: bool = False
    fine: int = 0  # groups that share a scale, and have a byte each that multiplies it; 0: they have none
    table: tuple[float, ...] = ()  # values of the codes before they are scaled
    sparse: bool = False  # whether two of four columns are stored

    @property
    def whole(self) -> bool:
        """Return whether products with rows of int8 are exact integers."""
        return self.number == "codes" and all(value == int(value) for value in self.table)

    def of(self, columns: int) -> Layout:
        """Return the layout with groups that divide a row of `columns`, where a scheme may cut its last group short."""
        if self.group is None or columns % self.group == 0:
            return self
        return replace(self, group=math.gcd(self.group, columns))

    def bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that a weight [rows, columns] takes, and one product reads."""
        if self.number in FLOATS:
            item = ITEM_BITS[self.number] // 8
            return _up(rows, LANES) * (columns // 2 * item + columns // 8 if self.sparse else columns * item)
        layout = self.of(columns)
        if layout.group is None or layout.group == columns:
            groups, padded = 1, _up(columns, 2 * RUN)
        else:
            padded = _up(columns, RUN) if layout.number == "codes" else columns
            groups = padded // layout.group
        held = padded * layout.bits // 8 if layout.number == "codes" else columns
        scales = -(-groups // (layout.fine or 1)) * (1 + layout.offsets) * ITEM_BITS[layout.scale] // 8
        beside = groups * (layout.zeros + (layout.fine > 0) * (1 + layout.offsets))
        return _up(rows, LANES) * (held + scales + beside)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


_GGML: Mapping[str, Layout] = {
    "Q4_0": Layout(bits=4, group=32, scale="float16"),
    "Q4_1": Layout(bits=4, group=32, scale="float16", offsets=True),
    "Q5_0": Layout(bits=5, group=32, scale="float16"),
    "Q5_1": Layout(bits=5, group=32, scale="float16", offsets=True),
    "Q8_0": Layout(bits=8, group=32, scale="float16"),
    "Q2_K": Layout(bits=2, group=16, scale="float16", offsets=True, fine=16),
    "Q3_K": Layout(bits=3, group=16, scale="float16", fine=16),
    "Q4_K": Layout(bits=4, group=32, scale="float16", offsets=True, fine=8),
    "Q5_K": Layout(bits=5, group=32, scale="float16", offsets=True, fine=8),
    "Q6_K": Layout(bits=6, group=16, scale="float16", fine=16),
    "IQ4_NL": Layout(bits=4, group=32, scale="float16", table=IQ4_VALUES),
    "IQ4_XS": Layout(bits=4, group=32, scale="float16", fine=8, table=IQ4_VALUES),
    "MXFP4": Layout(bits=4, group=32, scale="bfloat16", table=FP4_VALUES),
    "NVFP4": Layout(bits=4, group=16, scale="bfloat16", table=FP4_VALUES),
}
GGML = frozenset(_GGML)  # types whose blocks have a layout
_NF4 = (0.5,) * 16  # whatever the file says: not whole


def layout_of(scheme: Scheme) -> Layout | None:
    """Return the layout of weights of this scheme, or None where they have none yet."""
    form: weight_formats.WeightFormat = scheme.weight
    match form:
        case Grid(kind="int"):
            return _of_codes(form, form.group_size, scheme)
        case Grid():
            number: Number = "float8_e4m3fn" if FLOAT8[form.kind] == "float8_e4m3fn" else "float8_e5m2"
            return Layout(number, group=form.group_size, scale=scheme.scale_dtype)
        case Fp8Blocks():
            return Layout("float8_e4m3fn", group=form.size, scale=scheme.scale_dtype)
        case Fp4(name="mxfp4"):
            return Layout(bits=4, group=form.group, scale="bfloat16", table=FP4_VALUES)
        case Fp4():
            return Layout(bits=4, group=form.group, table=FP4_VALUES)
        case Nf4():
            return Layout(bits=4, group=form.block, table=_NF4)
        case Int8Rows():  # with unrounded outliers in the rows, products are not of integers
            return Layout(bits=8) if scheme.activation is None else Layout("int8")
        case GgmlBlocks():
            return _GGML.get(form.type.name)
        case Sparse24(values=None):
            return Layout(scheme.scale_dtype, sparse=True)
        case Sparse24(values=Grid(kind="int") as values):  # a group of values spans twice as many columns
            return _of_codes(values, None if values.group_size is None else 2 * values.group_size, scheme)
    return None


def _of_codes(grid: Grid, group: int | None, scheme: Scheme) -> Layout:
    in_runs = group is None or group % RUN == 0 or group == RUN // 2
    number: Number = "codes" if in_runs else "int8"
    bits = grid.bits if in_runs else 0
    return Layout(number, bits, group, scheme.scale_dtype, zeros=not grid.symmetric)


@lru_cache(4096)  # a plan asks about each layer of a model, under each recipe
def weight_against(scheme: Scheme) -> str | None:
    """Return a readable reason why the reference multiplies by such a weight, or None where a kernel does."""
    grid, rounding = scheme.weight, scheme.activation
    if isinstance(grid, Progressive):
        return None if rounding is not None else "weights of two levels meet rows of int8 alone"
    if isinstance(grid, Lookup):
        return None
    layout = layout_of(scheme)
    if layout is None:
        return f"{grid.name} weights have no CPU kernel yet"
    if rounding is None or isinstance(rounding, Fp4 | weight_formats.Outliers):
        return None
    if not isinstance(rounding, Grid):
        return f"activations in {rounding.name} have no CPU kernel yet"
    if rounding.kind == "int" and (rounding.bits != 8 or not rounding.symmetric):
        return "integer activations other than symmetric int8 have no CPU kernel yet"
    if rounding.kind == "int" and not layout.whole:
        return f"rows of int8 do not go with {grid.name} weights in the CPU kernels"
    if rounding.granularity == "tensor" and not scheme.static:
        return "one activation scale for all rows of a call would tie them to each other"
    return None
