"""The command line: one table of subcommands, each importing only what it runs. `doctor` and `demo` are here.

`commands.py` declares commands and writes help. `terminal.py` has what all commands share at run time: exit statuses,
JSON, errors in one sentence, progress.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from attar.cli import (
    compression,
    drafting,
    evaluation,
    files,
    generation,
    load_testing,
    planning,
    serving,
    tritonserver,
)
from attar.cli.commands import Command, Commands, option
from attar.cli.fleet import route
from attar.cli.integrations.deploy import deploy
from attar.cli.options import Json, Overwrite, Quiet
from attar.cli.terminal import emit, errors, progress
from attar.version import described

app = typer.Typer(
    name="attar",
    cls=Commands,
    help="""Compress language models, measure the quality loss, and serve the result.

    Examples:
      attar compress demo ./small --recipe gptq-w4g128 --calib self
      attar generate ./small --prompt "Once upon a time"
      attar serve ./small
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


COMMANDS: dict[str, Callable[..., Any]] = {
    "compress": compression.compress, "eval": evaluation.evaluate, "report": evaluation.report, "lab": planning.lab,
    "generate": generation.generate, "chat": generation.chat, "serve": serving.serve, "route": route.route,
    "deploy": deploy,
    "bench-serve": load_testing.bench_serve, "bench": generation.bench, "plan": planning.plan,
    "inspect": files.inspect, "verify": evaluation.verify, "convert": files.convert, "imatrix": files.imatrix,
    "finetune": compression.finetune, "train-draft": drafting.train_draft,
    "merge": compression.merge, "doctor": doctor, "demo": demo,
}  # fmt: skip
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)
app.add_typer(tritonserver.app, name="tritonserver")


def version(show: bool) -> None:
    if show:
        print(described())
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and the commit.")
    ] = False,
) -> None:
    # Models write any character, and some terminals cannot show it: a `?` is better than no text.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
