"""Charts of the report page, as data: what each output cost against what it saved, its errors, and what was chosen.

Whole models share a chart only where their figures compare (`Compressed.measured_on`). Charts of linears have one for
each kind, block by block, all with the same ends. `charts/` draws them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from attar.charts.chart import CHARACTER, SOFT, Axis, Chart, Point, Series
from attar.evaluation.outliers import Profile
from attar.evaluation.outputs import Allocation, Choice, Compressed, front
from attar.formats.codecs.ggml_mix import MIXES

WORST = 3  # places whose channels are drawn one by one
BINS = 256  # columns of such a chart, each with its largest channel

ORIGINAL = "original"
"""The label of the original's profiles."""


# --- what it cost against what it saved -------------------------------------------------------------------------------


def trade_offs(outputs: Sequence[Compressed]) -> list[tuple[list[Compressed], list[Chart]]]:
    """Return groups of outputs whose figures compare, with their charts: KL against size, bits, and measured tokens a
    second."""
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
    """Return a chart of KL over `xs`, a colour a method; a line joins the points on the Pareto front."""
    kl = [each.figures["kl_mean"] for each in outputs]
    best = front([(-x if faster else x, one.value) for x, one in zip(xs, kl, strict=True)])
    series = [Series("Pareto front", [Point(xs[i], kl[i].value) for i in best], SOFT, "line", dashed=True)]
    for number, method in enumerate(sorted({_method(each) for each in outputs})):
        points = [
            Point(x, one.value, each.label, one.low, one.high)
            for each, x, one in zip(outputs, xs, kl, strict=True)
            if _method(each) == method
        ]
        series.append(Series(method, points, number, labelled=True))
    return Chart(title, axis, Axis("mean KL, nats", log=True), series)


def _method(output: Compressed) -> str:
    """Return the meaning of a colour: the recipe without its scheme, an allocation, or a GGUF type."""
    if output.allocation:
        return output.recipe.partition(",")[0] + ", chosen"
    return "GGUF" if output.recipe in MIXES else output.recipe.partition("-")[0]


# --- linear by linear -------------------------------------------------------------------------------------------------


NEAREST, SMALLEST = "rounded to nearest", "smallest left out"
"""The baselines of storing a linear, shown beside a method's result."""


def plain(outputs: Iterable[Compressed]) -> list[str]:
    """Return the baselines that apply to some outputs."""
    pruned = {layer.pruned for each in outputs for layer in each.layers}
    return [name for name, is_it in ((NEAREST, False), (SMALLEST, True)) if is_it in pruned] or [NEAREST]


def error_series(pairs: Iterable[tuple[int, str, float, float]], way: str) -> list[Series]:
    """Return the series of (block, name, error, error of the baseline); `way` names the baseline."""
    some = list(pairs)
    return [
        Series(way, [Point(at, rtn, name) for at, name, _, rtn in some], SOFT, dashed=True, hollow=True),
        Series("as stored", [Point(at, error, name) for at, name, error, _ in some], 0),
    ]


def error_charts(output: Compressed) -> list[Chart]:
    """Return one small chart for each kind of linear, all with the same ends."""
    kinds: dict[str, list[tuple[int, str, float, float]]] = defaultdict(list)
    ways: dict[str, str] = {}
    for each in output.layers:
        if each.layer is not None:
            ways[each.kind] = SMALLEST if each.pruned else NEAREST
            kinds[each.kind].append((each.layer, each.name, each.error, each.rtn_error))
    errors = [e for some in kinds.values() for _, _, *pair in some for e in pair if e > 0]
    ends = (min(errors), max(errors)) if errors else None
    axes = Axis("block", whole=True), Axis("relative error", log=True, ends=ends)
    found = []
    for kind, some in kinds.items():
        many = len({at for at, *_ in some}) < len(some)  # experts: several in a block make no line
        series = [replace(each, style="dots") if many else each for each in error_series(some, ways[kind])]
        found.append(Chart(kind, *axes, series, 280, 200))
    return found


# --- allocation -------------------------------------------------------------------------------------------------------


def allocation_charts(found: Allocation) -> list[Chart]:
    """Return charts of the whole model against uniform bits, then of each kind of group alone: a line a scheme, and the
    choice."""
    uniform = [Point(bits, kl, name) for (bits, kl), name in zip(found.uniform, found.candidates, strict=False)]
    drawn = [
        Chart(
            "the whole model", Axis("bits per weight"), Axis("mean KL, nats", log=True),
            [Series("one scheme for all", uniform, SOFT, labelled=True),
             Series("chosen", [Point(found.bits, found.kl, "chosen")], 0, "dots", labelled=True)], 280, 200,
        )
    ]  # fmt: skip
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for group in found.groups:
        kinds[group.kind].append(group)
    costs = [cost for group in found.groups for cost in group.kl if cost > 0]
    axes = Axis("block", whole=True), Axis("mean KL, nats", log=True, ends=(min(costs), max(costs)) if costs else None)
    beside = 20 + round(CHARACTER * max(map(len, found.candidates)))
    for kind, groups in kinds.items():
        last = groups[-1]  # at whose end a line has its name
        series = [
            Series("one scheme", [Point(g.layer, g.kl[c], name if g is last else "") for g in groups], SOFT, "line",
                   labelled=True)
            for c, name in enumerate(found.candidates)
        ]  # fmt: skip
        points = [Point(g.layer, g.kl[found.candidates.index(g.chosen)], g.chosen) for g in groups]
        drawn.append(Chart(f"{kind} alone", *axes, [*series, Series("chosen", points, 0, "dots")], 280, 200, beside))
    return drawn


# --- outliers ---------------------------------------------------------------------------------------------------------


def peak_charts(profiles: Mapping[str, Sequence[Profile]]) -> list[Chart]:
    """Return a small chart for each kind of place: how far its largest channel stands out, block by block."""
    axes = Axis("block", whole=True), Axis("largest / median", log=True)
    found = []
    for kind in dict.fromkeys(place.kind for places in profiles.values() for place in places):
        series = []
        for label, colour in _colours(profiles).items():
            some = [place for place in profiles[label] if place.kind == kind and place.tokens]
            many = len({place.layer for place in some}) < len(some)
            points = [Point(place.layer, place.peak, f"{label}, {place.linears[0]}") for place in some]
            series.append(Series(label, points, colour, "dots" if many else "both", dashed=colour == SOFT))
        found.append(Chart(f"input of {kind}", *axes, series, 280, 200))
    return found


def channel_charts(profiles: Mapping[str, Sequence[Profile]]) -> list[Chart]:
    """Return charts of the channels of the places that stand out most: largest activation, and largest weight."""
    first = next(iter(profiles.values()))
    peaks = [max(places[i].peak for places in profiles.values() if i < len(places)) for i in range(len(first))]
    found = []
    for i in sorted(range(len(first)), key=lambda i: -peaks[i])[:WORST]:
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
    """Return at most `BINS` points over the channels, each the largest of its bin, so that no outlier is lost."""
    step = max(1, math.ceil(len(values) / BINS))
    found = []
    for start in range(0, len(values), step):
        some = values[start : start + step]
        at = max(range(len(some)), key=some.__getitem__)
        found.append(Point(start + at, some[at]))
    return found


def _colours(profiles: Mapping[str, object]) -> dict[str, int]:
    return {label: SOFT if label == ORIGINAL else i for i, label in enumerate(profiles, -1 * (ORIGINAL in profiles))}
