"""Charts as SVG that stands in a page, with the styles and the legend that it needs there.

Marks carry `data-x` and `data-y`, so a test can compare every drawn number with the figure it came from. Colours are
CSS variables, which `THEMES` sets for light and dark paper. Not done: anything interactive. The hover text on each mark
is the browser's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from attar.charts.chart import COLOURS, Chart, Piece, Series, Stroke, Text, kind_of, laid_out, shape_of

_LIGHT, _DARK = ("".join(f" --c{i}: {pair[theme]};" for i, pair in enumerate(COLOURS)) for theme in (0, 1))

THEMES = f"""\
  :root {{ color-scheme: light dark; --ink: #1d2129; --paper: #fbfaf7; --card: #fff; --line: #d9d5cb; --grid: #ece8df;
          --soft: #6d6a63; --under: var(--card);{_LIGHT} }}
  @media (prefers-color-scheme: dark) {{ :root {{ --ink: #e9e5dc; --paper: #17181b; --card: #1e1f23; --line: #3a3b41;
          --grid: #2c2d32; --soft: #a19d94;{_DARK} }} }}"""
"""CSS variables of a page with charts: its ink, papers and lines, and the colours of series."""

STYLE = f"""\
  .key {{ display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; font-size: .85rem; margin: .25rem 0 .5rem; }}
  .key .sample {{ width: 24px; height: 14px; vertical-align: -2px; margin-right: .35rem; }}
  .scroll {{ overflow-x: auto; background: linear-gradient(90deg, var(--under) 50%, transparent) 0 / 2rem 100%,
          linear-gradient(-90deg, var(--under) 50%, transparent) 100% / 2rem 100%,
          linear-gradient(90deg, var(--soft), transparent) 0 / .4rem 100%,
          linear-gradient(-90deg, var(--soft), transparent) 100% / .4rem 100%, var(--under);
          background-attachment: local, local, scroll, scroll, scroll; background-repeat: no-repeat; }}
  svg text {{ font: 11px system-ui, sans-serif; fill: var(--ink); }}
  svg .tick, svg .name {{ fill: var(--soft); }}
  svg .label {{ paint-order: stroke; stroke: var(--card); stroke-width: 3px; }}
  svg path {{ fill: none; }}
  svg .grid {{ stroke: var(--grid); }} svg .axis {{ stroke: var(--soft); }}
  svg .line {{ stroke-width: 1.8; stroke-linejoin: round; }} svg .dashed {{ stroke-dasharray: 5 4; }} \
svg .faint {{ opacity: .4; }}
  svg .thin {{ stroke-width: .9; }}
  svg .whisker {{ stroke-width: 1.4; opacity: .75; }}
  svg .soft {{ --c: var(--soft); }}{"".join(f" svg .c{i} {{ --c: var(--c{i}); }}" for i in range(len(COLOURS)))}
  svg .line, svg .whisker, svg .mark {{ stroke: var(--c); }} svg .mark {{ fill: var(--c); stroke-width: 1.4; }}
  svg .mark.hollow {{ fill: var(--card); }}"""
"""CSS rules of charts and legends, in those variables."""


def svg(chart: Chart) -> str:
    """Return the chart as one <svg> element. All text that it is given is escaped."""
    label = escape(f"{chart.title}: {chart.y.label} against {chart.x.label}", quote=True)
    drawn = "".join(map(_element, laid_out(chart)))
    return f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{label}">{drawn}</svg>'


def _element(piece: Piece) -> str:
    if isinstance(piece, Stroke):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in piece.places)
        return f'<path class="{piece.kind}" d="M{path}"/>'
    if isinstance(piece, Text):
        place = f'x="{piece.x:.1f}" y="{piece.y:.1f}"'
        if piece.turned:
            place = f'transform="translate({piece.x:.0f} {piece.y:.0f}) rotate(-90)"'
        return f'<text class="{piece.kind}" {place} text-anchor="{piece.anchor}">{escape(piece.text)}</text>'
    point, name = piece.point, piece.series.name
    title = f"{point.label or name}: {point.y:.4g} at {point.x:.6g}"
    if point.low is not None and point.high is not None:
        title += f", interval {point.low:.4g} to {point.high:.4g}"
    return (
        f'<path class="{piece.kind}" d="{_shape(piece.shape, piece.x, piece.y)}" '
        f'data-series="{escape(name, quote=True)}" data-x="{point.x!r}" data-y="{point.y!r}">'
        f"<title>{escape(title)}</title></path>"
    )


def _shape(shape: str, x: float, y: float) -> str:
    s = 4.0
    return {
        "circle": f"M{x - s:.1f} {y:.1f}a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z",
        "square": f"M{x - s * 0.9:.1f} {y - s * 0.9:.1f}h{s * 1.8}v{s * 1.8}h{-s * 1.8}z",
        "triangle": f"M{x - s * 1.15:.1f} {y + s:.1f}h{s * 2.3}l{-s * 1.15} {-s * 2.1}z",
        "diamond": f"M{x - s * 1.25:.1f} {y:.1f}l{s * 1.25} {-s * 1.25}l{s * 1.25} {s * 1.25}l{-s * 1.25} {s * 1.25}z",
        "down": f"M{x - s * 1.15:.1f} {y - s:.1f}h{s * 2.3}l{-s * 1.15} {s * 2.1}z",
        "cross": f"M{x - s:.1f} {y - s * 0.4:.1f}h{s * 0.6}v{-s * 0.6}h{s * 0.8}v{s * 0.6}h{s * 0.6}v{s * 0.8}"
        f"h{-s * 0.6}v{s * 0.6}h{-s * 0.8}v{-s * 0.6}h{-s * 0.6}z",
    }[shape]


def key(series: Sequence[Series]) -> str:
    """Return the legend as HTML."""
    items = []
    for each in series:
        kind, drawn = kind_of(each), ""
        if each.style != "dots":
            drawn += f'<path class="line {kind}{" dashed" if each.dashed else ""}" d="M0 7H24"/>'
        if each.style != "line":
            shape = _shape(shape_of(each), 12, 7)
            drawn += f'<path class="mark {kind}{" hollow" if each.hollow else ""}" d="{shape}"/>'
        items.append(
            f'<span><svg class="sample" viewBox="0 0 24 14" aria-hidden="true">{drawn}</svg>{escape(each.name)}</span>'
        )
    return f'<p class="key">{"".join(items)}</p>'
