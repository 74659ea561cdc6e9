"""One HTML page about compressed outputs: what they cost against what they saved, layer by layer, with its evidence.

Everything shown comes from receipts and headers (`outputs.py`), and from profiles where some were made
(`outliers.py`). The page is one file that loads nothing: charts are inline SVG, and a content security policy forbids
the rest. The template escapes all text; only the charts and legends, which escape their own, go in as they are.

Whole models are compared only where their figures do (`Compressed.measured_on`); others get charts of their own, and
the page says so.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from attar.evaluation import charts
from attar.evaluation import pictures as pngs
from attar.evaluation.charts import CHARACTER, SOFT, Axis, Chart, Point, Series
from attar.evaluation.outliers import FACTOR, Profile
from attar.evaluation.outputs import LEAST, Allocation, Choice, Compressed, Figure, front
from attar.evaluation.table import size
from attar.formats.ggml_mix import MIXES
from attar.version import __version__

WORST = 3  # places whose channels are drawn one by one
BINS = 256  # columns in which such a chart draws channels, each by its largest

ORIGINAL = "original"


@dataclass(frozen=True)
class Contents:
    """What a page is about. `profiles` are those of the original (`ORIGINAL`) and of outputs, by label."""

    outputs: Sequence[Compressed]
    profiles: Mapping[str, Sequence[Profile]] = field(default_factory=dict)
    profiled_on: str = ""  # the text, by name


def html(contents: Contents) -> str:
    """The page."""
    text = importlib.resources.files("attar.evaluation").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    outputs = sorted(contents.outputs, key=lambda each: each.bytes)
    architectures = sorted({each.architecture for each in outputs})
    return environment.from_string(text).render(
        title="What compression cost",
        lead=f"{_count(len(outputs), 'compressed model')} of {' and '.join(architectures)}, from their receipts.",
        colours=charts.COLOURS,
        warnings=_warnings(outputs),
        summary=_summary(outputs),
        trade_offs=[_shown_trade_off(chosen, pieces) for chosen, pieces in trade_offs(outputs)],
        gains=[_gains(each) for each in outputs if each.selection is not None or each.tuning is not None],
        allocations=[_allocation(each) for each in outputs if each.allocation is not None],
        layers=[_layers(each, each is _unfolded(outputs)) for each in outputs],
        layers_key=Markup(charts.key(_error_series([], " or ".join(_plain(outputs))))),
        plain=" or ".join(_plain(outputs)),
        outliers=_outliers(contents) if contents.profiles else None,
        sources=[_source(each) for each in outputs],
        version=__version__,
    )


def pictures(contents: Contents) -> dict[str, list[Chart]]:
    """The charts that become PNGs, by the name of the file."""
    found = {}
    drawn = trade_offs(contents.outputs)
    for number, (_, pieces) in enumerate(drawn, 1):
        found["trade-off" + (f"-{number}" if len(drawn) > 1 else "")] = pieces
    for number, each in enumerate(contents.outputs, 1):
        after = f"-{number}" if len(contents.outputs) > 1 else ""
        found[f"errors{after}"] = error_charts(each)
        if each.allocation is not None:
            found[f"allocation{after}"] = allocation_charts(each.allocation)
    if contents.profiles:
        found["outliers"] = [*peak_charts(contents.profiles), *channel_charts(contents.profiles)]
    return {name: pieces for name, pieces in found.items() if pieces}


def save_pictures(contents: Contents, folder: Path) -> list[Path]:
    """Write them. Raises ValueError where matplotlib is not installed."""
    pngs.check()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, pieces in pictures(contents).items():
        paths.append(folder / f"{name}.png")
        pngs.png(pieces, paths[-1])
    return paths


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    text: str
    note: str = ""
    best: bool = False


def _summary(outputs: Sequence[Compressed]) -> dict[str, Any]:
    """Names, rows of cells, and a note; a column that no output fills is left out."""

    def figure(name: str, form: str) -> list[Cell | None]:
        found = (each.figures.get(name) for each in outputs)
        return [None if one is None else Cell(format(one.value, form), _ends(one, form)) for one in found]

    columns: dict[str, list[Cell | None]] = {
        "model": [Cell(each.label) for each in outputs],
        "size": [Cell(size(each.bytes), f"{each.bytes:,} B") for each in outputs],
        "KL mean": figure("kl_mean", ".3g"),
        "KL 99.9 %": figure("kl_p999", ".3g"),
        "perplexity": figure("ppl", ".2f"),
        "top-1 agreement": figure("top1", ".1%"),
        "bits/weight": [Cell(f"{each.bits_per_weight:.3f}") for each in outputs],
        "decode, tokens/s": [None if each.speed is None else Cell(f"{each.speed.decode:.1f}") for each in outputs],
        "error / plain": [None if each.gain is None else Cell(f"{each.gain:.3f}") for each in outputs],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [[cell or Cell("-") for cell in row] for row in zip(*columns.values(), strict=True)]
    note = "Below figures, 95 % intervals from a bootstrap over windows of the text. "
    base = {each.figures["ppl_base"].value for each in outputs if "ppl_base" in each.figures}
    if len(base) == 1:
        note += f"The original's perplexity is {base.pop():.4f}. "
    if "error / plain" in columns:
        plain = " or ".join(_plain(outputs))
        note += f"Last: the geometric mean over linears of the error as stored over that of the plain way: {plain}."
    return {"names": list(columns), "rows": rows, "note": note}


def _ends(figure: Figure, form: str) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return f"{figure.low:{form}} to {figure.high:{form}}"


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
    return found + [f"{each.label}: {warning}." for each in outputs for warning in each.warnings]


# --- what it cost against what it saved -------------------------------------------------------------------------------


def trade_offs(outputs: Sequence[Compressed]) -> list[tuple[list[Compressed], list[Chart]]]:
    """Outputs whose figures compare, with their charts: KL against size, bits, and tokens a second if measured."""
    groups: dict[object, list[Compressed]] = defaultdict(list)
    for each in outputs:
        if each.measured_on is not None:
            groups[each.measured_on].append(each)
    found = []
    for chosen in groups.values():
        pieces = [
            _trade_off("KL against size", Axis("weights on disk, MB"), chosen, [e.bytes / 1e6 for e in chosen]),
            _trade_off("KL against bits", Axis("bits per weight of the linears"), chosen,
                       [e.bits_per_weight for e in chosen]),
        ]  # fmt: skip
        fast = [(each, each.speed.decode) for each in chosen if each.speed is not None]
        if fast:
            some, speeds = [each for each, _ in fast], [speed for _, speed in fast]
            pieces.append(_trade_off("KL against speed", Axis("decode, tokens/s"), some, speeds, faster=True))
        found.append((chosen, pieces))
    return found


def _trade_off(
    title: str, axis: Axis, outputs: Sequence[Compressed], xs: Sequence[float], faster: bool = False
) -> Chart:
    """KL over `xs`, a colour a method; a line joins those that no other beats in both."""
    kl = [each.figures["kl_mean"] for each in outputs]
    best = front([(-x if faster else x, one.value) for x, one in zip(xs, kl, strict=True)])
    series = [Series("beaten by none", [Point(xs[i], kl[i].value) for i in best], SOFT, "line", dashed=True)]
    methods = sorted({_method(each) for each in outputs})
    for number, method in enumerate(methods):
        points = [
            Point(x, one.value, each.label, one.low, one.high)
            for each, x, one in zip(outputs, xs, kl, strict=True)
            if _method(each) == method
        ]
        series.append(Series(method, points, number, labelled=True))
    return Chart(title, axis, Axis("mean KL, nats", log=True), series)


def _method(output: Compressed) -> str:
    """What a colour stands for: the recipe without its scheme, that bits were chosen, or that it is a type of GGUF."""
    if output.allocation:
        return output.recipe.partition(",")[0] + ", chosen"
    return "GGUF" if output.recipe in MIXES else output.recipe.partition("-")[0]


def _shown_trade_off(outputs: Sequence[Compressed], pieces: Sequence[Chart]) -> dict[str, Any]:
    evaluation = outputs[0].receipt["evaluation"]
    protocol = evaluation.get("protocol")
    cut = f", windows of {protocol.get('context')}" if isinstance(protocol, dict) else ""
    speed = next((each.speed for each in outputs if each.speed is not None), None)
    machine = ""
    if speed is not None:
        machine = f" Speed: {_count(speed.batch, 'sequence')}, {_count(speed.threads, 'thread')}, {speed.isa}."
    return {
        "title": "What it cost, and what it saved",
        "lead": f"Mean KL divergence from the original over {evaluation.get('tokens')} tokens{cut}, with 95 % "
        f"intervals: the lower the better. No model on the dashed line is beaten in both by another.{machine}",
        "key": Markup(charts.key(pieces[0].series)),
        "charts": [_drawn(each) for each in pieces],
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _drawn(chart: Chart) -> dict[str, Any]:
    return {"title": chart.title, "drawn": Markup(charts.svg(chart))}


# --- what each step gained --------------------------------------------------------------------------------------------


def _gains(output: Compressed) -> dict[str, Any]:
    """Recipes tried with what each gained over the first, and tuning, on text set aside from calibration."""
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


NEAREST, SMALLEST = "rounded to nearest", "smallest left out"
"""The plain ways to store a linear, beside which what a method does is shown."""


def _plain(outputs: Iterable[Compressed]) -> list[str]:
    """Those of some outputs."""
    pruned = {layer.pruned for each in outputs for layer in each.layers}
    return [name for name, is_it in ((NEAREST, False), (SMALLEST, True)) if is_it in pruned] or [NEAREST]


def _error_series(pairs: Iterable[tuple[int, str, float, float]], plain: str) -> list[Series]:
    """Of (block, name, error, error of the plain way)."""
    some = list(pairs)
    return [
        Series(plain, [Point(at, rtn, name) for at, name, _, rtn in some], SOFT, dashed=True, hollow=True),
        Series("as stored", [Point(at, error, name) for at, name, error, _ in some], 0),
    ]


def error_charts(output: Compressed) -> list[Chart]:
    """One small chart for each kind of linear, all with the same ends."""
    kinds: dict[str, list[tuple[int, str, float, float]]] = defaultdict(list)
    plain: dict[str, str] = {}
    for each in output.layers:
        if each.layer is not None:
            plain[each.kind] = SMALLEST if each.pruned else NEAREST
            kinds[each.kind].append((each.layer, each.name, each.error, each.rtn_error))
    errors = [e for some in kinds.values() for _, _, *pair in some for e in pair if e > 0]
    ends = (min(errors), max(errors)) if errors else None
    axes = Axis("block", whole=True), Axis("relative error", log=True, ends=ends)
    found = []
    for kind, some in kinds.items():
        many = len({at for at, *_ in some}) < len(some)  # experts: several in a block make no line
        series = [replace(each, style="dots") if many else each for each in _error_series(some, plain[kind])]
        found.append(Chart(kind, *axes, series, 280, 200))
    return found


def _unfolded(outputs: Sequence[Compressed]) -> Compressed | None:
    """The output whose errors are open: the first that was not stored the plain way, where there is one."""
    differ = (each for each in outputs if each.gain is not None and round(each.gain, 2) != 1)
    return next(differ, next(iter(outputs), None))


def _layers(output: Compressed, shown: bool) -> dict[str, Any]:
    rows = [
        (each.name, each.scheme, each.measure, f"{each.error:.4g}", f"{each.rtn_error:.4g}",
         f"{each.error / each.rtn_error:.3f}" if each.rtn_error else "-")
        for each in output.layers
    ]  # fmt: skip
    gain = f", {output.gain:.2f} of the plain way's error on average" if output.gain is not None else ""
    note = f"{len(rows)} linears{gain}"
    drawn = [_drawn(each) for each in error_charts(output)]
    return {"label": output.label, "note": note, "charts": drawn, "rows": rows, "shown": shown}


# --- allocation -------------------------------------------------------------------------------------------------------


def allocation_charts(found: Allocation) -> list[Chart]:
    """The whole model against uniform bits, then each kind of group alone: a line a scheme, and what was chosen."""
    uniform = [Point(bits, kl, name) for (bits, kl), name in zip(found.uniform, found.ladder, strict=False)]
    chosen = Point(found.bits, found.kl, "chosen")
    drawn = [
        Chart(
            "the whole model", Axis("bits per weight"), Axis("mean KL, nats", log=True),
            [Series("one scheme for all", uniform, SOFT, labelled=True),
             Series("chosen", [chosen], 0, "dots", labelled=True)], 280, 200,
        )
    ]  # fmt: skip
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for group in found.groups:
        kinds[group.kind].append(group)
    costs = [cost for group in found.groups for cost in group.kl if cost > 0]
    axes = Axis("block", whole=True), Axis("mean KL, nats", log=True, ends=(min(costs), max(costs)) if costs else None)
    beside = 20 + round(CHARACTER * max(map(len, found.ladder)))
    for kind, groups in kinds.items():
        last = groups[-1]  # at whose end a line has its name
        series = [
            Series("one scheme", [Point(g.layer, g.kl[c], name if g is last else "") for g in groups], SOFT, "line",
                   labelled=True)
            for c, name in enumerate(found.ladder)
        ]  # fmt: skip
        points = [Point(g.layer, g.kl[found.ladder.index(g.chosen)], g.chosen) for g in groups]
        drawn.append(Chart(f"{kind} alone", *axes, [*series, Series("chosen", points, 0, "dots")], 280, 200, beside))
    return drawn


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
            rank = -1 if group is None else found.ladder.index(group.chosen)
            share = round(8 + 62 * rank / max(1, len(found.ladder) - 1)) if group else 0
            costs = [] if group is None else [f"{n} {kl:.3g}" for n, kl in zip(found.ladder, group.kl, strict=True)]
            cells.append({"share": share, "text": "" if group is None else group.chosen, "title": ", ".join(costs)})
        rows.append({"kind": kind, "cells": cells})
    pieces = allocation_charts(found)
    without = f" Measured without {' and '.join(found.without)}, which followed." if found.without else ""
    key = Series("one scheme", [], SOFT, "line"), Series("chosen", [], 0, "dots")
    return {
        "label": output.label,
        "lead": f"At most {found.target}. Chosen among {', '.join(found.ladder)}, by the KL divergence that each group "
        f"of linears causes alone over {found.tokens} calibration tokens: {found.bits:.3f} bits a weight, KL "
        f"{found.kl:.4g} as a whole ({found.kl_unrefined:.4g} before steps between neighbours were measured).{without}",
        "layers": [f"block {block}" for block in blocks],
        "rows": rows,
        "charts": [_drawn(each) for each in pieces],
        "key": Markup(charts.key(key)),
    }


# --- outliers ---------------------------------------------------------------------------------------------------------


def peak_charts(profiles: Mapping[str, Sequence[Profile]]) -> list[Chart]:
    """How far each place's largest channel stands out, block by block: a small chart for each kind of place."""
    kinds = list(dict.fromkeys(place.kind for places in profiles.values() for place in places))
    found = []
    for kind in kinds:
        series = []
        for label, colour in _colours(profiles).items():
            some = [place for place in profiles[label] if place.kind == kind and place.tokens]
            many = len({place.layer for place in some}) < len(some)
            points = [Point(place.layer, place.peak, f"{label}, {place.linears[0]}") for place in some]
            series.append(Series(label, points, colour, "dots" if many else "both", dashed=colour == SOFT))
        found.append(
            Chart(f"input of {kind}", Axis("block", whole=True), Axis("largest / median", log=True), series, 280, 200)
        )
    return found


def channel_charts(profiles: Mapping[str, Sequence[Profile]]) -> list[Chart]:
    """The channels of the places that stand out most: largest activation, and largest weight."""
    first = next(iter(profiles.values()))
    worst = sorted(
        range(len(first)), key=lambda i: -max(places[i].peak for places in profiles.values() if i < len(places))
    )[:WORST]
    found = []
    for i in worst:
        place = first[i]
        where = f"block {place.layer}, {place.kind}"
        for what, of in (("largest activation", "inputs"), ("largest weight", "weights")):
            series = [
                Series(label, _binned(getattr(profiles[label][i], of).tolist()), colour, "line")
                for label, colour in _colours(profiles).items()
                if i < len(profiles[label])
            ]
            found.append(Chart(f"{where}: {what}", Axis("input channel"), Axis(what, log=True), series, 400, 200))
    return found


def _binned(values: Sequence[float]) -> list[Point]:
    """At most `BINS` points over the channels, each the largest of its bin, so that no outlier is lost."""
    step = max(1, math.ceil(len(values) / BINS))
    found = []
    for start in range(0, len(values), step):
        some = values[start : start + step]
        at = max(range(len(some)), key=some.__getitem__)
        found.append(Point(start + at, some[at]))
    return found


def _colours(profiles: Mapping[str, object]) -> dict[str, int]:
    return {label: SOFT if label == ORIGINAL else i for i, label in enumerate(profiles, -1 * (ORIGINAL in profiles))}


def _outliers(contents: Contents) -> dict[str, Any]:
    profiles = contents.profiles
    peaks = peak_charts(profiles)
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
        "key": Markup(charts.key(peaks[0].series)),
        "charts": [_drawn(each) for each in peaks],
        "details": [_drawn(each) for each in channel_charts(profiles)],
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
