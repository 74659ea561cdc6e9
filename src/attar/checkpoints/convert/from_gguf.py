"""Conversion of a GGUF file to a folder, bit for bit, under the contract of `run.py`.

Config and tokenizer are written anew from the metadata, and read back. Matrices of blocks become the form that the
folder's format has for their values: mostly integers (`grids.py` decides), 4-bit floats where it has these. Offsets
must be zero points, and scales numbers of the format's dtype; this is found when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from attar.checkpoints import vocabulary
from attar.checkpoints.convert.gguf import DENSE
from attar.checkpoints.convert.proof import Converted, Digest, compare
from attar.checkpoints.convert.source import Stored, dense_values, inexact, values_of
from attar.checkpoints.convert.targets import Target, bits_per_weight, packed_as
from attar.checkpoints.folder import CONFIG, GENERATION, write_json
from attar.checkpoints.gguf import config as gguf_config
from attar.checkpoints.gguf import export as gguf_export
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.writer import MAX_SHARD, ShardWriter, atomic_folder, plan_files
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Part, Scheme
from attar.formats.weight_formats import GgmlBlocks
from attar.kernels.operands import Linear
from attar.model.config import ModelConfig
from attar.progress import Progress

FOLDERS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose files become folders: those that store every tensor in the form of a folder."""

MODEL_TYPES: Mapping[str, str] = {
    "MixtralForCausalLM": "mixtral", "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3_text",
}  # fmt: skip
"""Values of `model_type` in config.json that differ from the architecture's name in files."""


def file_to_folder(
    checkpoint: GgufCheckpoint, dst: Path, target: Target, overwrite: bool, report: Progress, most: int = MAX_SHARD
) -> Converted:
    """Write a GGUF file to the folder `dst` in the format of `target`, in files of at most `most` bytes; `report`
    counts tensors.

    Raises ValueError naming the first tensor that the format cannot hold exactly. It also does where nothing is
    compressed, where config.json cannot express the metadata, where `dst` exists, and where a tensor reads back
    otherwise than it was written.
    """
    config, where = checkpoint.config, checkpoint.file.path
    if config.architecture not in FOLDERS:
        known = ", ".join(FOLDERS)
        raise UserError(
            "architecture_unsupported",
            f"{where} is a {config.architecture}, and files that become folders of {target.name} are of {known}: --to "
            "dense writes a folder of any",
        )
    names = list(gguf_export.tensor_names(config, checkpoint.has))
    ends = {f"{each}.weight" for each in (config.names.embed, config.names.head)}
    linears: dict[str, Stored] = {}
    notes: list[str] = []
    layout: dict[str, Part] = {}
    for name in names:
        module, info = name.removesuffix(".weight"), checkpoint.info(name)
        kind, shape = info.kind, info.shape
        dtype = next((dtype for dtype, plain in DENSE.items() if plain == kind.name), None)
        if name in ends or dtype is not None or len(shape) != 2:
            if dtype is None:
                notes.append(
                    f"{checkpoint.place(name).tensor} is {kind.name}: of a file only matrices of blocks are re-packed, "
                    "so it became float32."
                )
            layout[name] = Part(dtype or "float32", shape)
            continue
        linears[module] = Stored(Scheme(GgmlBlocks(kind), layout="plain"), (shape[0], shape[1]))
        if (against := target.against(linears[module])) is not None:
            raise inexact(checkpoint.place(name).tensor, against, where)
    if not linears:
        raise UserError(
            "source_not_compressed",
            f"{where} is not compressed: there is nothing to re-pack. `attar compress` makes a smaller model of it",
        )
    planned = target.planned(linears)
    for module, each in planned.items():
        layout |= target.declared(module, each)
    settings = target.config(planned, [config.names.head])
    files, ours = plan_files(layout, most), Digest()
    with atomic_folder(dst, overwrite, resumes=False) as work:
        with ShardWriter(work.out, files) as writer:
            for done, name in enumerate(names, 1):
                module = name.removesuffix(".weight")
                values = checkpoint.tensor(name)
                if module in linears:
                    try:
                        arrays = target.arrays(module, packed_as(_linear(checkpoint, module), planned[module]))
                    except ValueError as error:
                        raise inexact(checkpoint.place(name).tensor, error, where) from None
                    for tensor, value in arrays.items():
                        writer.write(tensor, value)
                else:
                    writer.write(name, values.to(getattr(torch, layout[name].dtype)))
                ours.add(name, values)
                report("converting", done, len(names))
            writer.finish()
        write_json(work.out / CONFIG, {**config_json(checkpoint), "quantization_config": settings})
        write_tokenizer(checkpoint, work.out)
        again, theirs = Checkpoint.open(work.out, as_stored=True), Digest()
        check_config(checkpoint, again.config)
        for done, name in enumerate(names, 1):
            module = name.removesuffix(".weight")
            theirs.add(name, values_of(again.linear(module)) if module in linears else dense_values(again, name))
            report("comparing", done, len(names))
        compare(ours, theirs)
    size = sum(file.size for file in files)
    bits, weights = bits_per_weight(target, planned), sum(math.prod(each.shape) for each in linears.values())
    before = 8 * sum(each.scheme.bytes(each.shape) for each in linears.values()) / weights
    return Converted(dst, target.name, len(ours.of), len(linears), size, bits, before, ours.whole, tuple(notes))


def _linear(checkpoint: GgufCheckpoint, module: str) -> Linear:
    """Return the linear as the blocks of the file, without its bias."""
    scheme = Scheme(GgmlBlocks(checkpoint.kind_of(module)), layout="plain")
    raw = checkpoint.rows_of(f"{module}.weight")
    return Linear(module, PackedTensor(scheme, checkpoint.linear_shape(module), {"blocks": raw}))


def config_json(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    """Return the config.json of a file, in a form that transformers reads too."""
    file, config = checkpoint.file, checkpoint.config
    found = gguf_config.config_json(file.metadata, file.names(), config.vocab_size, config.dtype, checkpoint.factors)
    rope = config.ropes[0]
    if rope is not None and rope.kind == "llama3":
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    at = f"{config.names.layer.format(i=0)}."
    found["attention_bias"] = checkpoint.has(f"{at}{config.names.qkv[0]}.bias")
    found["mlp_bias"] = checkpoint.has(f"{at}{config.names.down}.bias")
    found["model_type"] = MODEL_TYPES.get(config.architecture, file.metadata["general.architecture"])
    return {key: value for key, value in found.items() if value is not None}


def check_config(file: GgufCheckpoint, made: ModelConfig) -> None:
    """Raise ValueError where config.json, which reads back as `made`, could not express the metadata."""
    ours, theirs = file.config, gguf_config.as_in_files(made)
    same = replace(
        theirs, bos_ids=ours.bos_ids, eos_ids=ours.eos_ids, qkv_bias=ours.qkv_bias, output_bias=ours.output_bias,
        feed_forward_bias=ours.feed_forward_bias, dtype=ours.dtype,
    )  # fmt: skip
    if same != ours:
        found = ", ".join(f.name for f in fields(ours) if getattr(same, f.name) != getattr(ours, f.name))
        raise UserError(
            "conversion_inexact",
            f"{file.file.path} cannot be converted exactly: config.json reads back with another {found}",
        )


def write_tokenizer(checkpoint: GgufCheckpoint, out: Path) -> None:
    """Write the file's tokenizer and the tokens that end a text into the folder `out`, if the file has a tokenizer."""
    if (ends := generation(checkpoint)) is not None:
        vocabulary.tokenizer(checkpoint.file.path).save(out)
        write_json(out / GENERATION, ends)


def generation(checkpoint: GgufCheckpoint) -> dict[str, Any] | None:
    """Return the generation_config.json of a file: the tokens that begin and end a text; None without a tokenizer."""
    path = checkpoint.file.path
    if not vocabulary.has_tokenizer(path):
        return None
    tokenizer = vocabulary.tokenizer(path)
    found = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    return {key: value for key, value in found.items() if value not in (None, [])}
