"""A model on native kernels and the windows of a text, as measurements of long contexts want them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hub, opening
from attar.errors import UserError
from attar.execution import kv_cache
from attar.execution.model_runner import Runner
from attar.kernels import dispatch
from attar.kv.eviction import Eviction
from attar.kv.pages import Bases
from attar.kv.schemes import KvScheme
from attar.kv.sparse import SparseAttention
from attar.kv.sparse_prefill import SparsePrefill
from attar.metrics import bootstrap
from attar.metrics.bootstrap import Interval
from attar.model.cache import BLOCK, ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.progress import Progress
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

PIECE = 512  # rows of a prefill at once
WINDOWS = 4


class Reading(NamedTuple):
    """What is measured: how little rows of outputs and of prompts read, and which keys are dropped; None for all."""

    sparse: SparseAttention | None = None
    prefill: SparsePrefill | None = None
    eviction: Eviction | None = None

    def __str__(self) -> str:
        parts = zip(("sparse attention", "sparse prefill", "KV eviction"), self, strict=True)
        return ", ".join(f"{name} {each}" for name, each in parts if each is not None)


@dataclass(frozen=True)
class Subject:
    """A loaded model, and a text's tokens."""

    decoder: Decoder
    tokenizer: Tokenizer
    scheme: KvScheme
    ids: list[int]
    context: int

    @classmethod
    def load(
        cls,
        model: str,
        text: Path,
        context: int,
        *,
        max_tokens: int | None = None,
        kv: str | None = None,
        activations: str = "exact",
        progress: Progress | None = None,
    ) -> Subject:
        """Load a model and a text. Raises ValueError for a text or a model whose context is shorter than a window."""
        told = progress or (lambda stage, done, total: None)
        path = hub.resolve(model)
        tokenizer = vocabulary.tokenizer(path)
        ids = list(tokenizer.encode(read_text(text))[:max_tokens])
        if len(ids) < context:
            raise UserError("text_too_short", f"the text has {len(ids):,} tokens, fewer than a window of {context:,}")
        decoder = opening.load(path, torch.float32, lambda *at: told("loading", *at), dispatch.store(activations))
        if context > decoder.config.context:
            message = f"a window of {context:,} tokens is past the {decoder.config.context:,} of the model"
            raise UserError("context_exceeded", message)
        return cls(decoder, tokenizer, kv_cache.resolve(decoder, kv), ids, context)

    @functools.cached_property
    def bases(self) -> list[Bases] | None:
        """Bases of caches, found on text that the model writes; None where the scheme is not calibrated."""
        return kv_cache.bases(self.decoder, self.scheme)

    def evicting_runner(self, policy: Eviction) -> Runner:
        """Return a runner with room for one window whose keys `policy` drops. Raises ValueError where it cannot."""
        kv_cache.check_eviction(self.decoder, self.scheme, policy, self.decoder.config.context)
        blocks = -(-self.context // BLOCK) + 2 * -(-policy.budget // BLOCK) + 2
        runner = Runner(self.decoder, blocks, self.context, self.scheme, bases=self.bases)
        runner.evict_keys()
        return runner

    def windows(self) -> list[Tensor]:
        """Return the first windows of the text, up to `WINDOWS`."""
        ends = range(self.context, len(self.ids) + 1, self.context)
        return [torch.tensor(self.ids[end - self.context : end]) for end in ends][:WINDOWS]


class RowLosses:
    """What rows of windows lose: their KL divergence in nats, and whether the most probable token stays."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._agree: list[Tensor] = []

    def add(self, full: Tensor, other: Tensor) -> None:
        """Add the rows of one window, as log probabilities [N, V]: of full attention, and of what is measured."""
        self._kl.append((full.exp() * (full - other)).sum(-1))
        self._agree.append((full.argmax(-1) == other.argmax(-1)).double())

    def means(self) -> tuple[int, Interval, float, float]:
        """Return the number of rows, their mean KL divergence, the worst, and the share with the same top token."""
        kl, agree = torch.cat(self._kl), torch.cat(self._agree)
        windows = torch.arange(len(self._kl)).repeat_interleave(torch.tensor([len(each) for each in self._kl]))
        return len(kl), bootstrap.mean(kl.numpy(), windows.numpy()), float(kl.max()), float(agree.mean())


def loss_lines(kl: Interval, worst: float, top1: float) -> tuple[str, str]:
    """Return the lines of a report's table that say what rows lose."""
    sure = "" if kl.low is None else f" (95 %: {kl.low:.5f} to {kl.high:.5f})"
    return (
        f"  KL divergence    {kl.value:.5f} nats{sure}, worst row {worst:.4f}",
        f"  same top token   {100 * top1:.1f} %",
    )


def run(
    decoder: Decoder, cache: KVCache, ids: Tensor, told: Progress | None = None, before: int = 0, of: int = 1
) -> None:
    """Append tokens [N] to a cache of one sequence, in pieces.

    `told` is called with the stage `evaluating`, and with `before` and what the cache holds, of `of`.
    """
    for piece in ids.split(PIECE):
        decoder.states(piece, ForwardBatch((len(piece),), cache.capacity, cache))
        if told is not None:
            told("evaluating", before + cache.filled[0], of)


def log_chances(decoder: Decoder, cache: KVCache, ids: Tensor) -> Tensor:
    """Return log probabilities of the tokens behind the next rows, float64 [N, V]."""
    return decoder.forward(ids, ForwardBatch((len(ids),), cache.capacity, cache)).double().log_softmax(-1)
