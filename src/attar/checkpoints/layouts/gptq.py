"""Reader of GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

A quantized linear is four arrays: `qweight` int32 [I*bits/32, O], packed down the input dimension; `qzeros` int32
[G, O*bits/32]; `scales` [G, O]; and `g_idx` int32 [I], the group of each input column. Three details need care:

* `desc_act` quantizes columns in order of activation, so a group's columns lie scattered. They are stored in their
  natural order, and g_idx gives their groups. Kernels want groups contiguous, so the columns are sorted by group here,
  once, and the linear gets the permutation that its input needs. Where g_idx, not the config, shows groups in order,
  there is none;
* version 1 of the format ("gptq", the default) stores every zero point minus one, modulo 2^bits; "gptq_v2" stores it;
* symmetric checkpoints store zero points too. The stored numbers decide: where all are the middle of the range, the
  weight is read as symmetric.

The minus one of version 1 is undone field by field. GPTQModel subtracts it from whole words; the two differ only where
a zero point is 0, which borrows from its neighbour in the word, and the file does not name its writer.

Not done: Marlin and other layouts made for one kernel, and GPTQModel's `dynamic` with different bits per module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.strict_io import invalid, naming, unsupported
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.packing import unpack_gptq, unpack_words
from attar.formats.scheme import Grid, Scheme
from attar.kernels.operands import Linear

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


class Gptq:
    """Quantized modules of a GPTQ checkpoint. Raises CheckpointError where its config is not supported."""

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        bits = config.get("bits")
        if type(bits) is not int or bits not in BITS:
            raise unsupported(f"{folder.path}: GPTQ with bits {bits!r}: attar reads 2, 3, 4 and 8")
        self.bits = bits
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if config.get("is_marlin_format"):
            layout = "marlin"
        if layout not in FORMATS:
            raise unsupported(f"{folder.path}: GPTQ format {layout!r}: attar reads {' and '.join(FORMATS)}")
        self.stored_minus = 1 if layout == "gptq" else 0
        self.group_size = checked_group_size(folder, config.get("group_size"))
        if any(not str(pattern).startswith("-:") for pattern in config.get("dynamic") or ()):
            raise unsupported(f"{folder.path}: GPTQ with `dynamic` settings that differ by module is not supported")

    def holds(self, module: str) -> bool:
        return self.folder.has(f"{module}.qweight")

    def shape(self, module: str) -> tuple[int, int]:
        """Return the shape (out, in) of a module."""
        words, outputs = matrix(self.folder, f"{module}.qweight")
        return outputs, words * 32 // self.bits

    def scheme_of(self, module: str) -> Scheme:
        return self._scheme(module, self._zero(module))

    def read(self, module: str) -> Linear:
        """Return the linear, without its bias. Raises CheckpointError where its arrays do not fit together."""
        codes, permutation = self._codes(module)
        return Linear(module, self._packed(module, codes, self._zero(module)), permutation=permutation)

    def _codes(self, module: str) -> tuple[Tensor, Tensor | None]:
        """Return the signed codes, int8 [O, I], and the order of their columns [I] where it is not the input's."""
        inputs = self.shape(module)[1]
        codes = unpack_gptq(self.folder.read(f"{module}.qweight"), self.bits)
        if not self.folder.has(f"{module}.g_idx"):
            return codes, None
        size = inputs if self.group_size is None else self.group_size
        order = by_group(module, self.folder.read(f"{module}.g_idx"), inputs, size)
        return codes if order is None else codes[:, order], order

    def _zero(self, module: str) -> Tensor:
        """Return the signed zero points, int8 [G, O]."""
        outputs, name = self.shape(module)[0], f"{module}.qzeros"
        half = 1 << (self.bits - 1)
        matrix(self.folder, name)
        with naming(f"{self.folder.path}: {name}", "quantization_invalid"):
            stored = unpack_words(self.folder.read(name), self.bits, outputs).to(torch.int16) + half
        return ((stored + self.stored_minus) % (2 * half) - half).to(torch.int8)

    def _scheme(self, module: str, zero: Tensor) -> Scheme:
        """Return the scheme with signed zero points [G, O]: symmetric where all are the middle of the range."""
        size = self.group_size
        grid = Grid("int", self.bits, not bool(zero.any()), "group" if size else "channel", size)
        dtype = self.folder.info(f"{module}.scales").dtype
        with naming(f"{self.folder.path}: {module}", "quantization_invalid"):
            return Scheme(grid).with_scale_dtype(dtype)

    def _packed(self, module: str, codes: Tensor, zero: Tensor) -> PackedTensor:
        """Return signed codes [O, I], signed zero points [G, O] and the stored `scales` [G, O] as one value.

        Raises CheckpointError where the three do not fit together.
        """
        how, shape = self._scheme(module, zero), (codes.shape[0], codes.shape[1])
        where = f"{self.folder.path}: {module}"
        scales = self.folder.read(f"{module}.scales")
        with naming(where, "quantization_invalid"):
            groups = how.grid.groups(shape[1])
        if tuple(scales.shape) != (groups, shape[0]) or zero.shape != scales.shape:
            raise invalid(
                f"{where}: a weight {shape} in {groups} groups has {groups} x {shape[0]} scales and zero points, not "
                f"{tuple(scales.shape)} and {tuple(zero.shape)}"
            )
        zeros = None if how.grid.symmetric else zero.t().contiguous()
        return affine.encode(codes, scales.t().contiguous(), zeros, how, shape)


def by_group(module: str, g_idx: Tensor, inputs: int, group_size: int) -> Tensor | None:
    """Return the order [I] that makes each group's columns contiguous, stable within a group; None where they already
    are.

    Raises CheckpointError where g_idx does not give every group `group_size` columns.
    """
    groups = inputs // group_size
    if tuple(g_idx.shape) != (inputs,) or g_idx.dtype not in (torch.int32, torch.int64):
        raise invalid(f"{module}: g_idx must be {inputs} integers, not {g_idx.dtype} {tuple(g_idx.shape)}")
    index = g_idx.long()
    known = bool(((index >= 0) & (index < groups)).all())  # bincount allocates up to the largest, however large
    if not known or bool((index.bincount(minlength=groups) != group_size).any()):
        raise invalid(f"{module}: g_idx does not put {group_size} columns into each of {groups} groups")
    order = index.argsort(stable=True)
    return None if bool((index[1:] >= index[:-1]).all()) else order


def matrix(folder: Folder, name: str) -> tuple[int, int]:
    """Return the shape of a stored matrix of int32 words. Raises CheckpointError for anything else."""
    part = folder.info(name)
    if part.dtype != "int32" or len(part.shape) != 2:
        raise invalid(f"{folder.path}: {name} must be an int32 matrix, not {part.dtype} {part.shape}")
    return part.shape[0], part.shape[1]


def checked_group_size(folder: Folder, value: Any) -> int | None:
    """Return the config's group_size, None for -1: one group a row. Raises CheckpointError for other values."""
    if value == -1:
        return None
    if type(value) is not int or value < 1:
        raise invalid(f"{folder.path}: quantization group_size must be -1 or a positive number, not {value!r}")
    return value
