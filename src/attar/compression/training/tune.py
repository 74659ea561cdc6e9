"""Frozen-code tuning: after all codes are chosen, train the few continuous numbers that are stored beside them.

Block by block, rounding can only correct each block's output, not the predictions of the whole model. Here the scales
of groups, the weights of norms and the biases move, by Adam, towards the least KL(original || compressed)
over the whole vocabulary, on the calibration text. (The "E2E-QP" of EfficientQAT, Chen et al. 2024, with the original's
predictions instead of labels, and codes that never move.) It adds no bit: every such number is stored anyway, in the
same dtype as before.

* Each number moves relative to its own size: w = w0 + |w0| d, d trained from 0 (biases, which may be zero, by the root
  mean square of theirs). One learning rate then fits scales of 1e-3 and norms of 10, and a weight of zero stays.
* A pruned model that stays dense has no codes: the positions of its zeros are frozen. All other weights of pruned
  linears are trained, by the root mean square of their matrix, in the dtype in which they are stored.
* Rounding is in the loop: every forward pass computes with what would be stored, and the gradient passes straight
  through the rounding to d, which is float32. So the measured values are the written ones.
* One sequence in `HELD` is not trained on. On these the iterate after each epoch is compared with the untuned model,
  and the best is kept: the result is never worse there, and `Tuned` reports both figures.
* The original runs once, block by block; only the states before its final norm are kept, and its logits are computed
  again for the few rows at hand. Of the compressed model the codes stay in memory at two bytes a weight and the tables
  as they are stored (`trainable_model`).

A calibration text is soon exhausted: what it says about scales is more about that text than about the model. So the
original may write more text, by its own probabilities, on which the compressed model learns from its likely mistakes.
That text is written for tuning alone (`Tune.drawn`, and `distill`, whose default it is), or is also what the blocks
were calibrated on (`Amount.drawn`). The calibration text that was given alone judges.

`trainable_parameters` lists the numbers, form by form. Not done: scales of a packed LM head. Codes were tried, by
straight-through rounding from what `guided` had chosen. The KL of the 57,000 tokens trained on falls by a fifth, that
of other text of their kind no further than scales alone bring it, and that of text of another kind rises. A killed run
begins anew, to the same bytes: the model's files are changed only when all numbers are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.receipts.probes import measure_probes
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.vocabulary import is_gguf
from attar.compression.calibration import gradients, texts
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.hidden_states import HiddenStates, rows_at_once
from attar.compression.recipe.methods import Tune
from attar.compression.resume import restore, save
from attar.compression.training import trainable_parameters
from attar.compression.training.trainable_model import WholeModel, schedule, shuffled
from attar.compression.training.trainable_parameters import Knob
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.model import assembly, decoder
from attar.progress import Progress

TOKENS = 1 << 16
"""Maximal number of calibration tokens trained on: more would make this training rather than compression."""

DRAWN = 1 << 32
"""Offset of the seed of text sampled to train on, which differs from sampled calibration text."""

HELD = 8
BETAS = (0.9, 0.99)  # a few hundred steps: the usual 0.999 remembers them all
FOUND = "tuned"


@dataclass(frozen=True)
class Tuned:
    """Result of tuning: the numbers to store, by their names in a folder's files (in a GGUF file by attar's own), and
    the mean KL in nats on held-out sequences of the calibration text before and after."""

    kl_before: float
    kl_after: float
    kl_epochs: tuple[float, ...]  # mean KL after each epoch
    epoch: int  # epoch of the kept iterate; 0: the untuned model was best
    steps: int
    trained_tokens: int
    held_out_tokens: int
    untrained: tuple[str, ...]  # schemes without a trained part; norms and biases are trained
    tensors: dict[str, Tensor] = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict, without the tensors."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "tensors"}
        return found | {"untrained": list(self.untrained)}


def run(
    source: Checkpoint,
    made: Path,
    state: Path,
    tokens: tuple[Tensor, Tensor | None],
    options: Tune,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    dense: Collection[str] = (),
) -> Tuned:
    """Tune the finished model `made` from `source`, a folder or a GGUF file; the caller stores the tensors.

    The tokens are those given [S, L] and those drawn [D, L], sampled from the model in addition, unless the options
    have other text drawn. `dense` names the linears whose weights, but for zeros, are trained themselves. The result is
    kept in the folder `state`, from which a run that was killed while storing the tensors takes it again.

    Raises ValueError where this machine has too little memory, where there is only one sequence, where the compressed
    model's predictions are not finite, and where the kept result is damaged.
    """
    kept = state / FOUND
    if kept.is_dir():
        figures, tensors = restore(kept)  # raises if damaged: the model may hold some of it already
        lists = {name: tuple(figures[name]) for name in ("kl_epochs", "untrained")}
        return Tuned(**{**figures, **lists}, tensors=tensors)
    ids, drawn = tokens
    if len(ids) < 2:
        raise UserError(
            "calibration_too_short",
            "tuning needs at least 2 calibration sequences: it trains on some and selects on others",
        )
    report = progress or (lambda stage, done, total: None)
    length = ids.shape[1]
    ids = ids[_taken(ids)]
    judged = len(ids)
    if options.drawn:
        amount, path = Amount(options.drawn, length, DRAWN + seed), state / "drawn.i32"
        drawn = texts.written(source, amount, path, lambda done, of: report("drawing", done, of))
    if drawn is not None:
        ids = torch.cat([ids, drawn])
    with torch.inference_mode(False), torch.enable_grad():
        student = _Student(_opened(made), dense)
        sequences = max(1, options.batch // length)
        student.fit(sequences * length, sum(knob.base.numel() for knob in student.all_knobs()), None, "tuning")
        shape = (*ids.shape, source.config.hidden)
        path = state / "teacher.f32"
        with closing(HiddenStates(path, shape, 0, rows_at_once(source.config))) as states:
            layers = source.config.layers
            gradients.through(source, ids, [states] * (layers + 1), lambda done: report("original", done, layers))
            found = _Tuning(student, _Teacher(source, states), ids, judged, options, seed).run(sequences, report)
        path.unlink()
    save(kept, found.to_dict(), found.tensors)
    return found


def aside(ids: Tensor) -> list[int]:
    """Return the sequences of a calibration text [S, L] by which tuning judges; nothing before tuning should have seen
    them."""
    taken = _taken(ids)
    every = min(HELD, len(taken))
    return [s for i, s in enumerate(taken) if i % every == every - 1]


def without_judges(ids: Tensor) -> Tensor:
    """Return the other sequences of a calibration text [S, L], in order."""
    judges = set(aside(ids))
    return ids[[s for s in range(len(ids)) if s not in judges]]


def _taken(ids: Tensor) -> list[int]:
    """Return the sequences that tuning uses, evenly spread."""
    count = min(len(ids), max(2, TOKENS // ids.shape[1]))
    return [i * len(ids) // count for i in range(count)]


def _opened(made: Path) -> Checkpoint | GgufCheckpoint:
    if is_gguf(made):
        return GgufCheckpoint.open(made, torch.float32, as_stored=True, blocks=True)
    return Checkpoint.open(made)


def probes(made: Path, seed: int) -> dict[str, Any]:
    """Return the probes of the finished model, for its receipt: those of the block pass are of the untuned model."""
    checkpoint = _opened(made)
    return measure_probes(checkpoint.config, checkpoint, seed)


# The two models


class _Student(WholeModel):
    """The compressed model and its trainable parameters by block; the last are the final norm's."""

    def __init__(self, checkpoint: Checkpoint | GgufCheckpoint, dense: Collection[str] = ()) -> None:
        super().__init__(checkpoint)
        self.head.keep_dense = isinstance(self.head.weight, PackedTensor)  # it is applied to a few rows at a time
        self.in_file = isinstance(checkpoint, GgufCheckpoint)
        self.knobs = [list(trainable_parameters.of_block(checkpoint, block, dense)) for block in self.blocks]
        self.knobs.append(list(trainable_parameters.of_norm(checkpoint, self.final_norm)))

    def all_knobs(self) -> list[Knob]:
        return [knob for of_block in self.knobs for knob in of_block]

    def install(self, layer: int) -> None:
        for knob in self.knobs[layer]:
            knob.put()

    def untrained(self) -> tuple[str, ...]:
        """Return the schemes of linears without a trained part."""
        weights = [linear.weight for block in self.blocks for linear in block.linears()]
        schemes = [weight.scheme for weight in weights if isinstance(weight, PackedTensor)]
        which = trainable_parameters.untrained_in_file if self.in_file else trainable_parameters.untrained
        return which(schemes)


class _Teacher:
    """The original: its states before the final norm, its final norm and its LM head."""

    def __init__(self, source: Checkpoint, final: HiddenStates) -> None:
        self._config, self._final = source.config, final
        self._norm = assembly.build_final_norm(source.config, source)
        self._head = assembly.build_ends(source.config, source)[1]
        self._head.keep_dense = False

    def states(self, sequences: Sequence[int]) -> Tensor:
        """Return the inputs of the final norm, [len(sequences) * L, I]."""
        return torch.cat([self._final.read(range(s, s + 1)) for s in sequences])

    @torch.no_grad()
    def log_probabilities(self, rows: Tensor) -> Tensor:
        return decoder.logits(self._config, self._norm, self._head, rows).log_softmax(-1)


# Training


class _Tuning:
    """One run of Adam over the parameters of a student. Some of the first `judged` sequences of `ids` are not trained
    on."""

    def __init__(
        self, student: _Student, teacher: _Teacher, ids: Tensor, judged: int, options: Tune, seed: int
    ) -> None:
        self.student, self.teacher, self.ids, self.options, self.seed = student, teacher, ids, options, seed
        every = min(HELD, judged)
        self.held = [s for s in range(judged) if s % every == every - 1]
        self.trained = sorted({*range(len(ids))} - {*self.held})

    def run(self, sequences: int, report: Progress) -> Tuned:
        """Train `sequences` sequences a step; return the best of the untuned model and the iterate of every epoch."""
        trained = self.student.all_knobs()
        adam = torch.optim.Adam([knob.learned for knob in trained], lr=self.options.rate, betas=BETAS)
        before = least = self._held_out(sequences)
        best, kept = 0, [knob.stored() for knob in trained]
        after: list[float] = []
        total = self.options.epochs * -(-len(self.trained) // sequences)
        step = 0
        for epoch in range(1, self.options.epochs + 1):
            order = shuffled(self.trained, self.seed, epoch)
            for at in range(0, len(order), sequences):
                for group in adam.param_groups:
                    group["lr"] = self.options.rate * schedule((step + 0.5) / total)
                adam.zero_grad(set_to_none=True)
                self._learn(order[at : at + sequences])
                adam.step()
                step += 1
                report("tuning", step, total)
            after.append(found := self._held_out(sequences))
            if found < least:
                least, best, kept = found, epoch, [knob.stored() for knob in trained]
        length = self.ids.shape[1]
        tensors = {name: tensor for knob, tensor in zip(trained, kept, strict=True) for name in knob.names}
        amounts = len(self.trained) * length, len(self.held) * length
        return Tuned(before, least, tuple(after), best, step, *amounts, self.student.untrained(), tensors)

    def _learn(self, sequences: Sequence[int]) -> None:
        """Add the gradient of the mean KL over the tokens of some sequences."""
        self.student.learn(self.ids[list(sequences)], self._divergence(sequences, len(sequences) * self.ids.shape[1]))

    @torch.no_grad()
    def _held_out(self, at_once: int) -> float:
        """Return the mean KL over the tokens of the held-out sequences."""
        total, count = 0.0, len(self.held) * self.ids.shape[1]
        for at in range(0, len(self.held), at_once):
            some = self.held[at : at + at_once]
            losses = self.student.losses(self.student.states(self.ids[some]), self._divergence(some, count))
            total += sum(float(each) for each in losses)
        if not math.isfinite(total):
            raise UserError("not_finite", "the compressed model's predictions on the calibration text are not finite")
        return total

    def _divergence(self, sequences: Sequence[int], count: int) -> Callable[[Tensor, slice], Tensor]:
        """Return KL(original || compressed) of some rows of these sequences, summed, over `count`."""
        wanted = self.teacher.states(sequences)

        def loss(logits: Tensor, rows: slice) -> Tensor:
            log_p, log_q = self.teacher.log_probabilities(wanted[rows]), logits.log_softmax(-1)
            return (log_p.exp() * (log_p - log_q)).sum() / count

        return loss
