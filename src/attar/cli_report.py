"""The command that writes a page about compressed models: `report`; `cli.py` puts it into its table. Also the options
of `compress` that let it choose the bits of each layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar.options import Json, Quiet
from attar.terminal import emit, errors, parse_bytes, progress

if TYPE_CHECKING:
    from attar.compression.allocate import Target
    from attar.formats.scheme import Scheme

TargetBits = Annotated[
    float | None,
    typer.Option(
        metavar="BITS", help="Choose the bits of each layer by what they do to the predictions: so many a weight."
    ),
]
TargetSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The same, for weight files of at most this size, such as 700MB.")
]
TargetKl = Annotated[
    float | None, typer.Option(metavar="KL", help="The same: as small as this mean KL on calibration text allows.")
]
Ladder = Annotated[
    str | None,
    typer.Option(metavar="SCHEMES", help="What a target chooses among, such as w2g64,w3g128,w4g128,w8; default: the "
                 "recipe's own with 2 to 8 bits."),
]  # fmt: skip


def parse_target(
    bits: float | None, size: str | None, kl: float | None, ladder: str | None
) -> tuple[Target | None, tuple[Scheme, ...] | None]:
    """What the options say. Raises ValueError for two targets, or a ladder without one."""
    from attar.compression.allocate import Target, parse_ladder

    if bits is None and size is None and kl is None:
        if ladder is not None:
            raise ValueError("--ladder is what a target chooses among: give --target-bits, -size or -kl as well")
        return None, None
    target = Target(bits, None if size is None else parse_bytes(size), kl)
    return target, None if ladder is None else parse_ladder(ladder)


def report(
    outputs: Annotated[
        list[str], typer.Argument(metavar="OUT...", help="Compressed folders, or GGUF files, with their receipts.")
    ],
    page: Annotated[Path, typer.Option("--page", "-o", help="The HTML file to write.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the charts as PNGs; needs matplotlib.")
    ] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure the speed of each output here, one after another.")
    ] = False,
    speed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OUT=FILE", help="Speed of an output, as `attar bench OUT --json` printed it. Repeatable."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="TEXT", help="Find outlier channels: run the outputs, and --source, over this text."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The original, to compare the outputs' channels with.")
    ] = None,
    profile_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the --profile text at most.")] = 4096,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write an HTML page about what compression cost.

    KL against size and speed, the error of each linear, outlier channels, recipes, hashes. One file; it loads nothing.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.evaluation.summary import Options, write

        options = Options(page, png, bench, tuple(speed or ()), profile, source, profile_tokens)
        written = write(outputs, options, bar)
        bar.close()
        print(f"{page}: {len(outputs)} outputs, {page.stat().st_size:,} bytes")
        emit(as_json, written)
