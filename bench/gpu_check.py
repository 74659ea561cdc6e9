"""Is the GPU backend right on this card, and how near is it to what the card can do?

    python bench/gpu_check.py OUT [--minutes 7] [--only PART ..] [--skip-checks]
    python bench/gpu_check.py OUT --tune [KIND ..]

First every kernel is compared with the reference (`gpu/checks.py`), and the engine's steps with themselves: replayed
from CUDA graphs and launched one by one, on the card and on the CPU (`gpu/engine.py`). Then they are timed beside two
roofs of the same run: the bandwidth of a copy and torch's best dense product. Everything is a ratio to one of them, or
to what `attar plan` makes of them. Model weights are random, made on the card; nothing is downloaded. At the end the
worst of each kind stands beside its target (`gpu/targets.py`). The exit status is 1 where a check failed, whatever the
ratios are.

Time on a card is short (`gpu/budget.py`): after so many minutes no further check or figure is begun, and a minute and
a quarter later whatever still runs is cut off. Checks get `CHECKS` of it at most, one of each sort first. Results go to
OUT/gpu_check.json as they come; what there was no time for is listed under `left_out`.

`--tune` measures nothing but how products are best cut into programs (`gpu/tune.py`), for the shapes of Llama-3.1-8B,
and writes OUT/tuned.json, where the next such run goes on.

With TRITON_INTERPRET=1 everything runs on tiny shapes and the figures mean nothing: a rehearsal without a card.

| ratio | of | over |
|---|---|---|
| `read` | bytes of weights, or of keys and values, over the time | bandwidth of a copy |
| `peak` | multiplications and additions over the time | rate of torch's best product of that dtype |
| `of_roof` | the time of a step that `plan/` computes from both | the time it took |
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from gpu import checks, engine, models, start, targets, timing, tune
from gpu.budget import Budget, OutOfTime
from gpu.timing import DEVICE, HALF, copies, seconds

from attar.formats.kv import scheme as kv_scheme
from attar.kernels.operands import AttentionForm
from attar.kernels.pages import Placement
from attar.kernels.triton import attention, backend, linear, tuning
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.model.shapes import shape

MODEL = "tiny" if backend.interpreted() else "llama-3.1-8b"
FEW_ROWS = (1,) if backend.interpreted() else (1, 4, 16)
MANY_ROWS = 128 if backend.interpreted() else 4096
LONG = 64 if backend.interpreted() else 8192  # tokens
BATCHES = (1, 2) if backend.interpreted() else (1, 128)
WHOLE, SERVED = ("bf16", "w4g128", "fp8"), ("w4g128", "fp8")  # schemes of whole models
CACHES = ((2, LONG),) if backend.interpreted() else ((1, LONG), (32, LONG), (128, LONG // 8))
KEPT = {"bfloat16": HALF, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": None}
"""What keys and values are kept as: None is 4 bits, in coordinates of their own."""
CHECKS = 0.45  # of the minutes: checks come first and must not eat the figures
STRIDE = 7  # one in so many checks comes before the others, and is the only one in a rehearsal
Row = dict[str, Any]


def few_rows(roofs: Row) -> Iterator[Row]:
    """Products that are bound by the weight's bytes."""
    for scheme in ("w4g128", "w4g32-asym", "qserve-g128", "w8a8", "fp8"):
        for name, size in models.products(MODEL).items():
            laid = models.prepared(scheme, size)
            for rows in FEW_ROWS if scheme == "w4g128" else (1,):
                x = torch.randn(rows, size[1], device=DEVICE).to(HALF)
                once = seconds([lambda one=one, x=x: linear.linear(x, (one,)) for one in laid])
                read = laid[0].weight.read_bytes / once / roofs["copy"]  # type: ignore[union-attr]
                yield {"work": f"{scheme} {name}, {rows} rows", "us": once * 1e6, "read": read}
            del laid


def many_rows(roofs: Row) -> Iterator[Row]:
    """Products that are bound by arithmetic, each beside torch's best of its kind."""
    schemes = (("fp8", "fp8"), ("fp8-block", "fp8"), ("w8a8", "int8"), ("qserve-g128", "int8"), ("w4g128", "bf16"))
    for scheme, kind in schemes:
        for name, size in models.products(MODEL).items():
            work = 2.0 * MANY_ROWS * size[0] * size[1]
            x = torch.randn(MANY_ROWS, size[1], device=DEVICE).to(HALF)
            laid = models.prepared(scheme, size)[:1]
            once = seconds([lambda one=laid[0], x=x: linear.linear(x, (one,))])  # type: ignore[misc]
            row = {"work": f"{scheme} {name}, {MANY_ROWS} rows", "us": once * 1e6, "peak": work / once / roofs[kind]}
            if scheme == "fp8" and DEVICE == "cuda":
                row["triton_us"] = 1e6 * tune.alone(x, laid[0])
            yield row


def decode_attention(roofs: Row) -> Iterator[Row]:
    """Bound by the bytes of keys and values."""
    config = shape(MODEL)
    form = AttentionForm(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5)
    for batch, length in CACHES:
        for label, kv in KEPT.items():
            pages, place = cached(batch, length, 1, form, kv)
            q = torch.randn(batch, form.heads, form.head_dim, device=DEVICE).to(HALF)
            sets = copies(pages.nbytes)
            several = [pages, *(cached(batch, length, 1, form, kv)[0] for _ in range(sets - 1))]
            once = seconds([lambda p=p, q=q, at=place: attention.paged_attention(q, p, at, form) for p in several])
            work = f"decode attention, {batch} x {length}, {label}"
            yield {"work": work, "us": once * 1e6, "read": pages.nbytes / once / roofs["copy"]}
            del several, pages


def cached(
    batch: int, length: int, rows: int, form: AttentionForm, kv: torch.dtype | None
) -> tuple[PlainPages, Placement]:
    """Full pages of sequences whose last `rows` tokens are asked for, their blocks scattered; `kv` as in `KEPT`."""
    width = -(-length // 64)
    sizes = (batch * width, 64, form.kv_heads, form.head_dim)
    if kv is None:
        pages: PlainPages = NibblePages.rotated(*sizes, kv_scheme("int4"), DEVICE)
    else:
        pages = PlainPages.make(*sizes, kv, DEVICE)
    for part in (pages.keys, pages.values):
        if kv == torch.float8_e4m3fn:
            part.view(torch.uint8).random_(0, 120)  # no NaN among them
        elif part.dtype == torch.uint8:
            part.random_(0, 256)
        elif part.dtype == torch.int8:
            part.random_(-127, 128)
        else:
            part.normal_()
    for scales in (pages.key_scales, pages.value_scales):
        if scales is not None:
            scales.fill_(0.01)
    tables = torch.randperm(batch * width, device=DEVICE).int().view(batch, width)
    positions = torch.arange(length - rows, length, device=DEVICE).int().repeat(batch)
    starts = (torch.arange(batch + 1, device=DEVICE) * rows).int()
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    return pages, Placement(starts, lengths, tables, positions, torch.zeros(batch * rows, device=DEVICE).long())


def guesses(roofs: Row) -> Iterator[Row]:
    """A tree of eight guesses for one long sequence: more queries than one tile of the tensor cores has at least."""
    config, count = shape(MODEL), 8
    form = AttentionForm(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5)
    length = 4 * LONG
    pages, place = cached(1, length, count, form, HALF)
    place.tree = torch.ones(count * count, dtype=torch.bool, device=DEVICE)
    q = torch.randn(count, form.heads, form.head_dim, device=DEVICE).to(HALF)
    several = [pages, *(cached(1, length, count, form, HALF)[0] for _ in range(copies(pages.nbytes) - 1))]
    once = seconds([lambda p=p: attention.paged_attention(q, p, place, form) for p in several])
    yield {
        "work": f"attention of a tree of {count}, 1 x {length}", "us": once * 1e6,
        "read": pages.nbytes / once / roofs["copy"],
    }  # fmt: skip


def prefill_attention(roofs: Row) -> Iterator[Row]:
    """Bound by arithmetic, of which half is masked and counted as not done; torch's own beside it."""
    config = shape(MODEL)
    form = AttentionForm(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5)
    pages, place = cached(1, LONG, LONG, form, HALF)
    q, k, v = (
        torch.randn(LONG, heads, form.head_dim, device=DEVICE).to(HALF)
        for heads in (form.heads, form.kv_heads, form.kv_heads)
    )
    work = 2.0 * LONG * LONG * form.heads * form.head_dim
    once = seconds([lambda: attention.paged_attention(q, pages, place, form)])
    theirs = seconds([
        lambda: torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
    ])  # fmt: skip
    yield {
        "work": f"prefill attention of {LONG}", "us": once * 1e6, "peak": work / once / roofs["bf16"],
        "torch_us": theirs * 1e6,
    }  # fmt: skip


def whole_model(roofs: Row) -> Iterator[Row]:
    """Steps of a whole decoder, replayed from a CUDA graph: what an engine that overlaps its work could reach."""
    for scheme in WHOLE:
        made = models.decoder(MODEL, scheme)
        heads = 2 * made.config.kv_heads * made.config.head_dim * 2 * made.config.layers  # bytes a token, bf16
        for batch, filled in ((batch, LONG // 8) for batch in BATCHES):
            ids, step = models.step(made, batch, filled, 1)
            with torch.inference_mode():
                once = seconds([lambda i=ids, s=step, m=made: m.run(i, again(s))])
            read = models.read_bytes(made) + batch * filled * heads
            yield {
                "work": f"decode {scheme}, batch {batch}, context {filled}", "us": once * 1e6, "tok_s": batch / once,
                "read": read / once / roofs["copy"], "read_bytes": read,
                "of_roof": models.roof(made, scheme, batch, filled, roofs) / once,
            }  # fmt: skip
            del ids, step
        ids, step = models.step(made, 1, 0, LONG)
        with torch.inference_mode():
            last = torch.tensor([LONG - 1], device=DEVICE)
            once = timing.eager(lambda i=ids, s=step, m=made, at=last: m.run(i, again(s), at))  # type: ignore[misc]
        config = made.config
        work = 2.0 * LONG * models.multiplications(made)
        work += 2.0 * LONG * LONG * config.heads * config.head_dim * config.layers
        peak = work / once / roofs["fp8" if scheme == "fp8" else "bf16"]
        yield {"work": f"prefill {scheme} of {LONG}", "us": once * 1e6, "tok_s": LONG / once, "peak": peak}
        del made, ids, step


def again(step: Any) -> Any:
    """The step, to be run once more at the same place."""
    step.cache.filled = [0] * len(step.cache.filled)
    return step


def served(roofs: Row) -> Iterator[Row]:
    """The same through the engine's own scheduler and runner, tokens chosen and fetched."""
    yield from engine.serving(MODEL, SERVED, BATCHES, LONG // 8, roofs)


def first_token(roofs: Row) -> Iterator[Row]:
    """What a user waits for after `attar serve`."""
    yield from start.first_token(MODEL)


def memory(roofs: Row) -> Iterator[Row]:
    """Where a server's memory would go."""
    yield from engine.memory(MODEL, "w4g128")


def compression(roofs: Row) -> Iterator[Row]:
    """A block of the model, by the amount of calibration text that `attar compress` takes by default."""
    if backend.interpreted():
        return
    yield from engine.block(MODEL, 128, 512, "gptq-w4g128")


PARTS = (
    few_rows, decode_attention, whole_model, served, first_token, many_rows, memory, compression, prefill_attention,
    guesses,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for gpu_check.json")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which nothing further is begun (default 7)")
    parser.add_argument(
        "--tune", nargs="*", metavar="KIND", help="only search for the best cuts, of all kinds or these"
    )
    parser.add_argument("--only", nargs="*", metavar="PART", help="measure these parts alone")
    parser.add_argument("--skip-checks", action="store_true", help="only measure")
    args = parser.parse_args(arguments)
    names, kinds = [part.__name__ for part in PARTS], get_args(tuning.Kind)
    for given, known in ((args.only, names), (args.tune, kinds)):
        if unknown := sorted(set(given or ()) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    backend.require(DEVICE)
    args.out.mkdir(parents=True, exist_ok=True)
    budget = Budget(args.minutes)
    report: Row = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter", "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(), "checks": [], "measured": [], "errors": [],
        "left_out": [], "now": "",
    }  # fmt: skip
    try:
        with budget.cut():
            if args.tune is None and not args.skip_checks:
                check(report, budget)
                write(args.out, report)
            report["roofs"] = roofs = {"copy": timing.copy_bandwidth()} | timing.dense_rates()
            print("  ".join(f"{name} {rate / 1e12:.3g} T/s" for name, rate in roofs.items()), flush=True)
            parts: list[tuple[str, Callable[[], Iterator[Row]]]] = [
                (part.__name__, lambda part=part: part(roofs))  # type: ignore[misc]
                for part in PARTS
                if args.only is None or part.__name__ in args.only
            ]
            if args.tune is not None:
                found, wanted = args.out / "tuned.json", args.tune or list(kinds)
                parts = [("tune", lambda: tune.search(MODEL, wanted, budget, found, roofs["copy"]))]
            for name, part in parts:
                measure(report, name, part, budget)
                write(args.out, report)
    except OutOfTime:
        report["left_out"].append(f"{report['now']}: cut off")
    del report["now"]
    report["seconds"] = budget.spent
    if args.tune is None:
        report["targets"] = targets.held_against(report["measured"])
        print("\n".join(map(targets.line, report["targets"])))
    write(args.out, report)
    print(json.dumps({key: report.get(key) for key in ("device", "roofs", "errors", "left_out", "seconds")}))
    return 1 if report["errors"] or not all(row["ok"] for row in report["checks"]) else 0


def check(report: Row, budget: Budget) -> None:
    """Every check, or as many as there is time for, first one of each sort."""
    every = list(checks.every())
    first = every[::STRIDE] + list(engine.checks())
    rest = [] if backend.interpreted() else [one for i in range(1, STRIDE) for one in every[i::STRIDE]]
    left = [*first, *rest]
    while left and not budget.over(CHECKS):
        name, run = left.pop(0)
        attempt(report, name, lambda name=name, run=run: checked(report, name, run))  # type: ignore[misc]
    report["left_out"] += [f"check {name}" for name, _ in left]
    bad = [row for row in report["checks"] if not row["ok"]]
    done = len(report["checks"])
    print(f"{done} checks, {len(bad)} failed, {len(left)} left out, {budget.spent:.0f} s", flush=True)
    for row in bad:
        print(f"  FAILED {row['name']}: error {row['error']:.2e}, at most {row['most']:.2e}", flush=True)


def checked(report: Row, name: str, run: checks.Check) -> None:
    error, most = run()
    report["checks"].append({"name": name, "error": error, "most": most, "ok": error <= most})


def attempt(report: Row, name: str, run: Callable[[], None]) -> None:
    """One part's failure is noted and does not cost the others: time on a card is dear."""
    report["now"] = name
    try:
        run()
    except Exception as error:
        report["errors"].append({"name": name, "error": f"{type(error).__name__}: {error}"[:2000]})
        print(f"  ERROR in {name}\n{traceback.format_exc(limit=-4)}", flush=True)


def measure(report: Row, name: str, part: Callable[[], Iterator[Row]], budget: Budget) -> None:
    """The figures of a part, as far as there is time."""
    if budget.over():
        report["left_out"].append(name)
        return

    def run() -> None:
        for row in part():
            report["measured"].append(row)
            print(shown(row), flush=True)
            if budget.over():
                report["left_out"].append(f"{name}, after {row['work']}")
                return

    attempt(report, name, run)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def shown(row: Row) -> str:
    ratios = "  ".join(f"{key} {row[key]:.2f}" for key in ("read", "peak", "of_roof") if key in row)
    figures = ("tok_s", "torch_us", "triton_us", "rule", "host_us", "record_s", "written_s", "made_s", "model_minutes")
    rest = "  ".join(f"{key} {row[key]:.1f}" for key in figures if key in row)
    rest += "".join(f"  {stage} {ended:.2f} s" for stage, ended in row.get("stages", {}).items())
    rest += "".join(f"  {part} {size:.2f} GB" for part, size in row.get("gb", {}).items())
    return f"{row['work']:48} {row['us']:10.1f} us  {ratios}  {rest}"


def write(out: Path, report: Row) -> None:
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
