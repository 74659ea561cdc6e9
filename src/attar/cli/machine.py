"""Commands that need no model: `doctor`, `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attar.cli.options import Json, Quiet
from attar.cli.terminal import (
    emit,
    errors,
    progress,
)


def doctor(as_json: Json = False) -> None:
    """Show versions, instruction sets, threads and kernels.

    For each operation, which kernel would run here, and what speaks against the others.
    """
    with errors(as_json):
        from attar.doctor import examine, to_text

        found = examine()
        print(to_text(found))
        emit(as_json, found)


def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Keep the compressed models here; default: a temporary folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace models that are there already.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compress the embedded model with each method.

    Prints what that cost, and a text generated before and after. Needs neither data nor network.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.demo import demonstrate

        shown = demonstrate(folder, bar, overwrite)
        bar.close()
        print(shown.text())
        emit(as_json, shown.to_dict())
