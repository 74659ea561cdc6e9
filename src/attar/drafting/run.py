"""A training run: steps of Adam on a draft head or model, with the target's states computed as it goes.

A killed run resumes: every `save_every` steps the head, Adam's moments, the losses and the agreement so far go to disk.
All randomness comes from counters, so the bytes are those of an uninterrupted run, given the same torch build,
instruction set and thread count. The last tenth of the text is held out, 8192 tokens at most. At every save the head's
most probable token is compared with the target's there: the agreement, by depth. Saves and the result also record
processor seconds. The receipt does not, because its bytes do not depend on speed.

The output is a folder in a published layout. Its receipt, `training.json`, has the hashes of source, text and files,
the settings, and the agreement.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from attar.checkpoints.receipts import receipt
from attar.checkpoints.writer import atomic_folder
from attar.compression.calibration.amount import Amount, drawn_name
from attar.compression.calibration.texts import kept_or_drawn, token_hash, within_context, within_vocabulary
from attar.compression.training.saves import Saves
from attar.compression.training.trainable_model import schedule, shuffled
from attar.drafting.eagle import EagleLearner
from attar.drafting.early_exit import ExitLearner
from attar.drafting.lessons import Lessons
from attar.drafting.medusa import MedusaLearner
from attar.drafting.small import STEP, SmallLearner
from attar.drafting.target import States, Target, frequent
from attar.errors import UserError
from attar.progress import Progress

Kind = Literal["medusa", "eagle3", "exit", "small"]
Loss = Literal["published", "acceptance"]
Layout = Literal["safeailab", "speculators"]
KINDS = get_args(Kind)
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "medusa": {"depths": 3, "draft_vocab": 32000}, "eagle3": {"depths": 3, "draft_vocab": 32000},
    "exit": {"layers": 1, "draft_vocab": 32000}, "small": {"layers": 2, "width": 128},
}  # fmt: skip
OWN = ("depths", "layers", "width", "draft_vocab")  # settings that not every kind has
RECEIPT = "training.json"
CLIP = 1.0  # limit of the gradient's norm
SLOW = 0.1  # share of the rate at which an LM head that begins as the target's learns
COMPARED = 8192  # tokens of the held-out text at most
STATES = 8 << 30  # bytes of states that are kept on disk, of a quarter of what is free


@dataclass(frozen=True, slots=True)
class DraftTraining:
    """Settings of a training; None is the kind's default, and what a kind does not have cannot be set.

    `depths` are Medusa heads, or steps that an EAGLE-3 head is unrolled. `layers` are those of a small model, or those
    before an exit, by default a quarter. `width` is a small model's hidden size. `draft_vocab` is the number of tokens
    that can be guessed; a small model guesses all. `layout` is that of an
    EAGLE-3 head's files, by default SafeAILab's. Raises ValueError on invalid values.
    """

    kind: Kind = "medusa"
    depths: int | None = None
    layers: int | None = None
    width: int | None = None
    draft_vocab: int | None = None
    layout: Layout | None = None
    loss: Loss = "published"
    epochs: int = 1
    rate: float = 1e-3
    batch: int = 2048  # tokens a step
    save_every: int = 25  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.loss not in get_args(Loss):
            raise UserError(
                "name_unknown",
                f"kinds are {', '.join(KINDS)} and losses {', '.join(get_args(Loss))}, not {self.kind} and {self.loss}",
            )
        for name in OWN:
            if getattr(self, name) is not None and name not in DEFAULTS[self.kind]:
                own = ", ".join("--" + each.replace("_", "-") for each in DEFAULTS[self.kind])
                message = f"--kind {self.kind} takes {own}, and not --{name.replace('_', '-')}"
                raise UserError("option_unused", message)
        if self.layout is not None and (self.kind != "eagle3" or self.layout not in get_args(Layout)):
            raise UserError(
                "option_unused",
                f"layouts are {', '.join(get_args(Layout))}, of eagle3, not {self.layout} of {self.kind}",
            )
        given = [value for name in OWN if (value := getattr(self, name)) is not None]
        if min(*given, self.epochs, self.batch, self.save_every) < 1 or self.seed < 0:
            raise UserError(
                "option_out_of_range",
                "numbers of layers, tokens, epochs and steps are at least 1, and the seed at least 0",
            )
        if (self.depths or 1) > 16 or not 0 < self.rate < 1:
            raise UserError(
                "option_out_of_range", f"depths are at most 16 and rate is in (0, 1), not {self.depths} and {self.rate}"
            )
        if (self.width or STEP) % STEP:
            raise UserError("option_out_of_range", f"the width is a multiple of {STEP}, not {self.width}")

    def complete(self, layers: int) -> DraftTraining:
        """Return these settings with the kind's defaults, for a target of so many layers."""
        own = {**DEFAULTS[self.kind], **({"layers": max(1, layers // 4)} if self.kind == "exit" else {})}
        return replace(
            self,
            depths=self.depths or own.get("depths"), layers=self.layers or own.get("layers"),
            width=self.width or own.get("width"), draft_vocab=self.draft_vocab or own.get("draft_vocab"),
        )  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Result of a training: the head's folder, its number of parameters, the loss of every step, and `curve`: tokens
    trained on, and the agreement at each depth on held-out text. `seconds` are the processor's at each of its points,
    those of interrupted runs until their last save included."""

    path: Path
    parameters: int
    losses: tuple[float, ...]
    curve: tuple[tuple[int, tuple[float, ...]], ...]
    seconds: tuple[float, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self) | {"path": str(self.path)}


Watch = Callable[[int, Sequence[float], float], None]
"""A function (tokens, agreement by depth, processor seconds)."""


class Learner(Protocol):
    """What is trained; `layers` are those whose inputs it reads, and `slow` are parameters that learn slowly."""

    layers: tuple[int, ...]
    slow: tuple[Tensor, ...]

    @property
    def needs_predictions(self) -> bool:
        """Return whether learning reads the target's predictions over all tokens."""

    def parameters(self) -> list[Tensor]: ...

    def learn(self, ids: Tensor, states: States) -> float:
        """Add the gradients of the loss on token ids [S, L], given the target's hidden states [S * L, I]; return the
        loss."""

    def agreement(self, ids: Tensor, states: States) -> list[tuple[int, int]]:
        """Return, for each depth, how many of the head's best tokens are the target's, and of how many."""

    def write(self, folder: Path) -> None:
        """Write the head to a folder that exists."""


def train_draft(
    path: Path,
    out: Path,
    text: Tensor | Amount,
    options: DraftTraining,
    *,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Trained:
    """Train a draft head of the model at `path`, a folder or GGUF file, on token ids [S, L] into the folder `out`, or
    on an amount of text that the model itself writes first.

    Raises ValueError where there are fewer than two sequences or they exceed the context, a loss is not finite, or an
    interrupted run of this output had other settings, was made elsewhere or left no undamaged save.
    """
    rows, length = (text.samples, text.length) if isinstance(text, Amount) else text.shape
    least = (options.depths or DEFAULTS[options.kind].get("depths", 0)) + 3
    if rows < 2 or length < least:
        raise UserError("text_too_short", f"a training needs two sequences of {least} tokens: give more text")
    if path.resolve().is_relative_to(out.resolve()):
        raise UserError("output_is_source", f"{out} would replace the model that it is trained for: choose another")
    report = progress or (lambda stage, done, total: None)
    with atomic_folder(out, overwrite) as work:
        if not resume:
            work.clear()
        report("loading", 0, 1)
        target = Target(path)
        within_context(length, target.config, "sequences to learn from")
        hashes, options = target.hashes(), options.complete(target.config.layers)
        ids = _written(target, text, hashes, work.state, report) if isinstance(text, Amount) else text
        within_vocabulary(ids, target.config.vocab_size, "learned")
        about = receipt.environment() | asdict(options) | {"source": hashes, "text": token_hash(ids)}
        about |= {"products": "bfloat16" if target.quick is not target.decoder else "as served"}
        about |= {"written": asdict(text)} if isinstance(text, Amount) else {}
        held = max(1, min(len(ids) // 10, COMPARED // ids.shape[1]))
        tokens = frequent(ids[:-held], options.draft_vocab or target.config.vocab_size, target.config.vocab_size)
        learner = _learner(target, options, tokens, ids[:2])
        saves = Saves(work.state, about, resume)
        with torch.inference_mode(False), torch.enable_grad():
            most = min(STATES, shutil.disk_usage(work.state).free // 4) if options.epochs > 1 else 0
            lessons = Lessons(target, ids[:-held], learner.layers, learner.needs_predictions, work.state, most)
            curve = Curve(learner, ids[-held:], target.states(ids[-held:], learner.layers), watch)
            losses = _train(learner, lessons, curve, options, saves, report)
        learner.write(work.out)
        count = sum(p.numel() for p in learner.parameters())
        _write_receipt(work.out, about, {"parameters": count, "loss": losses[-1], "curve": saves.figures["curve"]})
    points = tuple((int(at), tuple(shares)) for at, shares in saves.figures["curve"])
    return Trained(out, count, tuple(losses), points, tuple(saves.figures["seconds"]), tuple(saves.notes))


def _written(target: Target, amount: Amount, hashes: Mapping[str, str], state: Path, report: Progress) -> Tensor:
    """Return text that the target writes, int64 [S, L]; a resumed run finds it in the folder `state`."""
    at = state / drawn_name(receipt.combined_hash(hashes), amount)
    return kept_or_drawn(lambda: target.decoder, target.config, amount, at, partial(report, "sampling"))


def _learner(target: Target, options: DraftTraining, tokens: Tensor | None, sample: Tensor) -> Learner:
    depths, layers = options.depths or 0, options.layers or 0
    if options.kind == "medusa":
        return MedusaLearner(target, depths, tokens, options.loss)
    if options.kind == "eagle3":
        speculators = options.layout == "speculators"
        return EagleLearner(target, depths, tokens, options.loss, options.seed, sample, speculators)
    if options.kind == "exit":
        return ExitLearner(target, layers, tokens, options.loss)
    return SmallLearner(target, layers, options.width or 0, options.loss, options.seed)


def _write_receipt(folder: Path, about: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write what the head was made of and what came of it, with the hash of each file. It holds no clock and no path:
    the same inputs give the same bytes."""
    files = {path.name: receipt.sha256(path) for path in sorted(folder.iterdir())}
    text = json.dumps({**about, **found, "files": files}, indent=2, sort_keys=True, allow_nan=False)
    (folder / RECEIPT).write_text(f"{text}\n")


class Optimizer:
    """Adam for a learner. Steps of Adam are of one size, whatever the gradient's: at the full rate rows of an LM head
    that are seldom right would all move as far as the others."""

    def __init__(self, learner: Learner, rate: float) -> None:
        self._learner, self._rate, slow = learner, rate, {id(each) for each in learner.slow}
        groups = [
            {"params": [each for each in learner.parameters() if (id(each) in slow) == slowly], "share": share}
            for slowly, share in ((False, 1.0), (True, SLOW))
        ]
        self.adam = torch.optim.Adam([group for group in groups if group["params"]], lr=rate, fused=True)

    def step(self, ids: Tensor, states: States, done: float) -> float:
        """Learn from token ids [S, L] at a fraction of the training; return the loss, and change nothing where it is
        not finite."""
        for group in self.adam.param_groups:
            group["lr"] = self._rate * group["share"] * schedule(done)
        self.adam.zero_grad(set_to_none=True)
        if math.isfinite(loss := self._learner.learn(ids, states)):
            torch.nn.utils.clip_grad_norm_(self._learner.parameters(), CLIP)
            self.adam.step()
        return loss


class Curve:
    """Agreement on held-out token ids [S, L] over the tokens trained on, in the figures of a run's saves."""

    def __init__(self, learner: Learner, held: Tensor, states: States, watch: Watch | None) -> None:
        self._learner, self._held, self._states, self._watch = learner, held, states, watch
        self._figures: dict[str, Any] = {}
        self._since = 0.0

    def resume(self, figures: dict[str, Any]) -> None:
        """Take up the points of a save, or measure the first."""
        self._figures = figures
        self._since = time.process_time() - figures.get("seconds", [0.0])[-1]
        if "curve" not in figures:
            figures |= {"curve": [], "seconds": []}
            self.add(0)
        elif self._watch is not None:
            for (tokens, shares), seconds in zip(figures["curve"], figures["seconds"], strict=True):
                self._watch(tokens, shares, seconds)

    def add(self, tokens: int) -> None:
        """Measure a point."""
        shares = [right / max(1, count) for right, count in self._learner.agreement(self._held, self._states)]
        seconds = round(time.process_time() - self._since, 1)
        self._figures["curve"].append([tokens, shares])
        self._figures["seconds"].append(seconds)
        if self._watch is not None:
            self._watch(tokens, shares, seconds)


def _train(
    learner: Learner, lessons: Lessons, curve: Curve, options: DraftTraining, saves: Saves, report: Progress
) -> list[float]:
    """Train from the beginning, or from the save of an earlier run; return the loss of every step."""
    parameters, ids = learner.parameters(), lessons.ids
    optimizer = Optimizer(learner, options.rate)
    adam = optimizer.adam
    losses = saves.resume(parameters, adam)
    curve.resume(saves.figures)
    sequences = max(1, options.batch // ids.shape[1])
    plan = [
        order[at : at + sequences]
        for epoch in range(options.epochs)
        for order in [shuffled(range(len(ids)), options.seed, epoch)]
        for at in range(0, len(order), sequences)
    ]
    for step in range(len(losses), len(plan)):
        losses.append(optimizer.step(*lessons.of(plan[step]), (step + 0.5) / len(plan)))
        if not math.isfinite(losses[-1]):
            raise UserError(
                "training_diverged", f"the loss of step {step + 1} is {losses[-1]}: a smaller rate may help"
            )
        last = step + 1 == len(plan)
        if last or (step + 1) % options.save_every == 0:
            curve.add(sum(map(len, plan[: step + 1])) * ids.shape[1])
            if not last:
                saves.put(parameters, adam, losses)
        report("training", step + 1, len(plan))
    return losses
