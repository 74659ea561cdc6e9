"""Body of `attar bench-serve`: choose requests, send them at each load, report.

Several loads get the same requests with different tokens (`traces.shifted`), so that none finds an earlier one's
prompts in the server's prefix cache. Within a run, prompts share all that the trace shares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from attar.errors import UserError
from attar.load import drive, measures, schedule, traces
from attar.load.client import Server, printable
from attar.load.drive import Target
from attar.load.schedule import Load
from attar.load.traces import Ask, Synthetic
from attar.progress import Progress

SHIFT = 101  # offset of the token ids between runs
PAUSE = 0.5  # seconds between runs

SIZES = frozenset({"prompt", "messages", "max_tokens", "max_completion_tokens", "truncate_prompt_tokens"})
"""Request fields that change its length: with one of them in `extra`, only the server knows the length."""

Arrivals = Literal["poisson", "trace"]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Options:
    """Options of a benchmark. Loads are `rates` (requests a second), `clients`, or, with neither, a trace as
    recorded."""

    url: str
    key: str | None = None
    model: str | None = None  # None: the first that the server lists
    chat: bool = False
    text: bool = False  # send words, never token ids
    decode: Callable[[Sequence[int]], str] | None = None  # ids to text, where words are sent
    trace: Path | None = None
    synthetic: Synthetic = field(default_factory=Synthetic)
    requests: int = 100  # at most
    divisor: int = 1
    longest: int | None = None  # tokens of prompt and answer; longer requests are left out
    vocabulary: int | None = None  # ids stay below it
    rates: tuple[float, ...] = ()
    clients: tuple[int, ...] = ()
    arrivals: Arrivals = "poisson"
    seed: int = 0
    slo: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout: float = 600.0
    seconds: float | None = None  # of a run, after which nothing is sent
    ramp: float | None = None  # of a closed loop (`schedule.closed`)
    extra: Mapping[str, Any] = field(default_factory=dict)


def loads(options: Options) -> list[Load]:
    """Return the runs, in order. Raises ValueError where the options contradict each other or leave no request."""
    if options.requests < 1:
        raise UserError("option_out_of_range", f"a run has at least one request, not {options.requests}")
    if options.rates and options.clients:
        raise UserError("option_conflict", "a load has rates (open loop) or clients (closed loop), not both")
    if options.arrivals not in ("poisson", "trace"):
        raise UserError("name_unknown", f"arrivals are poisson or trace, not {options.arrivals!r}")
    if options.trace is None and options.arrivals == "trace":
        raise UserError("option_missing", "--arrivals trace takes the times of a trace: name its file with --trace")
    if options.trace is None and not (options.rates or options.clients):
        raise UserError("option_missing", "say how to send: --rates 1,2, --clients 1,8, or a --trace with its times")
    asks = _asks(options)
    runs: list[Load] = []
    for rate in options.rates:
        turned, timed = traces.shifted(asks, len(runs) * SHIFT), options.arrivals == "trace"
        runs.append(schedule.as_recorded(turned, rate) if timed else schedule.poisson(turned, rate, options.seed))
    for clients in options.clients:
        runs.append(schedule.closed(traces.shifted(asks, len(runs) * SHIFT), clients, options.ramp))
    return runs or [schedule.as_recorded(asks)]


def _asks(options: Options) -> list[Ask]:
    if options.trace is None:
        asks = traces.synthetic(options.synthetic, options.requests, options.seed)
    else:
        asks = traces.read(options.trace, options.requests, options.divisor, options.seed)
    found = len(asks)
    if options.longest is not None:
        asks = traces.within(asks, options.longest)
    if not asks:
        raise UserError("option_out_of_range", f"all {found} requests are longer than {options.longest} tokens")
    return asks if options.vocabulary is None else traces.folded(asks, options.vocabulary)


def parse_list(option: str, text: str | None, kind: type[Number]) -> tuple[Number, ...]:
    """Parse a list of numbers such as 1,2,4; None gives none. Raises ValueError that names the option."""
    try:
        return () if text is None else tuple(kind(each) for each in text.split(","))
    except ValueError:
        like = "numbers such as 1,2,4" if kind is float else "whole numbers such as 1,4,16"
        raise UserError("option_malformed", f"{option} {text!r} is not a list of {like}") from None


def bench_serve(options: Options, progress: Progress | None = None) -> dict[str, Any]:
    """Run every load and measure it. Return the report as JSON-compatible values; `to_text` formats it.

    Raises ValueError for an invalid option, and where the server cannot be reached, refuses this kind of request, or
    states a context too short for the requests.
    """
    return asyncio.run(_bench(options, loads(options), progress))


async def _bench(options: Options, runs: Sequence[Load], progress: Progress | None) -> dict[str, Any]:
    server = Server.parse(options.url, options.key)
    model = await drive.first_model(server) if options.model is None else options.model
    context = await drive.context(server, model)
    if context is not None:
        _check_lengths(options, runs[0].asks, context)
    target = await _accepted(Target(
        server, model, options.chat, options.text, options.decode, options.temperature, options.ignore_eos,
        options.timeout, options.extra,
    ))  # fmt: skip
    measured = []
    for i, load in enumerate(runs):
        if i:
            await asyncio.sleep(PAUSE)
        measured.append(measures.measure(await drive.run(load, target, options.seconds, progress), options.slo))
    return {
        "url": server.address, "model": target.model, "endpoint": target.path,
        "prompts": "text" if target.chat or target.text else "token ids",
        "source": "synthetic" if options.trace is None else options.trace.name, "divisor": options.divisor,
        "arrivals": "closed loop" if options.clients else options.arrivals if options.rates else "trace",
        "seed": options.seed, "runs": measured,
    }  # fmt: skip


def _check_lengths(options: Options, asks: Sequence[Ask], context: int) -> None:
    """Raise ValueError where requests are certainly longer than the server's context. A word is at least a token."""
    if SIZES & options.extra.keys() or (options.decode is not None and (options.chat or options.text)):
        return
    long = [ask for ask in asks if len(ask.prompt) + ask.output > context]
    if long:
        most = max(long, key=lambda ask: len(ask.prompt) + ask.output)
        hint = "lower --prompt or --gen" if options.trace is None else "shorten them with --divisor"
        if len(long) < len(asks):
            hint += f", or leave these out with --longest {context}"
        raise UserError(
            "context_exceeded",
            f"{len(long)} of {len(asks)} requests are longer than the server's context of {context} tokens, up to "
            f"{len(most.prompt) + most.output} ({len(most.prompt)} of the prompt, {most.output} of the answer): {hint}",
        )


async def _accepted(target: Target) -> Target:
    """Return the target in the form that the server accepts: with token ids, or with words where it refuses ids."""
    reason = await drive.probe(target)
    if reason is None:
        return target
    if not target.chat and not target.text and reason.startswith(("status 400", "status 422")):
        in_words = replace(target, text=True)
        if await drive.probe(in_words) is None:
            return in_words
    hint = "; --no-ignore-eos leaves that out" if target.ignore_eos and "ignore_eos" in reason else ""
    raise UserError("request_refused", f"the server does not answer a request of two tokens: {reason}{hint}")


def failure(report: Mapping[str, Any]) -> str | None:
    """Return the error where no request of any run succeeded, else None."""
    runs = report["runs"]
    if any(run["succeeded"] for run in runs):
        return None
    sent = sum(run["requests"] for run in runs)
    if not sent:
        return "no request was sent: --seconds ended every run before its first"
    return f"none of {sent} requests succeeded: {measures.failures(runs)[0]}"


def to_text(report: Mapping[str, Any]) -> str:
    """Return the report as a table for a terminal."""
    head = (
        f"{printable(report['model'])} at {report['url']}{report['endpoint']}: {report['source']}, prompts as "
        f"{report['prompts']}, arrivals {report['arrivals']}; latencies are p50 / p95 / p99"
    )
    return f"{head}\n\n{measures.to_text(report['runs'])}"
