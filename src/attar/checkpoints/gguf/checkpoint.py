"""GGUF file as a source of named weights: the counterpart of `hf.Checkpoint` for a folder.

The CPU kernels run the blocks of every quantized type: for them linears become `PackedTensor`s of those blocks. For all
other kernels, three types are grids that attar's schemes name: Q4_0 is w4g32, Q5_0 w5g32 and Q8_0 w8g32, symmetric with
fp16 scales. Their linears become `PackedTensor`s of the very same values. The rest (k-quants, IQ4, Q4_1, Q5_1, FP4) has
values that no grid here represents exactly, and is decoded to the compute dtype: results are right, and memory is that
of a dense model. F32, F16 and BF16 are read as they are. `kind_of` and `scheme_of` distinguish these cases.

Rows of q and k of `llama` files are put back into the order in which a head's halves rotate, as bytes, because no block
spans two rows. As with folders, opening builds the model once from shapes alone, so that a missing tensor or a wrong
shape is found before any weight is read. Tensors that the model has no place for are an error too: a file with more
than its architecture's tensors computes something else (an adapter, a head for multi-token prediction).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from attar.checkpoints.gguf import config as gguf_config
from attar.checkpoints.gguf.families import Factors
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.header import GgufTensor
from attar.checkpoints.gguf.names import (
    EMBED,
    FACTORS,
    ROPE_FACTORS,
    SHARED_GATE,
    Place,
    place,
)
from attar.checkpoints.strict_io import CheckpointError, naming
from attar.errors import code_of
from attar.formats import affine
from attar.formats.codecs import ggml_blocks
from attar.formats.codecs.ggml import DECODED, GgmlType
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import GgmlBlocks
from attar.kernels.dispatch import BackendWeights
from attar.kernels.native.layouts import GGML
from attar.kernels.native.store import CpuWeights
from attar.kernels.operands import Linear
from attar.model import assembly
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.fields import COUNT
from attar.progress import StageProgress

SCHEMES: Mapping[str, Scheme] = {
    name: Scheme.parse(scheme).with_scale_dtype("float16")
    for name, scheme in {"Q4_0": "w4g32", "Q5_0": "w5g32", "Q8_0": "w8g32"}.items()
}
"""Types whose values a scheme represents exactly."""

PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

UNUSED = (ROPE_FACTORS, *FACTORS)  # read while opening


class GgufCheckpoint:
    """Named weights of a GGUF file, dense ones cast to `dtype` on the way. Names are ours (`Names`).

    Weights are read on request only, except the factors of the rope.
    """

    def __init__(
        self, file: GgufFile, dtype: torch.dtype | None, as_stored: bool = False, blocks: bool = False
    ) -> None:
        self.file = file
        if f"{EMBED}.weight" not in file:
            raise file.error(
                "checkpoint_incomplete", f"has no tensor '{EMBED}.weight': not a language model with its weights"
            )
        embed = file.info(f"{EMBED}.weight")
        own = PLAIN.get(embed.kind.name, torch.float32)
        self.dtype = own if dtype is None else dtype
        self.as_stored, self.blocks = as_stored, blocks
        self.names: Collection[str] = ()  # ours of all tensors, in the order in which a decoder reads them
        with naming(file.path):
            self._interleaved = gguf_config.architecture(file.metadata).interleaved
            self.factors = self._factors()
            self.config = gguf_config.read_gguf_config(
                file.metadata, file.names(), embed.shape[0], str(own).removeprefix("torch."), self.factors
            )
            if ROPE_FACTORS in file:
                self.config = self._with_rope_factors(self.config)

    @classmethod
    def open(
        cls, path: Path, dtype: torch.dtype | None = None, *, as_stored: bool = False, blocks: bool = False,
        whole: bool = True,
    ) -> Self:  # fmt: skip
        """Open a GGUF file to compute in `dtype`; None: the dtype of its stored embedding, float32 where that is
        quantized.

        `as_stored` leaves 16-bit matrices as they are, and `blocks` quantized ones, for kernels that read them. Without
        `whole`, a file's header is enough, for plans. Raises CheckpointError where the file is malformed, of an
        unsupported architecture or type, lacks a tensor, or holds one of another shape than its metadata say. No weight
        is read.
        """
        checkpoint = cls(GgufFile(path, whole), dtype, as_stored, blocks)
        checkpoint._check()
        return checkpoint

    # Interface to the decoder

    def linear(self, name: str) -> Linear:
        """Return the linear of module `name`: its weight [O, I], packed where a scheme has its values, and its bias if
        any."""
        stored, scheme = self._weight(name), self.scheme_of(name)
        linear = Linear(name, self.matrix(stored) if scheme is None else self._packed(stored))
        if self.has(f"{name}.bias"):
            linear.bias = self.tensor(f"{name}.bias")
        return linear

    def tensor(self, name: str) -> Tensor:
        """Return the tensor `name`, decoded, in `dtype`. Raises CheckpointError where it is missing."""
        return self._decoded(name, self.dtype)

    def matrix(self, name: str) -> Tensor:
        """Return the matrix `name` decoded to `dtype`; 16-bit numbers stay as they are where the checkpoint is
        `as_stored`."""
        return self._decoded(name, self._dense(name))

    def has(self, name: str) -> bool:
        """Return whether `tensor(name)` finds one; weights that `linear` gives packed do not count."""
        stored = self.place(name).tensor
        return stored in self.file and not (name.endswith(".weight") and self._scheme(self._kind(name)))

    # Interface to reports

    def linear_shape(self, name: str) -> tuple[int, int]:
        """Return the shape (out, in) of linear `name`, from the header alone."""
        shape = self.info(self._weight(name)).shape
        if len(shape) != 2:
            stored = self.place(name).tensor
            raise self.file.error("checkpoint_mismatch", f"{stored}.weight is {list(shape)}, not a matrix")
        return (shape[0], shape[1])

    def kind_of(self, name: str) -> GgmlType:
        """Return the stored type of the weight of linear `name`."""
        return self._kind(self._weight(name))

    def scheme_of(self, name: str) -> Scheme | None:
        """Return the scheme of the packed weight that `linear` gives; None where it gives a dense one."""
        return self._scheme(self.kind_of(name))

    def decoded_as(self, name: str) -> str:
        """Return the dtype name of the weight of linear `name` as a dense matrix."""
        return str(self._dense(self._weight(name))).removeprefix("torch.")

    # Reading

    def place(self, name: str) -> Place:
        """Return the place in the file of our tensor or module `name`. Mixtral's files of before April 2024 have a
        tensor for each expert."""
        found = place(self.config.names, name)
        if found.expert is not None and found.tensor not in self.file:
            alone = Place(found.tensor.replace("_exps", f".{found.expert}"))
            return alone if alone.tensor in self.file else found
        return found

    def info(self, name: str) -> GgufTensor:
        """Return type and shape of our tensor `name`: of one expert's matrix, where the file stacks all experts, and of
        a matrix of one row, where it stores a vector. Raises CheckpointError where it is missing."""
        stored, expert = self.place(name)
        found = self.file.info(stored)
        if expert is not None:
            count = 0 if self.config.experts is None else self.config.experts.count
            if found.shape[0] != count or len(found.shape) != 3:
                raise self.file.error(
                    "checkpoint_mismatch",
                    f"{stored} is {list(found.shape)}: it must be {count} matrices, one for each expert",
                )
            return found._replace(shape=found.shape[1:])
        if SHARED_GATE in stored and len(found.shape) == 1:
            return found._replace(shape=(1, *found.shape))
        return found

    def read(self, name: str) -> Tensor:
        """Return the stored bytes of our tensor `name`, uint8 [..., bytes of a row]."""
        found = self.info(name)
        return self.file.read(*self.place(name)).view(found.raw_shape)

    def _kind(self, name: str) -> GgmlType:
        return self.file.info(self.place(name).tensor).kind

    def _scheme(self, kind: GgmlType) -> Scheme | None:
        return Scheme(GgmlBlocks(kind), layout="plain") if self.blocks and kind.name in GGML else SCHEMES.get(kind.name)

    def _dense(self, name: str) -> torch.dtype:
        return PLAIN.get(self._kind(name).name, self.dtype) if self.as_stored else self.dtype

    def _weight(self, name: str) -> str:
        """Return the name of a linear's weight: the embedding's, for the LM head of a tied model."""
        names = self.config.names
        return f"{names.embed if name == names.head and self.config.tied else name}.weight"

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Return rows [O, ...] of a tensor in our order: files may store the pairs of a head of q and k as
        neighbours."""
        stored = self.place(name).tensor
        if not self._interleaved or (".attn_q." not in stored and ".attn_k." not in stored):
            return rows
        size = self.config.head_dim
        return rows.view(-1, size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def rows_of(self, name: str) -> Tensor:
        """Return the stored rows of matrix `name`, uint8 [O, bytes of a row], in our order."""
        return self._in_order(name, self.read(name))

    def _decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        kind, raw = self._kind(name), self.read(name)
        if name.endswith(".bias"):  # one row, whose values are put in order: a block holds several
            return self._in_order(name, ggml_blocks.decode(kind, raw, dtype))
        return ggml_blocks.decode(kind, self._in_order(name, raw), dtype)

    def _packed(self, name: str) -> PackedTensor:
        kind, raw = self._kind(name), self.rows_of(name)
        if not self.blocks:
            return as_grid(kind, raw)
        scheme = self._scheme(kind)
        assert scheme is not None
        shape = self.info(name).shape
        return PackedTensor(scheme, (shape[0], shape[1]), {"blocks": raw})

    def _factors(self) -> Factors | None:
        """Return the factors of a longrope, None where there are none. The config's reader checks their number."""
        found = [name for name in FACTORS if name in self.file]
        if not found:
            return None
        if len(found) == 1:
            (missing,) = set(FACTORS) - set(found)
            raise self.file.error("checkpoint_incomplete", f"has {found[0]}, but not {missing}")
        rows = []
        for name in FACTORS:
            tensor = self.file.info(name)
            if not tensor.kind.decoded or len(tensor.shape) != 1 or tensor.shape[0] > COUNT:
                raise self.file.error(
                    "checkpoint_mismatch",
                    f"{name} must be a row of numbers, not {tensor.kind.name} {list(tensor.shape)}",
                )
            rows.append(ggml_blocks.decode(tensor.kind, self.file.read(name)).tolist())
        return Factors(*rows)

    def _with_rope_factors(self, config: ModelConfig) -> ModelConfig:
        (rope, *others), tensor = dict.fromkeys(config.ropes), self.file.info(ROPE_FACTORS)
        if rope is None or others:
            raise self.file.error(
                "checkpoint_mismatch", f"tensor {ROPE_FACTORS!r} has no place in a {config.architecture}"
            )
        if not tensor.kind.decoded or tensor.shape != (rope.dims // 2,):  # before any value is read
            raise self.file.error(
                "checkpoint_mismatch",
                f"{ROPE_FACTORS} must be a row of {rope.dims // 2} numbers, one for each pair of "
                f"columns, not {tensor.kind.name} {list(tensor.shape)}",
            )
        factors = ggml_blocks.decode(tensor.kind, self.file.read(ROPE_FACTORS)).tolist()
        return replace(config, ropes=(gguf_config.rope_with_factors(rope, factors),) * config.layers)

    # Opening

    def _check(self) -> None:
        """Build the model from shapes alone. Raises CheckpointError where the tensors are not those of the model."""
        outline, config, path = _Outline(self), self.config, self.file.path
        self.names = outline.names.keys()
        try:
            assembly.check(config, outline)
        except CheckpointError:
            raise
        except ValueError as error:
            said = str(error).replace("config.json makes", "the metadata make")
            said = said.replace("which config.json declares", "which the architecture has")
            raise CheckpointError(code_of(error), f"{path}: {said}") from None
        for name in self.file.names():
            if name not in outline.asked and name not in UNUSED:
                raise CheckpointError(
                    "checkpoint_mismatch", f"{path}: tensor {name!r} has no place in a {config.architecture}"
                )


def as_grid(kind: GgmlType, raw: Tensor) -> PackedTensor:
    """Return rows of blocks [O, bytes of a row] of a type in `SCHEMES` as a weight on its grid, with the same
    values."""
    rows, columns = raw.shape[0], raw.shape[1] // kind.block_bytes * kind.elements
    codes = torch.empty((rows, columns), dtype=torch.int8)
    scale = torch.empty((rows, columns // kind.elements), dtype=torch.float16)
    for part in row_slices(rows, columns):
        blocks = ggml_blocks.unpack(kind, raw[part].reshape(-1, kind.block_bytes))
        codes[part] = blocks.codes.view(-1, columns).to(torch.int8)
        scale[part] = blocks.d.view(-1, scale.shape[1])
    return affine.encode(codes, scale, None, SCHEMES[kind.name], (rows, columns))


class _Outline:
    """Weights of a checkpoint as tensors without data, for checks that only need shapes, with a record of the requested
    names."""

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self.checkpoint, self.dtype, self.has = checkpoint, checkpoint.dtype, checkpoint.has
        self.asked, self.names = set[str](), dict[str, None]()

    def linear(self, name: str) -> Linear:
        weight = self.tensor(self.checkpoint._weight(name))
        if weight.ndim != 2:
            stored = self.checkpoint.place(name).tensor
            raise self.checkpoint.file.error("checkpoint_mismatch", f"{stored}.weight is not a matrix")
        return Linear(name, weight, self.tensor(f"{name}.bias") if self.has(f"{name}.bias") else None)

    def tensor(self, name: str) -> Tensor:
        file, stored = self.checkpoint.file, self.checkpoint.place(name).tensor
        tensor = self.checkpoint.info(name)
        if not tensor.kind.decoded:
            known = ", ".join(kind.name for kind in DECODED)
            raise file.error(
                "quantization_unsupported", f"tensor {stored!r} is {tensor.kind.name}: attar computes with {known}"
            )
        self.asked.add(stored)
        self.names[name] = None
        return torch.empty(tensor.shape, device="meta")

    matrix = tensor


def load(
    path: Path,
    dtype: torch.dtype | None = None,
    progress: StageProgress | None = None,
    store: BackendWeights | None = None,
) -> Decoder:
    """Load the whole model of a GGUF file, ready to run. Arguments and errors as `hf.load`."""
    assert store is None or dtype == store.dtype, f"these kernels compute in {store.dtype}, not {dtype}"
    checkpoint = GgufCheckpoint.open(path, dtype, as_stored=store is not None, blocks=isinstance(store, CpuWeights))
    return assembly.build(checkpoint.config, checkpoint, progress, store)
