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
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from attar.checkpoints import vocabulary
from attar.checkpoints.convert.folders import folder_to_folder
from attar.checkpoints.convert.from_gguf import file_to_folder
from attar.checkpoints.convert.gguf import GGUF
from attar.checkpoints.convert.proof import Converted
from attar.checkpoints.convert.targets import TARGETS
from attar.checkpoints.convert.to_gguf import folder_to_file
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources import hub
from attar.checkpoints.sources.hf import Checkpoint
from attar.progress import Progress

FORMATS = (GGUF, *TARGETS)


def convert(
    src: str | Path, dst: str | Path, *, to: str, overwrite: bool = False, progress: Progress | None = None
) -> Converted:
    """Write the model `src` (folder, GGUF file, Hub id or `demo`) to `dst` in the format `to`, one of `FORMATS`.

    Raises ValueError naming the first tensor that the format cannot hold exactly, and why. It also does for an unknown
    format, where source and output are of one format, where `dst` exists, and where the source's receipt is damaged.
    """
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}: known are {', '.join(FORMATS)}")
    source = hub.resolve(src)
    if not str(dst):
        raise ValueError("the output's name is empty: give a folder or a .gguf file to write")
    if (Path(dst).suffix.lower() == ".gguf") != (to == GGUF):
        kind = "a file whose name ends" if to == GGUF else "a folder whose name does not end"
        raise ValueError(f"--to {to} writes {kind} in .gguf, not {dst}")
    if source.resolve().is_relative_to(Path(dst).resolve()):
        raise ValueError(f"{dst} would replace the model that it is made from: choose another output")
    report, found = progress or (lambda stage, done, total: None), receipt.read_receipt(source)
    if vocabulary.is_gguf(source):
        if to == GGUF:
            raise ValueError(f"{source} is a GGUF file already")
        file = GgufCheckpoint.open(source, torch.float32)
        return _with_receipt(found, source, file_to_folder(file, Path(dst), TARGETS[to], overwrite, report), report)
    checkpoint = Checkpoint.open(source, as_stored=True)
    if (checkpoint.folder.config.get("quantization_config") or {}).get("transform_config"):
        raise ValueError(f"{source} rotates inputs at run time (transform_config), which no other format can say")
    if to == GGUF:
        return _with_receipt(found, source, folder_to_file(checkpoint, Path(dst), overwrite, report), report)
    done = folder_to_folder(checkpoint, Path(dst), TARGETS[to], overwrite, report)
    return _with_receipt(found, source, done, report)


def _with_receipt(found: receipt.Receipt | None, source: Path, done: Converted, report: Progress) -> Converted:
    """Copy the source's receipt to the finished output. A kill before leaves an output without a receipt, never one
    with another's."""
    if found is None:
        return done
    output = Path(os.path.realpath(done.path))  # the receipt lies beside the target of a link
    try:
        why = receipt.carry(
            found, source, output, done.sha256, done.bits_per_weight, lambda n, total: report("hashing", n, total)
        )
    except (OSError, ValueError) as error:  # the output is whole
        why = f"the output has no receipt: {error}"
    return done if why is None else replace(done, notes=(*done.notes, why))
