"""The folder that comes out: what is stored under which name, decided before any weight is read.

Tensors keep the names, dtypes and order of the source; only a compressed linear's weight becomes the parts its scheme
declares. Everything that belongs to a block is written when the block is done, since transforms change norms and biases
too; the rest (embeddings, final norm, output matrix) is copied, large tables by rows.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoints import compressed_tensors
from attar.checkpoints.hf import Checkpoint
from attar.checkpoints.writer import ShardWriter
from attar.compression.recipe import Recipe
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Part, Scheme
from attar.kernels.operands import Linear
from attar.model.decoder import compressible
from attar.model.layers import Block

COPY_BYTES = 16 << 20  # of a table copied at once


class Output:
    """Names, schemes and sizes of the output of one recipe on one checkpoint.

    Raises ValueError where the source is compressed already, a group size does not divide, nothing would change, or a
    file that belongs beside the weights is a link out of the source.
    """

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe) -> None:
        folder, config = checkpoint.folder, checkpoint.config
        if "quantization_config" in folder.config:
            raise ValueError(f"{folder.path} is compressed already: start from the original checkpoint")
        self.checkpoint = checkpoint
        self.carried = folder.carry_files()
        modules = [name for layer in range(config.layers) for name in compressible(config, layer)]
        stored = {f"{checkpoint.stored_name(name)}.weight": name for name in modules}
        shapes = {}
        for tensor, name in stored.items():
            rows, columns = folder.info(tensor).shape
            shapes[name] = (columns, rows) if config.names.is_transposed(name) else (rows, columns)
        self.schemes: dict[str, Scheme | None] = {
            name: None if scheme is None else scheme.with_scale_dtype(folder.info(tensor).dtype)
            for (tensor, name), scheme in zip(stored.items(), recipe.schemes(shapes).values(), strict=True)
        }
        if not any(self.schemes.values()):
            raise ValueError(f"recipe {recipe.name} with its overrides compresses nothing")
        self.layout: dict[str, Part] = {}
        self._in_block: dict[str, int] = {}  # which block writes a tensor
        layers = {checkpoint.stored_name(config.names.layer.format(i=i)) + ".": i for i in range(config.layers)}
        packed_bytes = weights = 0
        for tensor in folder.names():
            parts = {tensor: folder.info(tensor)}
            name = stored.get(tensor, "")
            scheme = self.schemes.get(name)
            if scheme is not None:
                parts = compressed_tensors.declared(tensor.removesuffix(".weight"), scheme, shapes[name])
                packed_bytes += scheme.bytes(shapes[name])
                weights += math.prod(shapes[name])
            self.layout |= parts
            for prefix, layer in layers.items():
                if tensor.startswith(prefix):
                    self._in_block |= dict.fromkeys(parts, layer)
        self.bits_per_weight = 8 * packed_bytes / weights
        self.notes = _notes(config.names.transposed, config.experts is not None, self.schemes.values())

    def written(self, blocks_done: int) -> list[str]:
        """The tensors that are on disk once so many blocks are done."""
        return [name for name, layer in self._in_block.items() if layer < blocks_done]

    def write_block(self, writer: ShardWriter, block: Block, layer: int) -> None:
        """Write every tensor that the source stores under the block's name."""
        changed = dict(self._tensors(block))
        for name in [name for name, home in self._in_block.items() if home == layer]:
            tensor = changed.get(name)
            writer.write(name, self.checkpoint.folder.read(name) if tensor is None else tensor)

    def _tensors(self, block: Block) -> Iterator[tuple[str, Tensor]]:
        for linear in block.linears():
            yield from self._linear(linear)
        for norm in block.norms():
            yield f"{self.checkpoint.stored_name(norm.name)}.weight", norm.weight
            if norm.bias is not None:
                yield f"{self.checkpoint.stored_name(norm.name)}.bias", norm.bias

    def _linear(self, linear: Linear) -> Iterator[tuple[str, Tensor]]:
        module = self.checkpoint.stored_name(linear.name)
        if linear.bias is not None:
            yield f"{module}.bias", linear.bias
        if isinstance(linear.weight, PackedTensor):
            yield from compressed_tensors.parts_of(module, linear.weight, linear.activation_scale).items()
        else:
            assert isinstance(linear.weight, Tensor)
            transposed = self.checkpoint.config.names.is_transposed(linear.name)
            yield f"{module}.weight", linear.weight.T if transposed else linear.weight

    def copy_rest(self, writer: ShardWriter, report: Callable[[str, int, int], None]) -> None:
        """Copy what belongs to no block."""
        folder = self.checkpoint.folder
        rest = [name for name in self.layout if name not in self._in_block]
        for done, name in enumerate(rest, 1):
            part = folder.info(name)
            if part.bytes <= COPY_BYTES or len(part.shape) < 2:
                writer.write(name, folder.read(name))
            else:
                step = max(1, COPY_BYTES * part.shape[0] // part.bytes)
                starts = range(0, part.shape[0], step)
                blocks = (folder.read_rows(name, at, min(at + step, part.shape[0])) for at in starts)
                writer.write_rows(name, blocks)
            report("copying", done, len(rest))

    def write_config(self, folder: Path) -> None:
        """config.json with the quantization config, and every file that is carried over as it is."""
        schemes = {self.checkpoint.stored_name(name): scheme for name, scheme in self.schemes.items()}
        config: dict[str, Any] = dict(self.checkpoint.folder.config)
        config["quantization_config"] = compressed_tensors.quantization_config(
            {name: scheme for name, scheme in schemes.items() if scheme is not None},
            [name for name, scheme in schemes.items() if scheme is None] + self._other_linears(),
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        for name in self.carried:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.checkpoint.folder.path / name, folder / name)

    def _other_linears(self) -> list[str]:
        """Linears that no recipe compresses: the output matrix, and the gates of mixtures of experts."""
        names, config = self.checkpoint.config.names, self.checkpoint.config
        found = [names.head]
        for layer in range(config.layers):
            if config.experts is not None and config.is_sparse(layer):
                at = names.layer.format(i=layer)
                found.append(f"{at}.{names.router}")
                found += [f"{at}.{names.shared_gate}"] if config.experts.shared else []
        return [self.checkpoint.stored_name(name) for name in found]


def _notes(transposed: bool, experts: bool, schemes: Iterable[Scheme | None]) -> tuple[str, ...]:
    """What whoever loads the output elsewhere must know, a sentence each."""
    if transposed:
        return (
            "It loads in attar only: transformers, which keeps these weights in Conv1D modules, passes the packed ones "
            "over and starts from random ones.",
        )
    stored = [scheme for scheme in schemes if scheme is not None]
    asymmetric = any(scheme.layout == "packed" and not scheme.weight.symmetric for scheme in stored)
    if experts and (asymmetric or any(scheme.activation is not None for scheme in stored)):
        return (
            "It loads in attar; transformers 5.23, which fuses the experts of a mixture, refuses theirs in W8A8 and "
            "with packed zero points, and does not round the activations of FP8.",
        )
    if asymmetric:
        return (
            "attar and vLLM read it; transformers 5.23 needs "
            "`quantization_config=CompressedTensorsConfig(dequantize=True)` for its packed zero points.",
        )
    return ()


def model_card(
    recipe: str, bits_per_weight: float, size: int, cost: Mapping[str, Any] | None, notes: Sequence[str] = ()
) -> str:
    """README.md of a compressed folder: what it is, how to run it, and what the compression cost."""
    measured = "Not measured: `attar eval` does, against the original."
    if cost is not None:
        rows = [("perplexity", "ppl"), ("KL divergence, mean", "kl_mean"), ("KL divergence, 99.9 %", "kl_p999")]
        rows += [("top-1 agreement", "top1"), ("tokens measured", "tokens")]
        measured = "| measure | value |\n|---|---|\n" + "\n".join(
            f"| {label} | {cost[key]:.6g} |" for label, key in rows
        )
    readers = " ".join(notes) or "attar, transformers and vLLM read it."
    return (
        "---\nlibrary_name: transformers\ntags: [attar, compressed-tensors]\n---\n\n# Compressed with attar\n\n"
        f"Recipe `{recipe}`: {bits_per_weight:.3f} bits per weight in the compressed linears, {size:,} bytes of\n"
        f"weights. Stored as compressed-tensors. {readers}\n\n"
        "`receipt.json` holds the recipe, hashes and probes; `attar verify` checks them on your machine.\n\n"
        f"## What it cost\n\nAgainst the original, on held-out text:\n\n{measured}\n"
    )
