"""Calibration tokens, from which the statistics come.

Tokens come from a text, from ids, or from the model itself (`sample_from`): a language model's own samples are close
enough to its training text to calibrate with, and need no data. A text is often too short for detailed methods, whose
rounding then fits the text rather than the model. The model may write more to go with it (`Amount.drawn`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hf
from attar.compression.calibration.amount import Amount, Calibration, is_drawn, is_text
from attar.compression.calibration.gradients import draw, uniforms
from attar.errors import UserError
from attar.model.cache import ForwardBatch
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.progress import StageProgress
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20  # of KV cache while sampling


def tokenizer_for(calibration: Calibration, folder: Path) -> Tokenizer | None:
    """Return the tokenizer of the model in `folder` where a text needs one: ids and `SELF` need none."""
    return vocabulary.tokenizer(folder) if is_text(calibration) else None


def tokens(
    calibration: Calibration,
    checkpoint: hf.Checkpoint,
    tokenizer: Tokenizer | None,
    amount: Amount,
    drawn: Path,
    progress: StageProgress | None = None,
) -> Tensor:
    """Return the calibration tokens, int64 [S, L], of a text, ids or `SELF`. Sampling from the model takes time, so its
    text is kept in the file `drawn` for a resumed run. Raises ValueError where there is nothing to calibrate on,
    lengths differ, an id is out of range, or sequences are longer than the context."""
    config = checkpoint.config
    if isinstance(calibration, str | Path):
        within_context(amount.length, config)
        if is_drawn(calibration):
            return written(checkpoint, amount, drawn, progress)
        assert tokenizer is not None
        ids = windows(read(calibration, tokenizer), amount.samples, amount.length, tokenizer.added_bos)
    else:
        lengths = {len(s) for s in calibration}
        if len(lengths) != 1 or not all(lengths):
            raise UserError("option_malformed", f"calibration sequences must be of one length, not {sorted(lengths)}")
        ids = torch.tensor([list(s) for s in calibration])
    within_vocabulary(ids, config.vocab_size)
    within_context(ids.shape[1], config)
    return ids


def written(checkpoint: hf.Checkpoint, amount: Amount, drawn: Path, progress: StageProgress | None = None) -> Tensor:
    """Return text that the model writes, int64 [samples, length], as `kept_or_drawn`."""
    return kept_or_drawn(lambda: hf.load_again(checkpoint, torch.float32), checkpoint.config, amount, drawn, progress)


def kept_or_drawn(
    load: Callable[[], Decoder],
    config: ModelConfig,
    amount: Amount,
    drawn: Path,
    progress: StageProgress | None = None,
) -> Tensor:
    """Return text that a model writes, int64 [samples, length]: newly sampled by the decoder that `load` returns, or
    from the file `drawn`, where a resumed run finds it. Raises ValueError where that file holds an id out of range."""
    shape = (amount.samples, amount.length)
    if drawn.is_file() and drawn.stat().st_size == 4 * shape[0] * shape[1]:
        known = torch.from_numpy(np.fromfile(drawn, dtype="<i4").astype(np.int64)).view(shape)
        if int(known.min()) < 0 or int(known.max()) >= config.vocab_size:
            raise UserError(
                "state_damaged",
                f"{drawn}, which an interrupted run drew, holds a token id outside 0..{config.vocab_size - 1}: "
                "--restart draws anew",
            )
        return known
    found = sample_from(load(), amount, progress=progress)
    temporary = drawn.with_suffix(".tmp")
    temporary.write_bytes(found.numpy().astype("<i4").tobytes())
    temporary.replace(drawn)
    return found


def read(text: str | Path, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a text file."""
    return tokenizer.encode(read_text(text), add_special_tokens=False)


def within_context(length: int, config: ModelConfig, what: str = "calibration sequences") -> None:
    """Raise ValueError, beginning with `what`, where sequences exceed the context: the model is untrained for such
    rotary positions, and a table of positions has no row for them."""
    if length > config.context:
        raise UserError("context_exceeded", f"{what} of {length} tokens exceed the model's context of {config.context}")


def within_vocabulary(ids: Tensor, vocab_size: int, what: str = "calibration") -> None:
    """Raise ValueError where one of the ids [S, L] is not in the vocabulary."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise UserError("token_out_of_vocabulary", f"a {what} token id lies outside 0..{vocab_size - 1}")


def windows(ids: Sequence[int], samples: int, length: int, bos: int | None) -> Tensor:
    """Cut a text's token ids into at most `samples` windows, evenly spread over it: int64 [S, length]. Each window
    begins with `bos` where the tokenizer adds one. A text shorter than one window is used whole. Raises ValueError
    where there are fewer than two tokens."""
    if len(ids) < 2:
        raise UserError("calibration_too_short", f"the calibration text has {len(ids)} tokens: at least 2 are needed")
    body = min(len(ids), length if bos is None else length - 1)
    return _cut(ids, _spread(range(len(ids) // body), samples), body, bos)


def between(ids: Sequence[int], samples: int, length: int, bos: int | None, most: int) -> Tensor | None:
    """Return at most `most` of the windows that `windows` leaves out, evenly spread: int64 [S, length]. None where it
    leaves out none."""
    body = length if bos is None else length - 1
    every = range(len(ids) // body)
    left = sorted({*every} - {*_spread(every, samples)})
    return _cut(ids, _spread(left, most), body, bos) if left else None


def _spread(of: Sequence[int], most: int) -> Sequence[int]:
    return of if len(of) <= most else [of[i * len(of) // most] for i in range(most)]


def _cut(ids: Sequence[int], which: Sequence[int], body: int, bos: int | None) -> Tensor:
    head = [] if bos is None else [bos]
    return torch.tensor([head + list(ids[i * body : (i + 1) * body]) for i in which])


def token_hash(ids: Tensor) -> str:
    """Return the SHA-256 of the ids [S, L] as little-endian int32, rows in order, with the shape in front."""
    shape = f"{ids.shape[0]}x{ids.shape[1]}:".encode()
    return hashlib.sha256(shape + ids.to(torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


@torch.inference_mode()
def sample_from(decoder: Decoder, amount: Amount, progress: StageProgress | None = None) -> Tensor:
    """Sample sequences from the model itself: int64 [samples, length]. Each begins with BOS, or with a random token
    where the model has none, and takes its random numbers from a counter keyed by (seed, sequence). Raises ValueError
    where that BOS is not in the vocabulary."""
    config, samples, length = decoder.config, amount.samples, amount.length
    if config.bos_ids and config.bos_ids[0] >= config.vocab_size:
        raise UserError(
            "config_invalid",
            f"no text can be drawn from this model: its bos_token_id, {config.bos_ids[0]}, lies outside its vocabulary "
            f"of {config.vocab_size}; mend config.json, or give a text to --calib",
        )
    noise = torch.from_numpy(np.stack([uniforms(amount.seed, s, length, counter=0) for s in range(samples)]))
    first = [config.bos_ids[0]] * samples if config.bos_ids else (noise[:, 0] * config.vocab_size).long().tolist()
    ids = torch.zeros(samples, length, dtype=torch.int64)
    ids[:, 0] = torch.tensor(first)
    at_once = max(1, CACHE_BYTES // (8 * length * config.layers * config.kv_heads * config.head_dim))
    for begin in range(0, samples, at_once):
        rows = slice(begin, min(begin + at_once, samples))
        batch = rows.stop - rows.start
        cache = decoder.cache(length, batch)
        for t in range(1, length):
            logits = decoder.forward(ids[rows, t - 1], ForwardBatch((1,) * batch, length, cache))
            ids[rows, t] = draw(logits, noise[rows, t])
            if progress is not None:
                progress(begin * length + t * batch, samples * length)
    return ids
