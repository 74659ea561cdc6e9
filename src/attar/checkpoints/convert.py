"""`attar convert`: the same model in another format, bit for bit, or an error that says why not.

Nothing is rounded. A compressed linear keeps its integers and scales, in the order of the target's bits; what the
target cannot hold exactly is refused, naming the tensor. Dense tensors are copied in the dtype they have. When all is
written the output is opened with the reader of its own format, every tensor of both is decoded to float32, and the two
must be the same bits: their digests are what the proof says. An output that differs is not put in place.

Between folders (compressed-tensors, AWQ, GPTQ) everything beside the weights is carried over. A GGUF file says the same
in metadata, so its config.json and tokenizer are written anew, and read back. Of a file, the two tables around the
blocks may have a type that no folder's format has (Q6_K, mostly): those are stored as the float32 they stand for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from attar.checkpoints import hub, vocabulary
from attar.checkpoints.convert_files import GGUF, file_to_folder, folder_to_file
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
from attar.checkpoints.convert_targets import TARGETS, Stored, Target
from attar.checkpoints.folder import CONFIG
from attar.checkpoints.gguf_checkpoint import GgufCheckpoint
from attar.checkpoints.hf import Checkpoint
from attar.checkpoints.writer import ShardWriter, atomic_folder, plan_files
from attar.formats.scheme import Part

FORMATS = (GGUF, *TARGETS)


def convert(
    src: str | Path, dst: str | Path, *, to: str, overwrite: bool = False, progress: Progress | None = None
) -> Converted:
    """Write the model `src` (folder, GGUF file, Hub id or `demo`) to `dst` in the format `to`, one of `FORMATS`.

    Raises ValueError naming the first tensor that the format cannot hold exactly, and why; for an unknown format; where
    source and output are of one format; and where `dst` exists.
    """
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}: known are {', '.join(FORMATS)}")
    source = hub.resolve(src)
    if not str(dst):
        raise ValueError("the output's name is empty: give a folder or a .gguf file to write")
    if (Path(dst).suffix.lower() == ".gguf") != (to == GGUF):
        raise ValueError(f"a {to} output {'ends' if to == GGUF else 'does not end'} in .gguf, and {dst} does otherwise")
    if source.resolve().is_relative_to(Path(dst).resolve()):
        raise ValueError(f"{dst} would replace the model that it is made from: choose another output")
    report = progress or (lambda stage, done, total: None)
    if vocabulary.is_gguf(source):
        if to == GGUF:
            raise ValueError(f"{source} is a GGUF file already")
        return file_to_folder(GgufCheckpoint.open(source, torch.float32), Path(dst), TARGETS[to], overwrite, report)
    checkpoint = Checkpoint.open(source, as_stored=True)
    if to == GGUF:
        return folder_to_file(checkpoint, Path(dst), overwrite, report)
    return _folder_to_folder(checkpoint, Path(dst), TARGETS[to], overwrite, report)


def _folder_to_folder(
    checkpoint: Checkpoint, dst: Path, target: Target, overwrite: bool, report: Progress
) -> Converted:
    folder, config = checkpoint.folder, checkpoint.config
    linears = packed_linears(checkpoint)
    if not linears:
        raise ValueError(f"{folder.path} is not compressed: `attar compress` makes a smaller model of it")
    if folder.config["quantization_config"]["quant_method"] == target.name:
        raise ValueError(f"{folder.path} is stored as {target.name} already")
    modules = {checkpoint.stored_linear(name): each for name, each in linears.items()}
    if config.tied and config.names.head in linears and target.name != "compressed-tensors":
        raise inexact(config.names.embed, f"{target.name} has no packed embedding", folder.path)
    for name, each in linears.items():
        if (reason := target.against(each)) is not None:
            raise inexact(name, reason, folder.path)
    kept = [name for name in folder.names() if name.rpartition(".")[0] not in modules or name.endswith(".bias")]
    settings = target.config(modules, _dense_linears(checkpoint, linears, kept))
    layout: dict[str, Part] = {name: folder.info(name) for name in kept}
    for module, each in modules.items():
        layout |= target.declared(module, each)
    files, ours = plan_files(layout), Digest()
    with atomic_folder(dst, overwrite) as work:
        with ShardWriter(emptied(work), files) as writer:
            for done, name in enumerate(linears, 1):
                linear = checkpoint.linear(name)
                try:
                    arrays = target.arrays(checkpoint.stored_linear(name), linear)
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
        (work.out / CONFIG).write_text(as_json({**folder.config, "quantization_config": settings}))
        for name in folder.carry_files():
            (work.out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder.path / name, work.out / name)
        again, theirs = Checkpoint.open(work.out, as_stored=True), Digest()
        for name in linears:
            theirs.add(name, values_of(again.linear(name)))
        for name in kept:
            theirs.add(name, again.folder.read(name))
        compare(ours, theirs)
    size = sum(file.size for file in files)
    return Converted(dst, target.name, len(ours.of), len(linears), size, ours.whole, ())


def _dense_linears(checkpoint: Checkpoint, linears: Mapping[str, Stored], kept: list[str]) -> list[str]:
    """Stored names of the linears that are not compressed, gates of experts and a tied output matrix among them."""
    folder, names = checkpoint.folder, checkpoint.config.names
    tables = [checkpoint.stored_name(each) for each in (names.embed, names.positions) if each is not None]
    matrices = [name.removesuffix(".weight") for name in kept if len(folder.info(name).shape) == 2]
    head = [] if names.head in linears else [checkpoint.stored_name(names.head)]
    return list(dict.fromkeys([*(name for name in matrices if name not in tables), *head]))
