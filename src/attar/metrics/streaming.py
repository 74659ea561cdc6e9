"""The loop of every measurement: one model or two side by side, window by window, a run of rows at a time.

Base logits are never stored. Each model runs a window's blocks once and keeps the hidden states. Then the LM head of
both is applied to the same few rows at a time, and the logits are compared and dropped. So the memory beyond the two
models is two arrays of `LOGITS_AT_ONCE` numbers, whatever the vocabulary and the length of the text. The result keeps
one number per token and figure.

Legend: N counted tokens of all windows, T positions of a window, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attar.errors import UserError
from attar.metrics import bootstrap
from attar.metrics.bootstrap import Floats, Interval, Ints
from attar.metrics.divergence import Comparison, compare
from attar.metrics.perplexity import Window, nll
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.progress import StageProgress

LOGITS_AT_ONCE = 1 << 24
ROWS_AT_ONCE = 512  # of a prompt that runs through a cache

Logits = Callable[[Tensor, int], Iterator[Tensor]]
"""The interface of a model to this loop: (token ids [T], first position) to float32 logits [t, V] of all positions from
the first on, a run of rows at a time. Models that are compared yield runs of the same lengths."""


States = Callable[[Tensor], Tensor]
"""A function from the token ids [T] of a text to the output of the last block, [T, hidden]."""


class NewCache(Protocol):
    """A factory of KV caches: makes room for `batch` texts of `length` tokens."""

    def __call__(self, length: int, batch: int = 1, /) -> KVCache: ...


@dataclass(frozen=True, eq=False)
class Measurement:
    """Figures of each counted token: arrays [N]. `window` numbers the tokens' windows from 0. The last four are None
    where there was no base model. `agree` is 1 where both models have the same most probable token. `accept` is the
    chance that a token sampled from one is accepted by the other (`divergence`)."""

    window: Ints
    nll: Floats
    base_nll: Floats | None = None
    kl: Floats | None = None
    agree: Floats | None = None
    accept: Floats | None = None

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @property
    def kl_windows(self) -> Floats:
        """Return the KL divergence summed over each window's tokens, [W], for `bootstrap.paired_bootstrap_ratio`."""
        assert self.kl is not None
        return bootstrap.per_window(self.kl, self.window)

    def figures(self, seed: int = bootstrap.SEED) -> dict[str, Interval]:
        """Return each figure with its interval: `nll` (nats a token) and `ppl`; more against a base. These are
        `ppl_base`, `ppl_ratio` (paired) and its logarithm `ln_ppl_change`, `kl_mean`, `kl_p50`, `kl_p99`, `kl_p999`,
        `top1`, `ear`, and `kl_max`. The last has no interval, because a bootstrap says nothing of a maximum."""
        loss = bootstrap.mean(self.nll, self.window, seed)
        figures = {"nll": loss, "ppl": loss.map(exp)}
        if self.base_nll is None or self.kl is None or self.agree is None or self.accept is None:
            return figures
        change = bootstrap.mean(self.nll - self.base_nll, self.window, seed)
        return figures | {
            "ppl_base": bootstrap.mean(self.base_nll, self.window, seed).map(exp),
            "ppl_ratio": change.map(exp),
            "ln_ppl_change": change,
            "kl_mean": bootstrap.mean(self.kl, self.window, seed),
            "kl_p50": bootstrap.quantile(self.kl, self.window, 0.5, seed),
            "kl_p99": bootstrap.quantile(self.kl, self.window, 0.99, seed),
            "kl_p999": bootstrap.quantile(self.kl, self.window, 0.999, seed),
            "kl_max": Interval(float(self.kl.max()), None, None),
            "top1": bootstrap.mean(self.agree, self.window, seed),
            "ear": bootstrap.mean(self.accept, self.window, seed),
        }


def exp(x: float) -> float:
    """Return e^x, infinite beyond float64's range: the perplexity of a thoroughly broken model."""
    return math.exp(x) if x < 709 else math.inf


def decoder_states(decoder: Decoder, cache: NewCache | None = None) -> States:
    """Return a function that runs the blocks of `decoder`. With a `cache`, each text runs as a prompt through one of
    its own, in pieces of `ROWS_AT_ONCE` rows."""
    last = decoder.last

    def states(ids: Tensor) -> Tensor:
        kept: list[Tensor] = []

        def watch(layer: int, hidden: Tensor) -> None:
            if layer == last:
                kept.append(hidden)

        ids, filled = ids.to(decoder.device), None if cache is None else cache(len(ids))
        for piece in ids.split(len(ids) if cache is None else ROWS_AT_ONCE):
            step = ForwardBatch((len(piece),), len(ids), filled, device=decoder.device)
            decoder.forward(piece, step, torch.tensor([len(piece) - 1], device=decoder.device), watch)
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    return states


def decoder_logits(decoder: Decoder, cache: NewCache | None = None, states: States | None = None) -> Logits:
    """Wrap a decoder for `stream`: the blocks run once a window, the LM head by runs of rows. With a `cache`, each
    window runs as a prompt through one of its own. `states` stand in for the blocks, where their outputs were kept."""
    at_once = max(1, LOGITS_AT_ONCE // decoder.config.vocab_size)
    known = decoder_states(decoder, cache) if states is None else states

    def run(ids: Tensor, first: int) -> Iterator[Tensor]:
        for rows in known(ids)[first:].split(at_once):
            with torch.inference_mode():  # entered anew each time: a generator that yields inside would leave it on
                logits = decoder.logits(rows)
            yield logits

    return run


def stream(
    model: Logits, windows: Sequence[Window], base: Logits | None = None, progress: StageProgress | None = None
) -> Measurement:
    """Run all windows and return the figures of each counted token. Raises ValueError naming the model, the window and
    the position where a model's logits are not finite."""
    total = sum(len(w.counted) for w in windows)
    done = 0
    columns: list[list[Floats]] = [[] for _ in range(1 if base is None else len(Comparison._fields))]
    for number, window in enumerate(windows):
        ids, targets = torch.tensor(window.inputs), torch.tensor(window.counted)
        runs = model(ids, window.first)
        base_runs = repeat(None) if base is None else base(ids, window.first)
        at = 0
        for run, base_run in zip(runs, base_runs, strict=base is not None):
            wanted = targets[at : at + len(run)].to(run.device)
            _refuse_nan(run, "model", number, window.first + at)
            if base_run is None:
                results: tuple[Tensor, ...] = (nll(run, wanted),)
            else:
                _refuse_nan(base_run, "base model", number, window.first + at)
                results = compare(base_run.to(run.device), run, wanted)
            for column, values in zip(columns, results, strict=True):
                column.append(values.double().cpu().numpy())
            at += len(run)
        assert at == len(targets), (at, len(targets))
        done += at
        if progress is not None:
            progress(done, total)
    of = np.repeat(np.arange(len(windows), dtype=np.int64), [len(w.counted) for w in windows])
    return Measurement(of, *(np.concatenate(column) for column in columns))


def _refuse_nan(logits: Tensor, name: str, window: int, position: int) -> None:
    finite = logits.isfinite().all(-1)
    if not finite.all():
        at = position + int((~finite).nonzero()[0, 0])
        raise UserError(
            "not_finite",
            f"the logits of the {name} hold a NaN or an infinity at position {at} of window {window}: "
            "its weights are damaged, or its values overflow the dtype it runs in",
        )
