"""Conversion of a folder to another format, bit for bit, under the contract of `run.py`. All files beside the weights
are copied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attar.checkpoints.convert.proof import Converted, Digest, compare
from attar.checkpoints.convert.source import Stored, dense_names, inexact, packed_linears, stored_bits, values_of
from attar.checkpoints.convert.targets import Target, bits_per_weight, packed_as
from attar.checkpoints.folder import CONFIG, write_json
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.writer import ShardWriter, atomic_folder, plan_files
from attar.formats.scheme import Part
from attar.progress import Progress


def folder_to_folder(checkpoint: Checkpoint, dst: Path, target: Target, overwrite: bool, report: Progress) -> Converted:
    """Write a compressed folder to the folder `dst` in the format of `target`; `report` counts linears.

    Raises ValueError naming the first tensor that the format cannot hold exactly. It also does where nothing is
    compressed or all is in that format already, where `dst` exists, and where a tensor reads back otherwise than it was
    written.
    """
    folder, config = checkpoint.folder, checkpoint.config
    linears = packed_linears(checkpoint)
    if not linears:
        raise ValueError(f"{folder.path} is not compressed: `attar compress` makes a smaller model of it")
    if folder.config["quantization_config"]["quant_method"] == target.name:
        raise ValueError(f"{folder.path} is stored as {target.name} already")
    if config.tied and config.names.head in linears and target.name != "compressed-tensors":
        raise inexact(config.names.embed, f"{target.name} has no packed embedding", folder.path)
    for name, each in linears.items():
        if (reason := target.against(each)) is not None:
            raise inexact(name, reason, folder.path)
    planned = target.planned(linears)
    placed = {checkpoint.stored_linear(name): each for name, each in planned.items()}
    kept = dense_names(checkpoint, linears)
    settings = target.config(placed, _dense_linears(checkpoint, linears, kept))
    layout: dict[str, Part] = {name: folder.info(name) for name in kept}
    for module, each in placed.items():
        layout |= target.declared(module, each)
    files, carried, ours = plan_files(layout), folder.carry_files(), Digest()
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
