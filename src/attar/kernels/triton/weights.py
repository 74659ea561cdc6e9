"""Weights laid out for Triton's products. Plain torch: a layout can be made and inspected without Triton.

Six layouts, by the numbers that meet in the tensor cores:
* `dense`: plain rows and weight. torch's own product is the fastest for them;
* `w4a16`: 4-bit codes, widened on the way to the tensor cores, times plain rows;
* `w4a8`: the codes of `w4a16`, times rows rounded to int8; a group's scale comes behind the sum over its columns (Atom;
  Zhao et al. 2024);
* `p4a8`: 4-bit codes in progressive levels, which become int8 on the way, times rows rounded to int8; one sum of whole
  numbers over all columns, and one scale behind it (QServe; `formats/codecs/progressive.py`);
* `w8a16`: int8 or E4M3 codes, widened, times plain rows;
* `w8a8`: int8 or E4M3 codes on both sides, rows rounded on the fly with a scale each.

In the last two, E4M3 codes may have a scale for every 128 by 128 block (`formats/codecs/fp8_blocks.py`), `scales` then
being [O / 128, I / 128]; rounded rows have one for every 128 columns.

The 4-bit layouts serve a program that walks along the input columns of 64 outputs. A *run* is 32 to 128 columns under
one scale; its 64 x run codes lie together, so the program reads one piece of memory from end to end:

    codes   uint8 [O / 64, I / run, 64, run / 2]   low nibble: column j of the run, high nibble: column run / 2 + j
    codes   int16 [O / 64, I / run, 64, run / 4]   nibble k: column k * run / 4 + j, in `w4a16` with runs of 64 and 128
    scales        [O / 64, I / group, 64]
    zeros   uint8 [O / 64, I / group, 64]          on asymmetric grids
    zeros   int16 [O / 64, I / group, 64]          of progressive levels: factor + 256 * offset; `scales` are then [O]

A byte's two nibbles are half a run apart. So the low ones of a tile are a matrix that multiplies the first half of the
rows' run, and the high ones another: nothing is ever interleaved in registers. The four nibbles of a word are such
matrices too. Two words are one register, of which one instruction makes two bfloat16 numbers, where bytes take three.
Runs of 32 stay bytes, for a matrix of tensor cores has 16 columns at least. O is padded to whole tiles by codes that
mean zero. Linear layers that read the same rows are laid side by side, tile behind tile, and multiplied at once.

Numbers are code - zero, exact in any of the rows' dtypes; the scale is applied in float32 to each run's sum. This is
one rounding less than multiplying by dequantized weights, and a few instructions less for every weight.

Shapes: N rows, I input columns, O output columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attar.formats import affine
from attar.formats.codecs import progressive
from attar.formats.packed import PackedTensor
from attar.formats.packing import unpack_words
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp8Blocks, Progressive
from attar.kernels.operands import Linear
from attar.kernels.triton.backend import DTYPES

Form = Literal["dense", "w4a16", "w4a8", "p4a8", "w8a16", "w8a8"]
NIBBLES: frozenset[Form] = frozenset({"w4a16", "w4a8", "p4a8"})
"""Layouts whose codes are 4 bits, as drawn above."""

FLOAT8_FROM = (8, 9)  # the first GPUs with float8 in their tensor cores
TILE = 64  # outputs that lie together
RUNS = (128, 64, 32)
MOST_COLUMNS = 65536  # whose products of 8 by 8 bits one sum of 32 bits holds
INTEGER_RUN = 64  # at least: the integer tensor cores take 32 columns of each half
ZERO = 8  # the code of zero on a symmetric 4-bit grid, as nibbles are stored
HIGHEST_ZERO = 127  # zero point, counted like nibbles: int8 holds it, and bfloat16 the sum of `w4.py`


@dataclass(eq=False)
class TritonWeight:
    """A weight [O, I] that only Triton's kernels read.

    `codes` are [O, I] except in 4 bits; `scales` are [O] in 8 bits and behind progressive levels, unless they are of
    blocks.
    """

    form: Form
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0  # columns under one scale, in 4 bits; in 8 only where scales are of blocks
    static: bool = False  # whether rows are rounded by the linear layer's own scale
    fused: dict[tuple[weakref.ref[TritonWeight], ...], TritonWeight] = field(default_factory=dict, repr=False)
    """The weights side by side, for each tuple of weights of which this one is the first."""

    @property
    def run(self) -> int:
        """Columns whose codes lie together."""
        return self.codes.shape[3] * (4 if self.codes.dtype == torch.int16 else 2)

    @property
    def rounds(self) -> bool:
        """Return whether rows are rounded before the product."""
        return self.form in ("w4a8", "p4a8", "w8a8")

    @property
    def read_bytes(self) -> int:
        """Bytes that one product reads."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros) if part is not None)


def against(each: Linear) -> str | None:
    """Return why the kernels cannot multiply by this weight, or None where they can."""
    weight = each.weight
    if isinstance(weight, TritonWeight):
        return None
    if isinstance(weight, Tensor):
        return None if weight.dtype in DTYPES else f"{weight.dtype} weights have no Triton kernel"
    if not isinstance(weight, PackedTensor):
        return "is laid out for another device"
    grid, rounding = weight.scheme.weight, weight.scheme.activation
    if isinstance(grid, Fp8Blocks):
        return _against_blocks(weight)
    if isinstance(grid, Progressive):
        if grid.group < INTEGER_RUN:
            return f"groups of {grid.group} are not a multiple of {INTEGER_RUN}"
        if rounding is None:
            return f"{grid.name} weights have a Triton kernel for rows rounded to int8 alone"
        return _against_rounding(weight.scheme, "int") or _against_sum(weight.shape[1])
    if not isinstance(grid, Grid):
        return f"{grid.name} weights have no Triton kernel yet"
    four = (grid.kind, grid.bits) == ("int", 4)
    if four:
        group, least = grid.group_size or weight.shape[1], RUNS[-1] if rounding is None else INTEGER_RUN
        if group % least:
            return f"groups of {group} are not a multiple of {least}"
    eight = (grid.kind, grid.bits) in (("int", 8), ("e4m3", 8)) and grid.symmetric and grid.granularity != "group"
    if not four and not eight:
        return f"{weight.scheme.name} has no Triton kernel yet"
    if four and (strange := _against_numbers(weight)) is not None:
        return strange
    if grid.kind == "e4m3" and not knows_float8(weight.parts["codes"].device):
        return "this card knows no float8"
    if weight.shape[1] % 16:
        return f"rows of {weight.shape[1]} bytes are no multiple of 16"
    if rounding is None:
        return None
    whole = eight and grid.kind == "int"  # rows are summed as integers to their end
    return _against_rounding(weight.scheme, grid.kind) or (_against_sum(weight.shape[1]) if whole else None)


def _against_numbers(weight: PackedTensor) -> str | None:
    """Return why no kernel takes 4-bit codes or zero points stored as int8, or None. A file may fill them with
    anything: packed ones cannot leave their range, and here they would wrap around in it."""
    for part, highest in (("codes", 2 * ZERO - 1), ("zero", HIGHEST_ZERO)):
        numbers = weight.parts.get(part)
        if numbers is not None and numbers.dtype == torch.int8:
            low, high = (int(extreme) for extreme in numbers.aminmax())
            if low < -ZERO or high > highest - ZERO:
                what = "codes" if part == "codes" else "zero points"
                return f"4-bit {what} from {low} to {high} have no Triton kernel, only from {-ZERO} to {highest - ZERO}"
    return None


def _against_sum(columns: int) -> str | None:
    """Return why a sum of 32 bits may overflow, or None: products are of 8 by 8 bits."""
    return f"rows of {columns} columns may overflow a sum of 32 bits" if columns > MOST_COLUMNS else None


def _against_rounding(scheme: Scheme, kind: str) -> str | None:
    """Return why no kernel takes the scheme's rounding of rows beside weights of a kind of numbers, or None."""
    rounding = scheme.activation
    if not isinstance(rounding, Grid) or rounding.kind != kind or rounding.bits != 8 or not rounding.symmetric:
        return "activations of another grid than the weight's have no Triton kernel"
    if rounding.granularity == "group":
        return "activations in groups have no Triton kernel yet"
    if rounding.granularity == "tensor" and not scheme.static:
        return "one activation scale for all rows of a call would tie them to each other"
    return None


def _against_blocks(weight: PackedTensor) -> str | None:
    """Return why no kernel takes float8 with a scale for every block, or None."""
    if not knows_float8(weight.parts["codes"].device):
        return "this card knows no float8"
    if weight.shape[1] % Fp8Blocks.size:
        return f"{weight.shape[1]} columns are not a multiple of {Fp8Blocks.size}"
    wanted, rounding = Grid("e4m3", granularity="group", group_size=Fp8Blocks.size), weight.scheme.activation
    if rounding is not None and rounding != wanted:
        return "blocks of float8 have a kernel with rows rounded to float8 by 128, or left alone"
    return None


def knows_float8(device: torch.device) -> bool:
    """Return whether the device's tensor cores have float8. The interpreter has everything."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_FROM


def prepare(each: Linear, dtype: torch.dtype) -> None:
    """Lay the linear layer's weight out, dense ones in `dtype`.

    Raises ValueError where `against` gives a reason, where vectors do not fit the weight's shape, and where a damaged
    file has numbers that no code represents.
    """
    reason = against(each)
    if reason is not None:
        raise ValueError(f"{each.name}: {reason}")
    for what, size in (("bias", each.shape[0]), ("permutation", each.shape[1]), ("input_scale", each.shape[1])):
        vector = getattr(each, what)
        if vector is not None and vector.shape != (size,):
            raise ValueError(f"{each.name}: {what} has shape {tuple(vector.shape)}, not ({size},)")
    weight = each.weight
    if isinstance(weight, Tensor):
        each.weight = TritonWeight("dense", (weight.shape[0], weight.shape[1]), weight.to(dtype).contiguous())
    elif isinstance(weight, PackedTensor):
        if isinstance(weight.scheme.weight, Progressive):
            each.weight = _progressive(weight, weight.scheme.weight)
        else:
            blocks = isinstance(weight.scheme.weight, Fp8Blocks)
            each.weight = _w8(weight) if blocks or weight.scheme.grid.bits == 8 else _w4(weight)
    each.dense = None


def _w4(weight: PackedTensor) -> TritonWeight:
    outputs, columns = weight.shape
    codes, scale, zero = affine.decode(weight)
    groups = weight.scheme.grid.groups(columns)
    form: Form = "w4a16" if weight.scheme.activation is None else "w4a8"
    laid = _nibbles((codes + ZERO).to(torch.uint8), columns // groups, words=form == "w4a16")
    scales = _tiles(scale.expand(outputs, groups))
    zeros = None if zero is None else _tiles((zero.expand(outputs, groups) + ZERO).to(torch.uint8), ZERO)
    return TritonWeight(form, weight.shape, laid, scales, zeros, columns // groups, weight.scheme.static)


def _progressive(weight: PackedTensor, form: Progressive) -> TritonWeight:
    parts, columns = weight.parts, weight.shape[1]
    progressive.decode(weight)  # refuses numbers that are no int8
    codes = (unpack_words(parts["codes"], form.bits, columns) + progressive.MIDDLE).to(torch.uint8)
    levels = parts["factor"].to(torch.int16) | parts["offset"].to(torch.int16) << 8
    scales = parts["scale"].float().flatten().contiguous()
    laid = _nibbles(codes, form.group)
    return TritonWeight("p4a8", weight.shape, laid, scales, _tiles(levels), form.group, weight.scheme.static)


def _nibbles(codes: Tensor, group: int, words: bool = False) -> Tensor:
    """Arrange codes uint8 [O, I] in groups of `group` columns as [O / 64, I / run, 64, run / 2], or as `words` where
    the run is long enough."""
    columns, run = codes.shape[1], next(run for run in RUNS if group % run == 0)
    whole = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % TILE), value=ZERO)
    parts = 4 if words and run > RUNS[-1] else 2
    bits = whole.to(torch.int16 if parts == 4 else torch.uint8).view(-1, TILE, columns // run, parts, run // parts)
    laid = bits[:, :, :, 0]
    for part in range(1, parts):
        laid = laid | bits[:, :, :, part] << 4 * part
    return laid.transpose(1, 2).contiguous()


def _tiles(parts: Tensor, value: int = 0) -> Tensor:
    """Arrange [O, groups] as [O / 64, groups, 64], padded by `value` to whole tiles of outputs."""
    whole = torch.nn.functional.pad(parts, (0, 0, 0, -len(parts) % TILE), value=value)
    return whole.reshape(-1, TILE, parts.shape[1]).transpose(1, 2).contiguous()


def _w8(weight: PackedTensor) -> TritonWeight:
    scheme, scales = weight.scheme, weight.parts["scale"].float()
    form: Form = "w8a16" if scheme.activation is None else "w8a8"
    if isinstance(scheme.weight, Fp8Blocks):
        codes = weight.parts["codes"].contiguous()
        return TritonWeight(form, weight.shape, codes, scales.contiguous(), group=Fp8Blocks.size)
    codes = (weight.parts["codes"] if scheme.layout == "plain" else affine.decode(weight)[0]).contiguous()
    scales = scales.flatten().expand(weight.shape[0]).contiguous()
    return TritonWeight(form, weight.shape, codes, scales, static=scheme.static)


def side_by_side(weights: Sequence[TritonWeight]) -> TritonWeight | None:
    """Return the weights as one, [sum of O, I], kept for next time; None where their layouts differ. Their numbers
    move: each weight is then a view of the one, so memory holds them once."""
    first = weights[0]
    if len(weights) == 1:
        return first
    key = tuple(map(weakref.ref, weights))  # not by id, which another weight may get once one is gone
    if key not in first.fused:
        tile = TILE if first.form in NIBBLES else first.group or 1
        if any(_kind(each) != _kind(first) for each in weights) or any(each.shape[0] % tile for each in weights[:-1]):
            return None
        codes = _joined(weights, "codes")
        assert codes is not None
        shape = (sum(each.shape[0] for each in weights), first.shape[1])
        scales, zeros = _joined(weights, "scales"), _joined(weights, "zeros")
        first.fused[key] = TritonWeight(first.form, shape, codes, scales, zeros, first.group, first.static)
    return first.fused[key]


def _kind(each: TritonWeight) -> tuple[object, ...]:
    parts = (each.codes, each.scales, each.zeros)
    types = tuple(None if part is None else (part.dtype, part.device) for part in parts)
    return (each.form, each.shape[1], each.group, each.static, types)


def _joined(weights: Sequence[TritonWeight], name: str) -> Tensor | None:
    """Join the parts of that name, of which each weight then holds a view."""
    parts: list[Tensor] = [part for each in weights if (part := getattr(each, name)) is not None]
    if not parts:
        return None
    joined = torch.cat(parts)
    for each, part in zip(weights, joined.split([len(part) for part in parts]), strict=True):
        setattr(each, name, part)
    return joined
