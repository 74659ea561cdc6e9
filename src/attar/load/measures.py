"""Figures of a run: latencies, throughput, goodput, and warnings about them.

Definitions for one request; times count from when it was sent:

* TTFT, time to first token: to the first event that holds text.
* E2E, end to end: to its terminal event.
* TPOT, time per output token: (E2E - TTFT) / (tokens - 1); undefined for an answer of one token.
* ITL, inter-token latency: each gap between two events with text, over all requests together. Events that arrive in
  one piece have gaps of zero between them, so ITL shows stalls where TPOT shows the mean.
* Tokens are those that the server counts (`usage`), where it does. Else they are events with text, which are fewer
  where an event holds several; `counted` says which.

Definitions for a run. Throughput is the tokens of successful answers over the time from the beginning of the load to
the last answer. Goodput is requests a second that succeeded within every limit of the SLO. Failed requests are counted
by kind, with one example of each, and are in no latency. Percentiles interpolate linearly between the nearest values,
as numpy's do.

An open loop's latencies count from when a request was sent; its lateness is in `client`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from attar.errors import UserError
from attar.load.client import Answer
from attar.load.drive import Run

LATE = 0.01  # seconds that a client may be late in one of twenty cases
BUSY = 0.8  # fraction of a core from which a client is close to being the limit
BEHIND = 2.0  # times the latency of the first third of a run, from which the last third shows a growing queue
UNEXPLAINED = 0.1  # fraction of the prompts' tokens that may come from a cache beyond what the prompts share
SLO_KEYS = ("ttft", "tpot", "e2e")


def parse_slo(text: str) -> dict[str, float]:
    """Parse limits such as `ttft=1.0,tpot=0.05`, in seconds. Raises ValueError that names the valid keys."""
    limits: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in SLO_KEYS or not 0 < limit < math.inf or name in limits:
            message = f"{item.strip()!r} is no limit: write it like ttft=1.0,tpot=0.05, of {', '.join(SLO_KEYS)}"
            raise UserError("option_malformed", message)
        limits[name] = limit
    return limits


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing of one answer, in seconds. `tpot` is None below two tokens, `ttft` where no event held text."""

    ttft: float | None
    tpot: float | None
    e2e: float
    itl: tuple[float, ...]
    tokens: int
    from_usage: bool


def timing(answer: Answer) -> Timing:
    tokens = len(answer.arrivals) if answer.completion_tokens is None else answer.completion_tokens
    e2e = answer.ended - answer.sent
    ttft = answer.arrivals[0] - answer.sent if answer.arrivals else None
    tpot = (e2e - ttft) / (tokens - 1) if ttft is not None and tokens > 1 else None
    gaps = tuple(b - a for a, b in pairwise(answer.arrivals))
    return Timing(ttft, tpot, e2e, gaps, tokens, answer.completion_tokens is not None)


def meets(one: Timing, slo: Mapping[str, float]) -> bool:
    """Return whether every limit holds; a value that an answer does not have breaks none."""
    values = {"ttft": one.ttft, "tpot": one.tpot, "e2e": one.e2e}
    return all((value := values[name]) is None or value <= limit for name, limit in slo.items())


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 .. 100) of at least one value in ascending order."""
    at = q / 100 * (len(values) - 1)
    low = math.floor(at)
    return values[low] + (values[min(low + 1, len(values) - 1)] - values[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum; None for no values."""
    if not values:
        return None
    ranked = sorted(values)
    shown = {f"p{q}": percentile(ranked, q) for q in (50, 95, 99)}
    return {"mean": math.fsum(ranked) / len(ranked), **shown, "max": ranked[-1]}


def measure(run: Run, slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the figures of a run as JSON-compatible values: seconds, tokens, and rates a second."""
    good = [each for each in run.sent if each.answer.error is None]
    timings = [timing(each.answer) for each in good]
    output = sum(one.tokens for one in timings)
    counts = [(each.answer.prompt_tokens, len(each.ask.prompt)) for each in good]
    prompt = sum(own if counted is None else counted for counted, own in counts)
    cached = [each.answer.cached_tokens for each in good if each.answer.cached_tokens is not None]
    seconds = max(run.seconds, 1e-9)
    counted = {one.from_usage for one in timings}
    failed = [(each.answer.error, each.answer.detail) for each in run.sent if each.answer.error is not None]
    measured: dict[str, Any] = {
        "label": run.load.label,
        "rate": run.load.rate,
        "clients": run.load.clients,
        "requests": len(run.sent),
        "succeeded": len(good),
        "errors": dict(Counter(kind for kind, _ in failed).most_common()),
        "examples": {kind: detail for kind, detail in reversed(failed) if detail},  # the first of each kind
        "seconds": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,  # None where the server does not report them
        "output_tokens": output,
        "counted": " and ".join("usage" if each else "events" for each in sorted(counted, reverse=True)) or "nothing",
        "requests_s": len(good) / seconds,
        "output_tok_s": output / seconds,
        "total_tok_s": (prompt + output) / seconds,
        "in_flight": math.fsum(each.answer.ended - each.answer.sent for each in run.sent) / seconds,
        "ttft": spread([one.ttft for one in timings if one.ttft is not None]),
        "itl": spread([gap for one in timings for gap in one.itl]),
        "tpot": spread([one.tpot for one in timings if one.tpot is not None]),
        "e2e": spread([one.e2e for one in timings]),
        "client": _client(run),
    }
    if slo:
        met = sum(meets(one, slo) for one in timings)
        share = met / len(run.sent) if run.sent else 0.0
        measured["goodput"] = {"slo": dict(slo), "met": met, "requests_s": met / seconds, "share": share}
    measured["warnings"] = warnings(run, measured)
    return measured


def _client(run: Run) -> dict[str, Any]:
    """Return the client's own lateness and processor use."""
    return {
        "send_lag": spread([each.answer.sent - each.due for each in run.sent]),
        "loop_lag": spread(run.loop_lags),
        "cpu_share": run.cpu / max(run.seconds, 1e-9) if run.sent else 0.0,  # a run of zero seconds has none
    }


def warnings(run: Run, measured: Mapping[str, Any]) -> list[str]:
    """Return warnings that a reader needs to judge the figures."""
    if not run.sent:
        return ["nothing was sent: the time for it was over before the first request was due"]
    found = []
    client = measured["client"]
    late = max(lag["p95"] if lag is not None else 0.0 for lag in (client["send_lag"], client["loop_lag"]))
    if late > LATE:
        found.append(
            f"this client was {late * 1e3:.0f} ms late or later in one of 20 cases: part of the latencies is its own"
        )
    if client["cpu_share"] > BUSY:
        found.append(f"this client used {client['cpu_share']:.0%} of a core: the server may be able to do more")
    first, last = _thirds(run)
    if run.load.clients is None and last > BEHIND * first > 0:
        found.append(
            f"the server fell behind: answers took {first:.3g} s at the beginning and {last:.3g} s at the end, so "
            "latencies grow with the length of the run"
        )
    short = sum(
        timing(each.answer).tokens < each.ask.output
        for each in run.sent
        if each.answer.error is None and each.answer.completion_tokens is not None
    )
    if short:
        found.append(f"{short} answers were shorter than asked for: the server's stops ended them")
    silent = sum(each.answer.error is None and not each.answer.arrivals for each in run.sent)
    if silent:
        found.append(f"{silent} answers held no text, so they have no TTFT")
    if measured["counted"] == "events":
        found.append("the server reports no usage: tokens are events with text")
    if (warning := _cache_warning(run, measured["cached_tokens"], measured["prompt_tokens"])) is not None:
        found.append(warning)
    return found


def _cache_warning(run: Run, cached: int | None, prompt: int) -> str | None:
    """Return a warning where more tokens came from the server's cache than these prompts can have left there, else
    None.

    Tokens that the server counts beyond those of the prompts, such as a chat template's, may all be shared.
    """
    if not cached:
        return None
    own = sum(len(each.ask.prompt) for each in run.sent if each.answer.error is None)
    shared = _shared_tokens([each.ask.prompt for each in run.sent])
    if cached - shared - max(0, prompt - own) <= UNEXPLAINED * prompt:
        return None
    return (
        f"{cached / max(1, prompt):.0%} of the prompts' tokens came from the server's cache, and these prompts share "
        f"only {shared / max(1, own):.0%}: probably an earlier run left them there; take another --seed, or start the "
        "server anew"
    )


def _shared_tokens(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the tokens that a cache of these prompts alone can save: each one's longest prefix that another has had.
    In sorted order, that is what neighbours share."""
    pairs = (zip(a, b, strict=False) for a, b in pairwise(sorted(prompts)))
    return sum(sum(1 for _ in takewhile(lambda two: two[0] == two[1], pair)) for pair in pairs)


def _thirds(run: Run) -> tuple[float, float]:
    """Return the median seconds of the answers in the first and the last third of the arrivals; zeros for a short
    run."""
    took = [each.answer.ended - each.answer.sent for each in run.sent if each.answer.error is None]
    third = len(took) // 3
    if third < 4:
        return 0.0, 0.0
    return percentile(sorted(took[:third]), 50), percentile(sorted(took[-third:]), 50)


ROWS = (
    "requests", "errors", "seconds", "output tok/s", "total tok/s", "cached prompt", "TTFT", "ITL", "TPOT", "E2E",
    "goodput",
)  # fmt: skip


def to_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of runs side by side, a column each; latencies are p50 / p95 / p99."""
    columns = [[run["label"], *_column(run)] for run in runs]
    names = ["load", *ROWS]
    widths = [max(len(cell) for cell in column) for column in columns]
    first = max(map(len, names))
    lines = [
        f"{name:<{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in zip(names, *columns, strict=True)
        if any(cells)
    ]
    notes = [f"error: {failure}" for failure in failures(runs)]
    notes += [f"{run['label']}: {warning}" for run in runs for warning in run["warnings"]]
    return "\n".join([*lines, *notes])


def failures(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each kind of failure with its count, the most frequent first, and one example of the server's message."""
    kinds, examples = Counter[str](), dict[str, str]()
    for run in runs:
        kinds.update(run["errors"])
        examples = run["examples"] | examples
    return [f"{kind} x {n}" + (f": {examples[kind]}" if kind in examples else "") for kind, n in kinds.most_common()]


def _column(run: Mapping[str, Any]) -> list[str]:
    goodput = run.get("goodput")
    return [
        f"{run['requests']}", f"{run['requests'] - run['succeeded']}", f"{run['seconds']:.1f}",
        f"{run['output_tok_s']:,.1f}", f"{run['total_tok_s']:,.1f}",
        "" if run["cached_tokens"] is None else f"{run['cached_tokens'] / max(1, run['prompt_tokens']):.0%}",
        *(_latency(run[name]) for name in ("ttft", "itl", "tpot", "e2e")),
        "" if goodput is None else f"{goodput['requests_s']:.2f}/s ({goodput['share']:.0%})",
    ]  # fmt: skip


def _latency(values: Mapping[str, float] | None) -> str:
    if values is None:
        return "-"
    unit, name = (1.0, "s") if values["p50"] >= 1 else (1e3, "ms")
    shown = " / ".join(f"{values[q] * unit:.3g}" if values[q] * unit < 1000 else f"{values[q] * unit:.0f}" for q in
                       ("p50", "p95", "p99"))  # fmt: skip
    return f"{shown} {name}"
