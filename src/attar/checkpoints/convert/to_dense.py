"""Conversion of any model to a dense folder, tensor by tensor: what `dense.py` shows, written to disk.

Unlike other conversions this one may round, to the dtype of the output. It counts the tensors that it rounded, and an
overflow is an error. The output is read back and compared with what was written. Its receipt names the original's
format, schemes and files, and has probes of the output's own, because rounding and exact inputs change the results.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.convert.dense import DenseFolder, open_dense
from attar.checkpoints.convert.proof import Converted, Digest, compare, pieces
from attar.checkpoints.convert.vila import is_vila_folder, open_vila
from attar.checkpoints.folder import CONFIG, write_json
from attar.checkpoints.receipts import receipt
from attar.checkpoints.receipts.probes import measure_probes
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.writer import MAX_SHARD, ShardWriter, atomic_folder, plan_files, require_free
from attar.errors import UserError
from attar.progress import Progress

DENSE = "dense"  # the users' name of the format


def to_dense(
    path: Path, dst: Path, dtype: str | None, overwrite: bool, report: Progress, most: int = MAX_SHARD
) -> Converted:
    """Write the model at `path`, a folder, VILA's three or a GGUF file, to the folder `dst` without compression, in
    files of at most `most` bytes; `report` counts tensors. `dtype` is float32, float16 or bfloat16, None for the
    source's own.

    Raises UserError where the model has no dense form, where a number is too large for the dtype, where `dst` exists or
    the disk has too little room, and where a tensor reads back otherwise than it was written.
    """
    checkpoint = open_vila(path, dtype) if path.is_dir() and is_vila_folder(path) else open_dense(path, dtype)
    folder = checkpoint.folder
    assert isinstance(folder, DenseFolder)
    layout = {name: folder.info(name) for name in folder.names()}
    files, carried, ours, rounded = plan_files(layout, most), folder.carry_files(), Digest(), 0
    size = sum(file.size for file in files)
    require_free(dst.absolute().parent, size)
    with atomic_folder(dst, overwrite, resumes=False) as work:
        with ShardWriter(work.out, files) as writer:
            for done, name in enumerate(layout, 1):
                exact = folder.values(name)
                value = folder.rounded(name, exact)
                rounded += value.dtype != exact.dtype and not _same(value, exact)
                writer.write(name, value)
                ours.add(name, value)
                report("converting", done, len(layout))
            writer.finish()
        write_json(work.out / CONFIG, folder.config)
        folder.carry(carried, work.out)
        again, theirs = Checkpoint.open(work.out), Digest()
        for done, name in enumerate(layout, 1):
            theirs.add(name, again.folder.read(name))
            report("comparing", done, len(layout))
        compare(ours, theirs)
        bits = 8 * sum(part.bytes for part in layout.values()) / sum(math.prod(part.shape) for part in layout.values())
        about = receipt.environment() | {
            "recipe": {"name": DENSE, "dtype": folder.decoded_as}, "calibration": None, "seed": 0,
            "original": folder.original.to_dict(),
        }  # fmt: skip
        hashes = folder.source_hashes(lambda n, total: report("hashing", n, total))
        notes: tuple[str, ...] = ()
        try:
            receipt.write(work.out, about, hashes, [], bits, None, measure_probes(again.config, again, 0))
        except UserError as error:  # of a model that computes NaN, whose tensors are right all the same
            notes = (f"The output has no receipt: {error}.",)
    packed = sum(folder.original.schemes.values())
    return Converted(dst, DENSE, len(layout), packed, size, None, None, ours.whole, notes, folder.decoded_as, rounded)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors of different dtypes hold the same numbers."""
    return all(torch.equal(a.to(b.dtype), b) for a, b in zip(pieces(ours), pieces(theirs), strict=True))
