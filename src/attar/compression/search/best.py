"""Several recipes tried, one kept: the one closest to the original on text that none of them has seen.

Which are tried says `candidates`. Every eighth calibration sequence is set aside for the selection; the others
calibrate. Each recipe is made, measured there by its mean KL divergence, and deleted; then the winner is made in its
place, to the same bytes, which is simpler than moving what is finished and adds one run to several. Of equal ones the
first wins. The receipt holds all that were tried with what each gained (`selection`), and which rungs of a ladder the
model or the scheme cannot take, with the reason, those among them that gave up on a block: the text on which the cost
is reported is a third one, which no choice was made on.

Figures are kept beside the output until it is finished, so that a killed run tries none twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.receipts.receipt import combined_hash, environment
from attar.checkpoints.sources import hf, opening
from attar.compression import resume
from attar.compression.block.passes import Unsolved
from attar.compression.calibration import texts
from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.request.request import CompressionRequest
from attar.compression.request.resolve import resolve
from attar.compression.search.candidates import Candidates, Listed
from attar.metrics.measure import measure
from attar.model.decoder import Decoder
from attar.progress import Progress

EVERY = 8  # sequences, of which one is for the selection


@dataclass(frozen=True)
class Tried:
    """A recipe with its mean KL divergence on the selection, in nats, and the 95 % interval of that."""

    recipe: str
    bits_per_weight: float
    kl: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Choice:
    """What was tried, and the tokens [S][L] that calibrated; `tokens` are those of the selection, and `read` [S, L] all
    of both. `left_out` are rungs of a ladder with what speaks against each."""

    tried: tuple[Tried, ...]
    calibration: list[list[int]]
    tokens: int
    read: Tensor
    left_out: tuple[tuple[str, str], ...] = ()
    folder: Path | None = None  # what to remove once the output is there
    only: str | None = None  # the one rung that was left, which is not tried: then there are neither `tried` nor tokens

    @property
    def winner(self) -> str:
        return self.only or min(self.tried, key=lambda each: each.kl).recipe

    def forget(self) -> None:
        """Once the output is there."""
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for the receipt."""
        found = {"tokens": self.tokens, "tried": [asdict(each) for each in self.tried], "kept": self.winner}
        return found | {"left_out": [{"recipe": name, "why": why} for name, why in self.left_out]}


def for_output(
    candidates: Candidates,
    request: CompressionRequest,
    checkpoint: hf.Checkpoint,
    report: Callable[[str, int, int], None],
    run: Callable[[str, list[list[int]], Path], float],
) -> Choice:
    """Try recipes for the output of a request, beside which a folder keeps what is known until it is there.

    `run(name, calibration, out)` makes one in the folder `out` and returns its bits a weight. Whether a recipe can be
    made of so much calibration text is asked of all before the first is made. Of a ladder those that cannot are left
    out, as long as one remains, and so are those that give up on a block; where one is left at once, it is not tried.
    Raises ValueError also where there is nothing to calibrate on, where there are fewer than two sequences, and where
    the output exists.
    """
    calibration, amount, dst = request.calibration, request.amount, request.path
    if dst.exists() and not request.overwrite:  # said now, not after all trials
        raise ValueError(f"{dst} exists and is kept; choose another output, or pass --overwrite")
    if calibration is None:
        raise ValueError("choosing among recipes needs calibration: give --calib a text file, or `self` to sample it")
    left_out = _refused(candidates, request, checkpoint, _calibrating(texts.count(calibration, amount)))
    folder = checkpoint.folder.path
    tokenizer = texts.tokenizer_for(calibration, folder)
    kept = dst.absolute().parent / f".{dst.name}.attar-tried"
    if not request.resume:
        shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True, exist_ok=True)
    source = combined_hash(checkpoint.folder.source_hashes(lambda done, total: report("hashing", done, total)))
    drawn = kept / texts.drawn_name(source, amount)
    ids = texts.tokens(
        calibration, checkpoint, tokenizer, amount, drawn, lambda done, total: report("sampling", done, total)
    )
    candidates = _without(candidates, left_out)
    left_out |= (fewer := _refused(candidates, request, checkpoint, _calibrating(len(ids))))
    candidates = _without(candidates, fewer)
    drawn_by = {"seed": amount.seed, "samples": amount.samples, "length": amount.length, "drawn": amount.drawn}
    about = {
        **environment(),
        **drawn_by,
        "source": source,
        "recipes": [load_recipe(name).to_dict() for name in candidates.names],  # a file may say something else by now
        "head": request.head,
        "file": request.to_file,
        "device": request.device,
    }
    if candidates.count == 1:  # nothing to choose: all of the text calibrates
        return Choice((), ids.tolist(), 0, ids, tuple(left_out.items()), kept, candidates.names[0])
    found = choose(candidates, ids, lambda: hf.load(folder, torch.float32), run, kept, report, about)
    return replace(found, left_out=(*left_out.items(), *found.left_out), folder=kept)


def _refused(
    candidates: Candidates, request: CompressionRequest, checkpoint: hf.Checkpoint, sequences: int
) -> dict[str, str]:
    """Rungs of a ladder that cannot be, and why. Raises ValueError for recipes that a user named himself, and where no
    rung is left."""
    found: dict[str, str] = {}
    for name in candidates.names:
        try:
            resolve(request, checkpoint, name, sequences)
        except ValueError as error:
            if not candidates.ladder:
                raise
            found[name] = str(error)
    if len(found) == len(candidates.names):
        raise ValueError(found[candidates.names[0]])
    return found


def _without(candidates: Candidates, refused: Collection[str]) -> Candidates:
    """The rungs of a ladder that are left."""
    if not refused:
        return candidates
    return Listed(tuple(name for name in candidates.names if name not in refused), candidates.ladder)


def _aside(count: int) -> Tensor:
    """Which of so many sequences are for the selection, [count] bool."""
    return torch.arange(count) % EVERY == min(EVERY, count) - 1


def _calibrating(count: int) -> int:
    """How many of so many sequences calibrate. Raises ValueError where there are none of the one or the other."""
    if count < 2:
        raise ValueError("choosing among recipes takes at least 2 calibration sequences: one is for the selection")
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
    """Try recipes on token ids [S, L] of the model that `base` loads, which is in memory only while one is measured;
    `folder` holds what is known so far of a run `about` that. Raises Unsolved where each rung of a ladder gives up, or
    one recipe that a user named himself."""
    aside = _aside(len(ids))
    selection, calibration = ids[aside], ids[~aside].tolist()
    about = {**(about or {}), "tokens": texts.token_hash(ids), "names": list(candidates.names)}
    about = json.loads(json.dumps(about))  # as it will be read again
    path, tried, gave_up = folder / "tried.json", list[Tried](), dict[str, str]()
    if path.is_file() and (left := json.loads(path.read_bytes()))["about"] == about:
        tried, gave_up = [Tried(**each) for each in left["tried"]], left.get("gave_up", {})
    out = folder / ("out.gguf" if about.get("file") else "out")
    while (name := _without(candidates, gave_up).following([each.kl for each in tried])) is not None:
        progress("recipes", len(tried) + len(gave_up), candidates.count)
        try:
            bits = run(name, calibration, out)
        except Unsolved as error:
            if not candidates.ladder:
                raise
            gave_up[name] = str(error)
            # Before it is noted: nothing else begins where half of another recipe's output lies.
            shutil.rmtree(out.with_name(f".{out.name}.attar-partial"), ignore_errors=True)
        else:
            found = measure(opening.load(out, torch.float32), selection.tolist(), base=base()).figures["kl_mean"]
            tried.append(Tried(name, bits, found.value, found.low, found.high))
        resume.write_note(path, {"about": about, "tried": [asdict(each) for each in tried], "gave_up": gave_up})
    progress("recipes", candidates.count, candidates.count)
    if not tried:
        raise Unsolved(gave_up[candidates.names[0]])
    left_out = tuple((name, f"it gave up: {why}") for name, why in gave_up.items())
    return Choice(tuple(tried), calibration, selection.numel(), ids, left_out)
