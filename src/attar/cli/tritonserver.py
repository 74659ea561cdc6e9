"""`attar triton`: settings of an NVIDIA Triton Inference Server, for those who come from one or go to one.

`serve --triton-config` takes the same file and needs none of these: they show what it becomes, and the way back.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from attar.cli.options import Device, Json, Pp, Tp
from attar.cli.scheduling import (
    KvFraction,
    MaxDelay,
    MaxPreemptions,
    MaxRunning,
    MaxStepTokens,
    MaxTokensInCache,
    MaxWaiting,
    PolicyOption,
    PresetOption,
)
from attar.cli.terminal import emit, errors, tell

app = typer.Typer(
    help="Settings of Triton Inference Server, from and to `serve`.\n\nWith --json each prints an object as well.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("import")
def import_(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.PBTXT", help="Of a model of TensorRT-LLM's backend.")],
    as_json: Json = False,
) -> None:
    """Show what a configuration asks of `serve`.

    The command line that serves alike, what attar does anyhow, and what is lost.
    """
    with errors(as_json):
        from attar.integrations.triton_server import config as triton_config

        found = triton_config.load(config)
        print(found.command())
        for note in found.notes:
            tell(f"note: {note}")
        for warning in found.warnings:
            tell(f"warning: {warning}")
        emit(as_json, found.to_dict())


@app.command()
def export(
    template: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TEMPLATE.PBTXT]",
            help="TensorRT-LLM's own, whose `${...}` are filled in as far as they are known; default: these settings "
            "alone.",
        ),
    ] = None,
    preset: PresetOption = None,
    policy: PolicyOption = None,
    max_running: MaxRunning = None,
    max_step_tokens: MaxStepTokens = None,
    max_waiting: MaxWaiting = None,
    max_delay: MaxDelay = None,
    max_preemptions: MaxPreemptions = None,
    max_tokens_in_cache: MaxTokensInCache = None,
    kv_fraction: KvFraction = None,
    device: Device = "cuda",
    tp: Tp = 1,
    pp: Pp = 1,
    as_json: Json = False,
) -> None:
    """Print options of `serve` as a configuration."""
    with errors(as_json):
        from attar.integrations.triton_server import pbtxt
        from attar.integrations.triton_server import template as triton_template
        from attar.protocol.settings import Settings

        settings = Settings(
            model="",
            socket="",
            preset=None if preset is None else preset.value,
            policy=None if policy is None else policy.value,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_waiting=max_waiting,
            max_delay=max_delay,
            max_preemptions=max_preemptions,
        )
        values = triton_template.values(
            settings.limits(), tokens=max_tokens_in_cache, fraction=kv_fraction, device=device, shared=tp * pp
        )
        filled = triton_template.export(values, None if template is None else pbtxt.load(template))
        _show(filled, as_json)


@app.command()
def fill(
    template: Annotated[Path, typer.Argument(metavar="TEMPLATE.PBTXT", help="A file with `${name}` for values.")],
    values: Annotated[
        str, typer.Argument(metavar="NAME:VALUE,...", help="What stands there. A comma in a value is written \\,")
    ],
    as_json: Json = False,
) -> None:
    """Fill in a template, as TensorRT-LLM's fill_template.py does."""
    with errors(as_json):
        from attar.integrations.triton_server import pbtxt
        from attar.integrations.triton_server import template as triton_template

        _show(triton_template.fill(pbtxt.load(template), triton_template.parse_values(values)), as_json)


def _show(text: str, as_json: bool) -> None:
    """Print a configuration, and say what is still to be filled in."""
    from attar.integrations.triton_server import template as triton_template

    sys.stdout.write(text)
    if left := triton_template.left(text):
        tell(f"still to be filled in: {', '.join(left)}")
    emit(as_json, {"text": text, "left": left})
