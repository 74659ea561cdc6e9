"""Schemes of compressed weights: a `Grid` of representable values or another `WeightFormat`, and the `Scheme` that
stores a weight on one.

Nothing here imports torch: planners compute sizes of models that no machine at hand could hold. `Scheme.parts` is the
bit ledger. It declares every array of a stored weight, with dtype and shape, so bits per weight is a sum and never an
estimate. The codecs fill exactly these parts; the writers store exactly these parts.

A `Grid` is uniform, or a float8: `affine.py` and `floats.py` are its codecs. The kernels, and the solvers that move
weights column by column, know no other format. The formats of `weight_formats.py` (blocks of GGML, 4-bit floats, lookup
tables) are opaque to all but their codec. Code that needs a grid asks for `Scheme.grid`.

Two conventions that are often stated wrongly (see docs/numerics.md):
* symmetric grids use *signed* codes, -2^(b-1) .. 2^(b-1)-1, with scale = max|w| / ((2^b - 1) / 2);
* asymmetric grids force zero into the range, so that zero is exactly representable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from attar.errors import UserError
from attar.formats.weight_formats import ITEM_BITS as ITEM_BITS
from attar.formats.weight_formats import (
    WEIGHT_FORMATS,
    Fp4,
    Fp8Blocks,
    Lookup,
    Outliers,
    Progressive,
    ScaleDtype,
    Sparse24,
    WeightFormat,
)
from attar.formats.weight_formats import Part as Part

Kind = Literal["int", "e4m3", "e5m2"]
Granularity = Literal["tensor", "channel", "group", "token"]
Layout = Literal["packed", "plain"]

HEADS: Mapping[str, str | None] = {"bf16": None, "int8": "w8", "int4": "w4g128"}
"""Short names of how an LM head is stored: schemes, or None for its own dtype."""

FLOAT8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a quantized tensor may take, and how much of the tensor shares one scale. `tensor` has one scale;
    `channel` one per output row of a weight; `token` one per row of activations; `group` one per `group_size`
    consecutive elements along the input dimension. Raises ValueError on construction where the fields do not fit each
    other."""

    kind: Kind = "int"
    bits: int = 8
    symmetric: bool = True
    granularity: Granularity = "channel"
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "int":
            if not 2 <= self.bits <= 8:
                raise UserError("scheme_unsupported", f"integer grids have 2 to 8 bits, not {self.bits}")
        elif self.kind in FLOAT8:
            if self.bits != 8:
                raise UserError("scheme_unsupported", f"{self.kind} has 8 bits, not {self.bits}")
            if not self.symmetric:
                raise UserError("scheme_unsupported", f"{self.kind} is a signed float: it has no asymmetric form")
        else:
            raise ValueError(f"unknown kind {self.kind!r}: known are int, e4m3, e5m2")
        if self.granularity not in ("tensor", "channel", "group", "token"):
            raise ValueError(f"unknown granularity {self.granularity!r}: known are tensor, channel, group, token")
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError("group_size goes with granularity 'group', and only with it")
        if self.group_size is not None and self.group_size < 1:
            raise UserError("quantization_invalid", f"group_size must be positive, not {self.group_size}")

    @property
    def qmin(self) -> float:
        """Smallest code (int) or smallest value (float), before scaling."""
        return -self.qmax if self.kind != "int" else -float(2 ** (self.bits - 1))

    @property
    def qmax(self) -> float:
        """Largest code (int) or largest finite value (float), before scaling. Asymmetric codes are stored signed too:
        code and zero point are both shifted by 2^(bits-1), which leaves their difference unchanged."""
        return {"int": float(2 ** (self.bits - 1) - 1), "e4m3": 448.0, "e5m2": 57344.0}[self.kind]

    @property
    def name(self) -> str:
        """Name of the grid in schemes without quantized activations."""
        name = f"w{self.bits}" if self.kind == "int" else ("fp8" if self.kind == "e4m3" else "fp8-e5m2")
        name += {"group": f"g{self.group_size}", "tensor": "-tensor"}.get(self.granularity, "")
        return name if self.symmetric else f"{name}-asym"

    @property
    def by_row(self) -> bool:
        return self.granularity != "tensor"

    def check(self, columns: int) -> None:
        self.groups(columns)

    def parts(
        self, shape: tuple[int, int], scale_dtype: ScaleDtype = "float32", layout: Layout = "packed"
    ) -> dict[str, Part]:
        """Return every array of a stored weight of `shape` (out, in). Raises ValueError where groups do not divide."""
        rows, columns = shape
        groups = self.groups(columns)
        scales = (1,) if self.granularity == "tensor" else (rows, groups)
        parts: dict[str, Part] = {}
        if layout == "packed":
            parts["codes"] = Part("int32", (rows, -(-columns * self.bits // 32)))
        else:
            parts["codes"] = Part(FLOAT8.get(self.kind, "int8"), (rows, columns))
        parts["scale"] = Part(scale_dtype, scales)
        if not self.symmetric:
            packed = layout == "packed" and self.granularity != "tensor"
            parts["zero"] = Part("int32", (-(-rows * self.bits // 32), groups)) if packed else Part("int8", scales)
        if layout == "packed":
            parts["shape"] = Part("int64", (2,))
        return parts

    def groups(self, columns: int) -> int:
        """Return the scales per row of `columns` elements. Raises ValueError where the group size does not
        divide them."""
        if self.group_size is None:
            return 1
        if columns % self.group_size:
            divisors = [g for g in (256, 128, 64, 32, 16, 8) if columns % g == 0]
            raise UserError(
                "group_size_indivisible",
                f"group size {self.group_size} does not divide {columns} input columns"
                + (f"; {', '.join(map(str, divisors))} would: end the scheme in g{divisors[0]}" if divisors else ""),
            )
        return columns // self.group_size


NVFP4 = Fp4("nvfp4")
SPARSE = "sparse24-"

ROUNDS: Mapping[str, WeightFormat] = {
    "fp8-block": Grid("e4m3", granularity="group", group_size=Fp8Blocks.size),
    "nvfp4": NVFP4,
    "mxfp4": Fp4("mxfp4"),
    "llm-int8": Outliers(),
    **{name: Grid(granularity="token") for name, form in WEIGHT_FORMATS.items() if isinstance(form, Progressive)},
}
"""Activation format of each weight format, unless the scheme's name ends in -weight."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The storage of one linear layer's weight, and the rounding of its input before the product. `layout` is for
    grids: `packed` (codes back to back in int32 words, none wasted, the order of compressed-tensors' pack-quantized) or
    `plain` (one int8 or float8 an element). Other formats have their own and say `plain`. `static` activations use a
    scale fixed at calibration, which belongs to the linear layer; dynamic ones are scaled from the current values.
    NVFP4's do both: groups are scaled from the values, under one fixed number. Raises ValueError on construction where
    the fields do not fit each other."""

    weight: WeightFormat
    activation: WeightFormat | None = None
    static: bool = False
    scale_dtype: ScaleDtype = "float32"
    layout: Layout = "packed"

    def __post_init__(self) -> None:
        weight, activation = self.weight, self.activation
        if isinstance(weight, Grid) and weight.granularity == "token":
            raise UserError("scheme_unsupported", "a weight has no tokens: its granularity is tensor, channel or group")
        if isinstance(activation, Grid) and activation.granularity == "channel":
            raise UserError(
                "scheme_unsupported", "activations are quantized per tensor, token or group, not per channel"
            )
        grids = isinstance(weight, Grid) and isinstance(activation, Grid)
        if activation is not None and not grids and activation != ROUNDS.get(weight.name):
            raise UserError("scheme_unsupported", f"{weight.name} weights do not go with {activation.name} activations")
        per_tensor = isinstance(activation, Grid) and activation.granularity == "tensor"
        if self.static and not per_tensor and activation != NVFP4:
            raise UserError("scheme_unsupported", "static activation scales are per tensor")
        if self.layout == "packed" and weight.kind != "int":
            raise UserError(
                "scheme_unsupported",
                "float8 weights are stored plain: one byte an element"
                if isinstance(weight, Grid)
                else f"{weight.name} has one layout, its own, and no packed one",
            )

    @property
    def grid(self) -> Grid:
        """The weight's grid. Raises ValueError where its values lie on none."""
        if not isinstance(self.weight, Grid):
            raise UserError(
                "scheme_unsupported", f"{self.name} is no uniform grid, such as w4g128, which is what is needed here"
            )
        return self.weight

    def check(self, columns: int) -> None:
        """Raise ValueError where a linear layer with `columns` inputs cannot have this scheme.

        Activations can always be rounded: their last group may be smaller.
        """
        self.weight.check(columns)

    def parts(self, shape: tuple[int, int]) -> dict[str, Part]:
        """Return every array of a stored weight of `shape` (out, in). Raises ValueError where groups do not divide."""
        if isinstance(self.weight, Grid):
            return self.weight.parts(shape, self.scale_dtype, self.layout)
        return self.weight.parts(shape, self.scale_dtype)

    def bytes(self, shape: tuple[int, int]) -> int:
        return sum(part.bytes for part in self.parts(shape).values())

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        return 8 * self.bytes(shape) / math.prod(shape)

    def with_scale_dtype(self, dtype: str) -> Scheme:
        if dtype not in get_args(ScaleDtype):
            raise UserError("quantization_unsupported", f"scales are float32, float16 or bfloat16, not {dtype}")
        return replace(self, scale_dtype=cast(ScaleDtype, dtype))

    @property
    def name(self) -> str:
        """Short name that `parse` reads back: w4g128, w4g128-asym, w8a8, w8a8-static, fp8, fp8-e5m2, q4_k ..."""
        grid, activation = self.weight, self.activation
        if not isinstance(grid, Grid):
            return grid.name + ("-weight" if activation is None and grid.name in ROUNDS else "")
        name = grid.name
        if isinstance(activation, Grid) and grid.kind == "int":
            name = f"w{grid.bits}a{activation.bits}" + name.removeprefix(f"w{grid.bits}")
        if activation is None and grid.kind != "int":
            name += "-weight"
        if isinstance(activation, Grid) and activation.granularity == "tensor":
            name += "-static" if self.static else "-atensor"
        return name

    @staticmethod
    def parse(name: str) -> Scheme:
        """Read a scheme's short name. Raises ValueError naming the forms that exist."""
        if name in WEIGHT_FORMATS:
            return Scheme(WEIGHT_FORMATS[name], ROUNDS.get(name), ROUNDS.get(name) == NVFP4, layout="plain")
        if (form := name.removesuffix("-weight")) in ROUNDS:
            return Scheme(WEIGHT_FORMATS[form], layout="plain")
        if (table := Lookup.parse(name)) is not None:
            return Scheme(table, layout="plain")
        if name.startswith(SPARSE):
            inner = name.removeprefix(SPARSE)
            values = None if inner.startswith(SPARSE) else Scheme.parse(inner)
            if values is None or values.layout != "packed":
                raise UserError(
                    "scheme_unknown",
                    f"unknown scheme {name!r}: the values of {SPARSE}... are weights alone, such as w4g64",
                )
            return Scheme(Sparse24(values.weight), layout="plain")
        match = re.fullmatch(
            r"(?:w(?P<bits>\d)(?:a(?P<abits>[48]))?|(?P<fp8>fp8)(?P<e5m2>-e5m2)?)(?:g(?P<group>[1-9]\d*))?"
            r"(?P<tensor>-tensor)?(?P<asym>-asym)?(?P<wonly>-weight)?(?P<act>-static|-atensor)?",
            name,
        )
        if match is None:
            raise UserError(
                "scheme_unknown",
                f"unknown scheme {name!r}: a scheme is w<bits> with optional g<group>, a8, -asym "
                f"(w4g128, w3g64-asym, w8, w8a8, w8a8-static), or fp8, fp8-e5m2, {SPARSE}w4g64, "
                f"{', '.join(WEIGHT_FORMATS)}",
            )
        group = int(match["group"]) if match["group"] else None
        granularity: Granularity = "group" if group else "tensor" if match["tensor"] else "channel"
        kind: Kind = "int" if match["bits"] else "e5m2" if match["e5m2"] else "e4m3"
        weight = Grid(kind, int(match["bits"] or 8), match["asym"] is None, granularity, group)
        activation = None
        if match["abits"] or (match["fp8"] and not match["wonly"]):
            activation = Grid(kind, int(match["abits"] or 8), True, "tensor" if match["act"] else "token")
        elif match["act"]:
            raise UserError(
                "scheme_unsupported", f"scheme {name!r} has an activation suffix but no quantized activations"
            )
        plain = activation is not None or kind != "int"
        return Scheme(weight, activation, match["act"] == "-static", layout="plain" if plain else "packed")


def multiplied_in(scheme: Scheme | None) -> Literal["bf16", "int8", "fp8"]:
    """Return the number format in which a GPU's tensor cores multiply a weight of this scheme; None is a dense weight.
    It selects the GPU's peak rate with which its products are compared, where a kernel exists."""
    rounding = None if scheme is None else scheme.activation
    if rounding is None:
        return "bf16"
    return "fp8" if isinstance(rounding, Grid) and rounding.kind == "e4m3" else "int8"


def scale_dtype(stored: str) -> str:
    """Return the dtype of the scales of a weight that is stored in dtype `stored`: the same, float32 for float64."""
    return "float32" if stored == "float64" else stored
