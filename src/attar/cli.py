"""The command line: one table of subcommands, each importing only what it runs.

What all of them share (exit statuses, JSON, errors in one sentence, progress) is `terminal.py`'s. Help is plain text:
boxes drawn around it break in narrow terminals and logs.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from attar import cli_adapters, cli_formats, cli_report, cli_serving
from attar.cli_report import Ladder, TargetBits, TargetKl, TargetSize, parse_target
from attar.options import MODEL, Activations, ComputeDtype, Dtype, Json, Kv, Model, NoVerify, Quiet, Rounding
from attar.terminal import (
    CHECK_FAILED,
    Commands,
    emit,
    errors,
    fail,
    parse_bytes,
    print_pieces,
    progress,
    read_stdin,
    tell,
)
from attar.version import __version__

NO_RECEIPT = "no receipt: nothing says what this checkpoint should compute, so no probe is replayed"
RESUME = "the same command goes on after the last finished block; --restart begins anew"

app = typer.Typer(
    name="attar",
    cls=Commands,
    help="Make a language model small, prove what that cost, and generate from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def compress(
    source: Model,
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="The folder to write, or a file OUT.gguf. It is absent or complete, never half-written.",
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="method[+method]-scheme, such as gptq-w4g128, the default; for OUT.gguf a type or mix, such as q4_k_m "
            "(the default), iq4_xs or f16; or a YAML file with overrides."
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="The output matrix: bf16 (as it is), int8, int4, or a scheme; default: the recipe's, kept."),
    ] = None,
    target_bits: TargetBits = None,
    target_size: TargetSize = None,
    target_kl: TargetKl = None,
    ladder: Ladder = None,
    calib: Annotated[
        str | None,
        typer.Option(
            help="Calibration text (.txt, .jsonl), or `self`: sampled from the model; rtn and GGUF mixes need none, "
            "but the latter weigh errors by it."
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(help="Of OUT.gguf: importances to weigh errors by, from `attar imatrix` or llama.cpp's."),
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
    """Compress a checkpoint, and say what that cost.

    A folder loads in whatever reads compressed-tensors, or bitsandbytes for its schemes; its model card says who
    does. A file OUT.gguf loads in whatever reads GGUF. A run that was stopped resumes: give the same command again.
    """
    with errors(as_json, after_interrupt=RESUME), progress(quiet) as bar:
        from attar.compression.pipeline import compress as run
        from attar.compression.pipeline import default_recipe
        from attar.compression.recipe import KEEP
        from attar.evaluation.table import Row, cost_table

        target, rungs = parse_target(target_bits, target_size, target_kl, ladder)
        done = run(
            source, output, recipe=recipe or default_recipe(output), head=head, target=target, ladder=rungs,
            calibration=calib, imatrix=imatrix, evaluation=evaluation, samples=samples, length=length, seed=seed,
            calib_memory=parse_bytes(calib_memory), max_shard_bytes=parse_bytes(max_shard), eval_tokens=eval_tokens,
            overwrite=overwrite, resume=not restart, progress=bar,
        )  # fmt: skip
        bar.close()
        name = done.recipe if done.head in (KEEP, done.recipe) else f"{done.recipe}, head {done.head}"
        original = {"ppl": (done.cost or {}).get("ppl_base")}
        print(cost_table([
            Row("original", done.source_bytes, None, original),
            Row(name, done.bytes, done.bits_per_weight, done.cost),
        ]))  # fmt: skip
        share = done.bytes / done.source_bytes
        print(f"{done.path}: {done.bytes:,} bytes, {share:.1%} of the original's, in {done.seconds:.1f} s")
        for sentence in done.notes:
            tell(sentence)
        emit(as_json, done.to_dict())


@app.command("eval")
def evaluate(
    model: Model,
    against: Annotated[str | None, typer.Option(help="The original: also measure the divergence from it.")] = None,
    text: Annotated[Path | None, typer.Option(help="Held-out text (.txt, .jsonl).")] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME=FILE", help="Instead of a text, lambada=FILE.jsonl: the last word of each text."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of a task, the first so many items.")] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a window; default: the model's, 2048 at most.")
    ] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens between windows; default: the context.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Use at most this many tokens of the text.")] = None,
    dtype: ComputeDtype = Dtype.float32,
    kv: Kv = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a model on a text or a task, and against its original.

    Perplexity; with --against also KL divergence and top-1 agreement; all with 95 % intervals. The protocol is that of
    `compress --eval`, so the figures compare. With --kv, what keeping keys and values so costs at the context, 4096
    tokens by default where the model has them: against the same model, unless --against names another. Of a task,
    perplexity of the target and accuracy, as lm-eval has them.
    """
    with errors(as_json), progress(quiet) as bar:
        if task is not None:
            from attar.evaluation.tasks import evaluate_task, parse_task

            if any(given is not None for given in (text, against, stride, max_tokens, kv)):
                raise ValueError("--text, --against, --stride, --max-tokens and --kv are not for a --task")
            name, path = parse_task(task)
            found = evaluate_task(model, name, path, context=context, limit=limit, dtype=dtype.value, progress=bar)
            bar.close()
            print(found.table())
            emit(as_json, found.to_dict())
            return
        from attar.evaluation.report import evaluate as run

        if text is None:
            raise ValueError("give the text to measure on: --text heldout.txt, or a --task")
        if limit is not None:
            raise ValueError("--limit is of a --task; of a text, --max-tokens")
        report = run(
            model, against=against, text=text, context=context, stride=stride, max_tokens=max_tokens,
            dtype=dtype.value, kv=kv, progress=bar,
        )  # fmt: skip
        bar.close()
        print(report.table())
        emit(as_json, report.to_dict())


@app.command()
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue; default: stdin, less its last line break.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest that hold this much probability; in (0, 1].")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this fraction of the likeliest one's probability; in [0, 1].")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before become less likely.")] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logit of each token generated before.")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each time it was generated.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text, which is not printed. Repeatable.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the tokens that end a text, to --max-tokens.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes a drawn text repeatable.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Also report the log-probabilities of the k likeliest.")
    ] = None,
    dtype: ComputeDtype = Dtype.float32,
    activations: Activations = Rounding.int8g128,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a prompt.

    The text streams to stdout as it is made. Options are as given here: of the model's generation_config.json only the
    tokens that end a text are taken, never a temperature or filter.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.engine.llm import LLM
        from attar.engine.request import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, stop=tuple(stop or ()), ignore_eos=ignore_eos, seed=seed,
            logprobs=logprobs,
        )  # fmt: skip
        if prompt is None:
            prompt = read_stdin()
        llm = LLM(model, dtype=dtype.value, activations=activations.value, verify=not no_verify, progress=bar)
        bar.close()
        if llm.receipt is None:
            tell(NO_RECEIPT)
        done = print_pieces(llm.stream(prompt, params))
        emit(as_json, done.to_dict())


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest that hold this much probability; in (0, 1].")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes a drawn answer repeatable.")] = None,
    dtype: ComputeDtype = Dtype.float32,
    activations: Activations = Rounding.int8g128,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Talk to a model through its own chat template.

    One line is one turn; an empty line or Ctrl-D ends. With stdin piped, each of its lines is a turn.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.engine.llm import LLM
        from attar.engine.request import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        llm = LLM(model, dtype=dtype.value, activations=activations.value, verify=not no_verify, progress=bar)
        bar.close()
        if llm.receipt is None:
            tell(NO_RECEIPT)
        llm.tokenizer.chat_template()  # a model that cannot chat says so before the first turn
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - arrow keys and history in input()
        messages = [{"role": "system", "content": system}] if system else []
        while True:
            try:
                said = input("you> " if sys.stdin.isatty() else "")
            except EOFError:
                said = ""
            if not said.strip():
                break
            messages.append({"role": "user", "content": said})
            answer = print_pieces(llm.stream_chat(messages, params))
            messages.append({"role": "assistant", "content": answer.text})
        emit(as_json, {"messages": messages})


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """Show what a checkpoint is, from its headers.

    Architecture, schemes, bits per weight, size to the byte, and every tensor. No weight is read.
    """
    with errors(as_json):
        from attar.checkpoints.inspect import inspect as run

        found = run(model)
        if not found.receipt:
            tell("no receipt: this folder was not made by attar, or its receipt.json was not copied along")
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
    """Check a compressed folder or GGUF file against its receipt.

    Every hash, then every probe on this machine's kernels; where one differs, the first file or layer that does is
    named, and the exit status is 1.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.checkpoints.verify import verify as run

        verdict = run(model, hashes=not no_hashes, dtype=dtype.value, progress=bar)
        bar.close()
        if verdict.ok:
            print(verdict.sentence)
        emit(as_json, verdict.to_dict())
        if not verdict.ok:
            fail(verdict.sentence, CHECK_FAILED)


@app.command()
def bench(
    source: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL)] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model, random weights in the shape of one, such as llama-3.2-1b.")
    ] = None,
    scheme: Annotated[str, typer.Option(help="Of a shape: w4g128, w8a8, ... or bf16.")] = "w4g128",
    head: Annotated[str, typer.Option(help="Of a shape: its output matrix in bf16, int8 or int4.")] = "int8",
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of each prompt.")] = 512,
    gen: Annotated[int, typer.Option(min=2, help="Decode steps.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    activations: Activations = Rounding.int8g128,
    kv: Kv = None,
    as_json: Json = False,
) -> None:
    """Measure speed, beside what this machine can do."""
    with errors(as_json):
        from attar.checkpoints import hub
        from attar.engine import speed

        if (source is None) == (shape is None):
            raise ValueError("name a model or a --shape, one of the two")
        load = speed.Load(prompt, gen, batch)
        if shape is not None:
            name = shape
            report = speed.run(lambda store: speed.build(name, scheme, head, store), load, activations.value, kv)
            report |= {"shape": shape, "scheme": scheme, "head": "bf16" if scheme == "bf16" else head}
        else:
            path = hub.resolve(str(source))
            report = speed.run(lambda store: speed.load(path, store), load, activations.value, kv)
        print(speed.to_text(report))
        emit(as_json, report)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, instruction sets, threads and kernels.

    For each operation, which kernel would run here, and what speaks against the others.
    """
    with errors(as_json):
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
    """Compress the embedded model with each method.

    Prints what that cost, and a text generated before and after. Needs neither data nor network.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.demo import demonstrate

        shown = demonstrate(folder, bar)
        bar.close()
        print(shown.text())
        emit(as_json, shown.to_dict())


for command in (
    cli_formats.imatrix, cli_formats.convert, cli_serving.serve, cli_serving.plan, cli_serving.bench_serve,
    cli_report.report, cli_adapters.finetune, cli_adapters.merge,
):  # fmt: skip
    app.command()(command)


def version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    # Models write any character, and not every terminal can show it: better a `?` than no text.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
