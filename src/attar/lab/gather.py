"""Body of `attar lab`: read a model's headers and receipts, measure the machine, and write the page."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attar import machine
from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hub, opening
from attar.engine import deployment
from attar.errors import UserError
from attar.evaluation.outputs import Compressed, read, tell_apart
from attar.kernels.native import extension, limits
from attar.kv.schemes import SCHEMES
from attar.lab import channels as channels_of
from attar.lab import facts, page, replay
from attar.plan.comparison import Subject
from attar.plan.described import described
from attar.plan.rates import store
from attar.plan.rates.step_time import StepModel, fitted
from attar.plan.steps import StepLimits
from attar.progress import Progress
from attar.protocol.model_shape import MachineRates
from attar.protocol.scheduler_config import SchedulerConfig
from attar.text.files import read_text

WINDOW = 512  # tokens of one forward pass
CONTEXT = 512  # tokens of each sequence in the seconds by rows, as the page begins with


@dataclass(frozen=True)
class Options:
    """Options of a lab's page.

    `page` is the file to write, `kv` the KV format of the model. `measure`: whether this machine's rates are measured.
    With a `text`, the model's channels are sampled on its first `tokens` tokens.
    """

    page: Path
    kv: str = "bfloat16"
    measure: bool = True
    text: Path | None = None
    tokens: int = 512


def write(model: str, outputs: Sequence[str], options: Options, progress: Progress) -> dict[str, Any]:
    """Write the page. Return its path and counts as JSON-compatible values.

    Raises ValueError before any measurement where a model cannot be read or an output has no receipt, and where the
    page is no .html file or would replace another file than an earlier page of the lab.
    """
    check_page(options.page)
    subject = deployment.checkpoint(model)
    found = tell_apart([read(each) for each in outputs])
    threads = machine.cores()
    name = Path(model).name if Path(model).exists() else subject.name  # a page that is shared tells of no folders
    shape = described(name, subject.config, subject.storage, options.kv, StepLimits.of(SchedulerConfig(), threads))
    channels = [] if options.text is None else _channels(model, options.text, options.tokens, progress)
    rates = (kept_rates(subject, options.kv) or measured(threads)) if options.measure else None
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    data = facts.facts(shape, rates, now)
    data |= {"outputs": [_output(each) for each in found], "channels": channels, "replay": replay.of_page()}
    text = page.html(data)
    options.page.write_text(text, encoding="utf-8")
    return {
        "page": str(options.page), "bytes": len(text.encode()), "outputs": len(found), "measured": rates is not None,
        "channels": len(channels),
    }  # fmt: skip


def check_page(path: Path) -> None:
    """Raise ValueError where the page cannot be written there, or would replace a file that is no page of the lab."""
    if path.suffix not in (".html", ".htm"):
        raise UserError("output_invalid", f"the page is a .html file, not {path.name!r}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError("output_invalid", f"{path} cannot be written: name a file in a folder that exists")
    if path.exists() and f"<title>{page.TITLE}</title>".encode() not in path.read_bytes():
        raise UserError("output_exists", f"{path} exists and is no page of attar's lab: choose another file")


def kept_rates(subject: Subject, kv: str) -> MachineRates | None:
    """Return this machine's rates from the profile that `attar bench --rates` keeps; None where there is none.

    Seconds by rows are sums of the measured products of the model's schemes, with attention and overhead. They are
    left out where a scheme was not measured.
    """
    kept = store.RatesStore(store.folder()).find(store.key())
    if kept is None:
        return None
    model, here, rate = StepModel(subject.config, subject.storage, SCHEMES[kv], kept), machine.examine(), kept.int8
    best = (kept.tile or rate).value
    scheme = "w8a8" if subject.storage.label == "w8a8" else "w4g128"
    curve, context = kept.products.get(scheme), min(CONTEXT, subject.config.context)
    efficiency = None if curve is None else fitted(curve, kept.bandwidth.value, best)
    rows = curve.rows if curve is not None and model.evidence == "measured" else ()
    source = (
        f"This machine's profile of {kept.measured} (attar bench --rates): {kept.bandwidth.value / 1e9:.1f} GB/s read, "
        f"int8 {best / 1e9:,.0f} GOP/s; seconds by rows add measured products, at {context} tokens of context"
    )
    return MachineRates(
        kept.bandwidth.value, best, kept.bf16.value, here.memory, here.limited_by, source,
        rows=tuple((row, model.decode(row, context).total) for row in rows),
        reached=(1.0, 1.0) if efficiency is None else (min(1.0, efficiency.read), min(1.0, efficiency.compute)),
        overhead=model.decode(1, context).overhead,
    )  # fmt: skip


def measured(threads: int) -> MachineRates | None:
    """Measure this machine's rates at `threads` threads; None without kernels."""
    if not extension.loaded():
        return None
    found, here = limits.measure(), machine.examine()
    tiles = f", tiles {found.tile_gops:,.0f} GOP/s" if found.tile_gops else ""
    level = extension.cpu_level()
    source = (
        f"This machine, {threads} threads, {level}: reads {found.read_gb_s:.1f} GB/s, int8 {found.int8_gops:,.0f} "
        f"GOP/s{tiles}; medians of {limits.REPEATS} runs as the page was written"
    )
    return MachineRates(
        1e9 * found.read_gb_s, 1e9 * (found.tile_gops or found.int8_gops), None, here.memory, here.limited_by, source
    )


def _channels(model: str, text: Path, tokens: int, progress: Progress) -> list[dict[str, Any]]:
    """Sample the channels of a model on a text. Raises ValueError where the text is empty."""
    path = hub.resolve(model)
    tokenizer, decoder = vocabulary.tokenizer(path), opening.load(path, torch.float32)
    first = [] if tokenizer.added_bos is None else [tokenizer.added_bos]
    ids = tokenizer.encode(read_text(text), add_special_tokens=False)[:tokens]
    size = min(WINDOW, decoder.config.context) - len(first)
    windows = [first + ids[at : at + size] for at in range(0, len(ids), size)]
    return channels_of.sampled(decoder, windows, partial(progress, "channels"))


def _output(each: Compressed) -> dict[str, Any]:
    figures = {name: (figure.value, figure.low, figure.high) for name, figure in each.figures.items()}
    decode = None if each.speed is None else each.speed.decode
    return facts.output(each.label, each.bytes, each.bits_per_weight, figures, decode)
