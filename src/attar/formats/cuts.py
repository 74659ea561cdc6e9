"""Cuts of a stored weight into pieces that are weights of its scheme, and the share of each part that a piece takes.

Every part is an image of the weight [O, I] at some scale: one of its rows covers so many outputs, one of its columns so
many inputs. With 4-bit codes in words a column of `codes` is 8 inputs; with groups of 128 a column of `scale` is 128.
These numbers (`units`) determine everything. A cut is possible where it falls between whole rows and columns of every
part. A scale of the whole tensor goes along with every piece.

Some weights cannot be cut, because the stored data of a row is not found at that row. They are nf4 (its second-level
scales cover 256 blocks wherever rows end), lookup tables with outliers (a share of the whole matrix, row by row), and
all unlisted formats. They are refused by name. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from attar.errors import UserError
from attar.formats.scheme import Grid, Layout, Scheme
from attar.formats.weight_formats import (
    Fp4,
    Fp8Blocks,
    GgmlBlocks,
    Int8Rows,
    Lookup,
    Progressive,
    Sparse24,
    WeightFormat,
)


class Unit(NamedTuple):
    """The fewest rows or columns of a weight that are whole ones of a part, and their number in the part."""

    weights: int = 1
    items: int = 1


Units = tuple[Unit | None, ...]
"""Units of each dimension of a part; None: all pieces share it."""

Range = tuple[int, int]

ONE = Unit()


def units(scheme: Scheme) -> Mapping[str, Units]:
    """Return the units of every part but `shape`. Raises ValueError for weights that cannot be cut."""
    found = _units(scheme.weight, scheme.layout)
    if found is None:
        raise UserError(
            "parallel_unsupported", f"{scheme.name} weights cannot be cut: what is stored of a row depends on others"
        )
    return found


def _units(form: WeightFormat, layout: Layout) -> dict[str, Units] | None:
    match form:
        case Grid():
            return _of_grid(form, layout)
        case GgmlBlocks():
            return {"blocks": (ONE, Unit(form.type.elements, form.type.block_bytes))}
        case Fp8Blocks():
            return {"codes": (ONE, ONE), "scale": (Unit(form.size), Unit(form.size))}
        case Fp4():
            parts: dict[str, Units] = {"codes": (ONE, Unit(2)), "scale": (ONE, Unit(form.group))}
            return parts if form.name == "mxfp4" else parts | {"global": (None,)}
        case Int8Rows():
            return {"codes": (ONE, ONE), "absmax": (ONE,), "format": ()}
        case Progressive():
            by_group = (ONE, Unit(form.group))
            return {"codes": (ONE, _words(form.bits)), "scale": (ONE, None), "factor": by_group, "offset": by_group}
        case Lookup() if not form.outliers:
            return {"codes": (ONE, _words(form.bits)), "table": (ONE, None)}
        case Sparse24():
            plain: dict[str, Units] = {"values": (ONE, ONE)}
            inner = plain if form.values is None else _units(form.values, "packed")
            if inner is None:
                return None
            return {name: _doubled(dimensions) for name, dimensions in inner.items()} | {"places": (ONE, Unit(8))}
        case _:
            return None


def _of_grid(grid: Grid, layout: Layout) -> dict[str, Units]:
    word = _words(grid.bits)
    group = None if grid.group_size is None else Unit(grid.group_size)
    scales: Units = (None,) if grid.granularity == "tensor" else (ONE, group)
    parts: dict[str, Units] = {"codes": (ONE, word if layout == "packed" else ONE), "scale": scales}
    if not grid.symmetric:
        down = layout == "packed" and grid.granularity != "tensor"  # zero points are packed along the outputs
        parts["zero"] = (word, group) if down else scales
    return parts


def _words(bits: int) -> Unit:
    """Return the unit of codes in words of 32 bits, back to back."""
    common = math.gcd(bits, 32)
    return Unit(32 // common, bits // common)


def _doubled(dimensions: Units) -> Units:
    """Convert units of a matrix of half the columns to columns of the whole."""
    if len(dimensions) < 2 or dimensions[1] is None:
        return dimensions
    return (dimensions[0], Unit(2 * dimensions[1].weights, dimensions[1].items))


def grain(scheme: Scheme | None) -> tuple[int, int]:
    """Return (outputs, inputs) whose multiples allow cuts; None is a dense weight. Raises ValueError like `units`."""
    if scheme is None:
        return (1, 1)
    found = units(scheme).values()
    rows = math.lcm(*(unit.weights for unit, *_ in filter(None, found) if unit is not None))
    columns = math.lcm(*(each[1].weights for each in found if len(each) > 1 and each[1] is not None))
    rounding = scheme.activation
    if isinstance(rounding, Grid) and rounding.group_size is not None:  # values rounded together stay together
        columns = math.lcm(columns, rounding.group_size)
    return rows, columns


def within(piece: Range, unit: Unit | None, size: int) -> Range:
    """Return the range of one dimension of a part that a piece takes; the part has `size` rows or columns."""
    if unit is None:
        return (0, size)
    start, stop = (end * unit.items for end in piece)
    assert start % unit.weights == 0, "a piece begins where a part has no row or column of its own"
    return start // unit.weights, min(-(-stop // unit.weights), size)
