"""Tables of arithmetic: what rounding rows costs, in attar and in llama.cpp, and what exact rows cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from reals.configs import CONFIGS, TYPES
from reals.framework import Column, Figures, Fills, Measurement, Row, Table, python
from reals.setting import NO_LLAMACPP, RATES, Setting, bench, each
from reals.texts import KINDS

ACTIVATIONS = ("int8g128", "int8g32", "int8")
LLAMACPP = "llama.cpp"
SHOWN = {"mean": "kl_mean", "median": "kl_p50", "99 %": "kl_p99", "largest": "kl_max", "at": "largest_at",
         "top-1": "top1"}  # fmt: skip
FAMILY = {"mean": "kl_mean", "largest": "kl_max", "top-1": "top1", "as f32": "as_f32"}


def gguf(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        if setting.llamacpp is None:
            yield Row(model, "", (), NO_LLAMACPP)
            return
        kl = _divergence(setting, path, "prose", LLAMACPP)
        f32 = ("--tokens", setting.tokens, "--llamacpp", setting.llamacpp, "--as-f32")
        read = Measurement(python("reals.divergence", path, *f32), {"as f32": partial(_figure, LLAMACPP, "kl_max")})
        greedy = ("reals.greedy", path, "--llamacpp", setting.llamacpp, "--kept", setting.out / "greedy")
        text = Measurement(python(*greedy), {"equal": "equal", "near": "near", "to tie": "to_tie"})
        exact = Measurement(python(*greedy, "--as-f32"), {"f32 equal": "equal", "f32 to tie": "to_tie"})
        itself = Measurement(python(*greedy, "--itself"), {"itself": "equal", "itself to tie": "to_tie"})
        yield Row(model, "", (kl, read, text, exact, itself))

    def families() -> Iterator[Row]:
        if setting.llamacpp is None:
            yield Row("", "tiny random models of each family", (), NO_LLAMACPP)
            return
        command = python("reals.families", "--llamacpp", setting.llamacpp)
        for name in (f"{kind} {type}" for kind in CONFIGS for type in TYPES):
            yield Row("", f"random {name}", (Measurement(command, _fills(name, FAMILY)),))

    return Table(
        "gguf",
        f"llama.cpp beside exact rows on the same file: KL on {setting.tokens:,} tokens of prose, or random tokens of "
        "random models; the largest KL where neither rounds; and the share of 50 greedy texts of 200 tokens that are "
        "equal to the end, to the end or a tie at which they differ (near), and up to the first tie; also where "
        "neither rounds, and llama.cpp's own by other kernels of its",
        (Column("mean", ".5f"), Column("largest", ".4f"), Column("top-1", ".2%"), Column("as f32", ".0e"),
         Column("equal", ".0%"), Column("near", ".0%"), Column("to tie", ".0%"), Column("f32 equal", ".0%"),
         Column("f32 to tie", ".0%"), Column("itself", ".0%"), Column("itself to tie", ".0%")),
        (*each(setting, rows), *families()),
    )  # fmt: skip


def activations(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        for text in KINDS:
            for rows_as in ACTIVATIONS:
                yield Row(model, f"{text} {rows_as}", (_divergence(setting, path, text, rows_as),))
            if setting.llamacpp is None:
                yield Row(model, f"{text} {LLAMACPP}", (), NO_LLAMACPP)
            else:
                yield Row(model, f"{text} {LLAMACPP}", (_divergence(setting, path, text, LLAMACPP),))

    return Table(
        "activations",
        f"KL of rounded rows from exact ones on the same file, {setting.tokens:,} tokens a text in windows of "
        "512; `at` is the position of the largest",
        (Column("mean", ".5f"), Column("median", ".5f"), Column("99 %", ".4f"), Column("largest", ".3f"),
         Column("at", ".0f"), Column("top-1", ".2%")),
        each(setting, rows),
    )  # fmt: skip


def front(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        for rows_as in ACTIVATIONS:
            kl = _divergence(setting, path, "prose", rows_as)
            quick = bench((path,), RATES, "--gen", 64, "--activations", rows_as)
            yield Row(model, rows_as, (kl, quick))

    return Table(
        "front",
        "what rounding rows costs and gains: KL from exact rows on prose, tokens/s of a prompt of 512 and of 64 steps",
        (Column("mean", ".5f"), Column("largest", ".3f"), Column("prefill"), Column("decode")),
        each(setting, rows),
    )


def exact(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        fills = {"prefill": "prefill_tok_s", "decode": "decode_tok_s", "GFLOP/s": "float32_gops",
                 "of it": "float32_fraction"}  # fmt: skip
        yield Row(model, "", (Measurement(python("reals.exact", path), fills, timed=True),))

    return Table(
        "exact",
        "exact rows: tokens/s, and prefill beside torch's float32 products in the same run",
        (Column("prefill"), Column("decode"), Column("GFLOP/s", ".0f"), Column("of it", ".2f")),
        each(setting, rows),
    )


def _figure(model: str, name: str, run: Figures) -> float:
    return float(run[model][name])


def _divergence(setting: Setting, path: Path, text: str, model: str) -> Measurement:
    """One of those that are measured beside the same base, in one run: attar in several ways, or llama.cpp."""
    given = ("--llamacpp", setting.llamacpp) if model == LLAMACPP else ("--activations", *ACTIVATIONS)
    command = python("reals.divergence", path, "--text", text, "--tokens", setting.tokens, *given)
    return Measurement(command, _fills(model, SHOWN))


def _fills(of: str, shown: Mapping[str, str]) -> Fills:
    """Columns from the figures that a run has of one of those that it measured."""
    return {column: partial(_figure, of, name) for column, name in shown.items()}
