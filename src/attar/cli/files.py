"""Commands about files, and those of other programs: `inspect`, `convert`, `imatrix`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attar.cli.options import Folder, Json, Model, Quiet
from attar.cli.terminal import (
    emit,
    errors,
    parse_bytes,
    progress,
    tell,
)


class Format(StrEnum):
    """What `convert` writes."""

    gguf = "gguf"
    compressed_tensors = "compressed-tensors"
    awq = "awq"
    gptq = "gptq"


def inspect(model: Model, as_json: Json = False) -> None:
    """Show what a checkpoint is, from its headers.

    Architecture, schemes, bits per weight, size to the byte, and every tensor. No weight is read.
    """
    with errors(as_json):
        from attar.checkpoints.inspect import inspect as run
        from attar.checkpoints.receipts.receipt import missing

        found = run(model)
        if not found.receipt:
            tell(missing(found.path))
        print(found.table())
        emit(as_json, found.to_dict())


def convert(
    source: Model,
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="The folder to write, or OUT.gguf.")],
    to: Annotated[Format, typer.Option(help="The format to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output where it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model in another format, bit for bit.

    Integers and scales are re-packed and nothing is rounded; the output is read back and compared with the source, bit
    for bit. What the format cannot hold exactly is an error that names the tensor and says why.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.checkpoints.convert.proof import proof
        from attar.checkpoints.convert.run import convert as run

        done = run(source, output, to=to.value, overwrite=overwrite, progress=bar)
        bar.close()
        print(f"{done.path}: {done.bytes:,} bytes, {done.format}")
        for sentence in proof(done):
            print(sentence)
        for sentence in done.notes:
            tell(sentence)
        emit(as_json, done.to_dict())


def imatrix(
    model: Folder,
    output: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The file to write, in GGUF as llama.cpp does; its older form if OUT.dat."),
    ],
    calib: Annotated[
        str, typer.Option(help="Calibration text (.txt, .jsonl), or `self`: sampled from the model.")
    ] = "self",
    samples: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each calibration sequence.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything drawn at random.")] = 0,
    calib_memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Calibration activations held in memory at most; more is read from disk."),
    ] = "2GiB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file where it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how much each column of each matrix counts.

    The mean squares of the inputs of the original model's linears, for `attar compress --imatrix` and for llama.cpp.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.compression.calibration.importance import make

        made = make(
            model, output, calibration=calib, samples=samples, length=length, seed=seed,
            calib_memory=parse_bytes(calib_memory), overwrite=overwrite, progress=bar,
        )  # fmt: skip
        bar.close()
        matrix, ratio = made.widest
        print(f"{made.path}: {made.matrices} matrices, from {made.tokens:,} tokens")
        print(f"the columns of {matrix} differ most: its largest importance is {ratio:.0f} times the mean")
        for sentence in made.warnings:
            tell(sentence)
        emit(as_json, made.to_dict())
