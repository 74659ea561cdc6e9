"""Scores of compressed models whose original is run over a text once, not once for every model.

The original's blocks are four fifths of its work. Their outputs are kept in a file, and the LM head runs anew: a text
of 32,768 tokens takes 76 MB for a width of 576, where its logits would take 6.4 GB. Figures are the same as without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.checkpoints.receipts.receipt import combined_hash
from attar.checkpoints.sources import hf
from attar.execution import kv_cache
from attar.metrics.bootstrap import Interval
from attar.metrics.perplexity import plan_windows
from attar.metrics.streaming import States, decoder_logits, decoder_states, stream
from attar.model.decoder import Decoder

Figures = dict[str, Interval]


def score(
    model: Decoder, original: Path, place: Path, texts: Sequence[Sequence[int]], kv: str | None = None
) -> Figures:
    """Measure a model against its original, the folder `original`, on texts of token ids, each one window.

    With `kv`, keys and values of `model` are kept in that scheme. Figures are those of `attar.evaluate`. States of the
    original are kept in the folder `place`.
    """
    base, cache = hf.load(original, torch.float32), None if kv is None else kv_cache.measured(model, kv)
    windows = [window for text in texts for window in plan_windows(text, len(text))]
    known = kept(base, original, place, [window.inputs for window in windows])
    figures = stream(decoder_logits(model, cache), windows, decoder_logits(base, states=known)).figures()
    del figures["nll"]
    return figures


def kept(base: Decoder, original: Path, place: Path, inputs: Sequence[Sequence[int]]) -> States:
    """Return states of the original by the tokens of a window, from a file of `place` that is written where missing."""
    told = hashlib.sha256(combined_hash(hf.Checkpoint.open(original).folder.source_hashes()).encode())
    for ids in inputs:
        told.update(np.array([len(ids), *ids], "<i8").tobytes())
    file = place / f"states-{told.hexdigest()[:16]}.safetensors"
    if not file.exists():
        run, draft = decoder_states(base), file.with_suffix(".tmp")
        save_file({str(i): run(torch.tensor(ids)).contiguous() for i, ids in enumerate(inputs)}, draft)
        draft.replace(file)
    numbers = {tuple(ids): i for i, ids in enumerate(inputs)}
    states = load_file(file)

    def known(ids: Tensor) -> Tensor:
        return states[str(numbers[tuple(ids.tolist())])]

    return known
