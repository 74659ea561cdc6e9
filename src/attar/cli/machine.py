"""Commands that need no model: `doctor`, `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from attar.cli.commands import option
from attar.cli.options import Json, Overwrite, Quiet
from attar.cli.terminal import emit, errors, progress


def doctor(as_json: Json = False) -> None:
    """Show versions, instruction sets, threads and kernels.

    For each operation it names the kernel that runs here, and the reason against each other one.

    Examples:
      attar doctor
      attar doctor --json
    """
    with errors(as_json):
        from attar.doctor import examine, to_text

        found = examine()
        print(to_text(found))
        emit(as_json, found)


def demo(
    folder: Annotated[
        Path | None, option("Output", "DIR", "Keep the compressed models here.", default="a temporary folder")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compress the embedded model with each method.

    The command prints the cost, and a text generated before and after. It needs neither data nor network.

    Examples:
      attar demo
      attar demo --folder ./demos
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.demo import demonstrate

        shown = demonstrate(folder, bar, overwrite)
        bar.close()
        print(shown.text())
        emit(as_json, shown.to_dict())
