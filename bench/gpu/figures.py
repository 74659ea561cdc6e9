"""What is timed on a card, part by part: products, attention, whole models, a server's steps, its start.

Every figure stands beside a roof of the same run, `roofs`: the bandwidth of a copy, and the rates of torch's own
products. One that is missing there is NaN, and so is what is held against it. Under the interpreter shapes are tiny and
figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from gpu import engine, models, start, timing, tune
from gpu.report import Row
from gpu.timing import DEVICE, HALF, copies, seconds
from torch import Tensor

from attar.kernels import ops
from attar.kernels.operands import AttentionForm
from attar.kernels.triton import attention, backend, linear
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.kv.pages import AttentionMetadata, Rotation
from attar.kv.schemes import scheme as kv_scheme
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
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
WRITTEN = (2,) if backend.interpreted() else (1, 128, 2048)  # rows


def few_rows(roofs: Row) -> Iterator[Row]:
    """Products that are bound by the weight's bytes."""
    for scheme in ("w4g128", "w4g32-asym", "qserve-g128", "w8a8", "fp8"):
        for name, size in models.products(MODEL).items():
            laid = models.prepared(scheme, size)
            for rows in FEW_ROWS if scheme == "w4g128" else (1,):
                x = torch.randn(rows, size[1], device=DEVICE).to(HALF)
                once = seconds([partial(linear.linear, x, (one,)) for one in laid])
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
            once = seconds([partial(linear.linear, x, (laid[0],))])
            row = {"work": f"{scheme} {name}, {MANY_ROWS} rows", "us": once * 1e6, "peak": work / once / roofs[kind]}
            if scheme == "fp8" and DEVICE == "cuda":
                row["triton_us"] = 1e6 * tune.alone(x, laid[0])
            yield row


def blocks_by_torch(roofs: Row) -> Iterator[Row]:
    """Products of float8 blocks by torch where it has them, which `--tune` chooses from the rows on that it is faster
    for."""
    if (reason := tune.against_blocks(MODEL)) is not None:
        print(f"  {reason}", flush=True)
        return
    for name, size in models.products(MODEL).items():
        x = torch.randn(MANY_ROWS, size[1], device=DEVICE).to(HALF)
        one = models.prepared("fp8-block", size)[0]
        with tune.forced("rows_from", 0):
            once = seconds([partial(linear.linear, x, (one,))])
        peak = 2.0 * MANY_ROWS * size[0] * size[1] / once / roofs["fp8"]
        yield {"work": f"torch's fp8-block {name}, {MANY_ROWS} rows", "us": once * 1e6, "peak": peak}


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
            once = seconds([partial(attention.paged_attention, q, each, place, form) for each in several])
            work = f"decode attention, {batch} x {length}, {label}"
            yield {"work": work, "us": once * 1e6, "read": pages.nbytes / once / roofs["copy"]}
            del several, pages


def cached(
    batch: int, length: int, rows: int, form: AttentionForm, kv: torch.dtype | None
) -> tuple[PlainPages, AttentionMetadata]:
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
    return pages, AttentionMetadata(starts, lengths, tables, positions, torch.zeros(batch * rows, device=DEVICE).long())


def writing(roofs: Row) -> Iterator[Row]:
    """A step's keys and values rotated, rounded and written, by the bytes that come and go: a few are bound by their
    launch."""
    config = shape(MODEL)
    heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
    form = AttentionForm(heads, kv_heads, size, size**-0.5)
    angles = torch.rand(LONG, size // 2, device=DEVICE)
    for rows in WRITTEN:
        room = max(rows, 64)
        rotation = Rotation(angles.cos(), angles.sin(), torch.arange(rows, device=DEVICE).int() % LONG)
        together = torch.randn(rows, heads + 2 * kv_heads, size, device=DEVICE).to(HALF)
        q, k, v = together.split((heads, kv_heads, kv_heads), 1)
        for label, kv in KEPT.items():
            pages, place = cached(1, room, rows, form, kv)
            place.slot_mapping = torch.randperm(room, device=DEVICE)[:rows]
            call = partial(ops.write_kv, q, k, v, pages, place, rotation)
            once = seconds([call])
            moved = HALF.itemsize * (together.numel() + q.numel()) + pages.nbytes * rows / room
            yield {"work": f"write {rows} rows, {label}", "us": once * 1e6, "read": moved / once / roofs["copy"]}


def guesses(roofs: Row) -> Iterator[Row]:
    """A tree of eight guesses for one long sequence: more queries than one tile of the tensor cores has at least."""
    config, count = shape(MODEL), 8
    form = AttentionForm(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5)
    length = 4 * LONG
    pages, place = cached(1, length, count, form, HALF)
    place.tree = torch.ones(count * count, dtype=torch.bool, device=DEVICE)
    q = torch.randn(count, form.heads, form.head_dim, device=DEVICE).to(HALF)
    several = [pages, *(cached(1, length, count, form, HALF)[0] for _ in range(copies(pages.nbytes) - 1))]
    once = seconds([partial(attention.paged_attention, q, each, place, form) for each in several])
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
    ahead_q, ahead_k, ahead_v = (x.transpose(0, 1)[None] for x in (q, k, v))  # heads before rows
    torchs = torch.nn.functional.scaled_dot_product_attention
    theirs = seconds([lambda: torchs(ahead_q, ahead_k, ahead_v, is_causal=True, enable_gqa=True)])
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
                once = seconds([partial(again, made, ids, step)])
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
            once = timing.eager(partial(again, made, ids, step, last))
        config = made.config
        work = 2.0 * LONG * models.multiplications(made)
        work += 2.0 * LONG * LONG * config.heads * config.head_dim * config.layers
        peak = work / once / roofs["fp8" if scheme == "fp8" else "bf16"]
        yield {"work": f"prefill {scheme} of {LONG}", "us": once * 1e6, "tok_s": LONG / once, "peak": peak}
        del made, ids, step


def again(made: Decoder, ids: Tensor, step: ForwardBatch, rows: Tensor | None = None) -> Tensor:
    """The step, run once more at the same place."""
    assert step.cache is not None
    step.cache.filled = [0] * len(step.cache.filled)
    return made.run(ids, step, rows)


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
    few_rows, decode_attention, whole_model, served, first_token, many_rows, blocks_by_torch, memory, compression,
    prefill_attention, guesses, writing,
)  # fmt: skip
