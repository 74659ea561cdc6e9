"""The dense form of a model: any checkpoint seen as the folder that it would be had it never been compressed.

`DenseFolder` decodes a tensor when it is read, so a view costs neither disk nor the memory of a model. `to_dense.py`
writes one to disk, and `attar compress --requantize` compresses one. Both see the same values, in this dtype:

* of a folder, the dtype of its embedding, for the tensors that are decoded; all others are as they are;
* of a GGUF file, that of its embedding too, or bfloat16 where the embedding is quantized. It holds for every tensor;
* a dtype that is asked for holds for every tensor that holds real numbers.

Rotations and permutations of a linear's columns are undone in its weight. What a format adds at run time is not part of
a weight: inputs that a scheme rounds are no longer rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.convert.from_gguf import check_config, config_json, generation, write_tokenizer
from attar.checkpoints.convert.proof import pieces
from attar.checkpoints.convert.source import dense_names, packed_schemes, values_of
from attar.checkpoints.folder import Folder, FolderView
from attar.checkpoints.gguf import export as gguf_export
from attar.checkpoints.gguf.checkpoint import PLAIN, GgufCheckpoint
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.vocabulary import is_gguf
from attar.errors import UserError
from attar.formats.scheme import Part
from attar.kernels import hadamard
from attar.model.families import DTYPES, read_config

REAL = (*DTYPES, "float64")


@dataclass(frozen=True)
class Original:
    """What a dense view is decoded from. `format` is the library's name in config.json, `gguf` or `safetensors`;
    `schemes` counts the compressed matrices by scheme or GGML type; `receipts` are `receipt.known` of it."""

    format: str
    schemes: Mapping[str, int]
    receipts: list[str]

    def __str__(self) -> str:
        counted = ", ".join(f"{count} of {name}" for name, count in self.schemes.items())
        return f"{self.format}: {counted}" if counted else self.format

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"format": self.format, "schemes": dict(self.schemes)}
        return found | ({"receipts": self.receipts} if self.receipts else {})


def open_dense(path: Path, dtype: str | None = None) -> Checkpoint:
    """Open the dense form of a folder or GGUF file, in one of `DTYPES` or the default above.

    Raises CheckpointError as opening does, and UserError where the model has no dense form: a module outside the
    decoder is compressed, or config.json cannot express a file's metadata.
    """
    if is_gguf(path):
        file = GgufCheckpoint.open(path, torch.float32)
        of = Checkpoint.over(GgufFolder(file), torch.float32)
        plain = PLAIN.get(file.info(f"{file.config.names.embed}.weight").kind.name, torch.bfloat16)
        return Checkpoint.over(DenseFolder(of, dtype or str(plain).removeprefix("torch."), _original_of_file(file)))
    of = Checkpoint.open(path)
    found = packed_schemes(of)
    library = str((of.folder.config.get("quantization_config") or {}).get("quant_method"))
    schemes = Counter(each.name for each in found.values())
    original = Original(library if found else "safetensors", schemes, receipt.known(path))
    return Checkpoint.over(DenseFolder(of, dtype, original))


class GgufFolder(Folder):
    """A GGUF file as a folder of its family: config.json, tokenizer, and every tensor by its name there, in float32.

    Raises ValueError where config.json cannot express the metadata.
    """

    def __init__(self, of: GgufCheckpoint) -> None:
        self.path, self.mapped = of.file.path, False
        self.files = {part.path.name: part for part in of.file.parts}
        self.of = of
        ends, padding = generation(of) or {}, of.file.metadata.get("tokenizer.ggml.padding_token_id")
        ids = {key: ends.get(key) for key in ("bos_token_id", "eos_token_id")} | {"pad_token_id": padding}
        self.config = {**config_json(of), **ids}  # a null as well, or transformers takes the family's
        self._family = read_config(self.config)
        check_config(of, self._family)

    def names(self) -> tuple[str, ...]:
        return tuple(self.of.names)

    def has(self, name: str) -> bool:
        return name in self.of.names

    def info(self, name: str) -> Part:
        shape = self.of.info(name).shape
        return Part("float32", shape[::-1] if self._turned(name) else shape)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        found = self.of.tensor(name)
        if self._turned(name):
            found = found.T.contiguous()
        elif self._family.norm_offset and gguf_export.is_norm(self._family, name.rpartition(".")[0]):
            found -= self._family.norm_offset
        return found.view(self.info(name).shape) if out is None else out.copy_(found)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.read(name)[start:stop]

    def generation(self) -> dict[str, Any] | None:
        return generation(self.of)

    def carry_files(self) -> tuple[str, ...]:
        return ()  # they are written anew

    def carry(self, names: Iterable[str], out: Path) -> None:
        write_tokenizer(self.of, out)

    def _turned(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        return part == "weight" and gguf_export.turned(self._family, module) and len(self.of.info(name).shape) == 2


class DenseFolder(FolderView):
    """A checkpoint as a folder without compression. `dtype` is one of `DTYPES`, None for the default of folders.

    Raises UserError where a module outside the decoder is compressed.
    """

    def __init__(self, source: Checkpoint, dtype: str | None, original: Original) -> None:
        folder = source.folder
        linears = packed_schemes(source)
        self._linears = {f"{source.stored_linear(name)}.weight": name for name in linears}
        kept = dense_names(source, linears)
        refuse_packed_outside(source, kept)
        config = {key: value for key, value in folder.config.items() if key != "quantization_config"}
        if dtype is not None:
            said = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
            config[said] = dtype
        super().__init__(folder, (*kept, *self._linears), config)
        self.original = original
        self._source, self._dtype = source, dtype
        self.decoded_as = dtype or str(source.dtype).removeprefix("torch.")  # the dtype of decoded tensors
        self._table: tuple[str, Tensor] | None = None  # the last of which rows were read

    def info(self, name: str) -> Part:
        linear = self._linears.get(name)
        if linear is None:
            part = self.of.info(name)
            return Part(self._dtype, part.shape) if self._dtype is not None and part.dtype in REAL else part
        shape = self._source.linear_shape(linear)
        return Part(self.decoded_as, shape[::-1] if self._source.config.names.is_transposed(linear) else shape)

    def values(self, name: str) -> Tensor:
        """Return a tensor's values before they are rounded to its dtype."""
        module = self._linears.get(name)
        if module is None:
            return self.of.read(name)
        linear = self._source.linear(module)
        assert linear.input_scale is None, "no folder stores one"
        found = values_of(linear)
        if linear.hadamard:  # x R W^T, and R is its own transpose
            found = hadamard.rotate(found, linear.hadamard)
        return found.T.contiguous() if self._source.config.names.is_transposed(module) else found

    def rounded(self, name: str, values: Tensor) -> Tensor:
        """Return a tensor's values in its dtype. Raises UserError where one is too large for it."""
        dtype: torch.dtype = getattr(torch, self.info(name).dtype)
        if values.dtype == dtype:
            return values
        found, largest = values.to(dtype), 0.0
        for ours, theirs in zip(pieces(found), pieces(values), strict=True):
            if bool((lost := ours.isinf() & theirs.isfinite()).any()):
                largest = max(largest, float(theirs[lost].abs().max()))
        if largest:
            wider = [each for each in DTYPES if torch.finfo(getattr(torch, each)).max >= largest]
            raise UserError(
                "not_finite",
                f"{name} holds {largest:g}, and {self.info(name).dtype} ends at {torch.finfo(dtype).max:g}: choose the "
                f"dtype {' or '.join(wider) or 'float64, which attar does not write'}",
            )
        return found

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        found = self.rounded(name, self.values(name))
        return found if out is None else out.copy_(found)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._linears and self._dtype is None:
            return self.of.read_rows(name, start, stop)
        table = self._table  # tables are read some rows at a time, thousands of times
        if table is None or table[0] != name:
            self._table = table = (name, self.read(name))
        return table[1][start:stop]


def refuse_packed_outside(source: Checkpoint, tensors: Iterable[str]) -> None:
    """Raise UserError where one of these tensors is a part of a compressed module that the decoder does not have, such
    as a linear of a vision tower."""
    for tensor in tensors:
        words = tensor.split(".")
        for end in range(1, len(words)):
            if words[end:] != ["bias"] and source.holds_packed(module := ".".join(words[:end])):
                raise UserError(
                    "quantization_unsupported",
                    f"{source.folder.path}: {module} is compressed and no part of the language model, so attar neither "
                    "decodes nor converts it",
                )


def _original_of_file(file: GgufCheckpoint) -> Original:
    kinds = [file.info(name).kind.name for name in file.names]
    schemes = Counter(kind for kind in kinds if kind not in PLAIN)
    return Original("gguf", schemes, receipt.known(file.file.path))
