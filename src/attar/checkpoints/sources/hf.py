"""Hugging Face checkpoint as a source of named weights: `Folder` (files) and `ModelConfig` (meaning) put together.

The decoder is built from `Checkpoint` (`model.decoder.Weights`). It finds a tensor under whichever of its spellings the
checkpoint uses, transposes GPT-2's [in, out] weights, and passes quantized modules to the reader of their format. Code
above it does not see whether a weight came dense, from GPTQ or from compressed-tensors.

Opening checks everything that headers contain. The decoder is built once from tensors that have a shape and no data,
which runs the very checks of the real build. A tensor that is missing or of another shape than config.json says is an
error before the first weight is read, not after hours of work.

Tied embeddings come in four shapes. Only `embed_tokens`, only `lm_head`, or both and equal: the one table serves both
ends, also where it is packed. Both and different although config.json ties them: both are used, as in transformers 5.
Where the config does not mention tying, a checkpoint that stores only one of the two is tied.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from attar.checkpoints.folder import CONFIG, DENSE, Folder
from attar.checkpoints.layouts import beside, bitsandbytes, fp8, own_format, squeezellm
from attar.checkpoints.layouts.awq import Awq
from attar.checkpoints.layouts.bitsandbytes import BitsAndBytes
from attar.checkpoints.layouts.compressed_tensors import METHOD, CompressedTensors
from attar.checkpoints.layouts.fp8 import Fp8
from attar.checkpoints.layouts.gptq import Gptq
from attar.checkpoints.layouts.own_format import OwnFormat
from attar.checkpoints.layouts.squeezellm import SqueezeLlm
from attar.checkpoints.strict_io import invalid, naming, near, unsupported
from attar.errors import UserError
from attar.formats.scheme import Part, Scheme
from attar.kernels.dispatch import BackendWeights
from attar.kernels.operands import Linear
from attar.model import assembly
from attar.model.assembly import Weights
from attar.model.config import ModelConfig, Names
from attar.model.decoder import Decoder
from attar.model.families import read_config
from attar.plan.costs import matrices
from attar.progress import StageProgress

logger = logging.getLogger(__name__)


class Quantized(Protocol):
    """Interface of a quantized format's reader. Modules go by their stored names."""

    def holds(self, module: str) -> bool:
        """Return whether the module is stored quantized."""

    def shape(self, module: str) -> tuple[int, int]:
        """Return the module's shape (out, in), without reading the weight."""

    def scheme_of(self, module: str) -> Scheme:
        """Return the scheme of the module, without reading the weight."""

    def read(self, module: str) -> Linear:
        """Return the linear, without its bias. Raises CheckpointError where its tensors do not fit together."""


READERS: Mapping[str, Callable[[Folder, Mapping[str, Any]], Quantized]] = {
    "awq": Awq,
    METHOD: CompressedTensors,
    "gptq": Gptq,
    fp8.METHOD: Fp8,
    bitsandbytes.METHOD: BitsAndBytes,
    own_format.METHOD: OwnFormat,
    squeezellm.METHOD: SqueezeLlm,
}


class Checkpoint:
    """Named weights of a model folder, dense ones cast to `dtype` on the way. Names are the family's (`Names`).

    Weights are read on request only.
    """

    def __init__(self, folder: Folder, config: ModelConfig, dtype: torch.dtype | None, as_stored: bool = False) -> None:
        self.folder = folder
        self.config = config
        self._renames = _renames(folder, config.names)
        modules = (*(each.name for each in matrices(config)), config.names.embed)  # which a tied head is stored under
        beside.drop_stale(folder, map(self.stored_name, modules))
        self._quantized = quantized_reader(folder)
        if self._tied_by_omission():
            self.config = replace(config, tied=True)
        self.dtype = self._own_dtype() if dtype is None else dtype
        self.as_stored = as_stored
        folder.mapped = as_stored  # a caller that lays weights out anew reads each of them once

    @classmethod
    def open(cls, path: Path, dtype: torch.dtype | None = None, *, as_stored: bool = False) -> Self:
        """Open a model folder to compute in `dtype`; None: the dtype of its stored embedding, float32 for float64.
        `as_stored` leaves dense matrices in the dtype of the files, for kernels that read it.

        Raises CheckpointError where the folder is not a checkpoint of a known architecture and format, lacks a tensor,
        or holds one of another shape than its config says. No weight is read.
        """
        folder = Folder(path)
        beside.settle(folder)
        return cls.over(folder, dtype, as_stored=as_stored)

    @classmethod
    def over(cls, folder: Folder, dtype: torch.dtype | None = None, *, as_stored: bool = False) -> Self:
        """Open the model of an open folder. Arguments and errors as `open`."""
        generation = folder.generation()
        with naming(folder.path / CONFIG):
            config = read_config(folder.config, generation)
        checkpoint = cls(folder, config, dtype, as_stored)
        checkpoint._check()
        return checkpoint

    # Interface to the decoder

    def linear(self, name: str) -> Linear:
        """Return the linear of module `name`: its weight [O, I], dense in `dtype` or packed as stored, and its bias if
        any."""
        module = self.stored_linear(name)
        if self._quantized is not None and self._quantized.holds(module):
            linear = self._quantized.read(module)
            linear.name = name
        else:
            weight = self.matrix(f"{name}.weight")
            linear = Linear(name, weight.t().contiguous() if self.config.names.is_transposed(name) else weight)
        if self.has(f"{name}.bias"):
            linear.bias = self.tensor(f"{name}.bias")
        return linear

    def tensor(self, name: str) -> Tensor:
        """Return the dense tensor `name` in `dtype`. Raises CheckpointError where it is missing or stores no real
        numbers."""
        self._dense_part(name)
        return self.folder.read(self.stored_name(name)).to(self.dtype)

    def matrix(self, name: str) -> Tensor:
        """Return the dense matrix `name`: in the dtype of the files where the checkpoint was opened `as_stored`, else
        in `dtype`."""
        if not self.as_stored or self._dense_part(name).dtype == "float64":
            return self.tensor(name)
        return self.folder.read(self.stored_name(name))

    def has(self, name: str) -> bool:
        """Return whether `tensor(name)` finds one; the codes of a quantized module do not count."""
        stored = self.stored_name(name)
        module, _, part = stored.rpartition(".")
        return self.folder.has(stored) and not (part == "weight" and self.holds_packed(module))

    # Interface to writers

    def stored_name(self, name: str) -> str:
        """Return a module's or tensor's name in this checkpoint's files, which outputs keep."""
        for ours, theirs in self._renames:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def stored_linear(self, name: str) -> str:
        """Return the module under which linear `name` is stored: the packed LM head of a tied model is its
        embedding."""
        names = self.config.names
        shared = name == names.head and self.config.tied and not self._stored_module(name)
        return self.stored_name(names.embed if shared else name)

    def holds_packed(self, module: str) -> bool:
        """Return whether the files hold a module, by its stored name, in a quantized format."""
        return self._quantized is not None and self._quantized.holds(module)

    def linear_shape(self, name: str) -> tuple[int, int]:
        """Return the shape (out, in) of linear `name`, from headers alone."""
        return _Outline(self).linear(name).shape

    def scheme_of(self, name: str) -> Scheme | None:
        """Return the scheme of linear `name`; None where it is dense."""
        module = self.stored_linear(name)
        quantized = self._quantized
        return quantized.scheme_of(module) if quantized is not None and quantized.holds(module) else None

    def rows(self, ids: Tensor) -> Weights:
        """Return these weights with only the rows `ids` [R] of the embedding and the LM head."""
        return _Rows(self, ids)

    # Opening

    def _check(self) -> None:
        """Build the model from shapes alone. Raises CheckpointError where a tensor is missing or of another shape."""
        with naming(self.folder.path):
            assembly.check(self.config, _Outline(self))

    def _tied_by_omission(self) -> bool:
        names, stated = self.config.names, "tie_word_embeddings" in self.folder.config
        embed, head = (self._stored_module(name) for name in (names.embed, names.head))
        return not stated and not self.config.tied and embed != head

    def _stored_module(self, name: str) -> bool:
        module = self.stored_name(name)
        return self.has(f"{name}.weight") or self.holds_packed(module)

    def _own_dtype(self) -> torch.dtype:
        names = self.config.names
        if assembly.packed_ends(self.config, self) and (scheme := self.scheme_of(names.head)) is not None:
            return getattr(torch, scheme.scale_dtype)  # type: ignore[no-any-return]
        table = names.embed if self.has(f"{names.embed}.weight") else names.head
        return self._computable(self._dense_part(f"{table}.weight").dtype)

    def widest(self) -> torch.dtype:
        """Return the dtype that holds every dense tensor of the files as stored; float32 for float64."""
        dtypes = {self.folder.info(name).dtype for name in self.folder.names()} & DENSE
        return reduce(torch.promote_types, map(self._computable, dtypes), self.dtype)

    @staticmethod
    def _computable(dtype: str) -> torch.dtype:
        """Return the dtype to compute in of tensors stored in `dtype`: no kernel computes in float64."""
        return torch.float32 if dtype == "float64" else getattr(torch, dtype)

    def _dense_part(self, name: str) -> Part:
        stored = self.stored_name(name)
        if not self.folder.has(stored):
            module = stored.rpartition(".")[0] + "."
            kin = sorted(n.removeprefix(module) for n in self.folder.names() if n.startswith(module))
            if "qweight" in kin or "weight_packed" in kin:
                hint = f": it is stored quantized ({', '.join(kin)}), which " + (
                    "is not supported here" if self._quantized else f"{CONFIG} has no quantization_config for"
                )
            else:
                hint = near(stored, self.folder.names())
            files = list(self.folder.files)
            listed = ", ".join(files[:5]) + (f" and {len(files) - 5} more files" if len(files) > 5 else "")
            raise self.folder.error("checkpoint_incomplete", f"no tensor {stored!r} in {listed}{hint}")
        part = self.folder.info(stored)
        if part.dtype not in DENSE:
            raise invalid(
                f"{self.folder.path}: tensor {stored!r} is {part.dtype}, without the scales that would make it numbers"
            )
        return part


class _Outline:
    """Weights of a checkpoint as tensors without data, for checks that only need shapes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.dtype, self.has = checkpoint, checkpoint.dtype, checkpoint.has

    def linear(self, name: str) -> Linear:
        checkpoint, quantized = self.checkpoint, self.checkpoint._quantized
        module = checkpoint.stored_linear(name)
        if quantized is not None and quantized.holds(module):
            weight = torch.empty(quantized.shape(module), device="meta")
        else:
            weight = self.tensor(f"{name}.weight")
            if checkpoint.config.names.is_transposed(name):
                weight = weight.t()
        if weight.ndim != 2:
            raise checkpoint.folder.error(
                "checkpoint_mismatch", f"{module}.weight is {list(weight.shape)}, not a matrix"
            )
        return Linear(name, weight, self.tensor(f"{name}.bias") if self.has(f"{name}.bias") else None)

    def tensor(self, name: str) -> Tensor:
        return torch.empty(self.checkpoint._dense_part(name).shape, device="meta")

    matrix = tensor


class _Rows:
    """Weights of a checkpoint with only some rows of the embedding and of the LM head: tables [R, I]."""

    def __init__(self, checkpoint: Checkpoint, ids: Tensor) -> None:
        self.checkpoint, self.ids = checkpoint, ids.tolist()
        self.dtype, self.has = checkpoint.dtype, checkpoint.has

    def linear(self, name: str) -> Linear:
        is_table = name == self.checkpoint.config.names.head
        return Linear(name, self.tensor(f"{name}.weight")) if is_table else self.checkpoint.linear(name)

    def tensor(self, name: str) -> Tensor:
        checkpoint, names = self.checkpoint, self.checkpoint.config.names
        if name not in (f"{names.embed}.weight", f"{names.head}.weight"):
            return checkpoint.tensor(name)
        part, stored = checkpoint._dense_part(name), checkpoint.stored_name(name)
        table = torch.empty((len(self.ids), *part.shape[1:]), dtype=checkpoint.dtype)
        start = 0
        for end in range(1, len(self.ids) + 1):
            if end == len(self.ids) or self.ids[end] != self.ids[end - 1] + 1:  # neighbours are read together
                table[start:end] = checkpoint.folder.read_rows(stored, self.ids[start], self.ids[end - 1] + 1)
                start = end
        return table

    matrix = tensor


DTYPES: Mapping[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_dtype(name: str | None, device: str = "cpu") -> torch.dtype | None:
    """Return the dtype of a user's name for it; None for "auto", the checkpoint's own. Raises ValueError for others.

    The default is float32 on a CPU. Elsewhere the default and "auto" are bfloat16, because kernels are laid out for one
    dtype.
    """
    if device != "cpu" and name in (None, "auto"):
        return torch.bfloat16
    name = name or "float32"
    if name not in DTYPES:
        raise UserError("name_unknown", f"unknown dtype {name!r}: known are {', '.join(DTYPES)}{near(name, DTYPES)}")
    return DTYPES[name]


def load(
    path: Path,
    dtype: torch.dtype | None = None,
    progress: StageProgress | None = None,
    store: BackendWeights | None = None,
) -> Decoder:
    """Load the whole model of a folder, ready to run. `progress(done, total)` counts blocks. Raises as
    `Checkpoint.open`.

    With a `store` the weights are laid out for its kernels, which compute in its dtype whatever is stored.
    """
    assert store is None or dtype == store.dtype, f"these kernels compute in {store.dtype}, not {dtype}"
    checkpoint = Checkpoint.open(path, dtype, as_stored=store is not None)
    with naming(path):
        return assembly.build(checkpoint.config, checkpoint, progress, store)


def load_again(checkpoint: Checkpoint, dtype: torch.dtype, store: BackendWeights | None = None) -> Decoder:
    """Load the whole model of an open checkpoint, ready to run in `dtype`. Arguments and errors as `load`."""
    again = copy.copy(checkpoint)
    again.dtype, again.as_stored = dtype, store is not None
    with naming(checkpoint.folder.path):
        return assembly.build(again.config, again, None, store)


def quantized_reader(folder: Folder) -> Quantized | None:
    """Return the reader of a folder's quantized modules; None for a dense folder. Raises CheckpointError for a format
    that attar does not read."""
    settings = folder.config.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str) or method not in READERS:
        raise unsupported(
            f"{folder.path}: quantized with {method!r}, which attar does not read: known are {', '.join(READERS)}"
        )
    return READERS[method](folder, settings)


def _renames(folder: Folder, names: Names) -> tuple[tuple[str, str], ...]:
    """Return this checkpoint's spelling of names, decided once: (prefix of our name, prefix in the files) pairs.

    Raises CheckpointError where the first block is found under no spelling.
    """
    modules = {name.rpartition(".")[0] for name in folder.names()}
    first = f"{names.layer.format(i=0)}.{names.attention_norm}"
    if not any(spelling in modules for spelling in names.spellings(first)):
        tried = " or ".join(f"{spelling}.weight" for spelling in names.spellings(first))
        raise folder.error(
            "checkpoint_incomplete",
            f"the first block is not there; looked for {tried}{near(f'{first}.weight', folder.names())}",
        )
    chosen = []
    for ours in dict.fromkeys(ours for ours, _ in names.prefixes):
        options = [ours, *(theirs for prefix, theirs in names.prefixes if prefix == ours)]
        probes = [name.removeprefix(ours) for name in (first, names.head) if name.startswith(ours)]
        found = (option for option in options for probe in probes if option + probe in modules)
        chosen.append((ours, next(found, ours)))
    return tuple(chosen)
