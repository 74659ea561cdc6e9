"""Selection among several recipes: the one closest to the original on text that none of them has seen is kept.

`candidates` determines the recipes. Every eighth calibration sequence is set aside for the selection; the others
calibrate. Each recipe is made, measured there by its mean KL divergence, and deleted. Then the winner is made in its
place, to the same bytes, which is simpler than moving a finished output and adds one run to several. The first of equal
ones wins. The receipt holds every recipe tried with its gain (`selection`). It also lists the candidates that the model
or the scheme cannot take, with the reason, including those that gave up on a block. The cost is reported on a third
text, on which no choice was made.

Figures are kept beside the output until it is finished, so that a killed run tries no recipe twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.receipts.receipt import combined_hash, environment
from attar.checkpoints.sources import hf, opening
from attar.compression import resume
from attar.compression.block.passes import Unsolved
from attar.compression.calibration import texts
from attar.compression.calibration.amount import count_sequences, drawn_name
from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.request.request import CompressionRequest
from attar.compression.request.resolve import resolve
from attar.compression.search.candidates import Candidates, Listed
from attar.errors import Code, UserError, code_of
from attar.metrics.measure import measure
from attar.model.decoder import Decoder
from attar.progress import Progress

EVERY = 8  # one sequence in so many is for the selection


@dataclass(frozen=True)
class Tried:
    """A recipe with its mean KL divergence on the selection, in nats, and the 95 % interval of the mean."""

    recipe: str
    bits_per_weight: float
    kl: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Choice:
    """Result of the selection, with the tokens [S][L] that calibrated; `tokens` are those of the selection, and `read`
    [S, L] all of both. `left_out` maps impossible candidates to the reason."""

    tried: tuple[Tried, ...]
    calibration: list[list[int]]
    tokens: int
    read: Tensor
    left_out: tuple[tuple[str, str], ...] = ()
    folder: Path | None = None  # folder to remove once the output is there
    only: str | None = None  # the only remaining candidate, untried: then `tried` and tokens are empty

    @property
    def winner(self) -> str:
        return self.only or min(self.tried, key=lambda each: each.kl).recipe

    def forget(self) -> None:
        """Remove the stored figures, once the output is there."""
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict for the receipt."""
        found = {"tokens": self.tokens, "tried": [asdict(each) for each in self.tried], "kept": self.winner}
        return found | {"left_out": [{"recipe": name, "why": why} for name, why in self.left_out]}


def for_output(
    candidates: Candidates,
    request: CompressionRequest,
    checkpoint: hf.Checkpoint,
    report: Callable[[str, int, int], None],
    run: Callable[[str, list[list[int]], Path], float],
) -> Choice:
    """Try recipes for the output of a request; a folder beside it keeps the figures until the output is there.

    `run(name, calibration, out)` makes one in the folder `out` and returns its bits a weight. All recipes are checked
    against the amount of calibration text before the first is made. Candidates of attar's own list that fail are left
    out, as long as one remains, and so are those that give up on a block. A single remaining candidate is not tried.

    Raises ValueError also where there is nothing to calibrate on, where there are fewer than two sequences, and where
    the output exists.
    """
    calibration, amount, dst = request.calibration, request.amount, request.path
    if dst.exists() and not request.overwrite:  # fails now, not after all trials
        raise UserError("output_exists", f"{dst} exists and is kept; choose another output, or pass --overwrite")
    if calibration is None:
        raise UserError(
            "calibration_missing",
            "choosing among recipes needs calibration: give --calib a text file, or `self` to sample it",
        )
    left_out = _refused(candidates, request, checkpoint, _calibrating(count_sequences(calibration, amount)))
    tokenizer = texts.tokenizer_for(calibration, checkpoint.folder.path)
    kept = dst.absolute().parent / f".{dst.name}.attar-tried"
    if not request.resume:
        shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True, exist_ok=True)
    source = combined_hash(checkpoint.folder.source_hashes(lambda done, total: report("hashing", done, total)))
    drawn = kept / drawn_name(source, amount)
    ids = texts.tokens(calibration, checkpoint, tokenizer, amount, drawn, partial(report, "sampling"))
    candidates = _without(candidates, left_out)
    left_out |= (fewer := _refused(candidates, request, checkpoint, _calibrating(len(ids))))
    candidates = _without(candidates, fewer)
    about = environment()
    about |= {"seed": amount.seed, "samples": amount.samples, "length": amount.length, "drawn": amount.drawn}
    recipes = [load_recipe(name).to_dict() for name in candidates.names]  # a file may have changed by now
    about |= {"source": source, "recipes": recipes, "head": request.head}
    about |= {"file": request.to_file, "device": request.device}
    if candidates.count == 1:  # no choice to make: all of the text calibrates
        return Choice((), ids.tolist(), 0, ids, tuple(left_out.items()), kept, candidates.names[0])
    found = choose(candidates, ids, lambda: hf.load_again(checkpoint, torch.float32), run, kept, report, about)
    return replace(found, left_out=(*left_out.items(), *found.left_out), folder=kept)


def _refused(
    candidates: Candidates, request: CompressionRequest, checkpoint: hf.Checkpoint, sequences: int
) -> dict[str, str]:
    """Return the candidates that are impossible, with reasons. Raises ValueError for recipes that the user
    named, and where no candidate is left."""
    found, codes = dict[str, str](), list[Code]()
    for name in candidates.names:
        try:
            resolve(request, checkpoint, name, sequences)
        except ValueError as error:
            if not candidates.own:
                raise
            found[name] = str(error)
            codes.append(code_of(error))
    if len(found) == len(candidates.names):
        raise UserError(codes[0], found[candidates.names[0]])
    return found


def _without(candidates: Candidates, refused: Collection[str]) -> Candidates:
    """Return the remaining candidates."""
    if not refused:
        return candidates
    return Listed(tuple(name for name in candidates.names if name not in refused), candidates.own)


def _aside(count: int) -> Tensor:
    """Return which of so many sequences are for the selection, [count] bool."""
    return torch.arange(count) % EVERY == min(EVERY, count) - 1


def _calibrating(count: int) -> int:
    """Return how many of so many sequences calibrate. Raises ValueError where none calibrate or none select."""
    if count < 2:
        raise UserError(
            "calibration_too_short",
            "choosing among recipes takes at least 2 calibration sequences: one is for the selection",
        )
    return int((~_aside(count)).sum())


def choose(
    candidates: Candidates,
    ids: Tensor,
    base: Callable[[], Decoder],
    run: Callable[[str, list[list[int]], Path], float],
    folder: Path,
    progress: Progress,
    about: Mapping[str, Any] | None = None,
) -> Choice:
    """Try recipes on token ids [S, L]; return the best. `base` loads the original model, which is in memory only while
    one is measured. `folder` holds the known figures of a run `about` that subject. Raises Unsolved where each
    candidate of attar's own list gives up, or one recipe that the user named."""
    aside = _aside(len(ids))
    selection, calibration = ids[aside], ids[~aside].tolist()
    about = {**(about or {}), "tokens": texts.token_hash(ids), "names": list(candidates.names)}
    about = json.loads(json.dumps(about))  # in the form in which it is read again
    path, tried, gave_up = folder / "tried.json", list[Tried](), dict[str, tuple[Code, str]]()
    if path.is_file() and (left := json.loads(path.read_bytes()))["about"] == about:
        tried, gave_up = [Tried(**each) for each in left["tried"]], left.get("unsolved", {})
    out = folder / ("out.gguf" if about.get("file") else "out")
    while (name := _without(candidates, gave_up).following([each.kl for each in tried])) is not None:
        progress("recipes", len(tried) + len(gave_up), candidates.count)
        try:
            bits = run(name, calibration, out)
        except Unsolved as error:
            if not candidates.own:
                raise
            gave_up[name] = error.code, str(error)
            # Before it is noted: no other recipe may begin in a half-deleted output.
            shutil.rmtree(out.with_name(f".{out.name}.attar-partial"), ignore_errors=True)
        else:
            found = measure(opening.load(out, torch.float32), selection.tolist(), base=base()).figures["kl_mean"]
            tried.append(Tried(name, bits, found.value, found.low, found.high))
        resume.write_note(path, {"about": about, "tried": [asdict(each) for each in tried], "unsolved": gave_up})
    progress("recipes", candidates.count, candidates.count)
    if not tried:
        raise Unsolved(*gave_up[candidates.names[0]])
    left_out = tuple((name, f"it gave up: {why}") for name, (_, why) in gave_up.items())
    return Choice(tuple(tried), calibration, selection.numel(), ids, left_out)
