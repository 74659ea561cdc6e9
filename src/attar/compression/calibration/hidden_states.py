"""Hidden states that carry calibration from block to block, and the two ends of a model.

Hidden states live in two files, one that a block reads and one that it writes, in turn. So a killed run resumes to the
same bytes, and the states may be larger than memory. Up to `memory` bytes they are held in memory as well, so that the
disk is written but not read. The embedding and the LM head can be larger than several blocks and are never read whole.
Of the embedding only the rows that the text needs are read (`embed`); the LM head is read some rows at a time
(`head_rows`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.safetensors import byte_view
from attar.checkpoints.sources import hf
from attar.checkpoints.strict_io import CheckpointError
from attar.compression.calibration.image_rows import ImagePlaces, ImageRows
from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear
from attar.model.assembly import build_embedding, build_head
from attar.model.cache import ForwardBatch
from attar.model.config import ModelConfig

ROWS_AT_ONCE = 2048  # rows of one forward call at most: enough to keep the cores busy
WIDEST = 32 << 20  # maximal bytes of its widest activation, unless one sequence has more
IN_A_BLOCK = 2 * WIDEST  # bytes of all activations of one forward call
HEAD_ROWS = 4096  # of the LM head, in memory at once; zero points are packed 32 rows at a time


def rows_at_once(config: ModelConfig) -> int:
    """Return the number of rows that one forward call of a block may have."""
    return max(1, min(ROWS_AT_ONCE, WIDEST // (4 * config.intermediate * (2 if config.gated else 1))))


class HiddenStates:
    """Float32 hidden states [S, L, I] of all calibration sequences, in a file and, if they fit, in memory. They are
    read to `device`."""

    def __init__(
        self,
        path: Path,
        shape: tuple[int, int, int],
        memory: int,
        rows_at_once: int = ROWS_AT_ONCE,
        device: torch.device | str = "cpu",
        places: ImagePlaces | None = None,
    ) -> None:
        """`places` are those of sequences that have images."""
        self.path, self.shape, self.rows_at_once, self.device = path, shape, rows_at_once, device
        self._places = places or ImagePlaces()
        self._row_bytes = shape[1] * shape[2] * 4
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._file, 0, shape[0] * self._row_bytes)
        self._held: dict[int, Tensor] | None = {} if shape[0] * self._row_bytes <= memory else None

    def batches(self) -> Iterator[range]:
        """Yield the ranges of sequences of each forward call."""
        size = max(1, self.rows_at_once // self.shape[1])
        for start in range(0, self.shape[0], size):
            yield range(start, min(start + size, self.shape[0]))

    def step(self, batch: range) -> ForwardBatch:
        angles, spans = self._places
        if angles is not None:
            angles = angles[:, batch.start : batch.stop].flatten(1).to(self.device)
        if spans is not None:
            spans = spans[batch.start : batch.stop].flatten(0, 1)
        lengths = (self.shape[1],) * len(batch)
        return ForwardBatch(lengths, self.shape[1], device=self.device, angles=angles, spans=spans)

    def read(self, batch: range) -> Tensor:
        """Return rows [len(batch) * L, I]."""
        if self._held is not None and all(s in self._held for s in batch):
            return torch.cat([self._held[s] for s in batch]).to(self.device)
        out = torch.empty(len(batch) * self.shape[1], self.shape[2])
        if not _read(self._file, out, batch.start * self._row_bytes):
            raise CheckpointError(
                "state_damaged", f"{self.path} is shorter than it was written: the disk or the folder was tampered with"
            )
        if self._held is not None:
            self._held.update(zip(batch, out.split(self.shape[1]), strict=True))
        return out.to(self.device)

    def write(self, batch: range, rows: Tensor) -> None:
        rows = rows.cpu()
        _write(self._file, rows.contiguous(), batch.start * self._row_bytes)
        if self._held is not None:
            self._held.update(zip(batch, rows.split(self.shape[1]), strict=True))

    def settle(self) -> None:
        """Flush the file to disk, so that it survives a crash."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
        self._held = None


@torch.no_grad()
def embed(
    checkpoint: hf.Checkpoint,
    ids: Tensor,
    into: HiddenStates,
    stored: Callable[[Tensor], PackedTensor | None] | None = None,
    images: ImageRows | None = None,
) -> None:
    """Write the first block's inputs on tokens [S, L]; only the rows of the table that are needed are read.
    `stored(rows)` returns rows [R, I] of the table in their stored form, if that differs from the source's. Ids beyond
    the vocabulary are rows of `images`."""
    used, place = torch.unique(ids, return_inverse=True)
    beyond = used[used >= checkpoint.config.vocab_size]
    used = used[: len(used) - len(beyond)]
    seen = None if images is None or not len(beyond) else images.rows(beyond)
    assert seen is not None or not len(beyond), "ids outside of the vocabulary"
    embedding = build_embedding(replace(checkpoint.config, vocab_size=len(used)), checkpoint.rows(used))
    if stored is not None:
        assert isinstance(embedding.table, Tensor)
        if (rounded := stored(embedding.table)) is not None:
            embedding.table, embedding.dtype = rounded, torch.float32
    for batch in into.batches():
        rows = place[batch.start : batch.stop].reshape(-1)
        found = embedding.forward(rows.clamp(max=len(used) - 1), into.step(batch).positions.cpu()).float()
        if seen is not None and len(at := (rows >= len(used)).nonzero()[:, 0]):
            found[at] = seen[rows[at] - len(used)]
        into.write(batch, found)


def head_rows(checkpoint: hf.Checkpoint) -> Iterator[tuple[Tensor, Linear]]:
    """Yield the LM head, `HEAD_ROWS` rows at a time, with their token ids."""
    for ids in torch.arange(checkpoint.config.vocab_size).split(HEAD_ROWS):
        yield ids, build_head(replace(checkpoint.config, vocab_size=len(ids)), checkpoint.rows(ids))


class Rows:
    """At most `limit` rows of `columns` float32, appended as they come and read repeatedly: an unnamed file. A search
    reads them for every candidate. In memory they could exceed the block; the page cache makes reading cheap."""

    def __init__(self, folder: Path, limit: int, columns: int) -> None:
        self.columns, self._limit, self._count = columns, limit, 0
        self._device = torch.device("cpu")  # device of the rows, given and read
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return self._count

    def append(self, x: Tensor) -> None:
        """Append rows x [N, columns], up to the limit."""
        self._device = x.device
        x = x[: self._limit - self._count].float().cpu().contiguous()
        _write(self._file.fileno(), x, self._count * self.columns * 4)
        self._count += len(x)

    def batches(self, size: int) -> Iterator[range]:
        return (range(start, min(start + size, self._count)) for start in range(0, self._count, size))

    def read(self, some: range) -> Tensor:
        """Return rows [len(some), columns]."""
        out = torch.empty(len(some), self.columns)
        whole = _read(self._file.fileno(), out, some.start * self.columns * 4)
        assert whole, "nobody else can reach the file"
        return out.to(self._device)

    def close(self) -> None:
        self._file.close()


def _read(file: int, out: Tensor, offset: int) -> bool:
    """Fill `out` from a file; return False where the file ends before."""
    view, at = byte_view(out), 0
    while at < len(view):
        got = os.preadv(file, [view[at:]], offset + at)
        if got == 0:
            return False
        at += got
    return True


def _write(file: int, rows: Tensor, offset: int) -> None:
    data, at = byte_view(rows), 0
    while at < len(data):
        at += os.pwrite(file, data[at:], offset + at)
