"""Tasks: how probable the right end of a context is to a model, and whether greedy decoding would write it.

An item is a context and a target. Its score is the log-likelihood of the target's tokens, each given the true ones
before it, and whether every one of them was the most probable (`greedy`). Three figures result. `accuracy` is the
fraction of items that are greedy throughout. `ppl` is e to the mean of an item's whole negative log-likelihood, as task
harnesses define perplexity. `ppl_token` is the same per token, which compares with the perplexity of a text.

The target's tokens are defined so: context and whole are encoded, and the tokens after their common prefix are to be
predicted. Where no token holds both the end of the context and the beginning of the target, EleutherAI's
lm-evaluation-harness takes the same tokens, and the figures are equal (`bench/lm_eval_lambada.py`). That is so in
vocabularies whose words begin with their space. Elsewhere the harness joins the context's tokens with as many of the
whole's as these leave, which spells another text, and sometimes leaves none to predict. BOS goes in front where the
tokenizer itself puts it, as everywhere in attar; the harness does so for a server only with `add_bos_token`.

Several items run in one call of the decoder, one behind the other without padding, and the LM head is applied to the
targets' rows only.

Legend: N items, R rows of targets in a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hf, hub
from attar.errors import UserError
from attar.evaluation.report import Model, load
from attar.kernels import dispatch
from attar.metrics import bootstrap
from attar.metrics.bootstrap import LEVEL, RESAMPLES, SEED, Interval
from attar.metrics.perplexity import nll
from attar.metrics.streaming import exp
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.progress import Progress
from attar.text.files import read_texts
from attar.text.tokenizer import Tokenizer

ROWS_AT_ONCE = 2048  # tokens of one call: bounds the memory of activations, as an engine's step does


@dataclass(frozen=True, slots=True)
class Item:
    """A context, and the target that continues it."""

    context: str
    target: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """An item as tokens: the last `targets` of `ids` are to be predicted."""

    ids: tuple[int, ...]
    targets: int


@dataclass(frozen=True, slots=True)
class Score:
    """One item's log-likelihood in nats, its number of target tokens, and whether each was the most probable."""

    log_likelihood: float
    tokens: int
    greedy: bool


@dataclass(frozen=True, eq=False)
class TaskReport:
    """Figures of a task by name (`ppl`, `ppl_token`, `accuracy`), and the scores they come from."""

    task: str
    scores: Sequence[Score]
    figures: Mapping[str, Interval]
    bos: int | None

    @property
    def tokens(self) -> int:
        return sum(score.tokens for score in self.scores)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values: figures, `intervals` (name to [low, high], None for a single item), `items`,
        `tokens`, `bos`."""
        return {
            "task": self.task,
            **{name: figure.value for name, figure in self.figures.items()},
            "intervals": {
                name: None if figure.low is None else [figure.low, figure.high] for name, figure in self.figures.items()
            },
            "items": len(self.scores),
            "tokens": self.tokens,
            "bos": self.bos,
            "protocol": f"{LEVEL:.0%} bootstrap over items, {RESAMPLES} resamples, seed {SEED}",
        }

    def table(self) -> str:
        """Return the figures as text for a terminal."""
        names = {"ppl": "perplexity", "ppl_token": "by token"}
        lines = []
        for name, figure in self.figures.items():
            pair = "" if figure.low is None else f"  [{figure.low:.4g}, {figure.high:.4g}]"
            lines.append(f"{names.get(name, name):<16} {figure.value:>10.5g}{pair}")
        bos = "no BOS" if self.bos is None else f"BOS {self.bos} first"
        lines.append(f"{self.task}: {len(self.scores)} items, {self.tokens} target tokens, {bos}")
        return "\n".join(lines)


def lambada(path: Path) -> list[Item]:
    """Read LAMBADA (Paperno et al. 2016, arXiv:1606.06031): the last word of each text, given the rest. The file is
    .jsonl with a text a line under `text`. Raises ValueError where a line has none, or no space in it."""
    items = []
    for number, text in enumerate(read_texts(path), 1):
        context, _, word = text.rpartition(" ")
        if not context.strip() or not word:
            raise UserError(
                "task_malformed", f"{path}, text {number}: it needs a word to predict behind a context and a space"
            )
        before = context.rstrip()
        items.append(Item(before, text[len(before) :]))
    return items


TASKS: Mapping[str, Callable[[Path], list[Item]]] = {"lambada": lambada}


def parse_task(text: str) -> tuple[str, Path]:
    """Parse NAME=FILE. Raises ValueError for another form, or an unknown name."""
    name, equals, path = text.partition("=")
    if name not in TASKS or not equals or not path:
        raise UserError(
            "option_malformed", f"a task is given as NAME=FILE with NAME among {', '.join(TASKS)}, not {text!r}"
        )
    return name, Path(path)


def evaluate_task(
    model: Model,
    task: str,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    limit: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    adapter: Path | None = None,
    progress: Progress | None = None,
) -> TaskReport:
    """Score a model on the first `limit` items of a task of `TASKS`. `context` is the most tokens of an item, by
    default the model's; `adapter` is the folder of one that the model computes with. A decoder given as `model` has no
    tokenizer of its own: `tokenizer` stands in. Raises ValueError for an unknown task, a file that does not hold it, a
    model that cannot be loaded, and logits that are not finite."""
    if task not in TASKS:
        raise UserError("name_unknown", f"unknown task {task!r}: known are {', '.join(TASKS)}")
    dispatch.require(device)
    computed = hf.compute_dtype(dtype, device)
    items = TASKS[task](path)[:limit]
    told = progress or (lambda stage, done, total: None)
    folder = None if isinstance(model, Decoder) else hub.resolve(model)
    if tokenizer is None:
        if folder is None:
            raise UserError("tokenizer_missing", "a loaded decoder has no tokenizer: pass one")
        tokenizer = vocabulary.tokenizer(folder)
    decoder = load(model, folder, computed, told, adapter, device)
    supported = decoder.config.context
    if context is not None and context > supported:
        raise UserError(
            "context_exceeded",
            f"a context of {context} is longer than the {supported} positions that the model supports",
        )
    encoded = [encode(tokenizer, item, context or supported) for item in items]
    scores: list[Score] = []
    for batch in _batches(encoded):
        scores += score(decoder, batch)
        told("evaluating", len(scores), len(items))
    return TaskReport(task, scores, _figures(scores), tokenizer.added_bos)


def encode(tokenizer: Tokenizer, item: Item, context: int) -> Encoded:
    """Encode an item as at most `context` tokens and one more: the last is only predicted. A longer context loses its
    beginning. Raises ValueError where the target has more tokens than that."""
    alone, whole = tokenizer.encode(item.context), tokenizer.encode(item.context + item.target)
    shared = next((at for at, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), len(alone))
    first = max(1, min(shared, len(whole) - 1))  # leaves a token to predict, and one to predict it from
    if len(whole) - first > context:
        raise UserError(
            "context_exceeded", f"the target {item.target!r} has {len(whole) - first} tokens: {context} fit"
        )
    return Encoded(tuple(whole[-(context + 1) :]), len(whole) - first)


def score(decoder: Decoder, batch: Sequence[Encoded]) -> list[Score]:
    """Return the scores of items that run in one call. Raises ValueError where logits are not finite."""
    inputs = [item.ids[:-1] for item in batch]
    lengths = tuple(map(len, inputs))
    rows: list[int] = []
    end = 0
    for item, length in zip(batch, lengths, strict=True):
        end += length
        rows += range(end - item.targets, end)
    ids = torch.tensor([token for each in inputs for token in each], device=decoder.device)
    step = ForwardBatch(lengths, lengths, device=decoder.device)
    logits = decoder.forward(ids, step, torch.tensor(rows, device=decoder.device)).cpu()  # [R, V]
    if not logits.isfinite().all():
        raise UserError("not_finite", "the logits of the model hold a NaN or an infinity: its weights are damaged")
    targets = torch.tensor([token for item in batch for token in item.ids[-item.targets :]])
    losses = nll(logits, targets)
    top_1 = logits.gather(1, targets[:, None])[:, 0] == logits.amax(1)
    counts = [item.targets for item in batch]
    return [
        Score(-loss.sum().item(), len(loss), bool(best.all()))
        for loss, best in zip(losses.split(counts), top_1.split(counts), strict=True)
    ]


def _batches(items: Sequence[Encoded]) -> Iterator[list[Encoded]]:
    """Yield the items in order, as many at a time as `ROWS_AT_ONCE` holds, at least one."""
    batch: list[Encoded] = []
    rows = 0
    for item in items:
        if batch and rows + len(item.ids) > ROWS_AT_ONCE:
            yield batch
            batch, rows = [], 0
        batch.append(item)
        rows += len(item.ids)
    if batch:
        yield batch


def _figures(scores: Sequence[Score]) -> dict[str, Interval]:
    loss = np.array([-score.log_likelihood for score in scores])
    tokens = np.array([score.tokens for score in scores], dtype=np.float64)
    greedy = np.array([score.greedy for score in scores], dtype=np.float64)
    one = np.ones(len(scores))
    return {
        "ppl": bootstrap.ratio(loss, one).map(exp),
        "ppl_token": bootstrap.ratio(loss, tokens).map(exp),
        "accuracy": bootstrap.ratio(greedy, one),
    }
