"""One HTML page about compressed outputs: what they cost against what they saved, layer by layer, with its evidence.

All contents come from receipts and headers (`outputs.py`), and from profiles where some were made (`outliers.py`). The
page is one file that loads nothing: charts are inline SVG, and a content security policy forbids the rest. The template
escapes all text; only the charts and legends, which escape their own, are inserted as they are.

Whole models are compared only where their figures compare; others get charts of their own (`page_charts`), and the page
says so.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from attar.charts import png
from attar.charts.chart import SOFT, Chart, Series
from attar.charts.svg import STYLE, THEMES, key, svg
from attar.evaluation import page_charts
from attar.evaluation.outliers import FACTOR, Profile
from attar.evaluation.outputs import LEAST, Compressed, Figure
from attar.evaluation.table import size
from attar.version import __version__

TITLE = "What compression cost"  # marks a page that the next may replace


@dataclass(frozen=True)
class Contents:
    """Contents of a page. `profiles` are those of the original (`page_charts.ORIGINAL`) and of outputs, by label."""

    outputs: Sequence[Compressed]
    profiles: Mapping[str, Sequence[Profile]] = field(default_factory=dict)
    profiled_on: str = ""  # the text's name


def html(contents: Contents) -> str:
    """Return the page."""
    text = importlib.resources.files("attar.evaluation").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    outputs = sorted(contents.outputs, key=lambda each: each.bytes)
    architectures = sorted({each.architecture for each in outputs})
    plain, groups = " or ".join(page_charts.plain(outputs)), page_charts.trade_offs(outputs)
    # The errors are unfolded of the first output that differs from the baseline, else of the first.
    differ = (each for each in outputs if each.gain is not None and round(each.gain, 2) != 1)
    unfolded = next(differ, next(iter(outputs), None))
    return environment.from_string(text).render(
        title=TITLE,
        lead=f"{_count(len(outputs), 'compressed model')} of {' and '.join(architectures)}, from their receipts.",
        themes=Markup(THEMES),
        chart_style=Markup(STYLE),
        warnings=_warnings(outputs),
        summary=_summary(outputs),
        tasks=_task_rows(outputs),
        trade_offs=[_shown_trade_off(chosen, pieces, len(groups) > 1) for chosen, pieces in groups],
        gains=[_gains(each) for each in outputs if each.selection is not None or each.tuning is not None],
        allocations=[_allocation(each) for each in outputs if each.allocation is not None],
        layers=[_layers(each, each is unfolded) for each in outputs],
        layers_key=Markup(key(page_charts.error_series([], plain))),
        plain=plain,
        outliers=_outliers(contents) if contents.profiles else None,
        sources=[_source(each) for each in outputs],
        version=__version__,
    )


def pictures(contents: Contents) -> dict[str, list[Chart]]:
    """Return the charts that become PNGs, by the name of the file."""
    found, drawn = {}, page_charts.trade_offs(contents.outputs)
    for number, (_, pieces) in enumerate(drawn, 1):
        found["trade-off" + (f"-{number}" if len(drawn) > 1 else "")] = pieces
    for number, each in enumerate(contents.outputs, 1):
        after = f"-{number}" if len(contents.outputs) > 1 else ""
        found[f"errors{after}"] = page_charts.error_charts(each)
        if each.allocation is not None:
            found[f"allocation{after}"] = page_charts.allocation_charts(each.allocation)
    if profiles := contents.profiles:
        found["outliers"] = [*page_charts.peak_charts(profiles), *page_charts.channel_charts(profiles)]
    return {name: pieces for name, pieces in found.items() if pieces}


def save_pictures(contents: Contents, folder: Path) -> list[Path]:
    """Write the PNGs and return their paths. Raises ValueError where matplotlib is not installed."""
    png.check("leave out --png")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, pieces in pictures(contents).items():
        paths.append(folder / f"{name}.png")
        png.save(pieces, paths[-1])
    return paths


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    text: str
    note: str = ""
    best: bool = False


def _summary(outputs: Sequence[Compressed]) -> dict[str, Any]:
    """Return names, rows of cells, and a note; a column that no output fills is left out."""

    def figure(name: str, form: str, images: bool = False) -> list[Cell | None]:
        found = ((each.images if images else each.figures).get(name) for each in outputs)
        return [None if one is None else Cell(format(one.value, form), _ends(one, form)) for one in found]

    columns: dict[str, list[Cell | None]] = {
        "model": [Cell(each.label) for each in outputs],
        "size": [Cell(size(each.bytes), f"{each.bytes:,} B") for each in outputs],
        "KL mean": figure("kl_mean", ".3g"),
        "KL 99.9 %": figure("kl_p999", ".3g"),
        "KL behind images": figure("kl_mean", ".3g", images=True),
        "perplexity": figure("ppl", ".2f"),
        "top-1 agreement": figure("top1", ".1%"),
        "acceptance (EAR)": figure("ear", ".1%"),
        "bits/weight": [Cell(f"{each.bits_per_weight:.3f}") for each in outputs],
        "decode, tokens/s": [None if each.speed is None else Cell(f"{each.speed.decode:.1f}") for each in outputs],
        "error / baseline": [None if each.gain is None else Cell(f"{each.gain:.3f}") for each in outputs],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [[cell or Cell("-") for cell in row] for row in zip(*columns.values(), strict=True)]
    note = "Below figures, 95 % intervals from a bootstrap over windows of the text. "
    base = {each.figures["ppl_base"].value for each in outputs if "ppl_base" in each.figures}
    if len(base) == 1:
        note += f"The original's perplexity is {base.pop():.4f}. "
    if "KL behind images" in columns:
        note += "KL behind images is the mean on texts behind images, as recorded, with intervals over images. "
    if "error / baseline" in columns:
        way = " or ".join(page_charts.plain(outputs))
        note += f"Last: the geometric mean over linears of the error as stored over the baseline's: {way}."
    return {"names": list(columns), "rows": rows, "note": note}


def _task_rows(outputs: Sequence[Compressed]) -> dict[str, Any] | None:
    """Return names and rows of the figures of recorded tasks; None where no output has any."""
    names = list(dict.fromkeys(name for each in outputs for name in each.tasks))
    if not names:
        return None
    rows = [[Cell(each.label), *(_task_cell(each.tasks.get(name)) for name in names)] for each in outputs if each.tasks]
    return {"names": ["model", *names], "rows": rows}


def _task_cell(figure: Figure | None) -> Cell:
    return Cell("-") if figure is None else Cell(f"{figure.value:.4g}", _ends(figure, ".4g"))


def _ends(figure: Figure, form: str) -> str:
    return "" if figure.low is None or figure.high is None else f"{figure.low:{form}} to {figure.high:{form}}"


def _warnings(outputs: Sequence[Compressed]) -> list[str]:
    found = []
    without = [each.label for each in outputs if each.measured_on is None]
    if without:
        found.append(
            f"Not measured against the original: {', '.join(without)}. `attar compress --eval TEXT` writes the figures "
            "into the receipt."
        )
    if len({each.measured_on for each in outputs} - {None}) > 1:
        found.append(
            "These models were measured on different texts, originals or protocols: figures compare within a chart, "
            "not between charts."
        )
    labels: dict[str, list[str]] = {}
    for each in outputs:
        for warning in each.warnings:
            labels.setdefault(warning, []).append(each.label)
    return found + [f"{', '.join(some)}: {warning}." for warning, some in labels.items()]


# --- what it cost against what it saved -------------------------------------------------------------------------------


def _shown_trade_off(outputs: Sequence[Compressed], pieces: Sequence[Chart], several: bool) -> dict[str, Any]:
    """Return a group of models whose figures compare. Where there are `several` groups, the title names its models."""
    evaluation = outputs[0].receipt["evaluation"]
    protocol = evaluation.get("protocol")
    cut = f", windows of {protocol.get('context')}" if isinstance(protocol, dict) else ""
    speed = next((each.speed for each in outputs if each.speed is not None), None)
    machine = ""
    if speed is not None:
        machine = f" Speed: {_count(speed.batch, 'sequence')}, {_count(speed.threads, 'thread')}, {speed.isa}."
    title = "KL against size, bits and speed" if speed is not None else "KL against size and bits"
    return {
        "title": f"{title}: {', '.join(each.label for each in outputs)}" if several else title,
        "lead": f"Mean KL divergence from the original over {evaluation.get('tokens')} tokens{cut}, with 95 % "
        "intervals: the lower the better. The dashed line is the Pareto front: no other model of the chart is better "
        f"in both.{machine}",
        "key": Markup(key(pieces[0].series)),
        "charts": [_drawn(each) for each in pieces],
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _drawn(chart: Chart) -> dict[str, Any]:
    return {"title": chart.title, "drawn": Markup(svg(chart))}


# --- what each step gained --------------------------------------------------------------------------------------------


def _gains(output: Compressed) -> dict[str, Any]:
    """Return the tried recipes with their gains over the first, and tuning, on text held out from calibration."""
    found: dict[str, Any] = {"label": output.label, "lead": "", "rows": [], "left_out": [], "tuning": ""}
    if (chosen := output.selection) is not None:
        found["lead"] = (
            f"{_count(len(chosen.tried), 'recipe')} tried; mean KL from the original on {chosen.tokens} calibration "
            "tokens set aside to choose by. Kept is the least; the figures at the top are on other text."
        )
        for each in chosen.tried:
            first = chosen.tried[0].kl.value
            ratio = f"{each.kl.value / first:.3f}" if first > LEAST else "-"
            cells = Cell(f"{each.bits:.3f}"), Cell(f"{each.kl.value:.3g}", _ends(each.kl, ".3g")), Cell(ratio)
            found["rows"].append({"recipe": each.recipe, "kept": each is chosen.kept, "cells": cells})
        found["left_out"] = [f"{recipe}: {why}" for recipe, why in chosen.left_out]
    if (tuned := output.tuning) is not None:
        found["tuning"] = (
            f"Tuning: mean KL {tuned.before:.3g} before and {tuned.after:.3g} after, on {tuned.tokens} calibration "
            "tokens that it did not train on."
        )
    return found


# --- linear by linear -------------------------------------------------------------------------------------------------


def _layers(output: Compressed, shown: bool) -> dict[str, Any]:
    rows = [
        (each.name, each.scheme, each.measure, f"{each.error:.4g}", f"{each.rtn_error:.4g}",
         f"{each.error / each.rtn_error:.3f}" if each.rtn_error else "-")
        for each in output.layers
    ]  # fmt: skip
    gain = f", {output.gain:.2f} of the baseline's error on average" if output.gain is not None else ""
    note = f"{len(rows)} linears{gain}"
    drawn = [_drawn(each) for each in page_charts.error_charts(output)]
    return {"label": output.label, "note": note, "charts": drawn, "rows": rows, "shown": shown}


# --- allocation -------------------------------------------------------------------------------------------------------


def _allocation(output: Compressed) -> dict[str, Any]:
    found = output.allocation
    assert found is not None
    blocks = sorted({group.layer for group in found.groups})
    rows = []
    for kind in dict.fromkeys(group.kind for group in found.groups):
        by_layer = {group.layer: group for group in found.groups if group.kind == kind}
        cells = []
        for block in blocks:
            group = by_layer.get(block)
            rank = -1 if group is None else found.candidates.index(group.chosen)
            share = round(8 + 62 * rank / max(1, len(found.candidates) - 1)) if group else 0
            costs = [] if group is None else [f"{n} {kl:.3g}" for n, kl in zip(found.candidates, group.kl, strict=True)]
            cells.append({"share": share, "text": "" if group is None else group.chosen, "title": ", ".join(costs)})
        rows.append({"kind": kind, "cells": cells})
    without = f" Measured without {' and '.join(found.without)}, which followed." if found.without else ""
    return {
        "label": output.label,
        "lead": f"At most {found.target}. Chosen among {', '.join(found.candidates)}, by the KL divergence that each "
        f"group of linears causes alone over {found.tokens} calibration tokens: {found.bits:.3f} bits a weight, KL "
        f"{found.kl:.4g} as a whole ({found.kl_unrefined:.4g} before steps between neighbours were measured).{without}",
        "layers": [f"block {block}" for block in blocks],
        "rows": rows,
        "charts": [_drawn(each) for each in page_charts.allocation_charts(found)],
        "key": Markup(key((Series("one scheme", [], SOFT, "line"), Series("chosen", [], 0, "dots")))),
    }


# --- outliers ---------------------------------------------------------------------------------------------------------


def _outliers(contents: Contents) -> dict[str, Any]:
    profiles = contents.profiles
    peaks = page_charts.peak_charts(profiles)
    tokens = max(place.tokens for places in profiles.values() for place in places)
    rows = []
    for label, places in profiles.items():
        for place in places:
            top = ", ".join(f"{channel} ({value:.3g})" for channel, value in place.top())
            rows.append((
                label, place.layer, place.kind, place.tokens, len(place.outliers()), f"{place.peak:.1f}", top,
                f"{place.input_kurtosis:.3g}", f"{place.weight_kurtosis:.3g}",
            ))  # fmt: skip
    return {
        "lead": f"For each input channel of the linears, the largest activation over {tokens} tokens of "
        f"{contents.profiled_on}, and the largest weight that reads it. First, how many times the median channel's the "
        f"largest one is; above {FACTOR:g} the table counts a channel as an outlier. Kurtosis is 3 for a Gaussian.",
        "key": Markup(key(peaks[0].series)),
        "charts": [_drawn(each) for each in peaks],
        "details": [_drawn(each) for each in page_charts.channel_charts(profiles)],
        "names": ("model", "block", "linears", "tokens", f"channels over {FACTOR:g} x", "largest / median",
                  "largest channels (max |x|)", "kurtosis of x", "of w"),
        "rows": rows,
    }  # fmt: skip


# --- evidence ---------------------------------------------------------------------------------------------------------


def _source(output: Compressed) -> dict[str, Any]:
    value = output.receipt
    versions, source = value["versions"], value["source"]
    facts = [
        ("output", str(output.path)),
        ("original, SHA-256 of all files", source.get("sha256")),
        ("calibration tokens, SHA-256", value["calibration"] or "none used"),
        ("seed", value["seed"]),
        *((name, versions[name]) for name in sorted(versions)),
    ]
    if output.speed is not None:
        facts.append(("speed", f"{output.speed.decode:.2f} tokens/s decode, {output.speed.prefill:.1f} prefill"))
    hashes = source.get("files")
    return {
        "label": output.label,
        "note": f"attar {versions.get('attar')}, {size(output.bytes)}",
        "facts": facts,
        "recipe": json.dumps(value["recipe"], indent=2, ensure_ascii=False),
        "files": _listed(value["files"]),
        "source_files": _listed(hashes if isinstance(hashes, dict) else {}),
    }


def _listed(hashes: Mapping[str, Any]) -> str:
    return "\n".join(f"{hashes[name]}  {name}" for name in sorted(hashes))
