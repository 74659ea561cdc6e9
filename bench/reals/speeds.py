"""Tables of speed: files as they are, the start of a process, and threads beside other work."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import engines

from attar import machine
from reals.framework import Column, Figures, Fills, Measurement, Ratio, Row, Table, python
from reals.setting import NO_LLAMACPP, RATES, Setting, bench, each

LONG = {"smollm2-135m": 8000}  # tokens of a long prompt, where the context has no room for more
LONGEST = 16384
FEW, MANY = ("--prompt", "512", "--gen", "64"), ("--prompt", "128", "--gen", "64", "--batch", "16")
BATCH: Fills = {"batch 16": "decode_tok_s"}
LONG_PROMPT: Fills = {"long prefill": "prefill_tok_s"}


def megabytes(run: Figures) -> float:
    return float(run["bytes_per_token"]) / 1e6


def of_file(size: int, run: Figures) -> float:
    """Bytes that a step reads over those of the file, which are also read to fill rows of an untied embedding."""
    return float(run["bytes_per_token"]) / size


def of_peak(run: Figures) -> float:
    return float(run["tile_fraction"] or run["compute_fraction"])


SIZES: Fills = {"MB/token": megabytes, "peak MB": "peak_rss_mb"}
LIMITS: Fills = {"of peak": of_peak, "of bandwidth": "read_fraction"}


def speed(setting: Setting) -> Table:
    def long(model: str) -> tuple[str, ...]:
        return ("--prompt", str(LONG.get(model, LONGEST)), "--gen", "2")

    def rows(model: str, path: Path) -> Iterator[Row]:
        size = path.stat().st_size if path.exists() else 1
        one = {**RATES, **LIMITS, **SIZES, "of file": partial(of_file, size)}
        ours = (
            bench((path,), one, *FEW), bench((path,), BATCH, *MANY), bench((path,), LONG_PROMPT, *long(model)),
        )  # fmt: skip
        yield Row(model, "attar", ours)
        if setting.llamacpp is None:
            yield Row(model, "llama.cpp", (), NO_LLAMACPP)
            return
        program = str(engines.CHILDREN / "run_llamacpp.py")
        given = (
            str(setting.llamacpp),
            program,
            "--file",
            str(path),
            "--threads",
            str(setting.threads or machine.cores()),
        )
        theirs = (
            Measurement((*given, *FEW), {**RATES, **SIZES}, timed=True),
            Measurement((*given, *MANY), BATCH, timed=True),
            Measurement((*given, *long(model)), LONG_PROMPT, timed=True),
        )
        yield Row(model, "llama.cpp", theirs)

    files, shape = each(setting, rows), tuple(_shape(setting))
    compared = ("prefill", "decode", "batch 16", "long prefill")
    pairs = [*zip(files[::2], files[1::2], strict=True), *((shape[0], other) for other in shape[1:])]
    return Table(
        "speed",
        "tokens/s of the files as they are: prompt of 512 and 64 steps, 16 sequences of 128 and 64, and a long prompt "
        "(16,384 tokens, 8,000 on SmolLM2); of the int8 peak and the bandwidth measured in the run",
        (Column("prefill"), Column("of peak", ".2f"), Column("decode"), Column("of bandwidth", ".2f"),
         Column("batch 16"), Column("long prefill"), Column("MB/token", ".0f"), Column("of file", ".2f"),
         Column("peak MB", ".0f")),
        (*files, *shape),
        tuple(Ratio(ours, theirs, compared) for ours, theirs in pairs if theirs.measurements),
    )  # fmt: skip


def _shape(setting: Setting) -> Iterator[Row]:
    """`w4g128` in the shape of a published model with random weights, beside OpenVINO."""
    name = engines.SHAPES[0]
    source, scheme = ("--shape", name), ("--scheme", "w4g128", "--head", "int8")
    one = {**RATES, **LIMITS, **SIZES}
    yield Row("", f"{name} w4g128", (bench(source, one, *scheme, *FEW), bench(source, BATCH, *scheme, *MANY)))
    if setting.openvino is None:
        yield Row("", f"{name} OpenVINO", (), "OpenVINO is measured with --openvino PYTHON")
        return
    ready = engines.CACHE / f"{name}-int4"
    program = str(engines.CHILDREN / "run_openvino.py")
    given = (
        str(setting.openvino),
        program,
        *source,
        "--cache",
        str(engines.CACHE),
        "--threads",
        str(setting.threads or machine.cores()),
    )
    for title, options in (("", ()), (" g128", ("--group", "128"))):
        theirs = (
            Measurement((*given, *options, *FEW), {**RATES, **SIZES}, timed=True, ready=ready),
            Measurement((*given, *options, *MANY), BATCH, timed=True, ready=ready),
        )
        yield Row("", f"{name} OpenVINO{title}", theirs)


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
        each(setting, rows),
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
                RATES,
                timed=True,
                threads=threads,
            )
            yield Row(model, f"{threads} thread{'s' if threads > 1 else ''}", (busy, alone))

    every = each(setting, rows)
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
