"""Weights of one process of several (`model/split.py`): it holds only its part of each linear in memory.

Where a file stores a weight part by part as the scheme declares it (dense safetensors, compressed-tensors, our own
format), only the slices are read. A linear that is cut by outputs is read by its rows. One that is cut by inputs is
read as all rows through a small buffer, because its columns lie between others. Formats that reorder what they store
(GPTQ, AWQ, bitsandbytes, GGUF, transposed GPT-2) are read linear by linear, and cut then. All processes are on one
machine, whose page cache reads the disk once for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.layouts import bitsandbytes, export_layouts
from attar.checkpoints.layouts.scales import activation_scale
from attar.checkpoints.sources import hf
from attar.checkpoints.strict_io import naming
from attar.checkpoints.vocabulary import is_gguf
from attar.errors import UserError
from attar.formats.cuts import Range, Units, units, within
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels.dispatch import BackendWeights
from attar.kernels.native.store import CpuWeights
from attar.kernels.operands import Linear
from attar.model import parallel
from attar.model.config import ModelConfig
from attar.model.parallel import Groups, SplitDecoder
from attar.model.split import Cut, Share, Split, split
from attar.plan.costs import matrices
from attar.progress import StageProgress

AT_ONCE = 1 << 24  # bytes of rows that are read to keep some of their columns

Checkpoint = hf.Checkpoint | GgufCheckpoint


def open_checkpoint(
    path: Path, dtype: torch.dtype | None = None, *, as_stored: bool = False, blocks: bool = False
) -> Checkpoint:
    """Open a folder or GGUF file, from its headers. `blocks` applies to files, as in `GgufCheckpoint.open`. Raises
    CheckpointError."""
    if is_gguf(path):
        return GgufCheckpoint.open(path, dtype, as_stored=as_stored, blocks=blocks)
    return hf.Checkpoint.open(path, dtype, as_stored=as_stored)


def schemes(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Scheme | None]:
    """Return the scheme of every linear."""
    return {each.name: checkpoint.scheme_of(each.name) for each in matrices(config)}


def load(
    path: Path,
    share: Share,
    groups: Groups,
    dtype: torch.dtype | None = None,
    progress: StageProgress | None = None,
    store: BackendWeights | None = None,
) -> SplitDecoder:
    """Load the part of `share`, ready to run with the others. Raises CheckpointError as `opening.load`, and ValueError
    where the model cannot be split so."""
    checkpoint = open_checkpoint(path, dtype, as_stored=store is not None, blocks=isinstance(store, CpuWeights))
    config = checkpoint.config
    part = split(config, share, schemes(checkpoint, config))
    with naming(path):
        return parallel.build(part, Shard(checkpoint, part), groups, progress, store)


class Shard:
    """Source of one process' weights: those of a checkpoint, cut."""

    def __init__(self, checkpoint: Checkpoint, part: Split) -> None:
        self.checkpoint, self.part = checkpoint, part
        self.dtype, self.has, self.tensor = checkpoint.dtype, checkpoint.has, checkpoint.tensor

    def matrix(self, name: str) -> Tensor:
        names, vocabulary = self.part.config.names, self.part.vocabulary
        assert name in (f"{names.embed}.weight", f"{names.head}.weight"), "the one matrix that is no linear"
        assert vocabulary is not None, "a process without vocabulary has no embedding"
        return self._dense(name, Cut(rows=(vocabulary,)))

    def linear(self, name: str) -> Linear:
        cut, vocabulary = self.part.cuts.get(name), self.part.vocabulary
        if name == self.part.config.names.embed and vocabulary is not None:
            cut = Cut(rows=(vocabulary,))
        if cut is None:
            return self.checkpoint.linear(name)
        return self._slices(name, cut) or cut_linear(self.checkpoint.linear(name), cut)

    def _slices(self, name: str, cut: Cut) -> Linear | None:
        """Read the linear slice by slice; None where its format does not allow it."""
        checkpoint = self.checkpoint
        if isinstance(checkpoint, GgufCheckpoint) or checkpoint.config.names.is_transposed(name):
            return None
        module, scheme, folder = checkpoint.stored_linear(name), checkpoint.scheme_of(name), checkpoint.folder
        if scheme is None:
            linear = Linear(name, self._dense(f"{name}.weight", cut))
        else:
            settings = folder.config["quantization_config"]
            method = settings.get("quant_method")
            library = export_layouts.library_of(method)
            more = settings.get("transform_config") or folder.has(f"{module}.weight_g_idx")  # for the reader to check
            if method != library.METHOD or library is bitsandbytes or library.against((scheme,)) is not None or more:
                return None
            if any(not folder.has(f"{module}.{library.stored_part(part, scheme)}") for part in units(scheme)):
                return None  # 2:4 zeros are left out of it
            shape = checkpoint.linear_shape(name)
            parts = {}
            for part, dimensions in units(scheme).items():
                stored = f"{module}.{library.stored_part(part, scheme)}"
                declared = scheme.parts(shape)[part].shape
                if all(unit is None for unit in dimensions):
                    parts[part] = folder.read(stored).reshape(declared)  # some files store one number as a scalar
                else:
                    parts[part] = _read(folder, stored, *_ranges(cut, dimensions, declared))
            linear = Linear(name, _packed(scheme, cut.shape(shape), parts))
            if scheme.static:
                linear.activation_scale = activation_scale(folder, f"{module}.{library.stored_scale(scheme)}")
        if self.has(f"{name}.bias"):
            linear.bias = _bias(self.tensor(f"{name}.bias"), cut)
        return linear

    def _dense(self, name: str, cut: Cut) -> Tensor:
        checkpoint = self.checkpoint
        if isinstance(checkpoint, GgufCheckpoint):
            return _take(checkpoint.matrix(name), cut.rows, cut.columns)
        found = _read(checkpoint.folder, checkpoint.stored_name(name), cut.rows, cut.columns)
        return found if checkpoint.as_stored and found.dtype != torch.float64 else found.to(self.dtype)


def cut_linear(linear: Linear, cut: Cut) -> Linear:
    """Return the part of a linear in memory of its own. Raises ValueError where its inputs cannot be cut."""
    weight, columns = linear.weight, cut.columns
    if columns is not None and linear.permutation is not None:
        raise UserError(
            "parallel_unsupported",
            f"{linear.name} stores its columns in another order (act-order): --tp cannot cut them; --pp would do, or "
            "the model compressed anew without it",
        )
    if columns is not None and linear.hadamard and any(at % linear.hadamard for at in columns):
        raise UserError(
            "parallel_unsupported",
            f"{linear.name} rotates its inputs in blocks of {linear.hadamard} columns, which --tp would cut through: "
            "--pp would do, or fewer parts",
        )
    made = replace(linear)
    if isinstance(weight, PackedTensor):
        parts = {
            part: _take(weight.parts[part], *_ranges(cut, dimensions, tuple(weight.parts[part].shape)))
            for part, dimensions in units(weight.scheme).items()
        }
        made.weight = _packed(weight.scheme, cut.shape(weight.shape), parts)
    else:
        assert isinstance(weight, Tensor)
        made.weight = _take(weight, cut.rows, columns)
    if linear.bias is not None:
        made.bias = _bias(linear.bias, cut)
    if linear.input_scale is not None:
        made.input_scale = _take(linear.input_scale, columns and (columns,), None)
    return made


def _bias(bias: Tensor, cut: Cut) -> Tensor:
    """Return the part of a bias: zeros where another process adds it, because a model with biases has them in every
    part."""
    return _take(bias, cut.rows, None) if cut.bias else torch.zeros_like(bias)


def _packed(scheme: Scheme, shape: tuple[int, int], parts: dict[str, Tensor]) -> PackedTensor:
    if "shape" in scheme.parts(shape):
        parts["shape"] = torch.tensor(shape, dtype=torch.int64)
    return PackedTensor(scheme, shape, parts)


Rows = tuple[Range, ...] | None


def _ranges(cut: Cut, dimensions: Units, shape: tuple[int, ...]) -> tuple[Rows, Range | None]:
    """Return the rows and columns that a cut of a weight takes of a part of `shape`, whose units are `dimensions`."""
    down = dimensions[0] if dimensions else None
    across = dimensions[1] if len(dimensions) > 1 else None
    rows = None if cut.rows is None or down is None else tuple(within(each, down, shape[0]) for each in cut.rows)
    columns = None if cut.columns is None or across is None else within(cut.columns, across, shape[1])
    return rows, columns


def _take(x: Tensor, rows: Rows, columns: Range | None) -> Tensor:
    """Copy ranges of rows of x, side by side, and a range of their columns, into memory of its own."""
    if rows is not None:
        x = torch.cat([x[start:stop] for start, stop in rows])
    return x.clone() if columns is None else x[:, slice(*columns)].clone()


def _read(folder: Folder, name: str, rows: Rows, columns: Range | None) -> Tensor:
    """Read ranges of rows of a file's tensor, side by side, and a range of their columns."""
    info = folder.info(name)
    pieces = []
    for start, stop in rows or ((0, info.shape[0]),):
        if columns is None:
            pieces.append(folder.read_rows(name, start, stop))
            continue
        step = max(1, AT_ONCE * info.shape[0] // max(1, info.bytes))
        bounds = [*range(start, stop, step), stop]
        pieces += [folder.read_rows(name, a, b)[:, slice(*columns)].clone() for a, b in pairwise(bounds)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
