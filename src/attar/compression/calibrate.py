"""Calibration: which tokens the statistics come from, and the hidden states that carry them from block to block.

Tokens come from a text, from ids, or from the model itself (`sample_from`): a language model's own samples are close
enough to what it was trained on to calibrate with, and need no data at all.

Hidden states live in two files, one that a block reads and one that it writes, in turn. That is what lets a killed run
resume to the very bytes it would have written, and lets the states be larger than memory. Up to `memory` bytes they are
held in memory as well, so that the disk is written but not read. The two tables at the ends of a model can be larger
than several blocks and are never read whole: of the embedding only the rows that the text needs (`embed`), of the
output matrix some after others (`head_rows`).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attar.checkpoints import hf
from attar.checkpoints.safetensors import byte_view
from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear
from attar.model.cache import Step
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder, build_embedding, build_head
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

Calibration = str | Path | Sequence[Sequence[int]]
"""A text file, token ids [S][L], or `SELF`."""

SELF = "self"

CACHE_BYTES = 256 << 20  # of keys and values while sampling
ROWS_AT_ONCE = 2048  # rows of one forward call at most: enough to keep the cores busy
WIDEST = 32 << 20  # bytes of its widest activation at most, unless one sequence has more
IN_A_BLOCK = 2 * WIDEST  # what the activations of one forward call take together
HEAD_ROWS = 4096  # of the output matrix, in memory at once; zero points are packed 32 rows at a time


@dataclass(frozen=True, slots=True)
class Amount:
    """How much text to take, and the seed of what is drawn at random."""

    samples: int = 128  # sequences
    length: int = 512  # tokens of each
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.length < 2 or self.seed < 0:
            raise ValueError("calibration takes at least 1 sequence of at least 2 tokens, and a seed of at least 0")


def is_text(calibration: Calibration | None) -> bool:
    """Whether it is a text file."""
    return isinstance(calibration, str | Path) and not is_drawn(calibration)


def is_drawn(calibration: Calibration | None) -> bool:
    """Whether the model is to draw it."""
    return isinstance(calibration, str | Path) and str(calibration) == SELF


def tokenizer_for(calibration: Calibration, folder: Path) -> Tokenizer | None:
    """The tokenizer of the model in `folder`, where a text needs one: ids and `SELF` do without."""
    return Tokenizer.load(folder) if is_text(calibration) else None


def count(calibration: Calibration, amount: Amount) -> int:
    """How many sequences there will be, at most."""
    return amount.samples if isinstance(calibration, str | Path) else len(calibration)


def drawn_name(source: str, amount: Amount) -> str:
    """The name of the file for what is drawn from the model whose files have the hash `source`."""
    return f"self-{source[:16]}-{amount.samples}x{amount.length}-{amount.seed}.i32"


def tokens(
    calibration: Calibration,
    checkpoint: hf.Checkpoint,
    tokenizer: Tokenizer | None,
    amount: Amount,
    drawn: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The calibration tokens, int64 [S, L], of whatever the user gave.

    Sampling from the model takes its time, so what it drew is kept in the file `drawn` for a resumed run. Raises
    ValueError where there is nothing to calibrate on, an id is out of range, or sequences are longer than the context.
    """
    config = checkpoint.config
    if not isinstance(calibration, str | Path):
        return as_tokens(calibration, config.vocab_size)
    if amount.length > config.context:
        raise ValueError(
            f"calibration sequences of {amount.length} tokens exceed the model's context of {config.context}"
        )
    if is_text(calibration):
        assert tokenizer is not None
        ids = tokenizer.encode(read_text(calibration), add_special_tokens=False)
        return windows(ids, amount.samples, amount.length, tokenizer.added_bos)
    shape = (amount.samples, amount.length)
    if drawn.is_file() and drawn.stat().st_size == 4 * shape[0] * shape[1]:
        known = torch.from_numpy(np.fromfile(drawn, dtype="<i4").astype(np.int64)).view(shape)
        if int(known.min()) < 0 or int(known.max()) >= config.vocab_size:
            raise ValueError(
                f"{drawn}, which an interrupted run drew, holds a token id outside 0..{config.vocab_size - 1}: "
                "--restart draws anew"
            )
        return known
    found = sample_from(hf.load(checkpoint.folder.path, torch.float32), amount, progress=progress)
    temporary = drawn.with_suffix(".tmp")
    temporary.write_bytes(found.numpy().astype("<i4").tobytes())
    temporary.replace(drawn)
    return found


def windows(ids: Sequence[int], samples: int, length: int, bos: int | None) -> Tensor:
    """Cut a text's token ids into at most `samples` windows, evenly spread over it: int64 [S, length].

    Each window begins with `bos` where the tokenizer adds one. A text shorter than one window is used whole.
    Raises ValueError where there are fewer than two tokens.
    """
    if len(ids) < 2:
        raise ValueError(f"the calibration text has {len(ids)} tokens: at least 2 are needed")
    body = length if bos is None else length - 1
    if len(ids) < body:
        body = len(ids)
    count = len(ids) // body
    chosen = range(count) if count <= samples else [i * count // samples for i in range(samples)]
    head = [] if bos is None else [bos]
    return torch.tensor([head + list(ids[i * body : (i + 1) * body]) for i in chosen])


def as_tokens(sequences: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """Token ids given by the caller, int64 [S, L]. Raises ValueError where lengths differ or an id is out of range."""
    lengths = {len(s) for s in sequences}
    if len(lengths) != 1 or not all(lengths):
        raise ValueError(f"calibration sequences must be of one length, not {sorted(lengths)}")
    ids = torch.tensor([list(s) for s in sequences])
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"a calibration token id lies outside 0..{vocab_size - 1}")
    return ids


def token_hash(ids: Tensor) -> str:
    """SHA-256 of the ids [S, L] as little-endian int32, rows in order, with the shape in front."""
    shape = f"{ids.shape[0]}x{ids.shape[1]}:".encode()
    return hashlib.sha256(shape + ids.to(torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


@torch.inference_mode()
def sample_from(
    decoder: Decoder,
    amount: Amount,
    temperature: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Draw sequences from the model itself: int64 [samples, length].

    Each begins with BOS, or with a random token where the model has none, and takes its random numbers from a counter
    keyed by (seed, sequence).
    """
    config, samples, length = decoder.config, amount.samples, amount.length
    noise = torch.from_numpy(np.stack([_uniforms(amount.seed, s, length) for s in range(samples)]))
    first = [config.bos_ids[0]] * samples if config.bos_ids else (noise[:, 0] * config.vocab_size).long().tolist()
    ids = torch.zeros(samples, length, dtype=torch.int64)
    ids[:, 0] = torch.tensor(first)
    at_once = max(1, CACHE_BYTES // (8 * length * config.layers * config.kv_heads * config.head_dim))
    for begin in range(0, samples, at_once):
        rows = slice(begin, min(begin + at_once, samples))
        batch = rows.stop - rows.start
        cache = decoder.cache(length, batch)
        for t in range(1, length):
            logits = decoder.forward(ids[rows, t - 1], Step((1,) * batch, length, cache))
            cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
            drawn = torch.searchsorted(cumulative, noise[rows, t, None] * cumulative[:, -1:], right=True)
            ids[rows, t] = drawn[:, 0].clamp(max=config.vocab_size - 1)
            if progress is not None:
                progress(begin * length + t * batch, samples * length)
    return ids


def _uniforms(seed: int, sequence: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`count` numbers in [0, 1) of stream (seed, sequence): the top 53 bits of Philox words, whose values are fixed."""
    raw = np.random.Philox(key=np.array([seed, sequence], dtype=np.uint64)).random_raw(count)
    return (np.asarray(raw) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def rows_at_once(config: ModelConfig) -> int:
    """Rows that one forward call of a block may have."""
    wide = config.intermediate * (2 if config.gated else 1)
    return max(1, min(ROWS_AT_ONCE, WIDEST // (4 * wide)))


class HiddenStates:
    """The hidden states [S, L, I], float32, of all calibration sequences, in a file and, if they fit, in memory. They
    are read to `device`."""

    def __init__(
        self,
        path: Path,
        shape: tuple[int, int, int],
        memory: int,
        rows_at_once: int = ROWS_AT_ONCE,
        device: torch.device | str = "cpu",
    ) -> None:
        self.path, self.shape, self.rows_at_once, self.device = path, shape, rows_at_once, device
        self._row_bytes = shape[1] * shape[2] * 4
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._file, 0, shape[0] * self._row_bytes)
        self._held: dict[int, Tensor] | None = {} if shape[0] * self._row_bytes <= memory else None

    def batches(self) -> Iterator[range]:
        """Sequences in the runs of one forward call."""
        size = max(1, self.rows_at_once // self.shape[1])
        for start in range(0, self.shape[0], size):
            yield range(start, min(start + size, self.shape[0]))

    def step(self, batch: range) -> Step:
        return Step((self.shape[1],) * len(batch), self.shape[1], device=self.device)

    def read(self, batch: range) -> Tensor:
        """Rows [len(batch) * L, I]."""
        if self._held is not None and all(s in self._held for s in batch):
            return torch.cat([self._held[s] for s in batch]).to(self.device)
        out = torch.empty(len(batch) * self.shape[1], self.shape[2])
        if not _read(self._file, out, batch.start * self._row_bytes):
            raise ValueError(f"{self.path} is shorter than it was written: the disk or the folder was tampered with")
        if self._held is not None:
            self._held.update(zip(batch, out.split(self.shape[1]), strict=True))
        return out.to(self.device)

    def write(self, batch: range, rows: Tensor) -> None:
        rows = rows.cpu()
        _write(self._file, rows.contiguous(), batch.start * self._row_bytes)
        if self._held is not None:
            self._held.update(zip(batch, rows.split(self.shape[1]), strict=True))

    def settle(self) -> None:
        """Make the file outlive a crash."""
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
) -> None:
    """Write what enters the first block on tokens [S, L]; only the rows of the table that are needed are read.

    `stored(rows)` says how rows [R, I] of the table are stored in the end, if not as they are.
    """
    used, place = torch.unique(ids, return_inverse=True)
    embedding = build_embedding(replace(checkpoint.config, vocab_size=len(used)), checkpoint.rows(used))
    if stored is not None:
        assert isinstance(embedding.table, Tensor)
        if (rounded := stored(embedding.table)) is not None:
            embedding.table, embedding.dtype = rounded, torch.float32
    for batch in into.batches():
        rows = place[batch.start : batch.stop].reshape(-1)
        into.write(batch, embedding.forward(rows, into.step(batch).positions.cpu()).float())


def head_rows(checkpoint: hf.Checkpoint) -> Iterator[tuple[Tensor, Linear]]:
    """The output matrix, `HEAD_ROWS` rows at a time, with their token ids."""
    for ids in torch.arange(checkpoint.config.vocab_size).split(HEAD_ROWS):
        yield ids, build_head(replace(checkpoint.config, vocab_size=len(ids)), checkpoint.rows(ids))


class Rows:
    """At most `limit` rows of `columns` float32, appended as they come and read again and again: a file without a name.

    What a search reads for every candidate would take more memory than the block; from the page cache it costs little.
    """

    def __init__(self, folder: Path, limit: int, columns: int) -> None:
        self.columns, self._limit, self._count = columns, limit, 0
        self._device = torch.device("cpu")  # where rows come from, and are read to
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return self._count

    def append(self, x: Tensor) -> None:
        """Take in rows x [N, columns], as many as there is room for."""
        self._device = x.device
        x = x[: self._limit - self._count].float().cpu().contiguous()
        _write(self._file.fileno(), x, self._count * self.columns * 4)
        self._count += len(x)

    def batches(self, size: int) -> Iterator[range]:
        return (range(start, min(start + size, self._count)) for start in range(0, self._count, size))

    def read(self, some: range) -> Tensor:
        """Rows [len(some), columns]."""
        out = torch.empty(len(some), self.columns)
        whole = _read(self._file.fileno(), out, some.start * self.columns * 4)
        assert whole, "nobody else can reach the file"
        return out.to(self._device)

    def close(self) -> None:
        self._file.close()


def _read(file: int, out: Tensor, offset: int) -> bool:
    """Fill `out` from a file; false where the file ends before."""
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
