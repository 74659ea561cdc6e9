"""Arguments and options that several commands take, in the same words."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

FOLDER = "A local folder, a Hub id such as org/name[@revision], or `demo`, the embedded model."
MODEL = FOLDER.replace("folder,", "folder, a GGUF file,")
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]
Folder = Annotated[str, typer.Argument(metavar="MODEL", help=FOLDER)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


class Dtype(StrEnum):
    """What the products are computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


ComputeDtype = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        help="What to compute in. On a CPU float32 by its kernels, the default, or bfloat16 by torch; on a GPU either, "
        "by default bfloat16.",
    ),
]
DEVICE = "Where to compute: cpu, or cuda, an NVIDIA GPU; cuda:1 is the second."
Device = Annotated[str, typer.Option("--device", help=DEVICE)]


class Rounding(StrEnum):
    """How rows meet packed weights whose scheme leaves them alone."""

    int8 = "int8"
    int8g128 = "int8g128"
    int8g32 = "int8g32"
    exact = "exact"


Activations = Annotated[
    Rounding,
    typer.Option(
        "--activations",
        help="How rows meet packed weights: rounded to int8 with one scale a row or 128 or 32 columns, or exact.",
    ),
]
Kv = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="How keys and values are kept: float32, bfloat16, int8, fp8, klt4, int4, klt2, kivi2, nuq4 or nuq3; "
        "default: as they are.",
    ),
]
Adapter = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Compute with this LoRA adapter, as PEFT stores it, beside the weights."),
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="GPUs that compute each layer together; on a CPU, processes.")]
Pp = Annotated[
    int, typer.Option("--pp", min=1, help="GPUs, or with --tp groups of them, that have some of the layers each.")
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Skip the probe that is replayed when the model loads.")]
