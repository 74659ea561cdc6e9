"""Is the GPU backend right on this card, and how near is it to what the card can do?

    python bench/gpu_check.py OUT [--minutes 7] [--tune] [--skip-checks]

First every kernel is compared with the reference (`gpu/checks.py`), and the engine's steps with themselves: replayed
from CUDA graphs and launched one by one, on the card and on the CPU (`gpu/engine.py`). Then they are timed beside two
roofs of the same run: the bandwidth of a copy and torch's best dense product. Everything is a ratio to one of them.
Model weights are random, made on the card; nothing is downloaded. Results go to OUT/gpu_check.json as they come, so
that a run that is cut short leaves what it had; what there was no time for is listed under `left_out`. At the end the
ratios stand beside their targets. The exit status is 1 where a check failed, whatever the ratios are.

`--tune` searches how products of a few rows are best cut into programs, for the shapes of Llama-3.1-8B, and writes
OUT/tuned.json in the form that `attar/kernels/triton/tuned.json` has.

With TRITON_INTERPRET=1 everything runs on tiny shapes and the figures mean nothing: a rehearsal without a card.

| ratio | of | over |
|---|---|---|
| `read` | bytes of weights, or of keys and values, over the time | bandwidth of a copy |
| `peak` | multiplications and additions over the time | rate of torch's best product of that dtype |
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from gpu import checks, engine, models, timing
from gpu.timing import DEVICE, HALF, copies, seconds

from attar.formats.scheme import Scheme
from attar.kernels.operands import AttentionForm, Linear
from attar.kernels.pages import Placement
from attar.kernels.triton import attention, backend, language, linear, tuning, w8, weights
from attar.kernels.triton.pages import PlainPages
from attar.kernels.triton.rows import round_rows
from attar.model.shapes import shape

MODEL = "tiny" if backend.interpreted() else "llama-3.1-8b"
FEW_ROWS = (1,) if backend.interpreted() else (1, 4, 16)
MANY_ROWS = 128 if backend.interpreted() else 4096
LONG = 64 if backend.interpreted() else 8192  # tokens
BATCHES = (1, 2) if backend.interpreted() else (1, 128)
CACHES = ((2, LONG),) if backend.interpreted() else ((1, LONG), (32, LONG), (128, LONG // 8))
REHEARSED = 7  # of so many checks one is made in a rehearsal
CUTS = tuple(
    tuning.Config(outputs, 16, splits, warps, stages)
    for outputs in ((64,) if backend.interpreted() else (64, 128))
    for splits in (1, 2, 4, 8)
    for warps in (4, 8)
    for stages in ((3,) if backend.interpreted() else (3, 5, 7))
)
Row = dict[str, Any]

TARGETS: tuple[tuple[str, str, float, float], ...] = (
    ("decode w4g128, batch 1,", "read", 0.75, 0.85),
    ("decode bf16, batch 1,", "read", 0.75, 0.85),
    ("w4g128 qkv, 1 rows", "read", 0.80, 0.90),
    ("w4g128 gate and up, 1 rows", "read", 0.80, 0.90),
    ("w4g128 down, 16 rows", "read", 0.80, 0.90),
    ("fp8 gate and up, 4096 rows", "peak", 0.70, 0.85),
    ("w8a8 gate and up, 4096 rows", "peak", 0.70, 0.85),
    ("decode attention, 32 x 8192, bfloat16", "read", 0.80, 0.90),
    ("decode attention, 32 x 8192, int8", "read", 0.80, 0.90),
    ("prefill bf16 of 8192", "peak", 0.55, 0.70),
    ("prefill fp8 of 8192", "peak", 0.55, 0.70),
    ("decode fp8, batch 128,", "of_roof", 0.60, 0.75),
    ("served fp8, batch 128,", "of_roof", 0.60, 0.75),
)
"""What a figure's name begins with, which of its ratios counts, the target and the stretch."""


def products() -> dict[str, tuple[int, int]]:
    """The products of a block, as they are multiplied: [O, I]."""
    config = shape(MODEL)
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    return {
        "qkv": (heads, config.hidden),
        "output": (config.hidden, config.heads * config.head_dim),
        "gate and up": (2 * config.intermediate, config.hidden),
        "down": (config.hidden, config.intermediate),
    }


def few_rows(roofs: Row) -> Iterator[Row]:
    """Products that are bound by the weight's bytes."""
    for scheme in ("w4g128", "w4g32-asym", "w8a8", "fp8"):
        for name, size in products().items():
            laid = prepared(scheme, size)
            for rows in FEW_ROWS if scheme == "w4g128" else (1,):
                x = torch.randn(rows, size[1], device=DEVICE).to(HALF)
                once = seconds([lambda one=one, x=x: linear.linear(x, (one,)) for one in laid])
                read = laid[0].weight.read_bytes / once / roofs["copy"]  # type: ignore[union-attr]
                yield {"work": f"{scheme} {name}, {rows} rows", "us": once * 1e6, "read": read}
            del laid


def prepared(scheme: str, size: tuple[int, int]) -> list[Linear]:
    """As many weights of that size as are cold together."""
    first = Linear("l", models.packed(size, Scheme.parse(scheme)))
    weights.prepare(first, HALF)
    assert isinstance(first.weight, weights.TritonWeight)
    made = [first]
    for _ in range(copies(first.weight.read_bytes) - 1):
        made.append(Linear("l", models.packed(size, Scheme.parse(scheme))))
        weights.prepare(made[-1], HALF)
    return made


def many_rows(roofs: Row) -> Iterator[Row]:
    """Products that are bound by arithmetic, each beside torch's best of its kind."""
    for name, size in products().items():
        work = 2.0 * MANY_ROWS * size[0] * size[1]
        x = torch.randn(MANY_ROWS, size[1], device=DEVICE).to(HALF)
        for scheme, kind in (("w4g128", "bf16"), ("w8a8", "int8"), ("fp8", "fp8"), ("fp8-block", "fp8")):
            laid = prepared(scheme, size)[:1]
            once = seconds([lambda one=laid[0], x=x: linear.linear(x, (one,))])  # type: ignore[misc]
            row = {"work": f"{scheme} {name}, {MANY_ROWS} rows", "us": once * 1e6, "peak": work / once / roofs[kind]}
            if scheme == "fp8" and DEVICE == "cuda":
                row["triton_us"] = 1e6 * ours_alone(x, laid[0])
            yield row


def ours_alone(x: torch.Tensor, one: Linear) -> float:
    """Seconds of the float8 product by Triton, where torch's is used."""
    assert isinstance(one.weight, weights.TritonWeight)
    out, most = x.new_empty(len(x), one.shape[0]), w8.SCALED_ROWS
    w8.SCALED_ROWS = sys.maxsize
    try:
        return seconds([lambda: w8.product(*round_rows(x, torch.float8_e4m3fn), one.weight, None, out)])  # type: ignore[arg-type]
    finally:
        w8.SCALED_ROWS = most


def decode_attention(roofs: Row) -> Iterator[Row]:
    """Bound by the bytes of keys and values."""
    config = shape(MODEL)
    form = AttentionForm(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5)
    for batch, length in CACHES:
        for kv in (HALF, torch.int8, torch.float8_e4m3fn):
            pages, place = cached(batch, length, 1, form, kv)
            q = torch.randn(batch, form.heads, form.head_dim, device=DEVICE).to(HALF)
            sets = copies(pages.nbytes)
            several = [pages, *(cached(batch, length, 1, form, kv)[0] for _ in range(sets - 1))]
            once = seconds([lambda p=p, q=q, at=place: attention.paged_attention(q, p, at, form) for p in several])
            label = f"decode attention, {batch} x {length}, {str(kv).removeprefix('torch.')}"
            yield {"work": label, "us": once * 1e6, "read": pages.nbytes / once / roofs["copy"]}
            del several, pages


def cached(batch: int, length: int, rows: int, form: AttentionForm, kv: torch.dtype) -> tuple[PlainPages, Placement]:
    """Full pages of sequences whose last `rows` tokens are asked for, their blocks scattered."""
    width = -(-length // 64)
    pages = PlainPages.make(batch * width, 64, form.kv_heads, form.head_dim, kv, DEVICE)
    for part in (pages.keys, pages.values):
        if kv == torch.int8:
            part.random_(-127, 128)
        elif kv == torch.float8_e4m3fn:
            part.view(torch.uint8).random_(0, 120)  # no NaN among them
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
    for scheme in ("bf16", "w4g128", "fp8"):
        made = models.decoder(MODEL, scheme)
        heads = 2 * made.config.kv_heads * made.config.head_dim * 2 * made.config.layers  # bytes a token, bf16
        for batch, filled in ((batch, LONG // 8) for batch in BATCHES):
            ids, step = models.step(made, batch, filled, 1)
            with torch.inference_mode():
                once = seconds([lambda i=ids, s=step, m=made: m.run(i, again(s))])
            read = models.read_bytes(made) + batch * filled * heads
            work = 2.0 * batch * models.multiplications(made)
            roof = max(read / roofs["copy"], work / roofs["fp8" if scheme == "fp8" else "bf16"])
            yield {
                "work": f"decode {scheme}, batch {batch}, context {filled}", "us": once * 1e6, "tok_s": batch / once,
                "read": read / once / roofs["copy"], "of_roof": roof / once, "read_bytes": read,
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
    """The same through the engine's own runner, tokens chosen and fetched."""
    yield from engine.serving(MODEL, ("w4g128", "fp8"), BATCHES, LONG // 8, roofs)


def memory(roofs: Row) -> Iterator[Row]:
    """Where a server's memory would go."""
    yield from engine.memory(MODEL, "w4g128")


def compression(roofs: Row) -> Iterator[Row]:
    """A block of the model, by the amount of calibration text that `attar compress` takes by default."""
    if backend.interpreted():
        return
    yield from engine.block(MODEL, 128, 512, "gptq-w4g128")


def targets(measured: list[Row]) -> list[Row]:
    """Each target with what was found; without a figure where it was not measured."""
    found = []
    for name, ratio, target, stretch in TARGETS:
        row = next((row for row in measured if row["work"].startswith(name)), {})
        found.append(
            {"work": name.rstrip(","), "ratio": ratio, "found": row.get(ratio), "target": target, "stretch": stretch}
        )
    times = {row["work"].split(",")[0]: row["us"] for row in measured if ", batch 1," in row["work"]}
    reads = {row["work"].split(",")[0]: row.get("read_bytes") for row in measured if ", batch 1," in row["work"]}
    if all(times.get(f"decode {scheme}") and reads.get(f"decode {scheme}") for scheme in ("bf16", "w4g128")):
        faster = times["decode bf16"] / times["decode w4g128"] / (reads["decode bf16"] / reads["decode w4g128"])
        found.append(
            {"work": "w4g128 faster than bf16", "ratio": "of its bytes", "found": faster, "target": 0.9, "stretch": 1.0}
        )
    return found


def tune(roofs: Row, out: Path) -> Iterator[Row]:
    """Every sensible way to cut the products of a few rows; the fastest go to OUT/tuned.json."""
    found: dict[str, list[Row]] = {}
    real = tuning.config
    for name, size in products().items():
        laid = prepared("w4g128", size)
        for rows in FEW_ROWS:
            x = torch.randn(rows, size[1], device=DEVICE).to(HALF)
            times: dict[tuning.Config, float] = {}
            rule = tuning.rule("w4a16", rows, *size, language.processors(x.device))
            for candidate in (rule, *CUTS):
                tuning.config = lambda *given, c=candidate: c  # type: ignore[assignment,misc]
                try:
                    times[candidate] = seconds([lambda one=one, x=x: linear.linear(x, (one,)) for one in laid])
                except triton.OutOfResources:  # more shared memory than there is
                    continue
                finally:
                    tuning.config = real
            best = min(times, key=lambda each: times[each])
            found.setdefault(f"w4a16 {size[0]}x{size[1]}", []).append({"most": rows, "config": asdict(best)})
            read = laid[0].weight.read_bytes / times[best] / roofs["copy"]  # type: ignore[union-attr]
            yield {
                "work": f"tuned w4g128 {name}, {rows} rows",
                "us": times[best] * 1e6,
                "read": read,
                "rule": times[rule] * 1e6,
            }
        del laid
        write(out / "tuned.json", {language.device_name(torch.device(DEVICE)): found})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for gpu_check.json")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further part is begun (default 7)")
    parser.add_argument("--tune", action="store_true", help="search for the best cuts of products; writes tuned.json")
    parser.add_argument("--skip-checks", action="store_true", help="only measure")
    args = parser.parse_args()
    backend.require(DEVICE)
    args.out.mkdir(parents=True, exist_ok=True)
    began, torch_says = time.monotonic(), torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter"
    report: Row = {
        "device": torch_says, "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "checks": [], "measured": [], "errors": [], "left_out": [],
    }  # fmt: skip
    if not args.skip_checks:
        every = list(checks.every())[:: REHEARSED if backend.interpreted() else 1] + list(engine.checks())
        for name, check in every:
            attempt(report, name, lambda check=check, name=name: checked(report, name, check))  # type: ignore[misc]
    write(args.out / "gpu_check.json", report)
    bad = [row for row in report["checks"] if not row["ok"]]
    print(f"{len(report['checks'])} checks, {len(bad)} failed, {time.monotonic() - began:.0f} s", flush=True)
    for row in bad:
        print(f"  FAILED {row['name']}: error {row['error']:.2e}, at most {row['most']:.2e}", flush=True)

    report["roofs"] = roofs = {"copy": timing.copy_bandwidth()} | timing.dense_rates()
    print("  ".join(f"{name} {rate / 1e12:.3g} T/s" for name, rate in roofs.items()), flush=True)
    parts: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        (part.__name__, lambda part=part: part(roofs))  # type: ignore[misc]
        for part in (
            few_rows,
            decode_attention,
            whole_model,
            served,
            memory,
            compression,
            many_rows,
            prefill_attention,
        )
    ]
    if args.tune:
        parts.insert(0, ("tune", lambda: tune(roofs, args.out)))
    for name, part in parts:
        if time.monotonic() - began > 60 * args.minutes:
            report["left_out"].append(name)
            continue
        attempt(report, name, lambda part=part: measured(report, part))  # type: ignore[misc]
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        report["seconds"] = time.monotonic() - began
        write(args.out / "gpu_check.json", report)
    report["targets"] = targets(report["measured"])
    for row in report["targets"]:
        shown = "not measured" if row["found"] is None else f"{row['found']:.2f}"
        print(f"{row['work']:48} {row['ratio']:12} {shown:>12}, target {row['target']}, stretch {row['stretch']}")
    write(args.out / "gpu_check.json", report)
    print(json.dumps({key: report[key] for key in ("device", "roofs", "errors", "left_out")}))
    return 1 if bad or report["errors"] else 0


def attempt(report: Row, name: str, run: Callable[[], None]) -> None:
    """One part's failure is noted and does not cost the others: time on a card is dear."""
    try:
        run()
    except Exception as error:
        report["errors"].append({"name": name, "error": f"{type(error).__name__}: {error}"[:2000]})
        print(f"  ERROR in {name}\n{traceback.format_exc(limit=-4)}", flush=True)


def checked(report: Row, name: str, check: checks.Check) -> None:
    error, most = check()
    report["checks"].append({"name": name, "error": error, "most": most, "ok": error <= most})


def measured(report: Row, part: Callable[[], Iterator[Row]]) -> None:
    for row in part():
        report["measured"].append(row)
        ratios = "  ".join(f"{key} {row[key]:.2f}" for key in ("read", "peak", "of_roof") if key in row)
        figures = ("tok_s", "torch_us", "triton_us", "rule", "record_s", "made_s", "model_minutes")
        rest = "  ".join(f"{key} {row[key]:.1f}" for key in figures if key in row)
        rest += "".join(f"  {part} {size:.2f} GB" for part, size in row.get("gb", {}).items())
        print(f"{row['work']:48} {row['us']:10.1f} us  {ratios}  {rest}", flush=True)


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
