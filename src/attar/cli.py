"""The command line: one table of subcommands, each importing only what it runs.

Rules for all of them: results on stdout, everything else on stderr; with `--json` the last line of stdout is one JSON
object; exit status 0 for success, 1 where a check failed, 2 for bad usage or input, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from attar.version import __version__

CHECK_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="attar",
    help="Make a language model small, prove what that cost, and generate from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(help="A local folder, a Hub id such as org/name[@revision], or `demo`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]


class Dtype(StrEnum):
    """What the products are computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


ComputeDtype = Annotated[Dtype, typer.Option("--dtype", help="What to compute in. float32 is the exact path.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Skip the probe that is replayed when the model loads.")]


@app.command()
def compress(
    source: Model,
    output: Annotated[Path, typer.Argument(help="The folder to write. It is absent or complete, never half-written.")],
    recipe: Annotated[
        str, typer.Option(help="method[+method]-scheme, such as gptq-w4g128, or a YAML file with overrides.")
    ] = "gptq-w4g128",
    calib: Annotated[
        str | None, typer.Option(help="Calibration text (.txt, .jsonl), or `self`: text sampled from the model.")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="Held-out text: measure the cost on it and write it into the receipt.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each calibration sequence.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything drawn at random.")] = 0,
    calib_memory: Annotated[
        str, typer.Option(help="Calibration activations held in memory at most; more is read from disk.")
    ] = "2GiB",
    max_shard: Annotated[str, typer.Option(help="Size at which the output is split into another file.")] = "5GB",
    eval_tokens: Annotated[int | None, typer.Option(min=2, help="Use at most this many tokens of --eval.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output folder where it exists.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what a killed run left, do not resume it.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compress a checkpoint; the output loads in any engine that reads compressed-tensors, and says what it cost."""
    with errors(), progress(quiet) as bar:
        from attar.compression.pipeline import compress as run
        from attar.evaluation.table import Row, cost_table

        done = run(
            source, output, recipe=recipe, calibration=calib, evaluation=evaluation, samples=samples, length=length,
            seed=seed, calib_memory=parse_bytes(calib_memory), max_shard_bytes=parse_bytes(max_shard),
            eval_tokens=eval_tokens, overwrite=overwrite, resume=not restart, progress=bar,
        )  # fmt: skip
        bar.close()
        print(cost_table([Row(done.recipe, done.bytes, done.bits_per_weight, done.cost)]))
        print(f"{done.path}: {done.bytes / done.source_bytes:.1%} of {done.source_bytes:,} bytes, {done.seconds:.1f} s")
        emit(as_json, done.to_dict())


@app.command("eval")
def evaluate(
    model: Model,
    against: Annotated[str | None, typer.Option(help="The original: also measure the divergence from it.")] = None,
    text: Annotated[Path | None, typer.Option(help="Held-out text (.txt, .jsonl).")] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a window; default: the model's, 2048 at most.")
    ] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens between windows; default: the context.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Use at most this many tokens of the text.")] = None,
    dtype: ComputeDtype = Dtype.float32,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity of a model on a text and, against its original, KL divergence and top-1 agreement, with intervals."""
    with errors(), progress(quiet) as bar:
        from attar.evaluation.report import evaluate as run

        if text is None:
            raise ValueError("give the text to measure on: --text heldout.txt")
        report = run(
            model, against=against, text=text, context=context, stride=stride, max_tokens=max_tokens,
            dtype=dtype.value, progress=bar,
        )  # fmt: skip
        bar.close()
        print(report.table())
        emit(as_json, report.to_dict())


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The text to continue; default: read from stdin.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest that hold this much probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this fraction of the likeliest one's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before become less likely.")] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logit of each token generated before.")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each time it was generated.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text, which is not printed. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes a drawn text repeatable.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Also report the log-probabilities of the k likeliest.")
    ] = None,
    dtype: ComputeDtype = Dtype.float32,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a prompt. The text streams to stdout as it is made."""
    with errors(), progress(quiet) as bar:
        from attar.engine.llm import LLM
        from attar.engine.request import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, stop=tuple(stop or ()), seed=seed, logprobs=logprobs,
        )  # fmt: skip
        if prompt is None:
            prompt = sys.stdin.read()
        llm = LLM(model, dtype=dtype.value, verify=not no_verify, progress=bar)
        bar.close()
        stream = llm.stream(prompt, params)
        try:
            while True:
                print(next(stream), end="", flush=True)
        except StopIteration as end:
            print()
            emit(as_json, end.value.to_dict())


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    dtype: ComputeDtype = Dtype.float32,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Talk to a model, turn by turn, through its own chat template. An empty line or Ctrl-D ends."""
    with errors(), progress(quiet) as bar:
        from attar.engine.llm import LLM
        from attar.engine.request import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        llm = LLM(model, dtype=dtype.value, verify=not no_verify, progress=bar)
        bar.close()
        messages = [{"role": "system", "content": system}] if system else []
        while True:
            try:
                said = input("you> " if sys.stdin.isatty() else "")
            except EOFError:
                said = ""
            if not said.strip():
                break
            messages.append({"role": "user", "content": said})
            answer = ""
            for piece in llm.stream_chat(messages, params):
                answer += piece
                print(piece, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})
        emit(as_json, {"messages": messages})


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """What a checkpoint is: architecture, scheme, size to the byte, and every tensor. Reads headers only."""
    with errors():
        from attar.checkpoints.inspect import inspect as run

        found = run(model)
        print(found.table())
        emit(as_json, found.to_dict())


@app.command()
def verify(
    model: Model,
    no_hashes: Annotated[bool, typer.Option("--no-hashes", help="Replay the probes only.")] = False,
    dtype: ComputeDtype = Dtype.float32,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a compressed folder against its receipt: every hash, and every probe on this machine's kernels."""
    with errors(), progress(quiet) as bar:
        from attar.checkpoints.verify import verify as run

        verdict = run(model, hashes=not no_hashes, dtype=dtype.value, progress=bar)
        bar.close()
        print(verdict.detail)
        emit(as_json, verdict.to_dict())
        if not verdict.ok:
            raise typer.Exit(CHECK_FAILED)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Versions, instruction sets, threads, and which kernel each operation would choose here, and why."""
    with errors():
        from attar.doctor import examine, to_text

        found = examine()
        print(to_text(found))
        emit(as_json, found)


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Keep the compressed models here; default: a temporary folder.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compress the embedded model with each method, print what it cost, and generate before and after."""
    with errors(), progress(quiet) as bar:
        from attar.demo import demonstrate

        emit(as_json, demonstrate(folder, bar))


def version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def emit(as_json: bool, value: dict[str, Any]) -> None:
    if as_json:
        print(json.dumps(value, allow_nan=False, ensure_ascii=False))


def parse_bytes(text: str) -> int:
    """A size such as 512MiB, 5GB or 1e9 in bytes. Raises ValueError naming the units."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip("BbKkMmGgIi ")
    unit = text[len(number) :].strip().upper()
    try:
        size = float(number) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a size: write it like 512MiB, 2GiB or 5GB") from None
    if not 0 <= size < 2**63:
        raise ValueError(f"{text!r} is not a size a machine could have")
    return int(size)


@contextmanager
def errors() -> Iterator[None]:
    """Turn what a user can mend into one sentence on stderr and exit status 2."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted; nothing finished is lost: the same command goes on where it stopped", INTERRUPTED)
    except (ValueError, OSError) as error:
        fail(str(error), BAD_INPUT)


def fail(sentence: str, status: int) -> NoReturn:
    print(f"attar: {sentence}", file=sys.stderr)
    raise typer.Exit(status)


class Progress:
    """Named stages with a bar and the time left, on stderr; silent where stderr is no terminal and on `--quiet`."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._quiet:
            return
        if self._bar is None:
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description:<14}"), progress.BarColumn(), progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn(),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._bar.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._tasks = None, {}


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    bar = Progress(quiet)
    try:
        yield bar
    finally:
        bar.close()
