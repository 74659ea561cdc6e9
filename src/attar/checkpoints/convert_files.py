"""Conversions of which one side is a GGUF file: `convert.py` says what is asked of them.

What a folder says in config.json and tokenizer.json a file says in metadata, so these are written anew, and read back.
Types of blocks stand for values that integers of a folder's formats do, or none does; which, `convert_gguf.py` knows
for one way, and `gguf_checkpoint.SCHEMES` for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints import gguf_config, gguf_export, hf, vocabulary
from attar.checkpoints.convert_gguf import blocks, kind_for
from attar.checkpoints.convert_proof import (
    Converted,
    Digest,
    Progress,
    as_json,
    compare,
    emptied,
    inexact,
    packed_linears,
    values_of,
)
from attar.checkpoints.convert_targets import Stored, Target
from attar.checkpoints.folder import CONFIG
from attar.checkpoints.gguf_checkpoint import GgufCheckpoint
from attar.checkpoints.gguf_config import ROPE_FACTORS, file_name
from attar.checkpoints.gguf_writer import atomic_gguf
from attar.checkpoints.hf import Checkpoint
from attar.checkpoints.writer import ShardWriter, atomic_folder, plan_files
from attar.formats import ggml_round
from attar.formats.ggml import TYPES, GgmlType
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Part

GGUF = "gguf"

DENSE: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types by the dtype of what they hold."""

PLAIN = 0  # general.file_type of a file whose matrices are of several types, as llama.cpp's own writers say it


# From folder to file


def folder_to_file(checkpoint: Checkpoint, dst: Path, overwrite: bool, report: Progress) -> Converted:
    folder = checkpoint.folder
    gguf_export.architecture(checkpoint.config)
    linears = packed_linears(checkpoint)
    ends = [f"{checkpoint.stored_name(name)}.weight" for name in (checkpoint.config.names.embed, "lm_head")]
    shared = checkpoint.config.tied and not all(map(folder.has, ends))
    config = replace(checkpoint.config, tied=shared)
    kinds: dict[str, GgmlType] = {}
    for name, each in linears.items():
        found = kind_for(each)
        if isinstance(found, str):
            raise inexact(name, found, folder.path)
        kinds[name] = found
    if shared and config.names.head in kinds:
        kinds[config.names.embed] = kinds[config.names.head]
    head, factors = gguf_export.describe(config, _file_type(kinds, config.dtype), folder.path.resolve().name)
    words, note = gguf_export.words(folder.path, config)
    layout: dict[str, tuple[GgmlType, tuple[int, ...]]] = {}
    if factors is not None:
        layout[ROPE_FACTORS] = (TYPES["F32"], (len(factors),))
    names = list(gguf_export.tensor_names(config, checkpoint.has))
    for name in names:
        layout[file_name(name)] = _planned(checkpoint, name, kinds)
    ours = Digest()
    with atomic_gguf(dst, head | words, layout, overwrite) as writer:
        if factors is not None:
            writer.write(ROPE_FACTORS, factors.contiguous().view(torch.uint8))
        for done, name in enumerate(names, 1):
            module, kind = name.removesuffix(".weight"), layout[file_name(name)][0]
            if module in kinds:
                linear = checkpoint.linear(config.names.head if module == config.names.embed else module)
                assert isinstance(linear.weight, PackedTensor)
                try:
                    raw = blocks(linear.weight, kind)
                except ValueError as error:
                    raise inexact(module, error, folder.path) from None
                values = values_of(linear)
            else:
                values = dense_values(checkpoint, name)
                raw = ggml_round.encode(kind, values)
            ours.add(name, values)
            if gguf_export.interleaves(config, name.rpartition(".")[0]):
                turned = _plain(values) if name.endswith(".bias") else raw
                raw = gguf_export.neighbours(turned, config.head_dim)
                raw = raw.contiguous().view(torch.uint8) if name.endswith(".bias") else raw
            writer.write(file_name(name), raw)
            report("converting", done, len(names))
        writer.sync()
        theirs = _of_file(GgufCheckpoint.open(writer.folder / writer.plans[0].name, torch.float32), names)
        compare(ours, theirs)
        size = writer.plans[0].size
    return Converted(dst, GGUF, len(ours.of), len(linears), size, ours.whole, () if note is None else (note,))


def _plain(values: Tensor) -> Tensor:
    return values.float().contiguous()


def _planned(checkpoint: Checkpoint, name: str, kinds: Mapping[str, GgmlType]) -> tuple[GgmlType, tuple[int, ...]]:
    """Type and shape of a tensor of the file."""
    module = name.removesuffix(".weight")
    if module in kinds:
        head = checkpoint.config.names.head
        return kinds[module], checkpoint.linear_shape(head if module == checkpoint.config.names.embed else module)
    part = checkpoint.folder.info(_stored(checkpoint, name))
    if part.dtype not in DENSE:
        raise inexact(name, f"GGUF has no type for {part.dtype}", checkpoint.folder.path)
    return TYPES[DENSE[part.dtype] if len(part.shape) == 2 else "F32"], part.shape


def dense_values(checkpoint: Checkpoint, name: str) -> Tensor:
    return checkpoint.folder.read(_stored(checkpoint, name))


def _stored(checkpoint: Checkpoint, name: str) -> str:
    """A dense tensor's name in the folder: the one table of a tied model may be the output matrix."""
    names, stored = checkpoint.config.names, checkpoint.stored_name(name)
    if name == f"{names.embed}.weight" and not checkpoint.folder.has(stored):
        return checkpoint.stored_name(f"{names.head}.weight")
    return stored


def _file_type(kinds: Mapping[str, GgmlType], dtype: str) -> int:
    """The number of what most matrices are."""
    names = [kind.name for kind in kinds.values()] or [DENSE[dtype]]
    common = max(set(names), key=names.count)
    return {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}.get(common, PLAIN)


def _of_file(checkpoint: GgufCheckpoint, names: list[str]) -> Digest:
    found = Digest()
    for name in names:
        found.add(name, checkpoint.tensor(name))
    return found


# From file to folder


def file_to_folder(
    checkpoint: GgufCheckpoint, dst: Path, target: Target, overwrite: bool, report: Progress
) -> Converted:
    config, where = checkpoint.config, checkpoint.file.path
    names = list(gguf_export.tensor_names(config, checkpoint.has))
    ends = {f"{each}.weight" for each in (config.names.embed, config.names.head)}
    linears: dict[str, Stored] = {}
    notes: list[str] = []
    layout: dict[str, Part] = {}
    for name in names:
        module, kind = name.removesuffix(".weight"), checkpoint.file.info(file_name(name)).kind
        shape = checkpoint.file.info(file_name(name)).shape
        scheme = checkpoint.scheme_of(module) if name.endswith(".weight") and len(shape) == 2 else None
        if name in ends or scheme is None:
            dtype = next((dtype for dtype, plain in DENSE.items() if plain == kind.name), None)
            if dtype is None and name not in ends:
                reason = f"{kind.name} has values that no grid of {target.name} has"
                raise inexact(file_name(name), reason, where)
            if dtype is None:
                notes.append(f"{file_name(name)} is {kind.name}, of which folders have no form: it became float32.")
            layout[name] = Part(dtype or "float32", shape)
            continue
        linears[module] = Stored(scheme, (shape[0], shape[1]))
        if (against := target.against(linears[module])) is not None:
            raise inexact(file_name(name), against, where)
        layout |= target.declared(module, linears[module])
    if not linears:
        raise ValueError(f"{where} is not compressed: `attar compress` reads folders, and {target.name} needs integers")
    settings = target.config(linears, [config.names.head])
    files, ours = plan_files(layout), Digest()
    with atomic_folder(dst, overwrite) as work:
        with ShardWriter(emptied(work), files) as writer:
            for done, name in enumerate(names, 1):
                module = name.removesuffix(".weight")
                values = checkpoint.tensor(name)
                if module in linears:
                    for tensor, value in target.arrays(module, checkpoint.linear(module)).items():
                        writer.write(tensor, value)
                else:
                    writer.write(name, values.to(getattr(torch, layout[name].dtype)))
                ours.add(name, values)
                report("converting", done, len(names))
            writer.finish()
        (work.out / CONFIG).write_text(as_json({**_config_json(checkpoint), "quantization_config": settings}))
        _write_tokenizer(checkpoint, work.out)
        again, theirs = Checkpoint.open(work.out, as_stored=True), Digest()
        _check_config(checkpoint, again)
        for name in names:
            module = name.removesuffix(".weight")
            theirs.add(name, values_of(again.linear(module)) if module in linears else dense_values(again, name))
        compare(ours, theirs)
    size = sum(file.size for file in files)
    return Converted(dst, target.name, len(ours.of), len(linears), size, ours.whole, tuple(notes))


def _config_json(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    """config.json of a file, as transformers reads it too."""
    file, config = checkpoint.file, checkpoint.config
    found = gguf_config.config_json(file.metadata, file.names(), config.vocab_size, config.dtype)
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
    found["model_type"] = file.metadata["general.architecture"]
    return {key: value for key, value in found.items() if value is not None}


def _check_config(file: GgufCheckpoint, folder: Checkpoint) -> None:
    """Raises ValueError where config.json could not say what the metadata did."""
    ours, theirs = file.config, folder.config
    same = replace(
        theirs, bos_ids=ours.bos_ids, eos_ids=ours.eos_ids, qkv_bias=ours.qkv_bias, output_bias=ours.output_bias,
        feed_forward_bias=ours.feed_forward_bias, dtype=ours.dtype,
    )  # fmt: skip
    if same != ours:
        raise ValueError(f"{file.file.path} cannot be converted exactly: config.json has no words for its rope")


def _write_tokenizer(checkpoint: GgufCheckpoint, out: Path) -> None:
    path = checkpoint.file.path
    if not vocabulary.has_tokenizer(path):
        return
    tokenizer = vocabulary.tokenizer(path)
    tokenizer.save(out)
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    (out / hf.GENERATION).write_text(
        as_json({key: value for key, value in generation.items() if value not in (None, [])})
    )
