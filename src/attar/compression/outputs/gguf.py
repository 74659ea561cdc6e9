"""The GGUF output file, an `Output` as the folder is.

Every matrix of a file has a type, so an uncompressed matrix is stored in the type of its own numbers. The embedding and
the LM head are in the mix too; norms and biases are F32, as llama.cpp wants them. The rules of `codecs.ggml_mix`
choose a matrix's type, unless the recipe overrides one. Types are handled as schemes (`GgmlBlocks`), so that
every solver that chooses codes for a scheme can choose them for a file.

A written block is left as a reader of the file has it: the grids that schemes name as such, everything else as its
blocks. So calibration on it, and the probes of the receipt, use the file's model, and its kernels' rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.convert.towers import tower_file
from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.gguf import export as gguf_export
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.names import file_name, homes, place
from attar.checkpoints.gguf.writer import GgufPlan, plan_parts
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.writer import FilePlan, ShardWriter
from attar.compression.block import structured
from attar.compression.outputs.model_card import untrained_note
from attar.compression.recipe.recipe import HEAD, Recipe, naming
from attar.compression.rotation.rotated import RotatedCheckpoint
from attar.compression.solvers.rounding import rtn
from attar.compression.training import trainable_parameters
from attar.errors import UserError
from attar.formats.codecs import ggml_blocks, ggml_codec, ggml_mix, ggml_round
from attar.formats.codecs.ggml import TYPES, GgmlType
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import GgmlBlocks
from attar.kernels.operands import Linear
from attar.model.layers import Block
from attar.progress import Progress

COPY_ROWS = 4096  # rows of a table copied at once
DENSE: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F32"}


class GgufOutput:
    """An `Output` that is a file: names, types and sizes of the file `name` that one recipe makes of one checkpoint.
    `calibrated` says whether importances will be known (`weighing`). Raises ValueError where the file format cannot
    represent the architecture or a part of the model. Also raises it for a recipe of schemes that are not GGML types,
    and where nothing would change."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, name: str, calibrated: bool = False) -> None:
        folder, config = checkpoint.folder, checkpoint.config
        assert recipe.mix is not None, "`Recipe.for_file` makes it one"
        self.checkpoint, self.recipe, self.name = checkpoint, recipe, name
        self.mix = ggml_mix.MIXES[recipe.mix]
        self.importances: Mapping[str, Tensor] = {}
        self.sizes: structured.Sizes | None = None
        ends = [checkpoint.stored_name(each) for each in (config.names.embed, HEAD)]
        self.shared = config.tied and not all(folder.has(f"{end}.weight") for end in ends)
        self.config = replace(config, tied=self.shared)
        self._embed = HEAD if self.shared else config.names.embed  # the embedding's name in recipes
        shapes = self._shapes()
        mixed, self.notes = self._mixed(shapes, calibrated)
        self.schemes: dict[str, Scheme | None] = recipe.schemes(shapes, mixed)
        for module, scheme in self.schemes.items():
            if scheme is not None and not isinstance(scheme.weight, GgmlBlocks):
                what = "the LM head" if module == HEAD else module
                raise UserError(
                    "gguf_inexpressible",
                    f"{what}: {scheme.name} has no place in a GGUF file, which holds types such as q4_k or q6_k",
                )
        if not any(self.schemes.values()) and recipe.rotate is None:
            raise UserError("recipe_without_effect", f"recipe {recipe.name} with its overrides compresses nothing")
        self.head = self.schemes[HEAD]
        self.packed_ends = self.shared and self.head is not None
        head_words, factors = gguf_export.describe(self.config, self._file_type(mixed), folder.path.resolve().name)
        tokenizer, note = gguf_export.words(folder.path, self.config)
        self.notes += () if note is None else (note,)
        if isinstance(checkpoint, RotatedCheckpoint) and checkpoint.untied:
            hint = ": `--head int4` makes it smaller" if recipe.head is None else ""
            self.notes += (
                "output.weight, which was token_embd.weight before, is a matrix of its own, because rotation folds the "
                f"last norm into it{hint}.",
            )
        if recipe.tune is not None:
            blocks = [scheme for name, scheme in self.schemes.items() if name not in (HEAD, self._embed)]
            self.notes += untrained_note(
                trainable_parameters.untrained_in_file(blocks), blocks, recipe.tune.method, dense=False
            )
        self._factors = factors
        self._metadata, self._layout = head_words | tokenizer, dict(self._tensors(shapes))
        self.tower = tower_file(folder, name, self._metadata)
        self.notes += self.tower.notes
        (self._plan,) = self._plans(None)
        counted = self._counted()
        stored = sum(self._kind(module).bytes(shapes[module]) for module in counted)
        self.bits_per_weight = 8 * stored / sum(math.prod(shapes[module]) for module in counted)

    def weighing(self, importances: Mapping[str, Tensor]) -> GgufOutput:
        found = copy.copy(self)
        found.importances = importances
        return found

    # Layout

    def plans(self, max_shard_bytes: int | None) -> list[FilePlan]:
        """Plan one file, whatever its size, or parts of at most so many bytes."""
        return [self._plan] if max_shard_bytes is None else [*self._plans(max_shard_bytes)]

    def _plans(self, most: int | None) -> list[GgufPlan]:
        return plan_parts(self.name, self._metadata, self._layout, most)

    def written(self, blocks_done: int) -> list[str]:
        return [each for each in self._layout if each.startswith("blk.") and int(each.split(".")[1]) < blocks_done]

    def _named(self, name: str) -> str:
        """Return the name in the file of our tensor or module `name`."""
        return file_name(self.config.names, name)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every matrix, by its name in recipes."""
        found = {}
        for module, _, _ in gguf_export.matrices(self.config):
            end = module == self.config.names.embed
            shape = (self.config.vocab_size, self.config.hidden) if end else self.checkpoint.linear_shape(module)
            found[self._embed if end else module] = shape
        return found

    def _mixed(
        self, shapes: Mapping[str, tuple[int, int]], calibrated: bool
    ) -> tuple[dict[str, Scheme], tuple[str, ...]]:
        """Return the schemes that the recipe's mix gives each matrix, and the notes about it."""
        config = self.config
        experts = 0 if config.experts is None else config.experts.count
        about = ggml_mix.About(config.layers, config.heads, config.kv_heads, self.shared, calibrated, experts)
        found: dict[str, Scheme] = {}
        others: dict[tuple[str, int, str], list[str]] = {}
        for module, matrix, layer in gguf_export.matrices(config):
            ours = self._embed if module == config.names.embed else module
            columns = shapes[ours][1]
            kind, wanted = ggml_mix.choose(self.mix, matrix, layer, columns, about)
            found[ours] = ggml_mix.scheme(kind)
            if wanted is not None:
                others.setdefault((wanted, columns, kind.name), []).append(file_name(config.names, module))
        return found, tuple(
            f"{', '.join(dict.fromkeys(names))}: rows of {columns} columns are not whole blocks of {wanted}, so they "
            f"are {kind}."
            for (wanted, columns, kind), names in others.items()
        )

    def _counted(self) -> list[str]:
        """Return the names over which bits a weight are counted: the linears and the LM head that a recipe reaches; if
        it reaches none, all linears."""
        linears = [module for module in self.schemes if module not in (HEAD, self._embed)]
        return [module for module in (*linears, HEAD) if self.schemes[module] is not None] or linears

    def _file_type(self, mixed: Mapping[str, Scheme]) -> int:
        """Return `general.file_type`: the mix's, where all types are its own or most matrices have its eponymous type.
        Otherwise the type of most matrices decides."""
        kinds = {module: self._kind(module) for module in self.schemes}
        found = gguf_export.file_type([kind.name for kind in kinds.values()])
        own = {module: ggml_codec.type_of(scheme) for module, scheme in mixed.items()}
        return self.mix.file_type if found == gguf_export.file_type([self.mix.base.name]) or kinds == own else found

    def _kind(self, module: str) -> GgmlType:
        """Return the type of the matrix that recipes call `module`; a kept matrix has the type of its own numbers."""
        scheme = self.schemes[module]
        if scheme is not None:
            return ggml_codec.type_of(scheme)
        stored = self.config.names.embed if module == self._embed and self._stores_embed() else module
        return TYPES[DENSE[self.checkpoint.folder.info(f"{self.checkpoint.stored_name(stored)}.weight").dtype]]

    def _stores_embed(self) -> bool:
        return self.checkpoint.has(f"{self.config.names.embed}.weight")

    def _tensors(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, tuple[GgmlType, tuple[int, ...]]]]:
        """Yield every tensor of the file: name, type and shape."""
        plain, embed = TYPES["F32"], self.config.names.embed
        for name, factors in self._factors.items():
            yield name, (plain, (len(factors),))

        def planned(name: str) -> gguf_export.Planned:
            module = self._embed if name == f"{embed}.weight" else name.removesuffix(".weight")
            if module in shapes:
                return self._kind(module), shapes[module]
            # a norm, a bias or the gate of experts
            return plain, self.checkpoint.folder.info(self.checkpoint.stored_name(name)).shape

        names = gguf_export.tensor_names(self.config, self.checkpoint.has)
        yield from gguf_export.layout(self.config, names, planned).items()

    # Writing

    def write_block(self, writer: ShardWriter, block: Block, layer: int) -> None:
        """Write every tensor of the block, and leave its weights as a reader of the file has them."""
        for norm in block.norms():
            name = f"{norm.name}.weight"
            _write_plain(writer, self._named(name), gguf_export.in_file(self.config, name, norm.weight))
            if norm.bias is not None:
                _write_plain(writer, self._named(f"{norm.name}.bias"), norm.bias)
        linears = {f"{linear.name}.weight": linear for linear in block.linears()}
        for tensor, names in homes(self.config.names, linears).items():
            if place(self.config.names, names[0]).expert is not None:
                writer.write_rows(tensor, (self._raw(linears[name])[None] for name in names))
            elif (linear := linears[names[0]]).name in self.schemes:
                writer.write(tensor, self._raw(linear))
            else:  # the gates of experts
                assert isinstance(linear.weight, Tensor)
                _write_plain(writer, tensor, gguf_export.in_file(self.config, names[0], linear.weight))
        for linear in linears.values():
            if (bias := linear.bias) is not None:
                if gguf_export.interleaves(self.config, linear.name):
                    bias = gguf_export.neighbours(bias, self.config.head_dim)
                _write_plain(writer, self._named(f"{linear.name}.bias"), bias)

    def _raw(self, linear: Linear) -> Tensor:
        """Return a weight as the file has it, and leave it in the linear as a reader has it."""
        weight = linear.weight
        assert isinstance(weight, Tensor | PackedTensor)
        if isinstance(weight, PackedTensor):
            raw = weight.parts["blocks"]
            linear.weight = self.as_read(weight)
        else:
            raw = ggml_round.encode(self._kind(linear.name), weight)
        interleaved = gguf_export.interleaves(self.config, linear.name)
        return gguf_export.neighbours(raw, self.config.head_dim) if interleaved else raw

    def write_again(self, writer: ShardWriter, found: Mapping[str, Tensor]) -> None:
        """Replace norms and biases, and numbers within the blocks of matrices, by attar's names."""
        file = GgufFile(writer.folder / writer.plans[0].name)
        for name, values in found.items():
            module = name.rpartition(".")[0]
            if gguf_export.interleaves(self.config, module):
                values = gguf_export.neighbours(values, self.config.head_dim)
            tensor, expert = place(self.config.names, name)
            if module in self.schemes and name.endswith(".weight"):
                raw = file.read(tensor)
                part = raw if expert is None else raw[expert]
                part.copy_(ggml_blocks.with_numbers(self._kind(module), part, values))
                writer.write(tensor, raw)
            else:
                _write_plain(writer, self._named(name), gguf_export.in_file(self.config, name, values))

    def round_head(self, rows: Tensor) -> PackedTensor:
        assert self.head is not None
        return self._rounded(HEAD, self.head, rows)

    def round_embedding(self, rows: Tensor) -> PackedTensor | None:
        scheme = self.schemes[self._embed]
        return None if scheme is None else self._rounded(self._embed, scheme, rows)

    def _rounded(self, module: str, scheme: Scheme, rows: Tensor) -> PackedTensor:
        with naming(module):
            return rtn.solve(rows, scheme, importance=self.importances.get(module))

    @staticmethod
    def as_read(packed: PackedTensor) -> PackedTensor:
        """Return a weight in GGML blocks as `GgufCheckpoint` gives it: a grid that a scheme names, or the blocks."""
        kind = ggml_codec.type_of(packed.scheme)
        return gguf_checkpoint.as_grid(kind, packed.parts["blocks"]) if kind.name in gguf_checkpoint.SCHEMES else packed

    def write_head(self, writer: ShardWriter, pieces: Iterable[PackedTensor]) -> None:
        module = self.config.names.embed if self.shared else HEAD
        writer.write_rows(self._named(f"{module}.weight"), (piece.parts["blocks"] for piece in pieces))

    def copy_rest(self, writer: ShardWriter, report: Progress) -> None:
        """Write what belongs to no block, except an LM head that `write_head` wrote."""
        names = self.config.names
        plain = [f"{names.final_norm}.weight", *([f"{names.final_norm}.bias"] if self.config.norm == "layer" else [])]
        plain += [] if names.positions is None else [f"{names.positions}.weight"]
        for name in plain:
            values = gguf_export.in_file(self.config, name, self.checkpoint.tensor(name))
            _write_plain(writer, self._named(name), values)
        for name, factors in self._factors.items():
            _write_plain(writer, name, factors)
        ends = [self._embed, *([] if self.shared else [HEAD])]
        left = [module for module in ends if module != HEAD or self.head is None]
        for done, module in enumerate(left, 1):
            name = self.config.names.embed if module == self._embed else module
            writer.write_rows(self._named(f"{name}.weight"), self._table(module))
            report("copying", done, len(left))

    def _table(self, module: str) -> Iterator[Tensor]:
        """Yield the embedding or the LM head, some rows at a time, as bytes."""
        stored = self.config.names.embed if module == self._embed and self._stores_embed() else HEAD
        name = self.checkpoint.stored_name(f"{stored}.weight")
        scheme = self.schemes[module]
        for at in range(0, self.config.vocab_size, COPY_ROWS):
            rows = self.checkpoint.folder.read_rows(name, at, min(at + COPY_ROWS, self.config.vocab_size))
            if scheme is None:
                yield ggml_round.encode(self._kind(module), rows)
            else:
                yield self._rounded(module, scheme, rows).parts["blocks"]

    def write_config(self, folder: Path) -> None:
        """Write nothing: a GGUF file contains its own configuration."""

    def write_card(self, folder: Path, size: int, cost: Mapping[str, Any] | None) -> None:
        """Write nothing: only the receipt lies beside a file."""


def _write_plain(writer: ShardWriter, name: str, values: Tensor) -> None:
    writer.write(name, values.float().contiguous().view(torch.uint8))
