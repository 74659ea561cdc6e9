"""Tables of what drafts gained, with the speeds that costs and acceptance allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attar.metrics import bootstrap
from attar.metrics.bootstrap import Interval
from speculation.llama_server import OFF
from speculation.runs import Run

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 17)  # whose costs are measured


@dataclass(frozen=True)
class Pair:
    """One round of one prompt, or of one batch of prompts, without drafts and with, and by llama.cpp's settings."""

    off: Run
    on: Run
    theirs: Mapping[str, Run] = field(default_factory=dict)


class RowCosts:
    """Seconds of a step by its rows, between the measured numbers by interpolation."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = tuple(seconds)

    def of(self, rows: float) -> float:
        return float(np.interp(rows, ROWS, self.seconds))

    def ratio(self, rows: float) -> float:
        """c(r): the cost over that of one row."""
        return self.of(rows) / self.seconds[0]


def summary(pairs: Sequence[Pair], costs: RowCosts, batch: int) -> dict[str, Any]:
    """The figures of all rounds together. The interval is that of the ratio of seconds, pairs drawn again and again."""
    off, on = sum((pair.off for pair in pairs), Run()), sum((pair.on for pair in pairs), Run())
    ratio = _ratio([pair.off.seconds for pair in pairs], [pair.on.seconds for pair in pairs])
    processor = _ratio([pair.off.processor for pair in pairs], [pair.on.processor for pair in pairs])
    shares = [right / made for right, made in zip(on.accepted, on.drafted, strict=True) if made]
    found: dict[str, Any] = {
        "pairs": len(pairs),
        "tokens": on.tokens,
        "off_tok_s": off.tokens / off.seconds,
        "on_tok_s": on.tokens / on.seconds,
        "ratio": [ratio.value, ratio.low, ratio.high],
        "processor_s": [off.processor, on.processor],
        "processor_ratio": [processor.value, processor.low, processor.high],
        "drafted": sum(on.drafted),
        "accepted": sum(on.accepted),
        "shares": shares,
        "drafted_by_position": [made for made in on.drafted if made],
        "tokens_a_pass": on.tokens / max(1, on.passes),
        "drafting_share": on.drafting / on.seconds,
        "draft_cost": on.drafting / max(1, sum(on.drafted)) / costs.seconds[0],
        "without": 1 - on.drafted[0] / max(1, on.passes),  # share of passes with no drafts
    }
    if pairs[0].theirs:
        found["llama.cpp"] = _theirs(pairs)
    if batch == 1:
        found["allowed"] = allowed(on, costs)
        found["best_fixed"] = best_fixed(shares, costs, found["draft_cost"])
    return found


def allowed(on: Run, costs: RowCosts) -> float:
    """How many times as fast the passes would be if each took what so many rows cost, and drafts what they took."""
    counts = [a - b for a, b in zip([on.passes, *on.drafted], [*on.drafted, 0], strict=True)]
    steps = sum(count * costs.ratio(1 + drafts) for drafts, count in enumerate(counts))
    return on.tokens / (steps + on.drafting / costs.seconds[0])


def best_fixed(shares: Sequence[float], costs: RowCosts, draft_cost: float) -> tuple[int, float]:
    """The number of drafts in every step that is the fastest by c(r), the cost of a draft and the shares of right
    drafts by position; and its speed."""
    best, tokens = (0, 1.0), 1.0
    for count, share in enumerate(shares, 1):
        tokens += share
        speed = tokens / (costs.ratio(1 + count) + count * draft_cost)
        best = max(best, (count, speed), key=lambda each: each[1])
    return best


def _theirs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """llama.cpp's tokens a second by its settings, and our best over its best with the interval of that."""
    runs = {name: [pair.theirs[name] for pair in pairs] for name in pairs[0].theirs}
    speeds = {name: sum(run.tokens for run in each) / sum(run.seconds for run in each) for name, each in runs.items()}
    best = max(speeds, key=lambda name: speeds[name])
    # Texts differ, in length too, so seconds a token are compared.
    ratio = _ratio(_paces(runs[best]), _paces([pair.on for pair in pairs]))
    gain = _ratio(_paces(runs[OFF]), _paces(runs[best]))
    return {
        "tok_s": speeds, "best": best, "ratio": [ratio.value, ratio.low, ratio.high],
        "gain": [gain.value, gain.low, gain.high],
    }  # fmt: skip


def _paces(runs: Sequence[Run]) -> list[float]:
    return [run.seconds / max(1, run.tokens) for run in runs]


def beside(rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Markdown: both programs' tokens a second, and what drafts gain each."""
    names = [*rows[0][1]["llama.cpp"]["tok_s"]]
    lines = [
        f"| texts | attar without, with | llama.cpp {', '.join(names)} | its best | attar over it | gain | its gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in rows:
        theirs = each["llama.cpp"]
        speeds = ", ".join(f"{theirs['tok_s'][setting]:.1f}" for setting in names)
        lines.append(
            f"| {name} | {each['off_tok_s']:.1f}, {each['on_tok_s']:.1f} | {speeds} | {theirs['best']} "
            f"| {interval(theirs['ratio'])} | {interval(each['ratio'])} | {interval(theirs['gain'])} |"
        )
    return "\n".join(lines)


def _ratio(off: Sequence[float], on: Sequence[float]) -> Interval:
    return bootstrap.ratio(np.array(off), np.array(on))


def table(rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Markdown."""
    lines = [
        "| texts | tokens/s without, with | times as fast (95 %) | by processor seconds | tokens a pass | right at "
        "drafts 1, 2, 3, 4, 6, 8 | steps with none | D | allowed | best fixed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in rows:
        shares = ", ".join(f"{each['shares'][at]:.2f}" for at in (0, 1, 2, 3, 5, 7) if at < len(each["shares"]))
        best = "" if "best_fixed" not in each else f"{each['best_fixed'][0]}: {each['best_fixed'][1]:.2f}"
        lines.append(
            f"| {name} | {each['off_tok_s']:.1f}, {each['on_tok_s']:.1f} | {interval(each['ratio'])} "
            f"| {interval(each['processor_ratio'])} | {each['tokens_a_pass']:.2f} | {shares} "
            f"| {each['without']:.0%} | {each['draft_cost']:.2f} | {each.get('allowed', 0):.2f} | {best} |"
        )
    return "\n".join(lines)


def interval(values: Sequence[float | None]) -> str:
    value, low, high = values
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"
