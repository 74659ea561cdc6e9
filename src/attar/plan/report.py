"""Plans and start-up tables, as text for a terminal and as a dict for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from attar.kv.eviction import Eviction
from attar.kv.schemes import KvScheme
from attar.model.split import Share
from attar.plan.comparison import Plan, Row
from attar.plan.fit import Fit, kept_free, size
from attar.plan.gpus import GPUS

CARD_FORMULA = "tokens/s <= users / max((weights read + users x KV read) / bandwidth, operations / their rates)"
FORMULA = "tokens/s <= users / max((weights read + users x KV read) / bandwidth, users x int8 operations / their rate)"


def startup(found: Fit, kv: KvScheme) -> str:
    """Return the table that a server prints before it loads: memory by use, and the capacity of the cache."""
    lines = [f"{what:<13}{size(count):>10}" for what, count in found.table() if count > 0]
    lines.append(f"{'memory':<13}{size(found.memory):>10}")
    lines.append(
        f"the cache holds {found.tokens:,} tokens in {found.blocks:,} blocks of {found.block} ({kv.name}): "
        f"{found.requests:,} {'request' if found.requests == 1 else 'requests'} of {found.context:,}"
    )
    if found.requests > 1 and (kept := kept_free(found.blocks, found.headroom)):
        lines[-1] += f", with {kept:,} {'block' if kept == 1 else 'blocks'} kept free for those that run"
    if found.sliding_blocks and found.windows is not None and found.windows.limits is not None:
        window = found.windows.limits.window
        lines.append(f"layers with a window of {window:,} tokens have {found.sliding_blocks:,} blocks of their own")
    return "\n".join(lines)


def to_text(plan: Plan) -> str:
    """Return the whole plan as text.

    It has a line for each choice of precisions, a start-up table for the most precise one that fits (or the one
    that is short of the least memory), and the answer in a sentence.
    """
    head = ("weights", "KV", "weights take", "KV a token", "tokens held", "requests", "fits", "tokens/s")
    lines = [
        f"{plan.model}: {plan.users} x {plan.context:,} tokens in {size(plan.memory)} ({plan.source})",
        "",
        *_aligned([head, *(_cells(row) for row in plan.rows)]),
        "",
    ]
    if plan.splits and plan.gpu is not None:
        lines += [
            f"on several {plan.gpu.name}, the most precise that fits. Sizes are of each. What they send to each "
            "other is not counted:", "", *_aligned([("", *head), *(_split(*each) for each in plan.splits)]), "",
        ]  # fmt: skip
    shown = _chosen(plan) or min(plan.rows, key=lambda row: row.short)
    by_compute = " (c: by compute)" if any(_by_compute(row) for row in plan.rows) else ""
    slow = dict.fromkeys(row.weights for row in plan.rows if row.references)
    precisions = f"{shown.weights} weights and the KV cache in {shown.kv.name}"
    lines += [f"a request is one full context; with {precisions} a server has:", "", startup(shown.fit, shown.kv), ""]
    if plan.eviction is not None:
        lines += [_of_eviction(plan.eviction, shown), ""]
    if plan.images:
        lines += [*_of_images(plan), ""]
    if plan.gpu is not None:
        rates = ", ".join(f"{kind} {rate / 1e12:,.0f}" for kind, rate in plan.gpu.operations.items())
        lines.append(
            f"{CARD_FORMULA}, here {plan.gpu.bandwidth / 1e9:,.0f} GB/s and 10^12 operations/s of "
            f"{rates}: limits, not promises{by_compute}"
        )
        lines.append("not counted: what driver and graphs take; `attar serve` measures all of it when it starts")
        if plan.gpu.name in GPUS:
            lines.append("a data sheet's GB are taken as 10^9 bytes: some cards show up to 7 % more")
        lines += [
            f"{name} has linears without a kernel for this card: held in 16 bits there, and where rows are to be "
            "rounded as they are stored too"
            for name in slow
        ]
        return "\n".join([*lines, answer(plan)])
    if plan.bandwidth is not None:
        rates = f"{plan.bandwidth / 1e9:.1f} GB/s"
        rates += "" if plan.int8_rate is None else f", int8 {plan.int8_rate / 1e9:,.0f} GOP/s"
        lines.append(f"{FORMULA}, here {rates}: limits, not promises{by_compute}")
    lines += [f"{name} has linears without a CPU kernel: slow, and held a second time as float32" for name in slow]
    return "\n".join([*lines, answer(plan)])


def _of_images(plan: Plan) -> list[str]:
    """Return what a vision tower takes, and what images are of a request."""
    others = " or ".join(f"{size(each)} with compress --vision {name}" for name, each in plan.tower.items())
    weights = others.replace(" with compress --vision stored", " as stored")
    lines = [f"vision tower, projector and features of images (--image-cache) take {size(plan.images)} beside"]
    lines.append(f"tower and projector: {weights}")
    if (load := plan.image_load) is not None:
        lines.append(f"{load}, {load.tokens:,} tokens of the context without markers")
    return lines


def _of_eviction(eviction: Eviction, row: Row) -> str:
    """Return one sentence: what a policy leaves of a request in the cache."""
    found, each = row.fit, row.fit.block_bytes / row.fit.block
    held = f"a request holds {found.held or 0:,} tokens at most ({size((found.held or 0) * each)})"
    if eviction.once:
        held += f" while its prompt is computed, then {eviction.budget:,} and the answer's"
    return f"KV eviction {eviction}: {held}"


def answer(plan: Plan) -> str:
    """Return one sentence: the most precise choice that fits, or the missing bytes."""
    best = _chosen(plan)
    if best is not None:
        fit, precisions = (
            "fits" if plan.users == 1 else "fit",
            f"{best.weights} weights and the KV cache in {best.kv.name}",
        )
        room = f"{_users(plan, best.fit.context)} {fit} with {precisions}: there is room for {best.fit.requests:,}"
        if best.fit.requests >= plan.limits.sequences:
            room += f" ({plan.limits.sequences:,} may run together), and {size(best.fit.unused)} are left"
        fitting = (row for row in plan.rows if row.fits)
        fastest = max(fitting, key=lambda row: 0.0 if row.speed is None else row.speed.tokens_per_second)
        if fastest is best or fastest.speed is None:
            return room
        rate = f"{fastest.speed.tokens_per_second:,.0f} tokens/s, limited by {fastest.speed.limited_by}"
        return f"{room}; the fastest that fits, {fastest.weights} with {fastest.kv.name}, could reach {rate}"
    least = min(plan.rows, key=lambda row: row.short)
    most = max(row.fit.requests for row in plan.rows)
    held = f"{most} would fit" if most else "not even one would"
    not_fit = f"{_users(plan, plan.context)} {'does' if plan.users == 1 else 'do'} not fit"
    if not least.short:
        kept = f"{least.fit.tokens:,} tokens, as {least.fit.kept_by} keeps it"
        return f"{not_fit} into a cache of {kept} ({held})"
    precisions = f"{least.weights} weights and the KV cache in {least.kv.name}"
    return f"{not_fit}: {size(least.short)} too little even with {precisions} ({held})"


def _chosen(plan: Plan) -> Row | None:
    """Return the most precise choice that fits; None where none does."""
    return next((row for row in plan.rows if row.fits), None)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _split(share: Share, row: Row | None) -> tuple[str, ...]:
    """Return the cells of several GPUs, beginning with the option that takes them."""
    option = f"--tp {share.tp}" if share.tp > 1 else f"--pp {share.pp}"
    return (
        option,
        *(("-",) * 6 if row is None else _cells(row)[:6]),
        *(("no", "-") if row is None else _cells(row)[6:]),
    )


def _users(plan: Plan, context: int) -> str:
    return f"{plan.users} user{'s' if plan.users > 1 else ''} of {context:,} tokens"


def _by_compute(row: Row) -> bool:
    return row.speed is not None and row.speed.limited_by == "compute"


def _cells(row: Row) -> tuple[str, ...]:
    fast = "-" if row.speed is None else f"{row.speed.tokens_per_second:,.0f}"
    fast += "c" if _by_compute(row) else ""
    short = "yes" if row.fits else f"no: {size(row.short)} short" if row.short else "no: too few tokens"
    fit = row.fit
    sizes = size(fit.weights), size(fit.block_bytes / fit.block), f"{fit.tokens:,}", f"{fit.requests:,}"
    return row.weights, row.kv.name, *sizes, short, fast


def fit_to_dict(found: Fit) -> dict[str, Any]:
    """Return the fields as JSON-compatible values; sizes in bytes."""
    names = (
        "memory", "weights", "adapters", "step", "processes", "cache", "unused", "block", "block_bytes", "blocks",
        "tokens", "context", "requests", "sliding_blocks",
    )  # fmt: skip
    return {name: getattr(found, name) for name in names}


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON-compatible values; sizes in bytes, rates a second."""
    return {
        "model": plan.model, "memory": plan.memory, "memory_source": plan.source, "context": plan.context,
        "users": plan.users, "step_sequences": plan.limits.sequences, "step_tokens": plan.limits.rows,
        "bandwidth": plan.bandwidth, "int8_rate": plan.int8_rate, "card": None if plan.gpu is None else plan.gpu.name,
        "kv_eviction": None if plan.eviction is None else str(plan.eviction),
        "images": plan.images, "tower": dict(plan.tower),
        "image_load": None if plan.image_load is None else plan.image_load.to_dict(),
        "formula": FORMULA if plan.gpu is None else CARD_FORMULA, "fits": any(row.fits for row in plan.rows),
        "answer": answer(plan), "rows": [_row_to_dict(row) for row in plan.rows],
        "splits": [
            {"tp": share.tp, "pp": share.pp, "row": None if row is None else _row_to_dict(row)}
            for share, row in plan.splits
        ],
    }  # fmt: skip


def _row_to_dict(row: Row) -> dict[str, Any]:
    return {
        "weight_scheme": row.weights, "kv": row.kv.name, "fits": row.fits, "short": row.short,
        "weight_parts": asdict(row.weight_bytes), "speed": None if row.speed is None else row.speed.to_dict(),
        "reference_linears": row.references, **fit_to_dict(row.fit),
    }  # fmt: skip
