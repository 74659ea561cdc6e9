"""`attar.evaluate`: from a user's model and text to the figures of `metrics.measure`.

The tokenizer is the model's own. The token in front of each window is the one that the tokenizer itself puts in front
of a text. Where it adds none, there is none, and the first token of the text is not predicted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from attar.checkpoints import vocabulary
from attar.checkpoints.adapters import lora
from attar.checkpoints.sources import hf, hub, opening
from attar.errors import UserError
from attar.execution import kv_cache as engine_kv
from attar.kernels import dispatch
from attar.metrics.measure import CacheBits, Report, measure
from attar.metrics.protocols import Protocol
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.progress import Progress
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

Model = str | os.PathLike[str] | Decoder
"""A folder, a Hub id, `demo`, or a loaded decoder."""

KV_CONTEXT = 4096


def evaluate(
    model: Model,
    *,
    against: Model | None = None,
    text: str | Path | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    kv: str | None = None,
    adapter: Path | None = None,
    prompts: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure a model on a text or on token sequences; with `against`, also its divergence from that model.

    `text` names a file (UTF-8; or .jsonl, with the text under `text`). `max_tokens` ends it early (for `tokens`: after
    whole sequences). A decoder given as `model` has no tokenizer of its own: `tokenizer` stands in. `context` and
    `stride` are explained in `metrics.perplexity`. Both models compute in `dtype` on `device`: by the reference on a
    CPU, in float32 by default; on `cuda` by its kernels, in bfloat16. A loaded decoder computes in its own dtype.

    `kv` names the scheme of the KV cache (`kv/schemes.py`) or a format as published, which is simulated
    (`kv/published.py`): each window then runs as a prompt through such a cache.
    Without `against`, the base is the model itself with an unquantized KV cache. Windows then have up to `KV_CONTEXT`
    tokens by default, because the cost of such a cache grows with its contents. `adapter` is the folder of a low-rank
    adapter that `model`, and not `against`, computes with. `prompts` prompts from all over the text are continued
    greedily by both, to count equal tokens (`metrics.greedy`).

    Raises ValueError for an empty text or one of fewer than two tokens, models of different vocabularies, logits that
    are not finite, and models that cannot be loaded.
    """
    if (text is None) == (tokens is None):
        raise UserError(
            "option_missing" if text is None else "option_conflict",
            "give what to evaluate on: either a text or token ids",
        )
    dispatch.require(device)
    computed = hf.compute_dtype(dtype, device)
    if max_tokens is not None and max_tokens < 2:
        raise UserError("option_out_of_range", f"max_tokens is {max_tokens}: at least 2 tokens are needed")
    content = None if text is None else read_text(text)
    told = progress or (lambda stage, done, total: None)
    folder = None if isinstance(model, Decoder) else hub.resolve(model)
    if tokenizer is None and folder is not None and (content is not None or vocabulary.has_tokenizer(folder)):
        tokenizer = vocabulary.tokenizer(folder)
    bos = None
    ids: list[list[int]]
    if content is not None:
        if tokenizer is None:
            raise UserError(
                "tokenizer_missing", "a loaded decoder has no tokenizer: pass one, or token ids instead of a text"
            )
        ids = [tokenizer.encode(content, add_special_tokens=False)[:max_tokens]]
        bos = tokenizer.added_bos
    else:
        ids = _first_tokens(tokens or [], max_tokens)
    loaded = load(model, folder, computed, told, adapter, device)
    base = None if against is None else load(against, None, computed, told, device=device)
    cache = None
    if kv is not None:
        cache = engine_kv.measured(loaded, kv)
        base = loaded if base is None else base
        context = min(KV_CONTEXT, loaded.config.context, base.config.context) if context is None else context
    found = measure(
        loaded, ids, base=base, bos=bos, context=context, stride=stride, bytes_of=tokenizer, cache=cache,
        prompts=prompts, progress=partial(told, "evaluating"),
    )  # fmt: skip
    if cache is None:
        return found
    assert isinstance(found.protocol, Protocol)
    return replace(found, cache=_bits(cache, loaded.config, found.protocol.context))


def _bits(cache: engine_kv.MeasuredCache, config: ModelConfig, context: int) -> CacheBits:
    """Return the bits of a cache's numbers in windows of `context` tokens."""
    numbers = 2 * config.kv_heads * config.head_dim * context
    return CacheBits(cache.name, context, cache.bits(context), 8 * cache.model_bytes / numbers)


def _first_tokens(sequences: Sequence[Sequence[int]], max_tokens: int | None) -> list[list[int]]:
    """Return as many whole sequences as `max_tokens` allows, at least one."""
    kept: list[list[int]] = []
    for sequence in sequences:
        if kept and max_tokens is not None and sum(map(len, kept)) + len(sequence) > max_tokens:
            break
        kept.append(list(sequence))
    return kept


def load(
    model: Model,
    folder: Path | None,
    dtype: torch.dtype | None,
    progress: Progress,
    adapter: Path | None = None,
    device: str = "cpu",
) -> Decoder:
    """Return `model` where it is a decoder, else load it from `folder` (None: resolve it), with the adapter of a
    folder. Raises ValueError for a decoder and an adapter together: the caller attaches one itself."""
    if isinstance(model, Decoder):
        if adapter is not None:
            raise UserError("option_conflict", "a decoder that is loaded already takes its adapter by lora.attach")
        return model
    path = folder or hub.resolve(model)
    found = opening.load_on(path, device, dtype, lambda done, total: progress("loading", done, total))
    if adapter is not None:
        lora.attach(found, adapter, path)
    return found
