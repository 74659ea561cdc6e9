"""The command line: one table of subcommands, each importing only what it runs.

What all of them share (exit statuses, JSON, errors in one sentence, progress) is `terminal.py`'s. Help is plain text:
boxes drawn around it break in narrow terminals and logs.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from attar.cli import compression, evaluation, files, generation, machine, planning, serving, tritonserver
from attar.cli.terminal import Commands
from attar.version import __version__

app = typer.Typer(
    name="attar",
    cls=Commands,
    help="Make a language model small, prove what that cost, and generate from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[str, Callable[..., Any]] = {
    "compress": compression.compress,
    "eval": evaluation.evaluate,
    "report": evaluation.report,
    "generate": generation.generate,
    "chat": generation.chat,
    "serve": serving.serve,
    "bench-serve": serving.bench_serve,
    "bench": generation.bench,
    "plan": planning.plan,
    "inspect": files.inspect,
    "verify": evaluation.verify,
    "convert": files.convert,
    "imatrix": files.imatrix,
    "finetune": compression.finetune,
    "merge": compression.merge,
    "doctor": machine.doctor,
    "demo": machine.demo,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(tritonserver.app, name="triton")


def version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    # Models write any character, and not every terminal can show it: better a `?` than no text.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
