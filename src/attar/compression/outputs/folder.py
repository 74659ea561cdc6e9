"""The output folder: the stored form and name of every tensor, decided before any weight is read.

Tensors keep the names, dtypes and order of the source, also where dtypes differ within it; only a compressed linear's
weight becomes the parts its scheme declares. Everything that belongs to a block is written when the block is done,
since transforms change norms and biases too; the rest (embeddings, final norm, LM head) is copied, large tables by
rows.

A recipe may compress the LM head. A tied model's LM head is its embedding as well, and is stored once, as the
embedding: as large as several blocks, a second copy would outweigh the gain of packing. compressed-tensors declares
packed embeddings, but not every reader has them (`model_card.notes`). Readers that skip the LM head of tied
models would silently drop the one copy if it were stored as `lm_head`. Where the source stores both tables, they stay
two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.folder import CONFIG, write_json
from attar.checkpoints.layouts import compressed_tensors, export_layouts
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.writer import MAX_SHARD, FilePlan, ShardWriter, plan_files
from attar.compression.block import structured
from attar.compression.outputs import model_card, towers
from attar.compression.outputs.tower_schemes import UNCHANGED
from attar.compression.recipe.recipe import HEAD, Recipe, naming
from attar.compression.rotation.rotated import RotatedCheckpoint
from attar.compression.solvers.rounding import rtn
from attar.compression.training import trainable_parameters
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Part, Scheme, scale_dtype
from attar.model.assembly import all_compressible, gates
from attar.model.layers import Block
from attar.model.vision.wrappers import OUTSIDE
from attar.progress import Progress

COPY_BYTES = 16 << 20  # bytes of a table copied at once


class FolderOutput:
    """An `Output` that is a folder: names, schemes and sizes of what one recipe makes of one checkpoint. Raises
    ValueError where a group size does not divide, a scheme has no place in the
    output's format, nothing would change, or a file that belongs beside the weights is a link out of the source."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, vision: str = UNCHANGED) -> None:
        folder, config = checkpoint.folder, checkpoint.config
        self.checkpoint = checkpoint
        self.carried = folder.carry_files()
        self.recipe = recipe
        ends = [checkpoint.stored_name(name) for name in (config.names.embed, HEAD)]
        tables = [end for end in ends if folder.has(f"{end}.weight")]
        self.shared = config.tied and len(tables) == 1  # one table serves both ends
        stored = {f"{checkpoint.stored_name(name)}.weight": name for name in all_compressible(config)}
        stored[f"{tables[-1]}.weight"] = HEAD
        shapes = {}
        for tensor, name in stored.items():
            rows, columns = folder.info(tensor).shape
            shapes[name] = (columns, rows) if config.names.is_transposed(name) else (rows, columns)
        self.schemes: dict[str, Scheme | None] = {
            name: None if scheme is None else scheme.with_scale_dtype(scale_dtype(folder.info(tensor).dtype))
            for (tensor, name), scheme in zip(stored.items(), recipe.schemes(shapes).values(), strict=True)
        }
        self.sizes: structured.Sizes | None = None
        self.importances: Mapping[str, Tensor] = {}
        if recipe.structured is not None:
            self.sizes = structured.sizes(config, recipe.structured.percent)
        changes = any(self.schemes.values()) or any(map(recipe.reshapes, self.schemes))
        if not changes and recipe.rotate is None:
            raise UserError("recipe_without_effect", f"recipe {recipe.name} with its overrides compresses nothing")
        self.head, self.head_shape = self.schemes[HEAD], shapes[HEAD]
        self.packed_ends = self.shared and self.head is not None
        self._modules = {name: checkpoint.stored_name(name) for name in self.schemes}  # as the output names them
        if self.packed_ends:
            self._modules[HEAD] = ends[0]
        used = {scheme for scheme in self.schemes.values() if scheme is not None}
        self._library = export_layouts.library_for(used)
        self.tower = towers.quantized(checkpoint, recipe, vision)
        towers.check_library(self.tower, recipe, self._library.METHOD)
        self._quantization = self._quantization_config(shapes)
        self._head_parts: dict[str, str] = {}  # tensor of each part of a compressed LM head
        if self.head is not None:
            self._head_parts = {
                part: f"{self._modules[HEAD]}.{self._library.stored_part(part, self.head)}"
                for part in self.head.parts(self.head_shape)
            }
        self.layout: dict[str, Part] = {}
        self._in_block: dict[str, int] = {}  # the block that writes each tensor
        layers = {checkpoint.stored_name(config.names.layer.format(i=i)) + ".": i for i in range(config.layers)}
        packed_bytes = weights = 0
        for tensor in folder.names():
            parts = {tensor: folder.info(tensor)}
            if self.tower is not None:
                parts = self.tower.parts(tensor) or parts
            if self.sizes is not None:
                parts[tensor] = structured.declared(config, self.sizes, tensor, parts[tensor])
            name = stored.get(tensor, "")
            scheme = self.schemes.get(name)
            if scheme is not None:
                parts = export_layouts.declared(self._library, self._modules[name], scheme, shapes[name])
                packed_bytes += scheme.bytes(shapes[name])
                weights += math.prod(shapes[name])
            elif name and (recipe.reshapes(name) or (not changes and name != HEAD)):
                packed_bytes += parts[tensor].bytes  # pruned and only-rotated weights are stored like any other
                weights += math.prod(parts[tensor].shape)
            self.layout |= parts
            for prefix, layer in layers.items():
                if tensor.startswith(prefix):
                    self._in_block |= dict.fromkeys(parts, layer)
        self.bits_per_weight = 8 * packed_bytes / weights
        self.method = self._library.METHOD if used or self.tower is not None else model_card.DENSE
        experts = config.experts is not None
        self.notes = model_card.notes(config.names.transposed, experts, self.packed_ends, used, self.method)
        online = isinstance(checkpoint, RotatedCheckpoint) and bool(checkpoint.online)
        special = experts or self.head is not None
        stored_in = used if self.tower is None else {*used, *self.tower.schemes.values()}
        self.readers = "" if self.notes else model_card.readers(stored_in, special, online)
        self.notes += model_card.wide_codes(used)
        if recipe.tune is not None:
            blocks = {name: scheme for name, scheme in self.schemes.items() if name != HEAD}
            learns = any(scheme is None and recipe.reshapes(name) for name, scheme in blocks.items())
            untrained = trainable_parameters.untrained(blocks.values())
            self.notes += model_card.untrained_note(untrained, blocks.values(), recipe.tune.method, learns)
        if recipe.structured is not None and self.sizes is not None:
            self.notes += (structured.account(config, recipe.structured.percent, self.sizes),)
        if isinstance(checkpoint, RotatedCheckpoint):
            self.notes += checkpoint.notes
        self.notes += towers.note(checkpoint, self.tower)

    def weighing(self, importances: Mapping[str, Tensor]) -> FolderOutput:
        return self

    def plans(self, max_shard_bytes: int | None) -> list[FilePlan]:
        return plan_files(self.layout, MAX_SHARD if max_shard_bytes is None else max_shard_bytes)

    def written(self, blocks_done: int) -> list[str]:
        return [name for name, layer in self._in_block.items() if layer < blocks_done]

    def write_block(self, writer: ShardWriter, block: Block, layer: int) -> None:
        changed = dict(self._tensors(block))
        for name in [name for name, home in self._in_block.items() if home == layer]:
            tensor = changed.get(name)
            writer.write(name, self.checkpoint.folder.read(name) if tensor is None else self._as_stored(name, tensor))

    def _as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the source in the dtype that it has there: bit for bit, where nothing changed it."""
        folder, dtype = self.checkpoint.folder, getattr(torch, self.layout[name].dtype)
        if tensor.dtype == dtype or not folder.has(name):
            return tensor
        stored = folder.read(name)
        return stored if torch.equal(stored.to(tensor.dtype), tensor) else tensor.to(dtype)

    def _tensors(self, block: Block) -> Iterator[tuple[str, Tensor]]:
        for linear in block.linears():
            module, weight = self.checkpoint.stored_name(linear.name), linear.weight
            if linear.bias is not None:
                yield f"{module}.bias", linear.bias
            if isinstance(weight, PackedTensor):
                yield from export_layouts.parts_of(self._library, module, weight, linear.activation_scale).items()
            else:
                assert isinstance(weight, Tensor)
                transposed = self.checkpoint.config.names.is_transposed(linear.name)
                yield f"{module}.weight", weight.T if transposed else weight
        for norm in block.norms():
            yield f"{self.checkpoint.stored_name(norm.name)}.weight", norm.weight
            if norm.bias is not None:
                yield f"{self.checkpoint.stored_name(norm.name)}.bias", norm.bias

    def write_again(self, writer: ShardWriter, found: Mapping[str, Tensor]) -> None:
        for name, tensor in found.items():
            writer.write(name, self._as_stored(name, tensor))

    def round_head(self, rows: Tensor) -> PackedTensor:
        assert self.head is not None
        with naming(HEAD):
            return rtn.solve(rows, self.head, scale_search=self.recipe.rounding.scale_search)

    def round_embedding(self, rows: Tensor) -> PackedTensor | None:
        return self.round_head(rows) if self.packed_ends else None

    def as_read(self, packed: PackedTensor) -> PackedTensor:
        return packed

    def write_head(self, writer: ShardWriter, pieces: Iterable[PackedTensor]) -> None:
        assert self.head is not None
        names = self._head_parts
        sizes = {part: declared.bytes for part, declared in self.head.parts(self.head_shape).items()}
        largest = max(sizes, key=sizes.__getitem__)
        small: dict[str, list[Tensor]] = {part: [] for part in names if part not in (largest, "shape")}

        def rows() -> Iterator[Tensor]:
            for piece in pieces:
                for part, found in small.items():
                    found.append(piece.parts[part])
                yield piece.parts[largest]

        writer.write_rows(names[largest], rows())
        for part, found in small.items():
            writer.write(names[part], torch.cat(found))
        if "shape" in names:
            writer.write(names["shape"], torch.tensor(self.head_shape))

    def copy_rest(self, writer: ShardWriter, report: Progress) -> None:
        folder = self.checkpoint.folder
        done_already = self._in_block.keys() | self._head_parts.values()
        rest = [name for name in self.layout if name not in done_already]
        of_tower = self._of_tower()
        made: dict[str, Tensor] = {}
        for done, name in enumerate(rest, 1):
            if name in of_tower:
                if name not in made:  # the parts of a weight lie one after another
                    assert self.tower is not None
                    made = self.tower.quantized(of_tower[name])
                writer.write(name, made.pop(name))
                report("copying", done, len(rest))
                continue
            part = folder.info(name)
            if part.bytes <= COPY_BYTES or len(part.shape) < 2:
                writer.write(name, folder.read(name))
            else:
                step = max(1, COPY_BYTES * part.shape[0] // part.bytes)
                starts = range(0, part.shape[0], step)
                writer.write_rows(name, (folder.read_rows(name, at, min(at + step, part.shape[0])) for at in starts))
            report("copying", done, len(rest))

    def _of_tower(self) -> dict[str, str]:
        """Return the source's tensor of each part of a quantized weight of the tower."""
        if self.tower is None:
            return {}
        weights = [f"{module}.weight" for module in self.tower.schemes]
        return {part: weight for weight in weights for part in self.tower.parts(weight) or ()}

    def write_config(self, folder: Path) -> None:
        """Write config.json with the quantization config, and copy every file that stays unchanged."""
        config: dict[str, Any] = dict(self.checkpoint.folder.config)
        if self.head is not None:  # two different tables, or one that is found by its own name only
            config["tie_word_embeddings"] = self.shared
        if self.sizes is not None:
            config |= {"num_attention_heads": self.sizes.heads, "num_key_value_heads": self.sizes.kv_heads}
            config |= {"head_dim": self.checkpoint.config.head_dim, "intermediate_size": self.sizes.intermediate}
        if self._quantization is not None:
            config["quantization_config"] = self._quantization
        write_json(folder / CONFIG, config)
        self.checkpoint.folder.carry(self.carried, folder)

    def write_card(self, folder: Path, size: int, cost: Mapping[str, Any] | None) -> None:
        recipe, sentences = (self.recipe.name, self.recipe.head_name), (self.readers, *self.notes)
        card = model_card.text(*recipe, self.bits_per_weight, size, cost, sentences, self.method)
        (folder / "README.md").write_text(card, encoding="utf-8")

    def _quantization_config(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Any] | None:
        if not any(self.schemes.values()) and self.tower is None:
            return None  # pruned only: a dense checkpoint
        modules = [(self._modules[name], scheme) for name, scheme in self.schemes.items()]
        packed = {module: scheme for module, scheme in modules if scheme is not None}
        dense = [module for module, scheme in modules if scheme is None]
        # Never compressed: an LM head that is stored as the embedding, and the gates of mixtures of experts.
        about = self.checkpoint.config
        others = [HEAD] * self.packed_ends + [name for i in range(about.layers) for name in gates(about, i)]
        dense += map(self.checkpoint.stored_name, others)
        for module in OUTSIDE.get(about.architecture, ()) if self.tower is None else ():
            dense += self._library.ignored_within(module)
        dense += () if self.tower is None else self.tower.ignored
        if about.architecture in OUTSIDE and HEAD not in packed and HEAD not in dense:
            dense.append(HEAD)  # under the name that transformers 5 gives it
        embeddings = [self._modules[HEAD]] if self.packed_ends else []
        sizes = {self._modules[name]: shape for name, shape in shapes.items()}
        config = self._library.quantization_config(packed, dense, embeddings, sizes)
        if self.tower is not None:
            config = self.tower.in_config(config)
        online = self.checkpoint.online if isinstance(self.checkpoint, RotatedCheckpoint) else {}
        if online and self._library is not compressed_tensors:
            raise UserError(
                "recipe_conflict",
                f"{self.recipe.name}: rotations at run time have a place in compressed-tensors alone, these schemes "
                "have none there: use rotate, with online and across false",
            )
        if online:
            rotated = {self._modules[name]: block for name, block in online.items()}
            config["transform_config"] = compressed_tensors.transform_config(rotated)
        return config
