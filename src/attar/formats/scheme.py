"""What a compressed number is: a `Grid` of representable values, and the `Scheme` that stores a weight on one.

Nothing here imports torch: planners compute sizes of models that no machine at hand could hold. `Scheme.parts` is the
bit ledger: it declares every array that a stored weight consists of, with dtype and shape, so that bits per weight is a
sum and never an estimate. The codecs (`affine.py`, `floats.py`) fill exactly these parts; the writers store exactly
these parts.

Two conventions that texts get wrong (see docs/numerics.md):

* symmetric grids use *signed* codes, -2^(b-1) .. 2^(b-1)-1, with scale = max|w| / ((2^b - 1) / 2);
* asymmetric grids force zero into the range, so that zero is exactly representable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

Kind = Literal["int", "e4m3", "e5m2"]
Granularity = Literal["tensor", "channel", "group", "token"]
Layout = Literal["packed", "plain"]
ScaleDtype = Literal["float32", "float16", "bfloat16"]

HEADS: Mapping[str, str | None] = {"bf16": None, "int8": "w8", "int4": "w4g128"}
"""Short names of what an output matrix is stored in: schemes, or None for the dtype that it has."""

ITEM_BITS: Mapping[str, int] = {
    "int8": 8,
    "uint8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "bool": 8,
}
"""Bits of one stored element, by torch dtype name."""

FLOAT8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class Grid:
    """The values a quantized tensor may take, and how much of the tensor shares one scale.

    `tensor` has one scale; `channel` one per output row of a weight; `token` one per row of activations; `group` one
    per `group_size` consecutive elements along the input dimension.
    """

    kind: Kind = "int"
    bits: int = 8
    symmetric: bool = True
    granularity: Granularity = "channel"
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "int":
            if not 2 <= self.bits <= 8:
                raise ValueError(f"integer grids have 2 to 8 bits, not {self.bits}")
        elif self.kind in FLOAT8:
            if self.bits != 8:
                raise ValueError(f"{self.kind} has 8 bits, not {self.bits}")
            if not self.symmetric:
                raise ValueError(f"{self.kind} is a signed float: it has no asymmetric form")
        else:
            raise ValueError(f"unknown kind {self.kind!r}: known are int, e4m3, e5m2")
        if self.granularity not in ("tensor", "channel", "group", "token"):
            raise ValueError(f"unknown granularity {self.granularity!r}: known are tensor, channel, group, token")
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError("group_size goes with granularity 'group', and only with it")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be positive, not {self.group_size}")

    @property
    def qmin(self) -> float:
        """Smallest code (int) or smallest value (float), before scaling."""
        return -self.qmax if self.kind != "int" else -float(2 ** (self.bits - 1))

    @property
    def qmax(self) -> float:
        """Largest code (int) or largest finite value (float), before scaling. Asymmetric codes are stored signed too:
        code and zero point are both shifted by 2^(bits-1), which leaves their difference as it was."""
        return {"int": float(2 ** (self.bits - 1) - 1), "e4m3": 448.0, "e5m2": 57344.0}[self.kind]

    def groups(self, columns: int) -> int:
        """Scales per row for a row of `columns` elements. Raises ValueError where the group size does not divide."""
        if self.group_size is None:
            return 1
        if columns % self.group_size:
            divisors = [g for g in (256, 128, 64, 32, 16, 8) if columns % g == 0]
            raise ValueError(
                f"group size {self.group_size} does not divide {columns} input columns"
                + (f"; {', '.join(map(str, divisors))} would" if divisors else "")
            )
        return columns // self.group_size


@dataclass(frozen=True, slots=True)
class Part:
    """One stored array: a torch dtype name and a shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one linear's weight is stored and what its input becomes before the product.

    `layout` is `packed` (codes back to back in int32 words, none wasted, the order of compressed-tensors'
    pack-quantized) or `plain` (one int8 or float8 an element). `static` activations use a scale fixed at calibration,
    which belongs to the linear; dynamic ones are scaled from the values at hand.
    """

    weight: Grid
    activation: Grid | None = None
    static: bool = False
    scale_dtype: ScaleDtype = "float32"
    layout: Layout = "packed"

    def __post_init__(self) -> None:
        if self.weight.granularity == "token":
            raise ValueError("a weight has no tokens: its granularity is tensor, channel or group")
        if self.activation is not None and self.activation.granularity == "channel":
            raise ValueError("activations are quantized per tensor, token or group, not per channel")
        if self.static and (self.activation is None or self.activation.granularity != "tensor"):
            raise ValueError("static activation scales are per tensor")
        if self.layout == "packed" and self.weight.kind != "int":
            raise ValueError("float8 weights are stored plain: one byte an element")

    def parts(self, shape: tuple[int, int]) -> dict[str, Part]:
        """Every array that a weight of `shape` (out, in) is stored as. Raises ValueError where groups do not divide."""
        rows, columns = shape
        grid, groups = self.weight, self.weight.groups(columns)
        scales = (1,) if grid.granularity == "tensor" else (rows, groups)
        parts: dict[str, Part] = {}
        if self.layout == "packed":
            parts["codes"] = Part("int32", (rows, -(-columns * grid.bits // 32)))
        else:
            parts["codes"] = Part(FLOAT8.get(grid.kind, "int8"), (rows, columns))
        parts["scale"] = Part(self.scale_dtype, scales)
        if not grid.symmetric:
            packed = self.layout == "packed" and grid.granularity != "tensor"
            parts["zero"] = Part("int32", (-(-rows * grid.bits // 32), groups)) if packed else Part("int8", scales)
        if self.layout == "packed":
            parts["shape"] = Part("int64", (2,))
        return parts

    def bytes(self, shape: tuple[int, int]) -> int:
        return sum(part.bytes for part in self.parts(shape).values())

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        return 8 * self.bytes(shape) / math.prod(shape)

    def with_scale_dtype(self, dtype: str) -> Scheme:
        if dtype not in get_args(ScaleDtype):
            raise ValueError(f"scales are float32, float16 or bfloat16, not {dtype}")
        return replace(self, scale_dtype=cast(ScaleDtype, dtype))

    @property
    def name(self) -> str:
        """The short name that `parse` reads back: w4g128, w4g128-asym, w8a8, w8a8-static, fp8, fp8-e5m2 ..."""
        grid, activation = self.weight, self.activation
        name = f"w{grid.bits}" if grid.kind == "int" else ("fp8" if grid.kind == "e4m3" else "fp8-e5m2")
        if activation is not None and grid.kind == "int":
            name += f"a{activation.bits}"
        if grid.granularity == "group":
            name += f"g{grid.group_size}"
        if grid.granularity == "tensor":
            name += "-tensor"
        if not grid.symmetric:
            name += "-asym"
        if activation is None and grid.kind != "int":
            name += "-weight"
        if activation is not None and activation.granularity == "tensor":
            name += "-static" if self.static else "-atensor"
        return name

    @staticmethod
    def parse(name: str) -> Scheme:
        """Read a scheme's short name. Raises ValueError naming the forms that exist."""
        match = re.fullmatch(
            r"(?:w(?P<bits>\d)(?:a(?P<abits>8))?|(?P<fp8>fp8)(?P<e5m2>-e5m2)?)(?:g(?P<group>[1-9]\d*))?"
            r"(?P<tensor>-tensor)?(?P<asym>-asym)?(?P<wonly>-weight)?(?P<act>-static|-atensor)?",
            name,
        )
        if match is None:
            raise ValueError(
                f"unknown scheme {name!r}: a scheme is w<bits> with optional g<group>, a8, -asym "
                "(w4g128, w3g64-asym, w8, w8a8, w8a8-static), or fp8, fp8-e5m2"
            )
        group = int(match["group"]) if match["group"] else None
        granularity: Granularity = "group" if group else "tensor" if match["tensor"] else "channel"
        kind: Kind = "int" if match["bits"] else "e5m2" if match["e5m2"] else "e4m3"
        weight = Grid(kind, int(match["bits"] or 8), match["asym"] is None, granularity, group)
        activation = None
        if match["abits"] or (match["fp8"] and not match["wonly"]):
            activation = Grid(kind, 8, True, "tensor" if match["act"] else "token")
        elif match["act"]:
            raise ValueError(f"scheme {name!r} has an activation suffix but no quantized activations")
        plain = activation is not None or kind != "int"
        return Scheme(weight, activation, match["act"] == "-static", layout="plain" if plain else "packed")
