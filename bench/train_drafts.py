"""Train drafts of several kinds for one model on the same text, side by side, as far as some minutes go.

    python bench/train_drafts.py MODEL OUT --text FILE --held prose=FILE --held chat=FILE [--kinds eagle3,medusa]
        [--seconds 240] [--epochs 3] [--vocab 8192]

The model's states are computed once for all kinds, which makes a comparison at equal tokens cheap; `attar train-draft`
trains one kind, and resumes. `eagle3-random` is an EAGLE-3 head whose fc begins as random numbers. Sequences are as
many as the first steps promise in the given seconds. Printed is how often each draft's best token is the model's own on
the held-out texts, by depth, along the training, and tokens a second. OUT/KIND are folders for `--draft`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.compression.calibration import texts
from attar.compression.training.trainable_model import shuffled
from attar.drafting.eagle import EagleLearner
from attar.drafting.early_exit import ExitLearner
from attar.drafting.initial import normal
from attar.drafting.lessons import Lessons
from attar.drafting.medusa import MedusaLearner
from attar.drafting.run import Learner, Optimizer
from attar.drafting.small import SmallLearner
from attar.drafting.target import States, Target, frequent

LENGTH, SEQUENCES, POINTS = 512, 2, 4
HELD = 4  # sequences of each held-out text
PROBED = 3  # steps whose times choose the number of sequences


class Trained:
    """A learner with its optimizer, and the processor seconds that it took."""

    def __init__(self, learner: Learner, rate: float) -> None:
        self.learner, self.optimizer, self.seconds = learner, Optimizer(learner, rate), 0.0

    def step(self, ids: Tensor, states: States, done: float) -> float:
        """Learn from a batch at a fraction of the training; return the loss."""
        since = time.process_time()
        loss = self.optimizer.step(ids, states, done)
        self.seconds += time.process_time() - since
        return loss


def random_fc(learner: EagleLearner) -> EagleLearner:
    """Return the head with other numbers in fc."""
    fc = learner.weights["fc.weight"]
    fc.data = normal(0, 50, (fc.shape[0], fc.shape[1]))
    return learner


def learners(target: Target, tokens: Tensor | None, sample: Tensor) -> dict[str, Callable[[], Learner]]:
    """Return how each kind is made, for a draft vocabulary and some of the text."""
    return {
        "eagle3": lambda: EagleLearner(target, 3, tokens, "published", 0, sample),
        "eagle3-random": lambda: random_fc(EagleLearner(target, 3, tokens, "published", 0, sample)),
        "medusa": lambda: MedusaLearner(target, 3, tokens, "published"),
        "exit": lambda: ExitLearner(target, target.config.layers // 4, tokens, "published"),
        "small": lambda: SmallLearner(target, 2, 128, "published", 0),
    }


class Clock:
    """Seconds since it was made: the processor's where there is one thread, which may share its core."""

    def __init__(self) -> None:
        self._now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self._since = self._now()

    @property
    def seconds(self) -> float:
        return self._now() - self._since


def sequences(made: dict[str, Trained], lessons: Lessons, epochs: int, seconds: float) -> int:
    """Return how many sequences can be learned in so many seconds, by the times of steps at a rate of almost nothing;
    states are computed in the first epoch alone."""
    clock, learning = Clock(), 0.0
    for step in range(PROBED):
        some, states = lessons.of(range(SEQUENCES * step, SEQUENCES * step + SEQUENCES))
        learned = Clock()
        for each in made.values():
            each.step(some, states, 1.0 - 1e-9)
        learning += learned.seconds / PROBED
    pace = clock.seconds / PROBED
    steps = max(1, int(seconds / (pace + (epochs - 1) * learning)))
    count = min(len(lessons.ids) // SEQUENCES, steps) * SEQUENCES
    times = f"{pace:.2f} s a step at first, {learning:.2f} later"
    print(f"{count} sequences of {LENGTH} tokens, {epochs} epochs, {times}", flush=True)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--kinds", default="eagle3,medusa,exit,small")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rate", type=float, default=1e-3)
    args = parser.parse_args()
    tokenizer, target = vocabulary.tokenizer(args.model), Target(args.model)
    ids = texts.windows(texts.read(args.text, tokenizer), 1 << 20, LENGTH, tokenizer.added_bos)
    ids = ids[torch.tensor(shuffled(range(len(ids)), 0, 0))]
    kinds = learners(target, frequent(ids, args.vocab, target.config.vocab_size), ids[:2])
    made = {name: Trained(kinds[name](), args.rate) for name in args.kinds.split(",")}
    read = tuple(sorted({layer for each in made.values() for layer in each.learner.layers}))
    with tempfile.TemporaryDirectory() as folder:
        held = {}
        for name, file in (pair.split("=", 1) for pair in args.held):
            some = texts.windows(texts.read(Path(file), tokenizer), HELD, LENGTH, tokenizer.added_bos)
            held[name] = Lessons(target, some, read, True, Path(folder), 0).of(range(len(some)))
        lessons = Lessons(target, ids, read, True, Path(folder), 8 << 30)
        count = sequences(made, lessons, args.epochs, args.seconds)
        plan = [
            order[at : at + SEQUENCES]
            for epoch in range(args.epochs)
            for order in [shuffled(range(count), 0, epoch)]
            for at in range(0, count, SEQUENCES)
        ]
        clock, rows = Clock(), list[dict[str, object]]()
        for step, which in enumerate(plan, 1):
            some, states = lessons.of(which)
            losses = {name: each.step(some, states, (step - 0.5) / len(plan)) for name, each in made.items()}
            if step % max(1, len(plan) // POINTS) == 0:
                seen = step * SEQUENCES * LENGTH
                for name, each in made.items():
                    found = {of: _shares(each.learner, pair) for of, pair in held.items()}
                    shown = "  ".join(f"{of} " + " ".join(f"{x:.3f}" for x in shares) for of, shares in found.items())
                    print(f"{name:13} {seen:>9,} tokens {each.seconds:5.0f} s  loss {losses[name]:.3f}  {shown}")
                    rows.append({"kind": name, "tokens": seen, "seconds": each.seconds, "agreement": found})
                    (args.out / name).mkdir(parents=True, exist_ok=True)
                    each.learner.write(args.out / name)
                print(f"{clock.seconds:.0f} s, {seen / clock.seconds:.0f} tokens/s of all", flush=True)
    print(json.dumps({"model": args.model.name, "sequences": count, "length": LENGTH, "rows": rows}))


def _shares(learner: Learner, held: tuple[Tensor, States]) -> list[float]:
    return [right / count for right, count in learner.agreement(*held)]


if __name__ == "__main__":
    main()
