"""The command that trains a draft head: `train-draft`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar.cli import options
from attar.cli.commands import configured, option
from attar.cli.terminal import emit, errors, progress, tell
from attar.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class DraftKind(StrEnum):
    """A kind of draft that can be trained."""

    medusa = "medusa"
    eagle3 = "eagle3"
    exit = "exit"
    small = "small"


class DraftLayout(StrEnum):
    """A layout of a head's files."""

    safeailab = "safeailab"
    speculators = "speculators"


class DraftLoss(StrEnum):
    """What a training minimizes."""

    published = "published"
    acceptance = "acceptance"


@dataclass(frozen=True, kw_only=True)
class TrainDraftConfig(options.OutputConfig):
    """Options of `train-draft`."""

    model: options.Model
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, for --draft.")]
    kind: Annotated[
        DraftKind,
        option(
            "Speculation",
            "KIND",
            "medusa: Medusa-1 heads; eagle3: an EAGLE-3 head; exit: an early exit of the model; small: a small model.",
            "--kind",
        ),
    ] = DraftKind.medusa
    depths: Annotated[
        int | None,
        option(
            "Speculation",
            "N",
            "Medusa heads, or steps that an EAGLE-3 head is unrolled.",
            min=1,
            max=16,
            default="3",
        ),
    ] = None
    layers: Annotated[
        int | None,
        option(
            "Speculation",
            "N",
            "Layers of a small model, or layers of the model before an early exit.",
            min=1,
            default="2 of a small model, a quarter of the model's for an exit",
        ),
    ] = None
    width: Annotated[
        int | None,
        option(
            "Speculation",
            "N",
            "Hidden size of a small model, a multiple of 32.",
            min=32,
            default="128",
        ),
    ] = None
    draft_vocab: Annotated[int | None, option(
        "Speculation", "N",
        "Tokens that can be drafted, the most frequent of the text.", min=1, default="32000, or all for a small model",
    )] = None  # fmt: skip
    layout: Annotated[DraftLayout | None, option(
        "Speculation", "LAYOUT", "Files of an EAGLE-3 head: safeailab, or speculators, of that library and vLLM.",
        default="safeailab",
    )] = None  # fmt: skip
    text: Annotated[Path | None, option("Data", "FILE", "Training text (.txt, .jsonl).")] = None
    calib: Annotated[str | None, option("Data", "SOURCE", "self: train on text that the model generates first.")] = None
    samples: Annotated[int, option("Data", "N", "Sequences taken from the text.", min=2)] = 1024
    length: Annotated[int, option("Data", "N", "Tokens of each sequence.", min=8)] = 256
    loss: Annotated[DraftLoss, option(
        "Training", "LOSS", "published: that of the paper; acceptance: the probability that a draft is right.",
    )] = DraftLoss.published  # fmt: skip
    epochs: Annotated[int, option("Training", "N", "Passes over the text.", min=1)] = 1
    rate: Annotated[float, option("Training", "RATE", "Learning rate (Adam).")] = 1e-3
    batch: Annotated[int, option("Training", "N", "Tokens of a step.", min=1)] = 2048
    save_every: Annotated[int, option("Training", "N", "Steps between two checkpoints of the run.", min=1)] = 25
    seed: Annotated[int, option("Training", "N", "Seed of all random numbers.", min=0)] = 0
    overwrite: options.Overwrite = False
    restart: options.Restart = False


@configured(TrainDraftConfig)
def train_draft(config: TrainDraftConfig) -> None:
    """Train a draft head, or a small model that drafts.

    The model, compressed or not, is not changed. The same command resumes an interrupted run from its last checkpoint.

    Examples:
      attar train-draft ./out ./heads --kind medusa --text text.txt
      attar train-draft ./out ./draft --kind small --calib self
      attar serve ./out --draft ./heads
    """
    with errors(config.as_json, "the same command resumes the run"), progress(config.quiet) as bar:
        from attar.checkpoints import vocabulary
        from attar.checkpoints.sources import hub
        from attar.compression.calibration import texts
        from attar.compression.calibration.amount import SELF, Amount
        from attar.drafting.run import DraftTraining
        from attar.drafting.run import train_draft as run

        training = DraftTraining(
            config.kind.value, config.depths, config.layers, config.width, config.draft_vocab,
            None if config.layout is None else config.layout.value, config.loss.value, config.epochs, config.rate,
            config.batch, config.save_every, config.seed,
        )  # fmt: skip
        if (config.text is None) == (config.calib is None) or config.calib not in (None, SELF):
            raise UserError("option_conflict", f"give --text FILE, or --calib {SELF} for the model's own text")
        path = hub.resolve(config.model)
        ids: Tensor | Amount = Amount(config.samples, config.length, config.seed)
        if config.text is not None:
            tokenizer = vocabulary.tokenizer(path)
            ids = texts.windows(texts.read(config.text, tokenizer), config.samples, config.length, tokenizer.added_bos)
        print("share of held-out tokens whose best draft is the model's best token, by depth:")
        made = run(
            path, config.output, ids, training, overwrite=config.overwrite, resume=not config.restart, progress=bar,
            watch=_print_point,
        )  # fmt: skip
        bar.close()
        print(f"{made.path}: {made.parameters:,} parameters, {len(made.losses)} step{'s' * (len(made.losses) != 1)}")
        for sentence in made.notes:
            tell(sentence)
        emit(config.as_json, made.to_dict())


def _print_point(tokens: int, shares: Sequence[float], seconds: float) -> None:
    """Print the agreement after so many tokens and processor seconds."""
    found = "  ".join(f"{share:.3f}" for share in shares)
    print(f"  after {tokens:>9,} tokens, {seconds:>7,.0f} processor s  {found}", flush=True)
