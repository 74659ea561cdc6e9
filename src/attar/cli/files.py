"""Commands about files, attar's own and other programs': `inspect`, `convert`, `imatrix`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attar.cli import options
from attar.cli.commands import configured, option
from attar.cli.terminal import emit, errors, progress, tell


class Format(StrEnum):
    """A format that `convert` writes."""

    gguf = "gguf"
    compressed_tensors = "compressed-tensors"
    awq = "awq"
    gptq = "gptq"
    dense = "dense"


class Dtype(StrEnum):
    """A dtype of dense outputs."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def inspect(model: options.Model, as_json: options.Json = False) -> None:
    """Show what a checkpoint is, from its headers.

    Architecture, schemes, bits per weight, size to the byte, and every tensor. No weight is read.

    Examples:
      attar inspect ./out
      attar inspect model.gguf --json
    """
    with errors(as_json):
        from attar.checkpoints.inspect import inspect as run

        found = run(model)
        print(found.table())
        emit(as_json, found.to_dict())


def convert(
    source: options.Model,
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="The folder to write, or OUT.gguf.")],
    to: Annotated[Format | None, option(
        "Output", "FORMAT", "Format to write: gguf, compressed-tensors, awq, gptq or dense.", "--to",
        default="dense for VILA's three folders; required for other models",
    )] = None,
    dtype: Annotated[Dtype | None, option(
        "Output", "DTYPE", "Dtype of --to dense: bfloat16, float16 or float32, which keeps most values exactly.",
        "--dtype", parser=options.one_of(Dtype), default="the source's, and bfloat16 for quantized GGUF files",
    )] = None,
    max_shard: options.MaxShard = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Write a model in another format, bit for bit.

    Integers and scales are re-packed, and nothing is rounded. The output is read back and compared with the source. An
    error names the tensor that the format cannot hold exactly, and the reason.

    With --to dense, weights are decoded and rounded to a dtype: the folder is that of an uncompressed model. VILA's
    folders of language model, tower and projector become one that other commands read.

    Examples:
      attar convert ./out out.gguf --to gguf
      attar convert ./out ./awq --to awq
      attar convert model.gguf ./dense --to dense
      attar convert ./VILA1.5-3b ./vila
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.checkpoints.convert.proof import proof
        from attar.checkpoints.convert.run import convert as run

        done = run(
            source, output, to=to and to.value, dtype=dtype and dtype.value, max_shard_bytes=max_shard,
            overwrite=overwrite, progress=bar,
        )  # fmt: skip
        bar.close()
        print(f"{done.path}: {done.bytes:,} bytes, {done.format}")
        for sentence in proof(done):
            print(sentence)
        for sentence in done.notes:
            tell(sentence)
        emit(as_json, done.to_dict())


@dataclass(frozen=True, kw_only=True)
class ImatrixConfig(options.OutputConfig):
    """Options of `imatrix`."""

    model: options.Model
    output: Annotated[Path, typer.Argument(
        metavar="OUT", help="The file to write: GGUF, or llama.cpp's older format if it ends in .dat.",
    )]  # fmt: skip
    calib: Annotated[str, option("Calibration", "FILE", options.CALIBRATION_TEXT)] = "self"
    samples: options.Samples = 128
    length: options.Length = 512
    seed: options.Seed = 0
    calib_memory: options.CalibrationMemory = options.CALIBRATION_MEMORY
    overwrite: options.Overwrite = False


@configured(ImatrixConfig)
def imatrix(config: ImatrixConfig) -> None:
    """Compute an importance matrix from calibration text.

    It holds the mean squares of the inputs of the original model's linear layers. `attar compress --imatrix` and
    llama.cpp read it.

    Examples:
      attar imatrix ./model model.imatrix.gguf --calib text.txt
      attar imatrix demo demo.dat --samples 64
    """
    with errors(config.as_json), progress(config.quiet) as bar:
        from attar.compression.calibration.amount import Amount
        from attar.compression.calibration.importance import make

        made = make(
            config.model, config.output, calibration=config.calib,
            amount=Amount(config.samples, config.length, config.seed), calib_memory=config.calib_memory,
            overwrite=config.overwrite, progress=bar,
        )  # fmt: skip
        bar.close()
        matrix, ratio = made.widest
        print(f"{made.path}: {made.matrices} matrices, from {made.tokens:,} tokens")
        print(f"the columns of {matrix} differ most: its largest importance is {ratio:.0f} times the mean")
        for sentence in made.warnings:
            tell(sentence)
        emit(config.as_json, made.to_dict())
