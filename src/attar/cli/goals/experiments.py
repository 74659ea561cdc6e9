"""Experiments of `attar plan --measure` and `--apply`: outputs, divergences and load tests of this machine.

Outputs and outcomes lie in a folder beside the output that `--apply` names, or in the folder of kept rates. Both hold
for one model, its files, texts and machine: another has another folder, and the same command goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.errors import UserError
from attar.plan.goals import report
from attar.plan.goals.candidates import Weights
from attar.plan.goals.halving import LEAST_SECONDS, TOKENS, Clock, OutOfTime
from attar.plan.goals.quality import Quality
from attar.plan.goals.search import Configuration, Question
from attar.progress import Progress

if TYPE_CHECKING:
    from attar.checkpoints.sources import hf

SUFFIX = ".plan"  # of the folder beside an output
REFERENCE = 4.0  # how many times as long a prompt takes in float32 by the reference, as a first guess
START = 10.0  # seconds that a server takes to start, as a first guess
LEAST_ANSWER = 8  # tokens of an answer that is cut to fit the time
MOST_REQUESTS = 1000  # of one load test, but two of each user
MOST_KEPT, DAY = 4, 86400.0  # folders of plans without an output; seconds
CONTEXT = 2048  # tokens of a window, at most


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What experiments are made of: the model, its folder or file, texts, and the number of calibration sequences."""

    model: str
    path: Path
    text: Path | None
    calib: str
    samples: int
    trace: Path | None = None

    def key(self) -> str:
        """Return a hash of all that outputs and outcomes depend on, but for the question."""
        from attar.plan.rates import store

        paths = [self.path, *([] if self.text is None else [self.text])]
        paths += [] if self.calib == "self" else [Path(self.calib)]
        about = [str(self.path.resolve()), self.calib, self.samples, *astuple(store.key()), *map(_state, paths)]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def _state(path: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of change of a file, or of the files in a folder."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    found = [(each.name, each.stat()) for each in files]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]


def place(materials: Materials, output: Path | None) -> Path:
    """Return the folder of experiments: one that exists, else beside the output, else in the folder of kept rates."""
    from attar.plan.rates import private, store

    kept = store.folder() / "plans" / materials.key()
    if output is None or kept.is_dir():
        private.make_folder(store.folder())
        kept.mkdir(parents=True, exist_ok=True)
        _prune(kept)
        return kept
    beside = output.with_name(f"{output.name}{SUFFIX}") / materials.key()
    beside.mkdir(parents=True, exist_ok=True)
    return beside


def _prune(kept: Path) -> None:
    """Remove the oldest folders of other plans, but for those of the last day, which may be in use."""
    others = [(each.lstat().st_mtime, each) for each in kept.parent.iterdir() if each != kept]
    for changed, each in sorted(others, reverse=True)[MOST_KEPT - 1 :]:
        if time.time() - changed > DAY:
            shutil.rmtree(each, ignore_errors=True)


class Experiments:
    """The experiments of `plan.goals.halving.Bench`, on this machine."""

    def __init__(
        self, question: Question, materials: Materials, folder: Path, progress: Progress, output: Path | None = None
    ) -> None:
        """Prepare experiments in a folder. `output`: where the chosen weights will be; a finished output of the same
        model there is used."""
        from attar.compression.resume import Log

        self.question, self.materials, self.folder, self.progress = question, materials, folder, progress
        self.output, self.finished = output, None if output is None else finished(output, materials.path)
        self.notes = Log(folder / "outcomes.jsonl", materials.key())
        self._token_seconds: float | None = None
        self._start = START

    def path(self, weights: Weights) -> Path:
        """Return where the weights are, or will be."""
        if weights.path is not None:
            return Path(weights.path)
        if weights.recipe is not None and weights.recipe == self.finished and self.output is not None:
            return self.output
        return self.materials.path if weights.recipe is None else self.folder / weights.recipe.replace("+", "-")

    def made(self, weights: Weights) -> bool:
        """Return whether the weights exist: an output is complete or absent."""
        return weights.recipe is None or self.path(weights).exists()

    def make(self, weights: Weights, clock: Clock | None, reserve: float = 0.0) -> None:
        """Compress by the recipe of `weights`; an interrupted run goes on. With a clock, raises OutOfTime as soon as
        the seconds of its layers say that `reserve` will not be left."""
        from attar.compression.request.request import CompressionRequest
        from attar.compression.runs.pipeline import compress_request

        assert weights.recipe is not None
        key = f"layers|{weights.recipe}"
        if clock is not None and (known := self.notes.get(key)) is not None:
            seconds, left = known
            clock.require(seconds * left + reserve)
        told = self._told(clock, key, reserve)
        given = None if weights.recipe.startswith("rtn-") else self.calibration(told)
        request = CompressionRequest(
            self.materials.model, self.path(weights), recipe=weights.recipe, calibration=given,
            samples=self.materials.samples, evaluation=self.materials.text, eval_tokens=TOKENS,
        )  # fmt: skip
        compress_request(request, told)

    def calibration(self, told: Progress) -> list[list[int]]:
        """Return the calibration text as token ids, the same for all recipes; what the model writes itself is kept.

        Of ids no more text is at hand, so compression does not compare itself with plain rounding: that takes time.
        """
        from attar.compression.calibration import texts
        from attar.compression.calibration.amount import Amount

        path, calib = self.materials.path, self.materials.calib
        amount = Amount(samples=self.materials.samples)
        kept = self.folder / f"self-{amount.samples}x{amount.length}.i32"
        tokenizer = texts.tokenizer_for(calib, path)
        return texts.tokens(calib, _source(path), tokenizer, amount, kept, partial(told, "sampling")).tolist()

    def _told(self, clock: Clock | None, key: str, reserve: float) -> Progress:
        since: tuple[float, int] | None = None

        def told(stage: str, done: int, total: int, /) -> None:
            nonlocal since
            self.progress(stage, done, total)
            now = time.monotonic()
            if stage == "blocks":
                if since is not None and done > since[1]:
                    seconds = (now - since[0]) / (done - since[1])
                    self.notes.put(key, [seconds, total - done])
                    if clock is not None:
                        clock.require(seconds * (total - done) + reserve)
                since = since or (now, done)
            _end(clock)

        return told

    def token_seconds(self, weights: Weights) -> float:
        """Return the seconds of a divergence for each token: those of the last one, else by the step-time model."""
        if self._token_seconds is not None:
            return self._token_seconds
        from attar.kv.schemes import SCHEMES
        from attar.plan.rates.step_time import StepModel

        q = self.question
        model = StepModel(q.config, q.storage, SCHEMES["float32"], q.profile)
        return 2 * REFERENCE * model.prefill(512) / 512

    def divergence(self, weights: Weights, kv: str, tokens: int, clock: Clock) -> Quality:
        """Measure the divergence from the model as it is stored, in windows of the plan's context."""
        from attar.evaluation.report import evaluate

        own = weights.recipe is None and weights.path is None
        context = min(CONTEXT, self.question.workload.context, self.question.config.context)
        begun = time.monotonic()

        def told(stage: str, done: int, total: int, /) -> None:
            self.progress(stage, done, total)
            _end(clock)

        found = evaluate(
            str(self.path(weights)), against=None if own else str(self.materials.path), text=self.materials.text,
            context=context, max_tokens=tokens, kv=kv, progress=told,
        )  # fmt: skip
        self._token_seconds = (time.monotonic() - begun) / max(1, found.tokens)
        kl, top1 = found.figures["kl_mean"], found.figures["top1"].value
        low, high = (kl.value if end is None else end for end in (kl.low, kl.high))
        return Quality(max(0.0, kl.value), max(0.0, low), max(0.0, high), "measured", f"{found.tokens} tokens", top1)

    def load_seconds(self, of: Configuration) -> float:
        """Return the least seconds of a load test: two requests of each user, of which the first is not counted."""
        first, each = of.cells["ttft_p95"].value, of.cells["tpot_p95"].value
        return self._start + max(LEAST_SECONDS, 2 * (first + LEAST_ANSWER * each))

    def load(self, of: Configuration, seconds: float, clock: Clock) -> Mapping[str, float]:
        """Serve a configuration to all users, or a trace, for about so many seconds.

        Users begin one after another, over the time of a request, and their first requests are not counted: as in the
        prediction. Where two answers take longer, they are cut to fit. The throughput is that of whole answers at these
        latencies.
        """
        from attar.load import policies, sweep
        from attar.load.traces import Synthetic

        work, first, each = self.question.workload, of.cells["ttft_p95"].value, of.cells["tpot_p95"].value
        answer = min(work.answer, max(LEAST_ANSWER, int((seconds / 2 - first) / each)))
        length = first + answer * each
        users = work.users
        requests = max(2 * users, min(MOST_REQUESTS, int(seconds / length) * users))
        begun, settings = time.monotonic(), report.settings(of, self.question)
        with policies.served(str(self.path(of.weights)), settings, max(1.0, clock.left)) as url:
            self._start = time.monotonic() - begun
            options = sweep.Options(
                url, synthetic=Synthetic(work.prompt, answer), vocabulary=self.question.config.vocab_size,
                clients=(users,), requests=requests, seconds=seconds,
                timeout=max(1.0, clock.left), ramp=length,
            )  # fmt: skip
            if work.trace:
                options = replace(
                    options, trace=self.materials.trace, clients=(), requests=len(work.trace), longest=work.context
                )
            measured = sweep.bench_serve(options, self.progress)
        if (wrong := sweep.failure(measured)) is not None:
            raise UserError("request_refused", f"a load test failed: {wrong}")
        return _quantities(measured["runs"][0], None if work.trace else users, work.answer)


def _quantities(run: Mapping[str, Any], users: int | None, answer: int) -> dict[str, float]:
    """Return a run's quantities by the labels of goals. The throughput of `users` users is that of answers of `answer`
    tokens at the mean latencies, since measured ones may be shorter (Little: users over the time of a request)."""
    found = {
        f"{name}_{quantile}": float(run[name][quantile])
        for name in ("ttft", "tpot") if run[name] is not None for quantile in ("p50", "p95", "p99")
    }  # fmt: skip
    rate = float(run["output_tok_s"])
    if users is not None and run["ttft"] is not None and run["tpot"] is not None:
        rate = users * answer / (run["ttft"]["mean"] + (answer - 1) * run["tpot"]["mean"])
    return {**found, "tokens_per_second": rate}


def _end(clock: Clock | None) -> None:
    if clock is not None and clock.left <= 0:
        raise OutOfTime(None)


def _source(path: Path) -> hf.Checkpoint:
    """Open a model as compression does."""
    from attar.checkpoints.convert.dense import open_dense
    from attar.checkpoints.sources import hf

    return open_dense(path) if path.is_file() else hf.Checkpoint.open(path)


def finished(output: Path, model: Path) -> str | None:
    """Return the recipe of a finished output of a model; None where the output does not exist.

    Raises UserError (`output_exists`) where it is something else, and CheckpointError for a damaged receipt.
    """
    from attar.checkpoints.receipts import receipt

    if not output.exists():
        return None
    found = receipt.read_receipt(output)
    about, source = ({}, {}) if found is None else (found.value["recipe"], found.value["source"])
    recipe = about.get("recipe") if isinstance(about, dict) else None
    own = receipt.combined_hash(_source(model).folder.source_hashes())
    if not isinstance(recipe, str) or not isinstance(source, dict) or source.get("sha256") != own:
        message = f"{output} exists, and is no finished output of this model: choose another --apply"
        raise UserError("output_exists", message)
    return recipe


def apply(experiments: Experiments, weights: Weights, tell: Callable[[str], None]) -> str:
    """Write the weights of a plan to the output, and return the name or path of the model to serve.

    Weights that exist, as the model's own, stay where they are. A finished output of the same model and recipe is used.
    Raises UserError (`output_exists`) for another one.
    """
    output = experiments.output
    assert output is not None
    if weights.recipe is None:
        served = weights.path or experiments.materials.model
        tell(f"nothing is written to {output}: the plan serves {served} as it is")
        return served
    if experiments.finished == weights.recipe:
        tell(f"{output} is {weights.recipe} of this model already")
    elif experiments.finished is not None:
        message = f"{output} is {experiments.finished}, and the plan chose {weights.recipe}: choose another --apply"
        raise UserError("output_exists", message)
    else:
        if not experiments.made(weights):
            experiments.make(weights, None)
        _move(experiments.path(weights), output)
    return str(output)


def _move(made: Path, output: Path) -> None:
    """Move an output, whole or not at all, also to another file system."""
    try:
        made.rename(output)
    except OSError:
        between = output.with_name(f".{output.name}.{os.getpid()}.attar-moving")
        try:
            shutil.copytree(made, between)
            between.rename(output)
        except BaseException:  # an interrupt too: half a copy is of no use
            shutil.rmtree(between, ignore_errors=True)
            raise
        shutil.rmtree(made)
