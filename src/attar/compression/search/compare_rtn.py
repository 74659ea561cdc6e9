"""Comparison of a recipe with plain rounding to the same schemes, by the divergence from the original.

A method can lose. It fits the calibration text, and plain rounding is closer where that is short, or where the model
lacks what the method is for. On 256 tokens `smoothquant` before w4g128 of the embedded model had KL 0.041 on a novel,
and 0.036 without. So recipes that read a text are compared with plain rounding, on sequences of the same kind that
nothing of the run has read. These lie between the calibration sequences of a long text, or the model writes them. The
receipt holds both figures, and a loss is reported. `best` can choose the steps to keep, on such text, where it is asked
to (`candidates`); a target is compared with what it asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar import machine
from attar.checkpoints.sources import hf
from attar.checkpoints.sources.shards import Checkpoint, open_checkpoint
from attar.compression.calibration import texts
from attar.compression.calibration.amount import Amount, Calibration, is_drawn, is_text
from attar.compression.recipe.methods import Rtn
from attar.compression.recipe.recipe import Recipe
from attar.compression.search.candidates import ABLATION, candidates
from attar.metrics.measure import measure
from attar.model import assembly
from attar.model.decoder import Decoder
from attar.progress import Progress
from attar.text.tokenizer import Tokenizer

SEQUENCES = 8
UNREAD = 3 << 32
"""Offset of the seed of text sampled for this comparison: nothing else is sampled by it."""


@dataclass(frozen=True)
class Gain:
    """Mean KL divergences from the original in nats, of the recipe and of plain rounding. They are measured on `tokens`
    that neither has read, with 95 % intervals where there are at least two sequences."""

    tokens: int
    kl: float
    interval: tuple[float, float] | None
    plain: float
    plain_interval: tuple[float, float] | None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Gain:
        """Build a gain from its dict, as JSON gives it back."""
        pairs = {name: None if found[name] is None else tuple(found[name]) for name in ("interval", "plain_interval")}
        return cls(**{**found, **pairs})

    def warnings(self, name: str) -> tuple[str, ...]:
        """Return a warning where the recipe lost."""
        if self.kl <= self.plain:
            return ()
        advice = (
            "give it more calibration text, or several recipes to choose from (best-..., or names with commas between)"
        )
        with suppress(ValueError):  # some recipes have no step to remove
            candidates(f"{ABLATION}{name}")
            advice += f", or leave out what does not help ({ABLATION}{name})"
        return (
            f"on {self.tokens:,} tokens held out from calibration {name} is worse than plain rounding (mean KL "
            f"{self.kl:.3g}, without it {self.plain:.3g}): {advice}",
        )


def plain(recipe: Recipe) -> Recipe | None:
    """Return the recipe without all that may be learned from a text. None where there is none: for zeros, which have to
    be chosen somehow, for a recipe that only rotates, and where the recipe itself is plain."""
    if recipe.pruning is not None or recipe.structured is not None or (recipe.scheme is None and recipe.mix is None):
        return None
    found = replace(recipe, passes=(Rtn(),), rotate=None, tune=None, said=())
    return None if found == replace(recipe, said=()) else found


def sequences(
    calibration: Calibration, checkpoint: hf.Checkpoint, tokenizer: Tokenizer | None, amount: Amount, drawn: Path
) -> Tensor | None:
    """Return token ids [S, L] of the calibration's kind, outside the calibration; None where there are none. Text that
    the model writes is kept in the file `drawn`."""
    if is_drawn(calibration):
        return texts.written(checkpoint, Amount(SEQUENCES, amount.length, UNREAD + amount.seed), drawn)
    if not is_text(calibration):
        return None
    assert tokenizer is not None
    assert isinstance(calibration, str | Path)
    text = texts.read(calibration, tokenizer)
    return texts.between(text, amount.samples, amount.length, tokenizer.added_bos, SEQUENCES)


def fits(checkpoint: hf.Checkpoint) -> bool:
    """Return whether this machine has the memory to compare: for two models as the original is stored."""
    folder = checkpoint.folder
    return 2 * sum(folder.info(name).bytes for name in folder.names()) <= machine.examine().budget


def compare(original: hf.Checkpoint, made: Path, rounded: Path, ids: Tensor, report: Progress) -> Gain:
    """Measure the outputs of a recipe, `made`, and of plain rounding against the original, by the reference in
    float32. Weights stay as they are stored, and are decoded in each product: copies in float32 would take several
    times the memory of all else that compression does."""
    windows = [[*row, 0] for row in ids.tolist()]  # no divergence depends on the last token
    again = copy.copy(original)
    again.dtype, again.as_stored = torch.float32, True
    base, found = _as_stored(again), []
    for done, path in enumerate((made, rounded)):
        report("comparing", done, 2)
        model = _as_stored(open_checkpoint(path, torch.float32, as_stored=True, blocks=True))
        found.append(measure(model, windows, base=base, context=ids.shape[1]).figures["kl_mean"])
    report("comparing", 2, 2)
    ours, theirs = found
    ends = [None if each.low is None or each.high is None else (each.low, each.high) for each in found]
    return Gain(ids.numel(), ours.value, ends[0], theirs.value, ends[1])


def _as_stored(checkpoint: Checkpoint) -> Decoder:
    """Return the whole model of a checkpoint whose weights the reference decodes some rows at a time."""
    model = assembly.build(checkpoint.config, checkpoint)
    for linear in (model.head, *(linear for block in model.blocks for linear in block.linears())):
        linear.keep_dense = False
    return model
