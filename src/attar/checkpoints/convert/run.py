"""Body of `attar convert`: write the same model in another format, bit for bit, or raise an error with the reason.

Nothing is rounded. A compressed linear keeps its numbers, in the target's bit order, or on a larger grid that includes
them, which may take more bits: the proof reports how many. A tensor that the target cannot hold exactly is refused by
name. Dense tensors are copied in their dtype. When all is written, the output is opened with the reader of its own
format, and every tensor of both is decoded to float32. The two must be the same bits; the proof reports their digests.
An output that differs is not put in place.

Between folders (compressed-tensors, AWQ, GPTQ) all files beside the weights are copied. A GGUF file has the same
content in metadata, so its config.json and tokenizer are written anew, and read back. A file's embedding and LM head
may have a type that no folder's format has (Q6_K, mostly): those are stored as float32 values.

The output keeps the source's receipt, with the hashes of its own files: `verify` replays the same probes on it.

A dense folder (`to_dense.py`) is the exception: it may be rounded to its dtype, and has a receipt of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from attar.checkpoints import vocabulary
from attar.checkpoints.convert.dense import refuse_packed_outside
from attar.checkpoints.convert.from_gguf import file_to_folder
from attar.checkpoints.convert.gguf import GGUF
from attar.checkpoints.convert.proof import Converted, Digest, compare
from attar.checkpoints.convert.source import (
    Stored,
    dense_names,
    inexact,
    packed_linears,
    packed_schemes,
    stored_bits,
    values_of,
)
from attar.checkpoints.convert.targets import TARGETS, Target, bits_per_weight, packed_as
from attar.checkpoints.convert.to_dense import DENSE, to_dense
from attar.checkpoints.convert.to_gguf import folder_to_file
from attar.checkpoints.convert.towers import left_out
from attar.checkpoints.convert.vila import is_vila_folder
from attar.checkpoints.folder import CONFIG, write_json
from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.layouts import compressed_tensors
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources import hub
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.strict_io import near
from attar.checkpoints.writer import MAX_SHARD, ShardWriter, atomic_folder, plan_files
from attar.errors import UserError
from attar.formats.scheme import Part
from attar.model.families import DTYPES
from attar.model.vision.wrappers import OUTSIDE
from attar.progress import Progress

FORMATS = (GGUF, *TARGETS, DENSE)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the model `src` (folder, GGUF file, Hub id or `demo`) to `dst` in the format `to`, one of `FORMATS`.
    Only VILA's three folders go without `to`: they are written as one dense folder.

    `dtype` is that of a dense output: float32, float16 or bfloat16, by default the source's own. An output file has at
    most `max_shard_bytes`; None: 5 GB, and a GGUF file of any size.

    Raises ValueError naming the first tensor that the format cannot hold exactly, and why. It also does for an unknown
    format or dtype, where source and output are of one format, where `dst` exists, and where the source's receipt is
    damaged.
    """
    if to is not None and to not in FORMATS:
        raise UserError("name_unknown", f"unknown format {to!r}: known are {', '.join(FORMATS)}")
    if dtype is not None and to not in (None, DENSE):
        raise UserError("option_unused", f"a dtype is of a dense output: leave it out, or write --to {DENSE}")
    if dtype is not None and dtype not in DTYPES:
        raise UserError("name_unknown", f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}{near(dtype, DTYPES)}")
    source = hub.resolve(src, vila=True)
    if source.is_dir() and is_vila_folder(source):
        if to not in (None, DENSE):
            said = f"{source} is in VILA's layout, which is converted --to {DENSE} first: --to {to} takes that output"
            raise UserError("feature_unsupported", said)
        to = DENSE
    if to is None:
        raise UserError("option_missing", f"give the format to write: --to {', '.join(FORMATS)}")
    if not str(dst):
        raise UserError("option_missing", "the output's name is empty: give a folder or a .gguf file to write")
    if (Path(dst).suffix.lower() == ".gguf") != (to == GGUF):
        kind = "a file whose name ends" if to == GGUF else "a folder whose name does not end"
        raise UserError("output_invalid", f"--to {to} writes {kind} in .gguf, not {dst}")
    if source.resolve().is_relative_to(Path(dst).resolve()):
        raise UserError(
            "output_is_source", f"{dst} would replace the model that it is made from: choose another output"
        )
    report = progress or (lambda stage, done, total: None)
    if to == DENSE:
        done = to_dense(source, Path(dst), dtype, overwrite, report, max_shard_bytes or MAX_SHARD)
        return replace(done, notes=done.notes + left_out(source))
    found = receipt.read_receipt(source)
    if vocabulary.is_gguf(source):
        if to == GGUF:
            raise UserError("source_is_gguf", f"{source} is a GGUF file already")
        file = GgufCheckpoint.open(source, torch.float32)
        most = max_shard_bytes or MAX_SHARD
        done = file_to_folder(file, Path(dst), TARGETS[to], overwrite, report, most)
        done = replace(done, notes=done.notes + left_out(source))
        return _with_receipt(found, source, done, report, has_tower=False)
    checkpoint = Checkpoint.open(source, as_stored=True)
    if (checkpoint.folder.config.get("quantization_config") or {}).get("transform_config"):
        raise UserError(
            "conversion_inexact",
            f"{source} rotates inputs at run time (transform_config), which no other format can say",
        )
    if to == GGUF:
        done = folder_to_file(checkpoint, Path(dst), overwrite, report, max_shard_bytes)
        copied = mmproj.stored(Path(os.path.realpath(done.path)), OUTSIDE.get(checkpoint.config.architecture, ()))
        return _with_receipt(found, source, done, report, copied, has_tower=bool(copied))
    refuse_packed_outside(checkpoint, dense_names(checkpoint, packed_schemes(checkpoint)))
    done = folder_to_folder(checkpoint, Path(dst), TARGETS[to], overwrite, report, max_shard_bytes or MAX_SHARD)
    return _with_receipt(found, source, done, report)


def _with_receipt(
    found: receipt.Receipt | None,
    source: Path,
    done: Converted,
    report: Progress,
    copied: Mapping[str, str] | None = None,
    has_tower: bool = True,
) -> Converted:
    """Copy the source's receipt to the finished output. A kill before leaves an output without a receipt, never one
    with another's. `copied` and `has_tower` are those of `receipt.carry`."""
    if found is None:
        return done
    output = Path(os.path.realpath(done.path))  # the receipt lies beside the target of a link
    try:
        why = receipt.carry(
            found, source, output, done.sha256, done.bits_per_weight, copied, has_tower,
            lambda n, total: report("hashing", n, total),
        )  # fmt: skip
    except (OSError, ValueError) as error:  # the output is whole
        why = f"the output has no receipt: {error}"
    return done if why is None else replace(done, notes=(*done.notes, why))


def folder_to_folder(
    checkpoint: Checkpoint, dst: Path, target: Target, overwrite: bool, report: Progress, most: int = MAX_SHARD
) -> Converted:
    """Write a compressed folder to the folder `dst` in the format of `target`, in files of at most `most` bytes;
    `report` counts linears.

    Raises ValueError naming the first tensor that the format cannot hold exactly. It also does where nothing is
    compressed or all is in that format already, where `dst` exists, and where a tensor reads back otherwise than it was
    written.
    """
    folder, config = checkpoint.folder, checkpoint.config
    linears = packed_linears(checkpoint)
    if not linears:
        raise UserError(
            "source_not_compressed", f"{folder.path} is not compressed: `attar compress` makes a smaller model of it"
        )
    if folder.config["quantization_config"]["quant_method"] == target.name:
        raise UserError("source_compressed", f"{folder.path} is stored as {target.name} already")
    if config.tied and config.names.head in linears and target.name != "compressed-tensors":
        raise inexact(config.names.embed, f"{target.name} has no packed embedding", folder.path)
    for name, each in linears.items():
        if (reason := target.against(each)) is not None:
            raise inexact(name, reason, folder.path)
    planned = target.planned(linears)
    placed = {checkpoint.stored_linear(name): each for name, each in planned.items()}
    kept = dense_names(checkpoint, linears)
    settings = target.config(placed, _dense_linears(checkpoint, linears, kept))
    if target.name == compressed_tensors.METHOD:
        for module in OUTSIDE.get(checkpoint.config.architecture, ()):
            settings["ignore"] += compressed_tensors.ignored_within(module)
    layout: dict[str, Part] = {name: folder.info(name) for name in kept}
    for module, each in placed.items():
        layout |= target.declared(module, each)
    files, carried, ours = plan_files(layout, most), folder.carry_files(), Digest()
    with atomic_folder(dst, overwrite, resumes=False) as work:
        with ShardWriter(work.out, files) as writer:
            for done, name in enumerate(linears, 1):
                linear = checkpoint.linear(name)
                try:
                    arrays = target.arrays(checkpoint.stored_linear(name), packed_as(linear, planned[name]))
                except ValueError as error:
                    raise inexact(name, error, folder.path) from None
                for tensor, value in arrays.items():
                    writer.write(tensor, value)
                ours.add(name, values_of(linear))
                report("converting", done, len(linears))
            for name in kept:
                value = folder.read(name)
                writer.write(name, value)
                ours.add(name, value)
            writer.finish()
        write_json(work.out / CONFIG, {**folder.config, "quantization_config": settings})
        folder.carry(carried, work.out)
        again, theirs = Checkpoint.open(work.out, as_stored=True), Digest()
        for done, name in enumerate(linears, 1):
            theirs.add(name, values_of(again.linear(name)))
            report("comparing", done, len(linears))
        for name in kept:
            theirs.add(name, again.folder.read(name))
        compare(ours, theirs)
    size = sum(file.size for file in files)
    bits, before = bits_per_weight(target, placed), stored_bits(checkpoint, linears)
    return Converted(dst, target.name, len(ours.of), len(linears), size, bits, before, ours.whole, ())


def _dense_linears(checkpoint: Checkpoint, linears: Mapping[str, Stored], kept: list[str]) -> list[str]:
    """Return the stored names of the linears that are not compressed, gates of experts and a tied LM head among
    them."""
    folder, names = checkpoint.folder, checkpoint.config.names
    tables = [checkpoint.stored_name(each) for each in (names.embed, names.positions) if each is not None]
    matrices = [name.removesuffix(".weight") for name in kept if len(folder.info(name).shape) == 2]
    head = [] if names.head in linears else [checkpoint.stored_name(names.head)]
    return list(dict.fromkeys([*(name for name in matrices if name not in tables), *head]))
