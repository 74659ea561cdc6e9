"""Conversion of a folder to a GGUF file, bit for bit, under the contract of `run.py`.

The content of config.json and tokenizer.json becomes metadata. GGML's blocks are copied. Integers and 4-bit floats
become those of a type with the very same values, where there is one (`gguf.py` in this package).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

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
from attar.checkpoints.convert.towers import tower_file
from attar.checkpoints.gguf import export as gguf_export
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.names import ROUTER, file_name, homes, place
from attar.checkpoints.gguf.writer import atomic_gguf, output_path
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
    kinds: dict[str, GgmlType] = {}
    for together in homes(config.names, linears).values():
        kinds |= dict.fromkeys(together, _chosen(checkpoint, {name: linears[name] for name in together}))
    if shared and config.names.head in kinds:
        kinds[config.names.embed] = kinds[config.names.head]
    file_type = gguf_export.file_type([kind.name for kind in kinds.values()] or [DENSE[config.dtype]])
    head, factors = gguf_export.describe(config, file_type, folder.path.resolve().name)
    words, note = gguf_export.words(folder.path, config)
    target = Path(os.path.realpath(dst))  # of a link; all files of the output lie in one folder
    tower = tower_file(folder, target.name, head | words)
    tower.check(target.parent, overwrite)
    layout: dict[str, tuple[GgmlType, tuple[int, ...]]] = {}
    layout |= {name: (TYPES["F32"], (len(each),)) for name, each in factors.items()}
    tensors = homes(config.names, gguf_export.tensor_names(config, checkpoint.has))
    names = [name for together in tensors.values() for name in together]
    layout |= gguf_export.layout(config, names, lambda name: _planned(checkpoint, name, kinds))
    ours = Digest()

    def raw_of(name: str, kind: GgmlType) -> Tensor:
        """Return the bytes of one of our tensors as the file has them."""
        module = name.removesuffix(".weight")
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
        report("converting", len(ours.of), len(names))
        if not gguf_export.interleaves(config, name.rpartition(".")[0]):
            return raw
        turned = gguf_export.neighbours(values.float().contiguous() if name.endswith(".bias") else raw, config.head_dim)
        return turned.contiguous().view(torch.uint8)

    with atomic_gguf(dst, head | words, layout, overwrite, most) as writer:
        for name, each in factors.items():
            writer.write(name, each.contiguous().view(torch.uint8))
        for tensor, together in tensors.items():
            kind = layout[tensor][0]
            if place(config.names, together[0]).expert is None:
                writer.write(tensor, raw_of(together[0], kind))
            else:
                writer.write_rows(tensor, (raw_of(name, kind)[None] for name in together))
        writer.sync()
        theirs = _of_file(GgufCheckpoint.open(writer.folder / writer.plans[0].name, torch.float32), names, report)
        compare(ours, theirs)
        size = sum(each.size for each in writer.plans)
        path = output_path(dst, writer.plans)
        tower.clear(target.parent)
    tower.write(target.parent)
    stored = sum(kinds[name].bytes(each.shape) for name, each in linears.items())
    bits = 8 * stored / sum(math.prod(each.shape) for each in linears.values()) if linears else None
    notes = (*(() if note is None else (note,)), *tower.notes)
    before = stored_bits(checkpoint, linears)
    return Converted(path, GGUF, len(ours.of), len(linears), size, bits, before, ours.whole, notes)


def _chosen(checkpoint: Checkpoint, linears: Mapping[str, Stored]) -> GgmlType:
    """Return the first type that holds a linear, or those of all experts. A single candidate is checked only when it
    is written. Raises ValueError where none fits."""
    candidates: list[GgmlType] | None = None
    for name, each in linears.items():
        found = kinds_for(each)
        if isinstance(found, str):
            raise inexact(name, found, checkpoint.folder.path)
        candidates = [kind for kind in found if candidates is None or kind in candidates]
    assert candidates is not None
    if len(candidates) == 1:
        return candidates[0]
    first, reasons = next(iter(linears)), list[str]()
    for kind in candidates:
        for name in linears:
            weight = checkpoint.linear(name).weight
            assert isinstance(weight, PackedTensor)
            try:
                blocks(weight, kind)
            except ValueError as error:
                first = name
                reasons.append(str(error))
                break
        else:
            return kind
    reasons = reasons or ["a file has one type for the experts of a layer, and no type holds all of these"]
    raise inexact(first, "; ".join(dict.fromkeys(reasons)), checkpoint.folder.path)


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
    # F32, as llama.cpp wants them
    plain = len(part.shape) != 2 or module == config.names.positions or ROUTER in file_name(config.names, module)
    shape = part.shape[::-1] if len(part.shape) == 2 and gguf_export.turned(config, module) else part.shape
    return TYPES["F32" if plain else DENSE[part.dtype]], shape


def _of_file(checkpoint: GgufCheckpoint, names: list[str], report: Progress) -> Digest:
    found = Digest()
    for done, name in enumerate(names, 1):
        found.add(name, checkpoint.tensor(name))
        report("comparing", done, len(names))
    return found
