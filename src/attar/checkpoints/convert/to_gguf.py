"""Conversion of a folder to a GGUF file, bit for bit, under the contract of `run.py`.

The content of config.json and tokenizer.json becomes metadata. GGML's blocks are copied. Integers and 4-bit floats
become those of a type with the very same values, where there is one (`gguf.py` in this package).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from attar.checkpoints.convert.gguf import DENSE, GGUF, blocks, kinds_for
from attar.checkpoints.convert.proof import Converted, Digest, compare
from attar.checkpoints.convert.source import (
    Stored,
    dense_values,
    inexact,
    packed_linears,
    stored_bits,
    stored_name,
    values_of,
)
from attar.checkpoints.gguf import export as gguf_export
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.names import file_name
from attar.checkpoints.gguf.writer import atomic_gguf
from attar.checkpoints.sources.hf import Checkpoint
from attar.formats.codecs import ggml_round
from attar.formats.codecs.ggml import TYPES, GgmlType
from attar.formats.packed import PackedTensor
from attar.progress import Progress


def folder_to_file(
    checkpoint: Checkpoint, dst: Path, overwrite: bool, report: Progress, most: int | None = None
) -> Converted:
    """Write a folder to the GGUF file `dst`, or parts of at most `most` bytes; `report` counts tensors.

    Raises ValueError naming the first tensor that no type holds exactly. It also does where GGUF cannot express the
    model or its tokenizer, where `dst` exists, and where a tensor reads back otherwise than it was written.
    """
    folder = checkpoint.folder
    gguf_export.architecture(checkpoint.config)
    linears = packed_linears(checkpoint)
    ends = [f"{checkpoint.stored_name(name)}.weight" for name in (checkpoint.config.names.embed, "lm_head")]
    shared = checkpoint.config.tied and not all(map(folder.has, ends))
    config = replace(checkpoint.config, tied=shared)
    kinds = {name: _chosen(checkpoint, name, each) for name, each in linears.items()}
    if shared and config.names.head in kinds:
        kinds[config.names.embed] = kinds[config.names.head]
    file_type = gguf_export.file_type([kind.name for kind in kinds.values()] or [DENSE[config.dtype]])
    head, factors = gguf_export.describe(config, file_type, folder.path.resolve().name)
    words, note = gguf_export.words(folder.path, config)
    layout: dict[str, tuple[GgmlType, tuple[int, ...]]] = {}
    layout |= {name: (TYPES["F32"], (len(each),)) for name, each in factors.items()}
    names = list(gguf_export.tensor_names(config, checkpoint.has))
    layout |= {file_name(config.names, name): _planned(checkpoint, name, kinds) for name in names}
    ours = Digest()
    with atomic_gguf(dst, head | words, layout, overwrite, most) as writer:
        for name, each in factors.items():
            writer.write(name, each.contiguous().view(torch.uint8))
        for done, name in enumerate(names, 1):
            module, kind = name.removesuffix(".weight"), layout[file_name(config.names, name)][0]
            if module in kinds:
                linear = checkpoint.linear(config.names.head if module == config.names.embed else module)
                assert isinstance(linear.weight, PackedTensor)
                try:
                    raw = blocks(linear.weight, kind)
                except ValueError as error:
                    raise inexact(module, error, folder.path) from None
                values = values_of(linear)
            else:
                values = gguf_export.in_file(config, name, dense_values(checkpoint, name))
                raw = ggml_round.encode(kind, values)
            ours.add(name, values)
            if gguf_export.interleaves(config, name.rpartition(".")[0]):
                turned = values.float().contiguous() if name.endswith(".bias") else raw
                raw = gguf_export.neighbours(turned, config.head_dim)
                raw = raw.contiguous().view(torch.uint8) if name.endswith(".bias") else raw
            writer.write(file_name(config.names, name), raw)
            report("converting", done, len(names))
        writer.sync()
        theirs = _of_file(GgufCheckpoint.open(writer.folder / writer.plans[0].name, torch.float32), names, report)
        compare(ours, theirs)
        size = sum(each.size for each in writer.plans)
        path = dst.with_name(writer.plans[0].name)
    stored = sum(kinds[name].bytes(each.shape) for name, each in linears.items())
    bits = 8 * stored / sum(math.prod(each.shape) for each in linears.values()) if linears else None
    notes = () if note is None else (note,)
    before = stored_bits(checkpoint, linears)
    return Converted(path, GGUF, len(ours.of), len(linears), size, bits, before, ours.whole, notes)


def _chosen(checkpoint: Checkpoint, name: str, each: Stored) -> GgmlType:
    """Return the first type that holds a linear. A single candidate is checked only when it is written. Raises
    ValueError where none fits."""
    found = kinds_for(each)
    if isinstance(found, str):
        raise inexact(name, found, checkpoint.folder.path)
    if len(found) == 1:
        return found[0]
    weight, reasons = checkpoint.linear(name).weight, []
    assert isinstance(weight, PackedTensor)
    for kind in found:
        try:
            blocks(weight, kind)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return kind
    raise inexact(name, "; ".join(dict.fromkeys(reasons)), checkpoint.folder.path)


def _planned(checkpoint: Checkpoint, name: str, kinds: Mapping[str, GgmlType]) -> tuple[GgmlType, tuple[int, ...]]:
    """Return the type and shape of a tensor of the file. Raises ValueError for a dtype that is not written."""
    module = name.removesuffix(".weight")
    if module in kinds:
        head = checkpoint.config.names.head
        return kinds[module], checkpoint.linear_shape(head if module == checkpoint.config.names.embed else module)
    part = checkpoint.folder.info(stored_name(checkpoint, name))
    if part.dtype not in DENSE:
        reason = f"attar writes {', '.join(DENSE)} to GGUF files, not {part.dtype}"
        raise inexact(name, reason, checkpoint.folder.path)
    config = checkpoint.config
    plain = len(part.shape) != 2 or module == config.names.positions  # F32, as llama.cpp wants them
    shape = part.shape[::-1] if len(part.shape) == 2 and gguf_export.turned(config, module) else part.shape
    return TYPES["F32" if plain else DENSE[part.dtype]], shape


def _of_file(checkpoint: GgufCheckpoint, names: list[str], report: Progress) -> Digest:
    found = Digest()
    for done, name in enumerate(names, 1):
        found.add(name, checkpoint.tensor(name))
        report("comparing", done, len(names))
    return found
