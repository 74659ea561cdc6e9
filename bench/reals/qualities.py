"""Tables of compression: what it costs in quality, time and memory, beside others' programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import lanes

from reals.framework import ROOT, Column, Fills, Measurement, Row, Table, python
from reals.setting import NO_LLAMACPP, Setting, each
from reals.texts import KINDS


def integers(bits: int) -> tuple[str, ...]:
    """Recipes on a grid of so many bits in groups of 64, symmetric or, as some peers, with zero points."""
    symmetric = tuple(f"{method}-w{bits}g64" for method in ("rtn", "gptq", "guided", "gptq+tune"))
    return (*symmetric, *(f"{method}-w{bits}g64-asym" for method in ("gptq", "guided", "guided+tune")))


CALIBRATED: Mapping[str, tuple[tuple[str, int], ...]] = {
    "smollm2-135m": tuple((kind, seed) for kind in KINDS for seed in (0, 1)),
    "qwen2.5-coder-0.5b": (("mixed", 0),),
}
SCORED = {"smollm2-135m": 32768, "qwen2.5-coder-0.5b": 16384}  # tokens
LANES: Mapping[str, tuple[str, ...]] = {
    **{f"INT{bits}": integers(bits) for bits in (4, 3)},
    "W8A8": ("rtn-w8a8", "smoothquant+gptq-w8a8", "quarot+gptq-w8a8", "spinquant+gptq-w8a8"),
    **{mix.upper(): (mix, f"gptq-{mix}", f"guided-{mix}") for mix in ("q4_k_m", "iq4_xs", "q3_k_m", "q2_k")},
    "2:4": ("prune-2:4", "sparsegpt-2:4", "prune+tune-2:4"),
}
FEWER = ("INT4", "W8A8", "Q4_K_M", "Q3_K_M")  # lanes of the larger model
PEERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "INT4": ("int4", ("llm_compressor", "gptq_model", "auto_round")),
    "INT3": ("int3", ("llm_compressor", "gptq_model")),
    "W8A8": ("w8a8", ("llm_compressor",)),
    "2:4": ("sparse", ("llm_compressor",)),
}
CACHES = ("int8", "klt4", "klt2")
METHODS = (
    "rtn-w4g64", "awq-w4g64", "gptq-w4g64", "gptq-w3g64", "guided-w4g64", "smoothquant+rtn-w8a8",
    "smoothquant+gptq-w8a8", "q4_k_m", "gptq-q4_k_m",
)  # fmt: skip
WALKS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "smollm2-135m": tuple((recipe, 32) for recipe in METHODS),
    "qwen2.5-coder-0.5b": (("rtn-w4g128", 32), ("awq-w4g128", 32), ("gptq-w4g128", 32)),
    "qwen2.5-coder-1.5b": (("rtn-w4g128", 32), ("awq-w4g128", 32), ("gptq-w4g128", 32), ("gptq-w4g128", 128)),
}
"""Recipes whose time is measured, with the number of calibration sequences."""
ASKED = (
    "rtn-w4g64", "gptq-w4g64", "guided-w4g64", "rtn-w3g64", "gptq-w3g64", "guided-w3g64", "smoothquant+gptq-w8a8",
    "q4_k_m", "q3_k_m", "q2_k", "prune-2:4", "sparsegpt-2:4",
)  # fmt: skip
WRITES_CODE, PROBLEMS = ("qwen2.5-coder-0.5b",), 164
POINTS: Fills = {
    "bits": "bits", "KL": "kl_mean", "HellaSwag": "hellaswag", "PIQA": "piqa", "LAMBADA": "lambada_openai",
    "HumanEval": "humaneval",
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
REQUANTIZED = ("q8_0", "rtn-w4g64")
CONVERTED: Fills = {"bits": "bits", "KL": "kl_attar", "KL, transformers": "kl_transformers", "seconds": "seconds"}
STAGES = ("inputs", "solve", "outputs", "probes", "write")
SHORT = ("--calib", "mixed", "--tokens", 8192)
NO_PEERS = "its environment is set up by `make bench-quality` and named with --peers PYTHON"

MADE: Fills = {
    "bits": "bits", "KL": "kl_mean", "99.9 %": "kl_p999", "ppl": "ppl", "ppl of original": "ppl_base", "top-1": "top1",
    "seconds": "seconds", "s/layer": "layer_s", "peak MB": "peak_mb", **{stage: f"{stage}_s" for stage in STAGES},
}  # fmt: skip


def _made(setting: Setting, path: Path, *options: object) -> Measurement:
    place = setting.out / "dense"
    return Measurement(python("reals.compression", path, "--place", place, *options), MADE)


def _peer(
    setting: Setting, model: str, path: Path, name: str, python: Path | None, reason: str, *options: object
) -> Row:
    """Make the row of a program that has an environment of its own; it is empty where there is none."""
    if python is None or not python.exists():
        return Row(model, name, (), reason)
    return Row(model, name, (_made(setting, path, "--python", python, *options),))


def dense(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        def made(*options: str) -> Measurement:
            return Measurement(python("reals.converted", path, "--place", setting.out, *options), CONVERTED)

        for dtype in DTYPES:
            yield Row(model, f"convert --to dense, {dtype}", (made("--dtype", dtype),))
        for recipe in REQUANTIZED:
            yield Row(model, f"compress --requantize, {recipe}", (made("--requantize", recipe),))

    return Table(
        "dense",
        "dense folders from compressed files, and outputs from those: KL from the file's own values on 4,096 tokens "
        "of prose, in attar and in transformers",
        (Column("bits", ".3f"), Column("KL", ".2e"), Column("KL, transformers", ".2e"), Column("seconds")),
        each(setting, rows),
    )


def quality(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        if model not in CALIBRATED:
            return
        for kind, seed in CALIBRATED[model]:
            given = ("--calib", kind, "--seed", seed, *amounts(setting, model))
            for lane, recipes in LANES.items():
                if model != "smollm2-135m" and lane not in FEWER:
                    continue
                at = f"{kind}/{seed} {lane}"
                for recipe in recipes:
                    yield Row(model, f"{at} {recipe}", (_made(setting, path, "--recipe", recipe, *given),))
                yield from peers(model, path, lane, at, given)
            if model == "smollm2-135m":
                bits = ("--recipe", "gptq-w4g64", "--bits", 3.5, *given)
                yield Row(model, f"{kind}/{seed} 3.5 bits gptq", (_made(setting, path, *bits),))
        tokens = setting.scored or SCORED[model]
        for kv in CACHES:
            yield Row(model, f"KV {kv}", (_made(setting, path, "--kv", kv, "--tokens", tokens),))

    def peers(model: str, path: Path, lane: str, at: str, given: tuple[object, ...]) -> Iterator[Row]:
        if lane not in PEERS:
            name, given = f"{at} llama-quantize, imatrix", ("--llama-quantize", lane.lower(), *given)
            yield _peer(setting, model, path, name, setting.llamacpp, NO_LLAMACPP, *given)
            return
        theirs, programs = PEERS[lane]
        for program in programs:
            apart = ROOT / lanes.APART[program] / "bin" / "python" if program in lanes.APART else setting.peers
            for job in lanes.lanes(64, 200)[theirs].peers[program]:
                options = ("--peer", program, "--lane", theirs, "--job", job["name"])
                yield _peer(setting, model, path, f"{at} {program}: {job['name']}", apart, NO_PEERS, *options, *given)

    return Table(
        "quality",
        "what compression costs; the original is the file's values in bfloat16, rows are exact in float32; "
        "calibration text and seed stand before the lane",
        (Column("bits", ".3f"), Column("KL", ".5f"), Column("99.9 %", ".3f"), Column("ppl", ".2f"),
         Column("ppl of original", ".2f"), Column("top-1", ".2%"), Column("seconds", ".0f")),
        each(setting, rows),
    )  # fmt: skip


def amounts(setting: Setting, model: str) -> tuple[object, ...]:
    """The options that say how much text a compression is calibrated and scored on."""
    samples = () if setting.samples is None else ("--samples", setting.samples)
    return (*samples, "--tokens", setting.scored or SCORED[model])


def tasks(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        if model not in CALIBRATED:
            return
        for recipe in ("", *ASKED):
            options: tuple[object, ...] = ("--recipe", recipe) if recipe else ()
            options += ("--problems", PROBLEMS) if model in WRITES_CODE else ()
            command = python("reals.asked", path, "--place", setting.out / "dense", *options)
            yield Row(model, recipe or "original", (Measurement(command, POINTS),))

    return Table(
        "tasks",
        f"points of tasks beside KL, over {len(ASKED)} recipes; HumanEval of models that write code",
        (
            Column("bits", ".3f"),
            Column("KL", ".5f"),
            *(Column(name, ".1%") for name in ("HellaSwag", "PIQA", "LAMBADA", "HumanEval")),
        ),
        each(setting, rows),
    )


def compression(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        for recipe, samples in WALKS.get(model, ()):
            given = ("--recipe", recipe, "--samples", samples, *SHORT)
            yield Row(model, f"{recipe}, {samples} x 512", (_made(setting, path, *given),))
        if model in WALKS:
            job, group = "GPTQ, mse", 64 if model == "smollm2-135m" else 128  # as attar's rows above it
            lane = ("--lane", "int4", "--job", job, "--group", group)
            options = ("--peer", "llm_compressor", *lane, "--samples", 32, *SHORT)
            yield _peer(setting, model, path, f"llm_compressor: {job}, 32 x 512", setting.peers, NO_PEERS, *options)

    return Table(
        "compression",
        "time and memory of compression from cold files, and the KL of what comes out on 8,192 tokens; seconds a layer "
        "in all, and of attar's by stage: the layer's inputs on the text, its rounding, its outputs, probes, the disk",
        (Column("seconds", ".0f"), Column("s/layer", ".2f"), *(Column(stage, ".2f") for stage in STAGES),
         Column("peak MB", ".0f"), Column("bits", ".3f"), Column("KL", ".5f")),
        each(setting, rows),
    )  # fmt: skip
