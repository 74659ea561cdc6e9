"""Body of `attar report`: gather the figures of some outputs, measure what was requested besides, and write the
page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attar.charts import png
from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hub, opening
from attar.errors import UserError
from attar.evaluation import decode_speed as bench
from attar.evaluation import page, page_charts
from attar.evaluation.outliers import Profile, profile
from attar.evaluation.outputs import Compressed, Speed, read, tell_apart
from attar.progress import Progress
from attar.text.files import read_text

PROFILE_WINDOW = 512  # tokens of one forward pass of a profile


@dataclass(frozen=True)
class Options:
    """Options of a report. `page` is the file to write, `png` a folder for pictures. `bench` measures speed here;
    `speeds` are OUT=FILE pairs of earlier measurements. With a text in `profile`, the outputs and `source` run over its
    first `profile_tokens`."""

    page: Path
    png: Path | None = None
    bench: bool = False
    speeds: Sequence[str] = ()
    profile: Path | None = None
    source: str | None = None
    profile_tokens: int = 4096


def write(names: Sequence[str], options: Options, progress: Progress) -> dict[str, Any]:
    """Write the page and pictures. Return the paths and figures as JSON-compatible values. Raises ValueError before any
    measurement where an output has no receipt, a speed names no output, or pictures cannot be drawn here. It also does
    where the page is no .html file or would replace another file than an earlier report."""
    if options.page.suffix not in (".html", ".htm"):
        raise UserError("output_invalid", f"the page is a .html file, not {options.page.name!r}")
    if options.page.is_dir() or not options.page.absolute().parent.is_dir():
        raise UserError("output_invalid", f"{options.page} cannot be written: name a file in a folder that exists")
    if options.page.exists() and f"<title>{page.TITLE}</title>".encode() not in options.page.read_bytes():
        raise UserError("output_exists", f"{options.page} exists and is no report of attar's: choose another file")
    if options.png is not None:
        png.check("leave out --png")
    if options.source is not None and options.profile is None:
        raise UserError(
            "option_missing", "--source is the model that a --profile compares with: give the text to profile on"
        )
    known = _speeds(options.speeds, names)
    outputs = tell_apart([read(name, known.get(name)) for name in names])
    if options.bench:
        outputs = [_benched(each, number, len(outputs), progress) for number, each in enumerate(outputs)]
    profiles = {} if options.profile is None else _profiles(outputs, options, progress)
    contents = page.Contents(outputs, profiles, "" if options.profile is None else options.profile.name)
    options.page.write_text(page.html(contents), encoding="utf-8", errors="replace")  # lone surrogates of JSON
    saved = [] if options.png is None else page.save_pictures(contents, options.png)
    return {
        "page": str(options.page),
        "pictures": [str(path) for path in saved],
        "outputs": [_figures(each) for each in outputs],
        "outliers": {label: [_place(each) for each in places] for label, places in profiles.items()},
    }


def _speeds(given: Sequence[str], names: Sequence[str]) -> dict[str, Speed]:
    """Parse OUT=FILE pairs into speeds by output. Raises ValueError for another form."""
    found = {}
    for pair in given:
        name, equals, file = pair.rpartition("=")
        if not equals or name not in names:
            raise UserError(
                "option_malformed", f"a speed is given as OUT=FILE with OUT among the outputs, not {pair!r}"
            )
        lines = read_text(file).splitlines()
        try:
            value = json.loads(lines[-1])
        except (ValueError, RecursionError):
            value = None
        found[name] = Speed.of(value if isinstance(value, Mapping) else {}, file)
    return found


def _benched(output: Compressed, number: int, count: int, progress: Progress) -> Compressed:
    progress("benchmarks", number, count)
    measured = bench.run(lambda store: bench.load(output.path, store), bench.Load())
    progress("benchmarks", number + 1, count)
    return replace(output, speed=Speed.of(measured, str(output.path)))


def _profiles(outputs: Sequence[Compressed], options: Options, progress: Progress) -> dict[str, Sequence[Profile]]:
    """Profile the original, where it is given, and every output, on the same tokens."""
    assert options.profile is not None
    paths = {} if options.source is None else {page_charts.ORIGINAL: hub.resolve(options.source)}
    paths |= {each.label: each.path for each in outputs}
    tokenizer = vocabulary.tokenizer(next(iter(paths.values())))
    ids = tokenizer.encode(read_text(options.profile), add_special_tokens=False)[: options.profile_tokens]
    found: dict[str, Sequence[Profile]] = {}
    for label, path in paths.items():
        decoder, stage = opening.load(path, torch.float32), f"profile {label}"
        if ids and max(ids) >= decoder.config.vocab_size:
            raise UserError(
                "vocabulary_mismatch",
                f"{path} has another vocabulary than {next(iter(paths.values()))}: profile them apart",
            )
        first = [] if tokenizer.added_bos is None else [tokenizer.added_bos]
        size = min(PROFILE_WINDOW, decoder.config.context) - len(first)
        windows = [first + ids[at : at + size] for at in range(0, len(ids), size)]
        found[label] = profile(decoder, windows, partial(progress, stage))
    return found


def _figures(output: Compressed) -> dict[str, Any]:
    kl = output.figures.get("kl_mean")
    return {
        "path": str(output.path),
        "label": output.label,
        "bytes": output.bytes,
        "bits_per_weight": output.bits_per_weight,
        "kl_mean": None if kl is None else kl.value,
        "decode_tok_s": None if output.speed is None else output.speed.decode,
    }


def _place(place: Profile) -> dict[str, Any]:
    return {
        "layer": place.layer,
        "linears": list(place.linears),
        "peak": place.peak,
        "outliers": place.outliers(),
        "kurtosis": place.input_kurtosis,
    }
