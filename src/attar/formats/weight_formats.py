"""Weight formats beyond uniform grids: a `WeightFormat` for each family, as data. Torch-free.

A format names its codec (`kind`), its spelling in `Scheme.parse` (`name`), the rows it can hold (`check`) and every
array that a weight becomes (`parts`): the bit ledger of `scheme.py`, whose `Grid` is a format too. The meaning of those
arrays is the codec's, one module a kind (`packed.codec`). So code that moves, counts or stores weights never asks for
it, and code that does arithmetic on a uniform grid narrows to `Grid` (`Scheme.grid`).

A format holds constants only: sizes follow from it and the shape, before a weight is read. For that reason it has a
share of the matrix as outliers, not a count found in the data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from attar.errors import UserError
from attar.formats.codecs.ggml import TYPES, GgmlType

ScaleDtype = Literal["float32", "float16", "bfloat16"]

ITEM_BITS: Mapping[str, int] = {
    "int8": 8, "uint8": 8, "int16": 16, "int32": 32, "int64": 64, "float16": 16, "bfloat16": 16, "float32": 32,
    "float64": 64, "float8_e4m3fn": 8, "float8_e5m2": 8, "bool": 8,
}  # fmt: skip
"""Bits of one stored element, by torch dtype name."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stored array: a torch dtype name and a shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


class WeightFormat(Protocol):
    """The numbers that a weight may take, or activations may be rounded to. Hashable, and equal by value."""

    @property
    def kind(self) -> str:
        """Key of the format's codec."""
        ...

    @property
    def name(self) -> str:
        """Name of the format in schemes."""
        ...

    @property
    def by_row(self) -> bool:
        """Return whether the stored data of a row depends on that row alone, and lies at that row of every part but
        `shape`. If so, rows can be quantized and written some at a time."""
        ...

    def check(self, columns: int) -> None:
        """Raise ValueError where the format cannot hold a row of `columns` elements."""
        ...

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        """Return every array of a stored weight of `shape` (out, in). Raises ValueError like `check`."""
        ...


def _runs(columns: int, size: int, what: str) -> int:
    """Return the runs of `size` in a row of `columns` elements. Raises ValueError where they do not divide it."""
    if columns % size:
        raise UserError("group_size_indivisible", f"{what} of {size}, which do not divide {columns} input columns")
    return columns // size


@dataclass(frozen=True, slots=True)
class GgmlBlocks:
    """The blocks of a GGML type, byte for byte as a GGUF file stores them; codec `ggml_codec`."""

    kind: ClassVar[str] = "ggml"
    by_row: ClassVar[bool] = True

    type: GgmlType

    @property
    def name(self) -> str:
        return self.type.name.lower()

    def check(self, columns: int) -> None:
        self.type.row_bytes(columns)

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        return {"blocks": Part("uint8", (shape[0], self.type.row_bytes(shape[1])))}


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """E4M3 with a scale for every block of 128 rows by 128 columns, smaller at the ends. Codec `fp8_blocks`."""

    kind: ClassVar[str] = "fp8-block"
    name: ClassVar[str] = "fp8-block"
    by_row: ClassVar[bool] = False
    size: ClassVar[int] = 128

    def check(self, columns: int) -> None:
        pass

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        blocks = (-(-shape[0] // self.size), -(-shape[1] // self.size))
        return {"codes": Part("float8_e4m3fn", shape), "scale": Part(scale_dtype, blocks)}


@dataclass(frozen=True, slots=True)
class Fp4:
    """E2M1, two codes a byte, in groups with a scale of eight bits. Codec `fp4`. `mxfp4` (OCP): groups of 32 under a
    power of two, E8M0. `nvfp4` (NVIDIA): groups of 16 under an E4M3 number, divided by a float32 number for the whole
    tensor."""

    kind: ClassVar[str] = "fp4"

    name: Literal["mxfp4", "nvfp4"]

    @property
    def by_row(self) -> bool:
        return self.name == "mxfp4"

    @property
    def group(self) -> int:
        return 32 if self.name == "mxfp4" else 16

    def check(self, columns: int) -> None:
        _runs(columns, self.group, f"{self.name} has groups")

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        rows, columns = shape
        self.check(columns)
        scale = "uint8" if self.name == "mxfp4" else "float8_e4m3fn"
        parts = {"codes": Part("uint8", (rows, columns // 2)), "scale": Part(scale, (rows, columns // self.group))}
        return parts if self.name == "mxfp4" else parts | {"global": Part("float32", (1,))}


@dataclass(frozen=True, slots=True)
class Nf4:
    """NF4: sixteen quantiles of a normal distribution, times the largest magnitude of 64 weights, as bitsandbytes
    stores it. With `double`, that magnitude is quantized to eight bits in turn. Codec `nf4`."""

    kind: ClassVar[str] = "nf4"
    by_row: ClassVar[bool] = False  # a second-level scale covers 256 blocks, wherever rows end
    block: ClassVar[int] = 64
    nested_block: ClassVar[int] = 256
    state_bytes: ClassVar[int] = 256

    double: bool = True

    @property
    def name(self) -> str:
        return "nf4" if self.double else "nf4-single"

    def check(self, columns: int) -> None:
        _runs(columns, self.block, "nf4 has blocks")

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        self.check(shape[1])
        blocks = shape[0] * (shape[1] // self.block)
        parts = {
            "codes": Part("uint8", (blocks * self.block // 2, 1)),
            "absmax": Part("uint8" if self.double else "float32", (blocks,)),
            "map": Part("float32", (16,)),
            "state": Part("uint8", (self.state_bytes,)),
        }
        if self.double:
            parts["nested_absmax"] = Part("float32", (-(-blocks // self.nested_block),))
            parts["nested_map"] = Part("float32", (256,))
        return parts


@dataclass(frozen=True, slots=True)
class Progressive:
    """QServe's format: four bits in groups upon int8 in rows. A group's codes times a whole number, less another, are
    int8; one float a row turns these into weights. Codec `progressive`."""

    kind: ClassVar[str] = "progressive"
    by_row: ClassVar[bool] = True
    bits: ClassVar[int] = 4

    group: int = 128

    @property
    def name(self) -> str:
        return f"qserve-g{self.group}"

    def check(self, columns: int) -> None:
        self.groups(columns)

    def groups(self, columns: int) -> int:
        """Return the groups of a row of `columns` elements. Raises ValueError where their size does not divide it."""
        return _runs(columns, self.group, f"{self.name} has groups")

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        rows, columns = shape
        by_group = Part("uint8", (rows, self.groups(columns)))
        return {
            "codes": Part("int32", (rows, columns * self.bits // 32)),
            "scale": Part(scale_dtype, (rows, 1)),
            "factor": by_group,
            "offset": by_group,
        }


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """LLM.int8()'s weights: int8 with the largest magnitude of each row, as bitsandbytes stores them. Outliers of the
    inputs are not rounded. Codec `llm_int8`."""

    kind: ClassVar[str] = "llm-int8"
    name: ClassVar[str] = "llm-int8"
    by_row: ClassVar[bool] = False  # its format is one number for the matrix

    def check(self, columns: int) -> None:
        pass

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        return {"codes": Part("int8", shape), "absmax": Part("float32", (shape[0],)), "format": Part("uint8", ())}


@dataclass(frozen=True, slots=True)
class Outliers:
    """LLM.int8()'s activations: a row's values of at least `threshold` stay, the others are int8. The scale is the
    row's largest remaining magnitude. No weight has this format. Codec `llm_int8`."""

    kind: ClassVar[str] = "llm-int8"
    by_row: ClassVar[bool] = True

    threshold: float = 6.0

    @property
    def name(self) -> str:
        return f"int8 below {self.threshold:g}"

    def check(self, columns: int) -> None:
        pass

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        raise ValueError("outliers are found in activations: no weight is stored so")


NUMBERS: Mapping[ScaleDtype, str] = {"float16": "", "float32": "-f32", "bfloat16": "-bf16"}
"""Ending of a `Lookup`'s name, by the dtype of its numbers."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Codes of `bits` bits into a table of each row's own, plus `outliers` (a share of the matrix) that are added to
    it. Outliers are stored row by row (CSR). This is SqueezeLLM's format, with its names for 0.05 and 0.45 %, s5 and
    s45. attar writes float16 `numbers` and those shares; SqueezeLLM's own files have float32 and any count. Codec
    `lookup`."""

    kind: ClassVar[str] = "lookup"

    bits: int
    outliers: float = 0.0
    numbers: ScaleDtype = "float16"

    @staticmethod
    def of(bits: int, count: int, shape: tuple[int, int], numbers: ScaleDtype) -> Lookup:
        """Return the format of a matrix with `count` outliers, equal to what `parse` makes of its name."""
        return Lookup(bits, float(f"{10_000 * count / (shape[0] * shape[1]):.12g}") / 10_000, numbers)

    @staticmethod
    def parse(name: str) -> Lookup | None:
        """Return the lookup format of that name, or None."""
        match = re.fullmatch(r"lut([234])(?:-s(\d+(?:\.\d+)?(?:e-\d+)?))?(-f32|-bf16)?", name)
        if match is None:
            return None
        share = float(match[2] or 0) / 10_000
        if share > 1:
            return None
        numbers = next(dtype for dtype, ending in NUMBERS.items() if ending == (match[3] or ""))
        return Lookup(int(match[1]), share, numbers)

    @property
    def name(self) -> str:
        apart = f"-s{10_000 * self.outliers:.12g}" if self.outliers else ""
        return f"lut{self.bits}{apart}{NUMBERS[self.numbers]}"

    @property
    def by_row(self) -> bool:
        return not self.outliers

    def check(self, columns: int) -> None:
        pass

    def count(self, shape: tuple[int, int]) -> int:
        """Return the number of outliers in a matrix of `shape`."""
        return round(self.outliers * shape[0] * shape[1])

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        rows, columns = shape
        parts = {
            "codes": Part("int32", (rows, -(-columns * self.bits // 32))),
            "table": Part(self.numbers, (rows, 1 << self.bits)),
        }
        if self.outliers:
            count = self.count(shape)
            parts["starts"] = Part("int32", (rows + 1,))
            parts |= {"places": Part("int32", (count,)), "extras": Part(self.numbers, (count,))}
        return parts


@dataclass(frozen=True, slots=True)
class Sparse24:
    """Two of every four consecutive weights, and which: half the numbers and one bit a weight. The numbers have another
    format in turn, as rows of half the columns, or the scale's dtype. Codec `sparse24`."""

    kind: ClassVar[str] = "sparse24"

    values: WeightFormat | None = None

    @property
    def name(self) -> str:
        return "sparse24" if self.values is None else f"sparse24-{self.values.name}"

    @property
    def by_row(self) -> bool:
        return self.values is None or self.values.by_row

    def check(self, columns: int) -> None:
        if columns % 8:
            raise UserError(
                "group_size_indivisible",
                f"2:4 sparse rows are stored eight columns a byte, which does not divide {columns}",
            )
        if self.values is not None:
            self.values.check(columns // 2)

    def parts(self, shape: tuple[int, int], scale_dtype: ScaleDtype) -> dict[str, Part]:
        rows, columns = shape
        self.check(columns)
        half = (rows, columns // 2)
        values = {"values": Part(scale_dtype, half)} if self.values is None else self.values.parts(half, scale_dtype)
        return values | {"places": Part("uint8", (rows, columns // 8))}


_GGML = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")

_ALL: tuple[WeightFormat, ...] = (
    *(GgmlBlocks(TYPES[name]) for name in _GGML),
    *(Fp8Blocks(), Fp4("nvfp4"), Fp4("mxfp4"), Nf4(), Nf4(double=False), Int8Rows()),
    *(Progressive(group) for group in (128, 64, 32)),
    Sparse24(),
    *(Lookup(bits, share) for bits in (4, 3, 2) for share in (0.0, 0.0005, 0.0045)),
)

WEIGHT_FORMATS: Mapping[str, WeightFormat] = {form.name: form for form in _ALL}
"""Weight formats other than grids, by name."""
