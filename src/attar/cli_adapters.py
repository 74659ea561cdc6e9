"""Commands about low-rank adapters: training one, and merging one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attar.options import Json, Model, Quiet
from attar.terminal import emit, errors, parse_bytes, progress


def finetune(
    model: Model,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The adapter's folder, as PEFT reads it.")],
    text: Annotated[Path, typer.Option(help="What to learn: a text (.txt, .jsonl).")],
    samples: Annotated[int, typer.Option(min=1, help="Sequences taken from the text.")] = 1024,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 512,
    rank: Annotated[int, typer.Option(min=1, help="Rank of each adapter.")] = 16,
    alpha: Annotated[float, typer.Option(help="The adapter counts alpha / rank times.")] = 32.0,
    targets: Annotated[str, typer.Option(help="Patterns of the linears that get one, with commas between.")] = "*",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = 1,
    rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = 2e-4,
    batch: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 2048,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two saves, from which a run resumes.")] = 25,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything drawn at random.")] = 0,
    memory: Annotated[str | None, typer.Option(help="Memory to use at most; by default, the machine's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output where it exists.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Do not resume an interrupted run.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a low-rank adapter (LoRA, QLoRA).

    The model stays as it is, compressed or not. A run that was interrupted resumes where it was last saved.
    """
    with errors(as_json, "the same command resumes the run"), progress(quiet) as bar:
        from attar.checkpoints import hub
        from attar.compression.finetune import FineTuning, read_ids
        from attar.compression.finetune import finetune as run

        path = hub.resolve(model)
        options = FineTuning(rank, alpha, tuple(targets.split(",")), epochs, rate, batch, save_every, seed)
        made = run(
            path, output, read_ids(path, text, samples, length), options, overwrite=overwrite, resume=not restart,
            memory=None if memory is None else parse_bytes(memory), progress=bar,
        )  # fmt: skip
        bar.close()
        print(f"{made.path}: {made.numbers:,} numbers, {len(made.losses)} steps")
        print(f"loss of the first step {made.losses[0]:.4f}, of the last {made.losses[-1]:.4f}")
        emit(as_json, made.to_dict())


def merge(
    model: Model,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT adapter's folder.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The model's folder to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output where it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model with an adapter merged into it.

    The model must not be compressed: a grid has no place for small changes. What reads adapters can add one to it.
    """
    with errors(as_json):
        from attar.checkpoints import hub, lora

        found = lora.merge(hub.resolve(model), adapter, output, overwrite=overwrite)
        print(f"{output}: {len(found.adapters)} linears changed")
        emit(as_json, {"path": str(output), "adapter": str(adapter), "linears": sorted(found.adapters)})
