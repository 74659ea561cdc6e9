"""The setting that tables are made for, and helpers that their makers share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from reals.framework import Fills, Measurement, Row

NO_LLAMACPP = "llama.cpp is measured with --llamacpp PYTHON"
RATES: Fills = {"prefill": "prefill_tok_s", "decode": "decode_tok_s"}


@dataclass(frozen=True)
class Setting:
    """Models by name, with their files; the folder of runs and outputs; tokens that arithmetic is scored on; threads of
    a program; why files cannot be used, by model; the peers' programs, where named; and of compressions, sequences to
    calibrate on and tokens to score on, where they are not the table's own."""

    models: Mapping[str, Path]
    out: Path
    tokens: int = 4096
    threads: int | None = None
    wrong: Mapping[str, str] = field(default_factory=dict)
    llamacpp: Path | None = None
    llama_cli: Path | None = None
    openvino: Path | None = None
    peers: Path | None = None
    samples: int | None = None
    scored: int | None = None


def each(setting: Setting, rows: Callable[[str, Path], Iterator[Row]]) -> tuple[Row, ...]:
    """The rows of every model. Those of a model that cannot be read are empty, with the reason."""
    found: list[Row] = []
    for name, path in setting.models.items():
        why = setting.wrong.get(name) or refused(path)
        found += [Row(row.model, row.name, (), why) if why else row for row in rows(name, path)]
    return tuple(found)


def refused(path: Path) -> str | None:
    """Why attar does not read a file, in its own words; None where it does."""
    try:
        GgufCheckpoint.open(path)
    except ValueError as error:
        return str(error)
    return None


def bench(source: tuple[object, ...], fills: Fills, *options: object) -> Measurement:
    """Measure a file, or a shape, by `attar bench`."""
    command = (sys.executable, "-m", "attar", "bench", *map(str, source), "--json", *map(str, options))
    return Measurement(command, fills, timed=True)
