"""`attar tritonserver`: settings of an NVIDIA Triton Inference Server, to and from those of `serve`.

`serve --triton-config` takes the same file and needs none of these commands. They show its equivalent, and convert
back. The language of the GPU kernels has the same name by chance.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from attar.cli.commands import Command, Commands, configured
from attar.cli.options import Device, Json, Pp, Tp
from attar.cli.scheduling import SchedulerOptions
from attar.cli.terminal import emit, errors, tell

app = typer.Typer(
    cls=Commands,
    help="""Convert settings of Triton Inference Server.

    They become options of `attar serve`, and the other way round. With --json each command prints an object as well.

    Examples:
      attar tritonserver import config.pbtxt
      attar serve ./out --triton-config config.pbtxt
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("import", cls=Command)
def import_(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="config.pbtxt of a model of TensorRT-LLM's backend.")],
    as_json: Json = False,
) -> None:
    """Show what a configuration asks of `serve`.

    The command prints the equivalent `attar serve` command line. It lists what attar does anyhow, and what is lost.

    Examples:
      attar tritonserver import config.pbtxt
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


@dataclass(frozen=True, kw_only=True)
class ExportConfig(SchedulerOptions):
    """Options of `tritonserver export`."""

    template: Annotated[Path | None, typer.Argument(
        metavar="FILE", help="Template of TensorRT-LLM: known values replace its `${...}`.",
        show_default="these settings alone",
    )] = None  # fmt: skip
    device: Device = "cuda"
    tp: Tp = 1
    pp: Pp = 1
    as_json: Json = False


@app.command(cls=Command)
@configured(ExportConfig)
def export(config: ExportConfig) -> None:
    """Print options of `serve` as a configuration.

    Examples:
      attar tritonserver export --max-running 64 > config.pbtxt
      attar tritonserver export template.pbtxt --preset throughput
    """
    with errors(config.as_json):
        from msgspec.structs import replace

        from attar.integrations.triton_server import pbtxt
        from attar.integrations.triton_server import template as triton_template
        from attar.protocol.settings import Settings

        values = triton_template.values(
            replace(Settings("", ""), **config.settings()).limits(), tokens=config.max_tokens_in_cache,
            fraction=config.kv_fraction, device=config.device, shared=config.tp * config.pp,
        )  # fmt: skip
        template = None if config.template is None else pbtxt.load(config.template)
        _show(triton_template.export(values, template), config.as_json)


@app.command(cls=Command)
def fill(
    template: Annotated[Path, typer.Argument(metavar="FILE", help="Template with `${name}` for values.")],
    values: Annotated[
        str, typer.Argument(metavar="NAME:VALUE", help="Values, with commas between; `\\,` is a comma in a value.")
    ],
    as_json: Json = False,
) -> None:
    r"""Fill in a template, as TensorRT-LLM's fill_template.py does.

    Examples:
      attar tritonserver fill template.pbtxt 'engine_dir:/x,gpu_device_ids:0\,1'
    """
    with errors(as_json):
        from attar.integrations.triton_server import pbtxt
        from attar.integrations.triton_server import template as triton_template

        _show(triton_template.fill(pbtxt.load(template), triton_template.parse_values(values)), as_json)


def _show(text: str, as_json: bool) -> None:
    """Print a configuration, and what is still to be filled in."""
    from attar.integrations.triton_server import template as triton_template

    sys.stdout.write(text)
    if left := triton_template.left(text):
        tell(f"still to be filled in: {', '.join(left)}")
    emit(as_json, {"text": text, "left": left})
