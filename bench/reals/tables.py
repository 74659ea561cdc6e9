"""Which tables there are: rows and columns, and the command of each measurement.

What cannot be measured by today's code stands here too, with empty cells and the reason. No figure does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import engines
import lanes
from real_models import MODELS

from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from reals.framework import Column, Figures, Measurement, Ratio, Row, Table, python
from reals.texts import KINDS

ACTIVATIONS = ("int8g128", "int8g32", "int8")
LONG = {"smollm2-135m": 8000}  # tokens of a long prompt, where the context has no room for 16K
LONGEST = 16384
WAITING = "attar cannot do it yet"
NO_LLAMACPP = "llama.cpp is measured with --llamacpp PYTHON"

CALIBRATED: Mapping[str, tuple[tuple[str, int], ...]] = {
    "smollm2-135m": tuple((kind, seed) for kind in KINDS for seed in (0, 1)),
    "qwen2.5-coder-0.5b": (("code", 0),),
}
SCORED = {"smollm2-135m": 32768, "qwen2.5-coder-0.5b": 16384}  # tokens
LANES: Mapping[str, tuple[str, ...]] = {
    "INT4": ("rtn-w4g64", "gptq-w4g64", "guided-w4g64"),
    "INT3": ("rtn-w3g64", "gptq-w3g64", "guided-w3g64"),
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


@dataclass(frozen=True)
class Setting:
    """What the tables are made for: models by name, with their files; where outputs lie; and the peers' programs."""

    models: Mapping[str, Path]
    out: Path
    llamacpp: Path | None = None
    llama_cli: Path | None = None
    openvino: Path | None = None
    peers: Path | None = None


def tables(setting: Setting) -> dict[str, Table]:
    makers = (
        gguf, dense, activations, front, exact, quality, tasks, compression, speed, start, chat, beside,
    )  # fmt: skip
    made = [make(setting) for make in makers]
    return {each.name: each for each in made}


def refused(path: Path) -> str | None:
    """Why attar does not read a file, in its own words; None where it does, or where there is no file."""
    if not path.exists():
        return f"there is no {path}"
    try:
        GgufCheckpoint.open(path)
    except ValueError as error:
        return str(error)
    return None


def _each(setting: Setting, rows: Callable[[str, Path], Iterator[Row]]) -> tuple[Row, ...]:
    """The rows of every model; those of a model that cannot be read are empty, with the reason."""
    found: list[Row] = []
    for name, path in setting.models.items():
        why = refused(path)
        found += [Row(each.model, each.name, (), why) if why else each for each in rows(name, path)]
    return tuple(found)


def gguf(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        if setting.llamacpp is None:
            yield Row(model, "", (), NO_LLAMACPP)
            return
        kl = Measurement(
            python("reals.divergence", path, "--llamacpp", setting.llamacpp),
            {"KL": "kl_mean", "largest": "kl_max", "top-1": "top1"},
        )
        text = Measurement(
            python("reals.greedy", path, "--llamacpp", setting.llamacpp), {"equal": "equal", "near": "near"}
        )
        yield Row(model, "", (kl, text))

    families = Row("", "tiny random models of each family", (), WAITING)
    return Table(
        "gguf",
        "llama.cpp beside exact rows on the same file: KL on 4,096 tokens of prose, and the share of 50 greedy texts "
        "of 200 tokens that are equal to the end, or to a near tie",
        (Column("KL", ".5f"), Column("largest", ".4f"), Column("top-1", ".2%"), Column("equal", ".0%"),
         Column("near", ".0%")),
        (*_each(setting, rows), families),
    )  # fmt: skip


def dense(setting: Setting) -> Table:
    rows = tuple(Row(model, "convert --to dense", (), WAITING) for model in setting.models)
    more = tuple(Row(model, "compress --requantize", (), WAITING) for model in setting.models)
    return Table(
        "dense",
        "dense folders from compressed sources, and outputs from those",
        (Column("equal", ".0%"), Column("KL", ".5f"), Column("seconds")),
        (*rows, *more),
    )


def _divergence(path: Path, text: str, *options: object) -> Measurement:
    return Measurement(
        python("reals.divergence", path, "--text", text, *options),
        {"mean": "kl_mean", "median": "kl_p50", "99 %": "kl_p99", "largest": "kl_max", "at": "largest_at",
         "top-1": "top1"},
    )  # fmt: skip


def activations(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        for text in KINDS:
            for each in ACTIVATIONS:
                yield Row(model, f"{text} {each}", (_divergence(path, text, "--activations", each),))
            if setting.llamacpp is None:
                yield Row(model, f"{text} llama.cpp", (), NO_LLAMACPP)
            else:
                yield Row(model, f"{text} llama.cpp", (_divergence(path, text, "--llamacpp", setting.llamacpp),))

    return Table(
        "activations",
        "KL of rounded rows from exact ones on the same file, 4,096 tokens a text in windows of 512; `at` is the "
        "position of the largest",
        (Column("mean", ".5f"), Column("median", ".5f"), Column("99 %", ".4f"), Column("largest", ".3f"),
         Column("at", ".0f"), Column("top-1", ".2%")),
        _each(setting, rows),
    )  # fmt: skip


def _bench(path: Path, fills: Mapping[str, str | Callable[[Figures], float | None]], *options: object) -> Measurement:
    command = (sys.executable, "-m", "attar", "bench", str(path), "--json", *map(str, options))
    return Measurement(command, fills, timed=True)


def front(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        for each in ACTIVATIONS:
            kl = _divergence(path, "prose", "--activations", each)
            quick = _bench(
                path, {"prefill": "prefill_tok_s", "decode": "decode_tok_s"}, "--gen", 64, "--activations", each
            )
            yield Row(model, each, (kl, quick))

    return Table(
        "front",
        "what rounding rows costs and gains: KL from exact rows on prose, tokens/s of a prompt of 512 and of 64 steps",
        (Column("mean", ".5f"), Column("largest", ".3f"), Column("prefill"), Column("decode")),
        _each(setting, rows),
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
        _each(setting, rows),
    )


MADE: Mapping[str, str] = {
    "bits": "bits", "KL": "kl_mean", "99.9 %": "kl_p999", "ppl": "ppl", "ppl of original": "ppl_base", "top-1": "top1",
    "seconds": "seconds", "s/layer": "layer_s", "peak MB": "peak_mb",
}  # fmt: skip


def _made(setting: Setting, path: Path, *options: object) -> Measurement:
    place = setting.out / "dense"
    return Measurement(python("reals.compression", path, "--place", place, *options), MADE)


def quality(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        if model not in CALIBRATED:
            return
        for kind, seed in CALIBRATED[model]:
            given = ("--calib", kind, "--seed", seed, "--tokens", SCORED[model])
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
        for kv in CACHES:
            yield Row(model, f"KV {kv}", (_made(setting, path, "--kv", kv, "--tokens", SCORED[model]),))

    def peers(model: str, path: Path, lane: str, at: str, given: tuple[object, ...]) -> Iterator[Row]:
        if lane.lower() in ("q4_k_m", "iq4_xs", "q3_k_m", "q2_k"):
            row = f"{at} llama-quantize, imatrix"
            if setting.llamacpp is None:
                yield Row(model, row, (), NO_LLAMACPP)
            else:
                options = ("--llama-quantize", lane.lower(), "--python", setting.llamacpp, *given)
                yield Row(model, row, (_made(setting, path, *options),))
            return
        name, programs = PEERS[lane]
        for program in programs:
            for job in lanes.lanes(64, 200)[name].peers[program]:
                row = f"{at} {program}: {job['name']}"
                apart = lanes.ROOT / lanes.APART[program] / "bin" / "python" if program in lanes.APART else None
                where = apart if apart is not None and apart.exists() else setting.peers if apart is None else None
                if where is None:
                    yield Row(model, row, (), f"{program} has no environment: `make bench-quality` sets it up, --peers")
                else:
                    options = ("--peer", program, "--job", job["name"], "--lane", name, "--python", where, *given)
                    yield Row(model, row, (_made(setting, path, *options),))

    return Table(
        "quality",
        "what compression costs; the original is the file's values in bfloat16, rows are exact in float32; "
        "calibration text and seed stand before the lane",
        (Column("bits", ".3f"), Column("KL", ".5f"), Column("99.9 %", ".3f"), Column("ppl", ".2f"),
         Column("ppl of original", ".2f"), Column("top-1", ".2%"), Column("seconds", ".0f")),
        _each(setting, rows),
    )  # fmt: skip


def tasks(setting: Setting) -> Table:
    reason = f"lm-eval's tasks and HumanEval: {WAITING}"
    return Table(
        "tasks",
        "points of tasks beside KL, over 12 recipes",
        tuple(Column(name, ".2%") for name in ("HellaSwag", "PIQA", "LAMBADA", "HumanEval")),
        tuple(Row(model, "", (), reason) for model in setting.models),
    )


def compression(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        if model == "qwen2.5-coder-1.5b":
            for recipe, samples in (("gptq-w4g128", 32), ("gptq-w4g128", 128), ("rtn-w4g128", 32), ("awq-w4g128", 32)):
                given = ("--recipe", recipe, "--samples", samples, "--tokens", 8192, "--calib", "code")
                yield Row(model, f"{recipe}, {samples} x 512", (_made(setting, path, *given),))
            name = "GPTQ, mse"
            if setting.peers is None:
                yield Row(model, f"llm_compressor: {name}, 32 x 512", (), "llm-compressor is run with --peers PYTHON")
            else:
                given = ("--peer", "llm_compressor", "--job", name, "--lane", "int4", "--python", setting.peers,
                         "--samples", 32, "--tokens", 8192, "--calib", "code")  # type: ignore[assignment]  # fmt: skip
                yield Row(model, f"llm_compressor: {name}, 32 x 512", (_made(setting, path, *given),))
        elif model == "smollm2-135m":
            for recipe in ("rtn-w4g64", "awq-w4g64", "gptq-w4g64", "guided-w4g64"):
                given = ("--recipe", recipe, "--samples", 32, "--tokens", 8192)  # type: ignore[assignment]
                yield Row(model, f"{recipe}, 32 x 512", (_made(setting, path, *given),))

    return Table(
        "compression",
        "time and memory of compression from cold files, and the KL of what comes out on 8,192 tokens",
        (Column("seconds", ".0f"), Column("s/layer", ".2f"), Column("peak MB", ".0f"), Column("bits", ".3f"),
         Column("KL", ".5f")),
        _each(setting, rows),
    )  # fmt: skip


def _megabytes(run: Figures) -> float:
    return float(run["bytes_per_token"]) / 1e6


def _of_file(size: int, run: Figures) -> float:
    return float(run["bytes_per_token"]) / size


def _of_peak(run: Figures) -> float:
    return float(run["tile_fraction"] or run["compute_fraction"])


def speed(setting: Setting) -> Table:
    def attar(model: str, path: Path) -> Row:
        long = LONG.get(model, LONGEST)
        size = path.stat().st_size if path.exists() else 1
        one = {
            "prefill": "prefill_tok_s", "of peak": _of_peak, "decode": "decode_tok_s", "of bandwidth": "read_fraction",
            "MB/token": _megabytes, "of file": partial(_of_file, size), "peak MB": "peak_rss_mb",
        }  # fmt: skip
        return Row(
            model,
            "attar",
            (
                _bench(path, one, "--prompt", 512, "--gen", 64),
                _bench(path, {"batch 16": "decode_tok_s"}, "--prompt", 128, "--gen", 64, "--batch", 16),
                _bench(path, {"long prefill": "prefill_tok_s"}, "--prompt", long, "--gen", 2),
            ),
        )

    def llamacpp(model: str, path: Path, interpreter: Path) -> Row:
        program = engines.CHILDREN / "run_llamacpp.py"
        command = (str(interpreter), str(program), "--file", str(path))

        def measured(fills: Mapping[str, str | Callable[[Figures], float | None]], *options: object) -> Measurement:
            return Measurement((*command, *map(str, options)), fills, timed=True)

        one = {"prefill": "prefill_tok_s", "decode": "decode_tok_s", "MB/token": _megabytes, "peak MB": "peak_rss_mb"}
        long = LONG.get(model, LONGEST)
        return Row(
            model,
            "llama.cpp",
            (
                measured(one, "--prompt", 512, "--gen", 64),
                measured({"batch 16": "decode_tok_s"}, "--prompt", 128, "--gen", 64, "--batch", 16),
                measured({"long prefill": "prefill_tok_s"}, "--prompt", long, "--gen", 2),
            ),
        )

    def rows(model: str, path: Path) -> Iterator[Row]:
        yield attar(model, path)
        if setting.llamacpp is None:
            yield Row(model, "llama.cpp", (), NO_LLAMACPP)
        else:
            yield llamacpp(model, path, setting.llamacpp)

    every, shape = list(_each(setting, rows)), list(_shape(setting))
    compared = ("prefill", "decode", "batch 16", "long prefill")
    pairs = zip(every[::2], every[1::2], strict=True)
    ratios = [Ratio(ours, theirs, compared) for ours, theirs in pairs if theirs.measurements]
    ratios += [Ratio(shape[0], each, ("prefill", "decode", "batch 16")) for each in shape[1:] if each.measurements]
    return Table(
        "speed",
        "tokens/s of the files as they are: prompt of 512 and 64 steps, 16 sequences of 128 and 64, and a long prompt "
        "(16,384 tokens, 8,000 on SmolLM2); of the int8 peak and the bandwidth measured in the run",
        (Column("prefill"), Column("of peak", ".2f"), Column("decode"), Column("of bandwidth", ".2f"),
         Column("batch 16"), Column("long prefill"), Column("MB/token", ".0f"), Column("of file", ".2f"),
         Column("peak MB", ".0f")),
        (*every, *shape),
        tuple(ratios),
    )  # fmt: skip


def _shape(setting: Setting) -> Iterator[Row]:
    """`w4g128` in the shape of a published model with random weights, beside OpenVINO."""
    name = engines.SHAPES[0]
    one = {"prefill": "prefill_tok_s", "of peak": _of_peak, "decode": "decode_tok_s", "of bandwidth": "read_fraction",
           "MB/token": _megabytes, "peak MB": "peak_rss_mb"}  # fmt: skip
    ours = (sys.executable, "-m", "attar", "bench", "--shape", name, "--json", "--scheme", "w4g128", "--head", "int8")
    few, many = ("--prompt", "512", "--gen", "64"), ("--prompt", "128", "--gen", "64", "--batch", "16")
    batch = {"batch 16": "decode_tok_s"}
    yield Row("", f"{name} w4g128", (Measurement((*ours, *few), one, True), Measurement((*ours, *many), batch, True)))
    if setting.openvino is None:
        yield Row("", f"{name} OpenVINO", (), "OpenVINO is measured with --openvino PYTHON")
        return
    ready = engines.CACHE / f"{name}-int4"
    theirs = (str(setting.openvino), str(engines.CHILDREN / "run_openvino.py"), "--shape", name, "--cache",
              str(engines.CACHE))  # fmt: skip
    shared = {"prefill": "prefill_tok_s", "decode": "decode_tok_s", "MB/token": _megabytes, "peak MB": "peak_rss_mb"}
    for title, options in (("", ()), (" g128", ("--group", "128"))):
        yield Row(
            "",
            f"{name} OpenVINO{title}",
            (
                Measurement((*theirs, *options, *few), shared, True, ready=ready),
                Measurement((*theirs, *options, *many), batch, True, ready=ready),
            ),
        )


def start(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        fills = {"first token": "first_token_s", "import torch": "torch_s", "beyond": "beyond_s",
                 "llama-cli": "llama_cli_s"}  # fmt: skip
        given = () if setting.llama_cli is None else ("--llama-cli", setting.llama_cli)
        reason = "llama-cli is measured with --llama-cli PROGRAM" if setting.llama_cli is None else None
        yield Row(model, "", (Measurement(python("reals.start", path, *given), fills, timed=True),), reason)

    return Table(
        "start",
        "seconds from the start of a process to the first token, with a warm page cache; llama-cli's whole time",
        tuple(Column(title, ".2f") for title in ("first token", "import torch", "beyond", "llama-cli")),
        _each(setting, rows),
    )


def chat(setting: Setting) -> Table:
    return Table(
        "chat",
        "answers to 200 prompts by attar chat, LLM.chat and the server, and transformers' rendering",
        (Column("equal", ".0%"), Column("prompts equal", ".0%")),
        tuple(Row(model, "", (), "the 200 prompts are not written yet") for model in setting.models),
    )


def beside(setting: Setting) -> Table:
    def rows(model: str, path: Path) -> Iterator[Row]:
        options = (path, "--prompt", 256, "--gen", 48)
        for threads in (1, 2, 4):
            alone = Measurement(
                python("reals.beside", *options, "--loops", 0),
                {"prefill alone": "prefill_tok_s", "decode alone": "decode_tok_s"},
                timed=True,
                threads=threads,
            )
            busy = Measurement(
                python("reals.beside", *options, "--loops", 1),
                {"prefill": "prefill_tok_s", "decode": "decode_tok_s"},
                timed=True,
                threads=threads,
            )
            yield Row(model, f"{threads} thread{'s' if threads > 1 else ''}", (busy, alone))

    every = _each(setting, rows)
    both, ratios = ("prefill", "decode"), list[Ratio]()
    for one, two, four in zip(every[::3], every[1::3], every[2::3], strict=True):
        ratios += [Ratio(two, one, both), Ratio(four, two, both)] if one.measurements else []
    return Table(
        "beside",
        "tokens/s beside one busy loop, and alone: prompt of 256, 48 steps",
        (Column("prefill"), Column("decode"), Column("prefill alone"), Column("decode alone")),
        every,
        tuple(ratios),
    )


ALL = tuple(MODELS)
