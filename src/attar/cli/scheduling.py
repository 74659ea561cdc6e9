"""Options of memory and of the scheduler, which `serve` takes, and whatever answers for what it would do."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from attar.cli.terminal import parse_bytes


def parse_size(text: str) -> int:
    """As `parse_bytes`, of what there is at least some of. Raises ValueError: 0 does not stand for the default."""
    if not (size := parse_bytes(text)):
        raise ValueError(f"{text!r} is nothing: leave the option out for its default")
    return size


Memory = Annotated[
    int | None,
    typer.Option(parser=parse_size, metavar="SIZE", help="Memory to use, such as 16GB; default: 90 % of what is free."),
]


class Preset(StrEnum):
    """Scheduler settings for a purpose."""

    latency = "latency"
    throughput = "throughput"
    long_context = "long-context"


class Policy(StrEnum):
    """How requests share steps."""

    continuous = "continuous"
    dynamic = "dynamic"
    static = "static"
    none = "none"


MaxTokensInCache = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Size of the KV cache in tokens; default: what the memory leaves, up to four times what the sequences "
        "that run together can use.",
    ),
]
KvFraction = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="How much of what the model leaves of the memory keys and values get, such as 0.9; "
        "--max-tokens-in-cache is then the most that the cache holds, and not its size.",
    ),
]
PresetOption = Annotated[Preset | None, typer.Option("--preset", help="Scheduler settings for a purpose.")]
PolicyOption = Annotated[Policy | None, typer.Option("--policy", help="How requests share steps; default: continuous.")]
MaxRunning = Annotated[int | None, typer.Option(min=1, help="Sequences that run together.")]
MaxStepTokens = Annotated[int | None, typer.Option(min=1, help="Tokens in one step.")]
MaxWaiting = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Sequences that may wait; more get 429. With several API keys half of the places are kept in equal parts "
        "for each of them, and of m keys that wait none gets more than 1/m; more of it get 429.",
    ),
]
MaxDelay = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds that policy dynamic waits for more to start together with; default: 0.1."),
]
MaxPreemptions = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Times that a sequence may be put back to make room for others; default: 4. With 0 none starts before the "
        "cache has room for all that it may come to.",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of a CPU; default: one a core.")]
