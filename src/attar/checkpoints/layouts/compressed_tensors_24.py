"""Reader of compressed-tensors' storages of 2:4 sparse weights, of versions up to 0.12.

sparse-24-bitmask, named in `sparsity_config`, has for module X

* X.compressed [O, I/2], the two of every four consecutive values of a row that are kept, in a dtype of their own;
* X.bitmask uint8 [O, I/8], which of eight columns they are, the first in the lowest bit;
* X.shape int64, [2] or [2, 1]: O and I.

Its values are 16- or 32-bit floats, or the int8 and float8 codes of a quantized module, whose scales are stored as
usual. Floats become `sparse24`, bit for bit. Codes get their zeros back and become their plain scheme, because no
kernel gains from leaving them out (`kernels/native/layouts.py`).

marlin-24, a format of a group, is made for one tensor-core kernel (Frantar et al. 2024, arXiv 2408.11743): 4- or 8-bit
integers, symmetric, in groups of 128 columns or in rows, with float16 scales. All three arrays are permuted:

* X.weight_packed int32 [I/32, O * bits/2]: the kept codes, transposed, in tiles of 16 inputs by 64 outputs, each in the
  order in which the kernel's threads load them, and within four bytes as its conversion to float16 takes them out;
* X.scale_packed float16 [G, O], runs of 64 outputs permuted (where there are several groups in the kept half of a row);
* X.meta int16 [I/32, 2 * O]: the places, two bits each, in CUTLASS's order for sparse products: rows are interleaved
  within 64, and blocks of two rows and two columns transposed.

Each order is a permutation of binary digits of an index, so undoing it is a view, a permute and a reshape. The result
is `sparse24-w4g64`: 64 kept codes are 128 columns.

Not done: sparse-bitmask, for unstructured zeros, which has no kernel here; asymmetric codes, whose zero is not 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.strict_io import invalid, unsupported
from attar.formats import affine
from attar.formats.codecs import sparse24
from attar.formats.packing import unpack_words
from attar.formats.scheme import FLOAT8, Grid, Scheme
from attar.formats.weight_formats import Sparse24

BITMASK = "sparse-24-bitmask"
TILE, OUTPUTS = 16, 64  # kept inputs, and outputs, of a Marlin tile
DENSE_GROUP = 128  # columns, of which half are kept


# sparse-24-bitmask


def is_masked(folder: Folder, module: str) -> bool:
    return folder.has(f"{module}.compressed") and folder.has(f"{module}.bitmask")


def masked_shape(folder: Folder, module: str) -> tuple[int, int]:
    """Return the shape (out, in) of a module. Raises CheckpointError where the three tensors do not agree on it."""
    values, mask = (folder.info(f"{module}.{part}") for part in ("compressed", "bitmask"))
    said = folder.info(f"{module}.shape")
    if len(values.shape) != 2 or mask.dtype != "uint8" or mask.shape != (values.shape[0], values.shape[1] // 4):
        raise invalid(
            f"{folder.path}: {module}.bitmask must be bytes, one for four of the values {list(values.shape)}, not "
            f"{mask.dtype} {list(mask.shape)}"
        )
    shape = (values.shape[0], 2 * values.shape[1])
    if said.dtype != "int64" or said.shape not in ((2,), (2, 1)):
        raise invalid(
            f"{folder.path}: {module}.shape must be two whole numbers, outputs and inputs, not {said.dtype} "
            f"{list(said.shape)}"
        )
    if tuple(folder.read(f"{module}.shape").flatten().tolist()) != shape:
        raise invalid(f"{folder.path}: {module}.shape is not that of its values, which have {list(shape)}")
    return shape


def masked_scheme(folder: Folder, module: str) -> Scheme:
    """Return the scheme of a module whose kept values are floats. Raises ValueError for other numbers."""
    return Scheme(Sparse24(), layout="plain").with_scale_dtype(folder.info(f"{module}.compressed").dtype)


def read_masked(folder: Folder, module: str, scheme: Scheme) -> dict[str, Tensor]:
    """Return the parts of a module whose kept values are floats. Raises CheckpointError where its tensors do not fit
    together."""
    masked_shape(folder, module)
    return {"values": folder.read(f"{module}.compressed"), "places": _places(folder, module)}


def read_masked_codes(folder: Folder, module: str, scheme: Scheme) -> Tensor:
    """Return the codes [O, I] of a quantized module, zeros included. Raises CheckpointError where they are not the
    scheme's."""
    grid = scheme.weight
    if not isinstance(grid, Grid) or not grid.symmetric or grid.bits != 8 or scheme.layout != "plain":
        raise unsupported(f"{folder.path}: {module}: {scheme.name} is not supported as {BITMASK}")
    masked_shape(folder, module)
    kept, wanted = folder.read(f"{module}.compressed"), getattr(torch, FLOAT8.get(grid.kind, "int8"))
    if kept.dtype != wanted:
        raise invalid(f"{folder.path}: {module}.compressed must be {wanted} for {scheme.name}, not {kept.dtype}")
    return sparse24.unpack_24(kept.view(torch.uint8), _places(folder, module)).view(wanted)


def _places(folder: Folder, module: str) -> Tensor:
    """Return the mask in the form of `sparse24`, a byte for a byte."""
    places = _PLACES[folder.read(f"{module}.bitmask").int()]
    if not sparse24.in_order(places):
        raise invalid(f"{folder.path}: {module}.bitmask must name two of every four columns")
    return places


def _places_of_masks() -> Tensor:
    """Return, for each of 256 masks of eight columns, the places of two in either half; 15 for a half that does not
    name two."""
    of_four = [15] * 16
    for second in range(4):
        for first in range(second):
            of_four[1 << first | 1 << second] = first | second << 2
    return torch.tensor([of_four[mask & 15] | of_four[mask >> 4] << 4 for mask in range(256)], dtype=torch.uint8)


_PLACES = _places_of_masks()


# marlin-24


def is_marlin(folder: Folder, module: str) -> bool:
    return folder.has(f"{module}.scale_packed")


def marlin_scheme(folder: Folder, module: str, grid: Grid) -> Scheme:
    """Return the scheme of a module whose group gives `grid` for its dense weight. Raises CheckpointError for other
    grids."""
    groups = grid.granularity == "group" and grid.group_size == DENSE_GROUP
    known = groups or grid.granularity == "channel"
    if grid.kind != "int" or grid.bits not in (4, 8) or not grid.symmetric or not known:
        raise unsupported(
            f"{folder.path}: {module}: {grid.name} is not supported as marlin-24: symmetric integers of 4 or 8 bits in "
            f"rows or groups of {DENSE_GROUP} are"
        )
    kept = replace(grid, group_size=DENSE_GROUP // 2) if groups else grid
    return Scheme(Sparse24(kept), scale_dtype="float16", layout="plain")


def marlin_shape(folder: Folder, module: str, scheme: Scheme) -> tuple[int, int]:
    """Return the shape (out, in) of a module. Raises CheckpointError where the arrays do not fit together."""
    bits = _kept(scheme).grid.bits
    words, scales, meta = (folder.info(f"{module}.{part}") for part in ("weight_packed", "scale_packed", "meta"))
    if len(words.shape) != 2 or len(scales.shape) != 2:
        raise invalid(f"{folder.path}: {module}: weight_packed and scale_packed must be matrices")
    runs, outputs = words.shape[0], scales.shape[1]
    if (words.dtype, scales.dtype, meta.dtype) != ("int32", "float16", "int16"):
        raise invalid(
            f"{folder.path}: {module}: weight_packed, scale_packed and meta must be int32, float16 and int16, not "
            f"{words.dtype}, {scales.dtype} and {meta.dtype}"
        )
    if outputs % OUTPUTS or words.shape[1] != outputs * TILE * bits // 32 or meta.shape != (runs, 2 * outputs):
        raise invalid(
            f"{folder.path}: {module}: weight_packed {list(words.shape)} and meta {list(meta.shape)} do not fit the "
            f"{outputs} outputs of scale_packed, which must be a multiple of {OUTPUTS}"
        )
    return outputs, runs * 2 * TILE


def read_marlin(folder: Folder, module: str, scheme: Scheme) -> dict[str, Tensor]:
    """Return the parts of a module with this `marlin_scheme`. Raises CheckpointError where its arrays do not fit
    together."""
    inner = _kept(scheme)
    outputs, inputs = marlin_shape(folder, module, scheme)
    groups = inner.grid.groups(inputs // 2)
    scales = folder.read(f"{module}.scale_packed")
    if scales.shape[0] != groups:
        raise invalid(f"{folder.path}: {module}: {inputs} columns have {groups} scales a row, not {scales.shape[0]}")
    places = _unswizzled(folder.read(f"{module}.meta"), outputs, inputs)
    if not sparse24.in_order(places):
        raise invalid(f"{folder.path}: {module}.meta must name two places of every four, in their order")
    codes = _untiled(folder.read(f"{module}.weight_packed"), inner.grid.bits, outputs, inputs // 2)
    # The writer compares a group of 128 with the number of kept codes, and so does this.
    if inner.grid.group_size is not None and inputs // 2 > DENSE_GROUP:
        scales = scales.view(groups, -1, 8, 4, 2).transpose(-1, -2).reshape(groups, outputs)
    packed = affine.encode(codes, scales.t().contiguous(), None, inner, (outputs, inputs // 2))
    return {**packed.parts, "places": places}


def _kept(scheme: Scheme) -> Scheme:
    """Return the scheme of the kept codes, as a matrix of half the columns."""
    assert isinstance(scheme.weight, Sparse24)
    assert isinstance(scheme.weight.values, Grid)
    return Scheme(scheme.weight.values, scale_dtype=scheme.scale_dtype)


def _untiled(words: Tensor, bits: int, outputs: int, kept: int) -> Tensor:
    """Return the signed codes, int8 [O, I/2], of the words of `marlin_shape`.

    A tile has 1024 codes, k of 16 kept inputs by n of 64 outputs. Their places in it, from the slowest digit to the
    fastest: n / 16, n / 8 % 2, k / 2 % 4 (so far: the thread), n % 4 (its register). In a register of 4-bit codes, k %
    2, n / 4 % 2, k / 8 follow; of 8-bit codes, n / 4 % 2, k % 2, k / 8.
    """
    codes = unpack_words(words, bits, outputs * TILE)
    digits = codes.view(kept // TILE, outputs // OUTPUTS, 4, 2, 4, 4, 2, 2, 2)  # tiles down, tiles across, then these
    low, block = (6, 7) if bits == 4 else (7, 6)
    return digits.permute(1, 2, 3, block, 5, 0, 8, 4, low).reshape(outputs, kept)


def _unswizzled(meta: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return the places, uint8 [O, I/8], of the words of meta: 16 columns each.

    With r a row of 64 and c the columns of two words, the digits of a word's place are, from the slowest: c of two,
    rows in 64s, r / 2 % 2, r / 8, r % 2, c % 2, r / 4 % 2. The last two are swapped by the transposition.
    """
    digits = meta.view(inputs // 32, outputs // 64, 2, 8, 2, 2, 2)
    return digits.permute(1, 3, 6, 2, 4, 0, 5).reshape(outputs, inputs // 16).view(torch.uint8)
