"""Weights in the layout of the CPU kernels, and products with them.

`prepare` turns a linear layer's weight, dense or packed, into a `PackedWeight` and releases the stored one, so a model
is in memory once. `layouts` gives the layout of a scheme, and `filling` fills it. The rounding of rows before a product
is fixed there too: by a scheme with quantized activations, and otherwise by `Activations`. `docs/numerics.md` draws the
layout; `csrc/linear.cpp` states the order of float operations, which makes a row's result independent of the rows
beside it.

Shapes: N rows, I input columns, O output columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats import packing
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp4, GgmlBlocks, Lookup, Outliers, Progressive
from attar.kernels.native import extension, filling
from attar.kernels.native.extension import library
from attar.kernels.native.layouts import RUN, layout_of, weight_against
from attar.kernels.operands import Activation, Linear

if TYPE_CHECKING:
    Factors = extension.Factors | extension.LookupFactors | extension.ProgressiveFactors

Activations = Literal["exact", "int8", "int8g128", "int8g32"]
"""Rounding of rows before a packed weight whose scheme has no quantized activations.

Either none (float32), or int8 on the fly with one scale a row, or one for every 128 or 32 columns. In groups the four
columns with the largest magnitude have codes of 15 bits (docs/numerics.md). The default everywhere is int8g128.
"""

LONGEST = 65536  # columns that share a scale, so that sums of products fit their integers
DENSE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class PackedWeight:
    """A weight [O, I] that only the native kernels can read."""

    matrix: extension.Matrix | extension.LookupMatrix | extension.ProgressiveMatrix
    scheme: Scheme | None  # None: dense
    integer: bool  # whether rows are rounded to int8
    activation_group: int  # columns that share an activation scale; 0: the whole row
    dtype: torch.dtype | None = None  # of a dense weight
    _plans: dict[tuple[str | weakref.ref[Linear], ...], list[Factors]] = field(default_factory=dict, repr=False)
    """Plans by the tuple of linear layers, of which this one is the first, and the gate.

    The layers are weak references: a dead one equals no other, although its id may recur, and a strong one would hold
    this weight.
    """

    @property
    def shape(self) -> tuple[int, int]:
        return (self.matrix.rows, self.matrix.columns)

    @property
    def read_bytes(self) -> int:
        """Bytes that one product reads."""
        return self.matrix.bytes

    @property
    def rounds(self) -> bool:
        """Return whether rows are rounded before the product."""
        return self.integer or (self.scheme is not None and self.scheme.activation is not None)

    @property
    def wide(self) -> bool:
        """Return whether four columns of each group of a row have codes of 15 bits: where no scheme says otherwise."""
        return self.activation_group > 0 and (self.scheme is None or self.scheme.activation is None)

    @property
    def apart(self) -> bool:
        """Return whether the weight has a kernel of its own: codes of two levels, and tables."""
        return self.scheme is not None and isinstance(self.scheme.weight, Lookup | Progressive)


def against(each: Linear) -> str | None:
    """Return why the kernels cannot multiply by this weight, or None where they can."""
    weight = each.weight
    if isinstance(weight, PackedWeight):
        return None
    if isinstance(weight, Tensor):
        return None if weight.dtype in DENSE else f"{weight.dtype} weights have no CPU kernel"
    if not isinstance(weight, PackedTensor):
        return "is laid out for another device"
    if (each.permutation is not None or each.input_scale is not None) and isinstance(weight.scheme.weight, Progressive):
        return "rows that are reordered or divided have no kernel of two levels"
    return weight_against(weight.scheme) or _shape_against(weight.scheme, each.shape[1])


def _shape_against(scheme: Scheme, columns: int) -> str | None:
    """Return why no CPU kernel multiplies by rows of `columns` in this scheme, or None."""
    form, rounding = scheme.weight, scheme.activation
    whole = -(-columns // (2 * RUN)) * 2 * RUN  # the padding of a row under one scale
    if isinstance(form, GgmlBlocks) and columns == RUN:
        return f"rows of {columns} columns, a single block of {form.name}, have no CPU kernel"
    layout = layout_of(scheme)
    group = None if layout is None else layout.of(columns).group
    if group is None and columns > LONGEST and not isinstance(form, Lookup):
        return f"rows of {columns} columns with one scale have no CPU kernel: {LONGEST} at most"
    if isinstance(rounding, Grid) and rounding.kind == "int" and (wanted := rounding.group_size):
        of_weight = group or whole
        if wanted % RUN or columns % wanted or max(wanted, of_weight) % min(wanted, of_weight):
            return f"activations in groups of {wanted} do not nest with the weights' groups in the CPU kernels"
    return None


def prepare(each: Linear, arena: extension.Arena, activations: Activations = "int8g128") -> None:
    """Put the weight into kernel layout, in the memory of `arena`.

    Raises ValueError where `against` gives a reason, where vectors do not fit the weight's shape, and where codes or
    zero points exceed their bits.
    """
    reason = against(each)
    if reason is not None:
        raise ValueError(f"{each.name}: {reason}")
    weight, (outputs, inputs) = each.weight, each.shape
    for what, size in (("bias", outputs), ("permutation", inputs), ("input_scale", inputs)):
        vector = getattr(each, what)
        if vector is not None and vector.shape != (size,):
            raise ValueError(f"{each.name}: {what} has shape {tuple(vector.shape)}, not ({size},)")
    if isinstance(weight, PackedWeight):
        return
    if isinstance(weight, PackedTensor):
        try:
            each.weight = _pack(weight, arena, activations)
        except ValueError as error:
            raise UserError("quantization_invalid", f"{each.name}: {error}") from None
    else:
        assert isinstance(weight, Tensor)
        dense, (rows, columns) = weight.contiguous(), each.shape
        matrix = library.pack_dense(arena, dense.data_ptr(), rows, columns, extension.number_name(dense.dtype))
        each.weight = PackedWeight(matrix, None, False, 0, dense.dtype)
    each.dense = None
    if each.bias is not None:
        each.bias = each.bias.float().contiguous()
    if each.input_scale is not None:
        each.input_scale = each.input_scale.float().contiguous()
    if each.permutation is not None:
        each.permutation = each.permutation.to(torch.int64).contiguous()


def _pack(weight: PackedTensor, arena: extension.Arena, activations: Activations) -> PackedWeight:
    scheme, columns = weight.scheme, weight.shape[1]
    if isinstance(scheme.weight, Progressive):
        return PackedWeight(filling.pack_progressive(weight, arena), scheme, True, 0)
    if isinstance(scheme.weight, Lookup):
        return PackedWeight(filling.pack_lookup(weight, arena), scheme, False, 0)
    layout = layout_of(scheme)
    assert layout is not None
    by_words = isinstance(scheme.weight, Grid) and scheme.weight.kind == "int" and layout.number == "codes"
    matrix = _pack_words(weight, arena) if by_words else filling.pack(weight, layout, arena)
    if isinstance(scheme.activation, Grid) and scheme.activation.kind == "int":
        return PackedWeight(matrix, scheme, True, scheme.activation.group_size or 0)
    if scheme.activation is not None:
        return PackedWeight(matrix, scheme, False, 0)
    integer = matrix.integer and activations != "exact"
    group = int(activations.removeprefix("int8g")) if integer and "g" in activations else 0
    return PackedWeight(matrix, scheme, integer, _nested(group, matrix.group, columns))


def _nested(wanted: int, of_weight: int, columns: int) -> int:
    """Return the columns that share an activation's scale, 0 for a row: the most up to `wanted`.

    They are whole runs and divide the row. Each of the groups of weights and activations holds whole ones of the other.
    """
    groups = (group for group in range(wanted, 0, -RUN) if columns % group == 0)
    return next((group for group in groups if max(group, of_weight) % min(group, of_weight) == 0), 0)


def _pack_words(weight: PackedTensor, arena: extension.Arena) -> extension.Matrix:
    """Pack codes as grids store them; C++ reads them unchanged."""
    scheme, (rows, columns) = weight.scheme, weight.shape
    grid, plain = scheme.grid, scheme.layout == "plain"
    groups = grid.groups(columns)
    codes, scale = weight.parts["codes"].contiguous(), weight.parts["scale"].expand(rows, groups).contiguous()
    zero = weight.parts.get("zero")
    if zero is not None:
        if zero.dtype == torch.int32:
            zero = packing.unpack_words(zero.t().contiguous(), grid.bits, rows).t()
        zero = zero.expand(rows, groups).contiguous()
    made: extension.Matrix = library.pack_codes(
        arena, codes.data_ptr(), plain, rows, columns, grid.bits, columns // groups, scale.data_ptr(),
        extension.number_name(scale.dtype), 0 if zero is None else zero.data_ptr(),
    )  # fmt: skip
    return made


def linear(x: Tensor, linears: Sequence[Linear], level: str | None = None) -> Tensor:
    """Run `ops.linear` on float32 rows x [N, I] and prepared weights. Bits do not depend on N, threads or the batch."""
    return _multiply(x, linears, sum(each.shape[0] for each in linears), "", level)


def gated_linear(x: Tensor, linears: Sequence[Linear], kind: Activation, level: str | None = None) -> Tensor:
    """Return act(a) * b of the products (a, b) of rows x [N, I] with two linear layers that `gateable` accepts: [N, O].
    The bits are those of `activate` after `linear`, without writing and reading the intermediate rows."""
    return _multiply(x, linears, linears[0].shape[0], kind, level)


def gateable(linears: Sequence[Linear]) -> bool:
    """Return whether these are two prepared weights of one shape, scheme, dtype and rounding."""
    weights = [each.weight for each in linears if isinstance(each.weight, PackedWeight) and not each.weight.apart]
    if not len(weights) == len(linears) == 2:
        return False
    same = len({(each.scheme, each.dtype, each.shape) for each in weights}) == 1
    return same and _form(linears[0]) == _form(linears[1])


def _multiply(x: Tensor, linears: Sequence[Linear], width: int, gate: str, level: str | None) -> Tensor:
    assert x.ndim == 2, x.shape
    assert x.dtype == torch.float32, x.dtype
    assert x.is_contiguous(), x.stride()
    if x.shape[1] != linears[0].shape[1]:
        raise ValueError(f"{linears[0].name} takes rows of {linears[0].shape[1]} columns, not {x.shape[1]}")
    rows, level = x.shape[0], level or extension.cpu_level()
    out = extension.empty((rows, width))
    for factors in _plan(linears, width, gate):
        extension.call(library.linear, factors, x.data_ptr(), rows, out.data_ptr(), level)
    return out


def _plan(linears: Sequence[Linear], width: int, gate: str) -> list[Factors]:
    first = linears[0].weight
    assert isinstance(first, PackedWeight)
    key: tuple[str | weakref.ref[Linear], ...] = (gate, *map(weakref.ref, linears))
    plan = first._plans.get(key)
    if plan is None:
        plan, at = [], 0
        for _, run in groupby(linears, _form):
            members = list(run)
            plan.append(_factors(members, at, width, gate))
            at += sum(each.shape[0] for each in members)
        first._plans[key] = plan
    return plan


def _form(each: Linear) -> tuple[object, ...]:
    """Return the properties that linear layers must share for one call."""
    weight = each.weight
    assert isinstance(weight, PackedWeight), f"{each.name} is not prepared"
    if weight.apart:
        return (weight.scheme and weight.scheme.weight, *each.vectors)
    group = cast("extension.Matrix", weight.matrix).group if weight.integer else 0
    rounding = None if weight.scheme is None else weight.scheme.activation
    return (weight.integer, weight.activation_group, group, rounding, *each.vectors)


def _factors(linears: Sequence[Linear], at: int, width: int, gate: str) -> Factors:
    one, weight = linears[0], linears[0].weight
    assert isinstance(weight, PackedWeight)
    weights = []
    for each in linears:
        assert isinstance(each.weight, PackedWeight)
        weights.append((each.weight.matrix, 0 if each.bias is None else each.bias.data_ptr()))
    order = 0 if one.permutation is None else one.permutation.data_ptr()
    divisor = 0 if one.input_scale is None else one.input_scale.data_ptr()
    made: Factors
    if not weight.apart:
        fixed = weight.scheme is not None and weight.scheme.static
        assert not fixed or one.activation_scale is not None
        scale = float(one.activation_scale) if fixed and one.activation_scale is not None else 0.0
        scale, group, rounding = _rounding(weight, scale)
        made = library.factors(
            weights, at, width, weight.integer, group, scale, order, divisor, gate, rounding, weight.wide
        )  # fmt: skip
    elif weight.scheme is not None and isinstance(weight.scheme.weight, Lookup):
        made = library.lookup_factors(weights, at, width, order, divisor)
    else:
        made = library.progressive_factors(weights, at, width)
    return made


def _rounding(weight: PackedWeight, fixed: float) -> tuple[float, int, str]:
    """Return the rounding of rows: a number, the columns that share a scale, and the format, "" for int8 or none."""
    form = None if weight.scheme is None else weight.scheme.activation
    match form:
        case Grid(kind="e4m3" | "e5m2"):
            return fixed, form.group_size or 0, form.kind
        case Fp4():
            return fixed, form.group, form.name
        case Outliers():
            return form.threshold, 0, "outliers"
    return fixed, weight.activation_group, ""
