"""Commands that say what a compressed model is worth: `eval`, `verify`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar.cli.options import Adapter, ComputeDtype, Device, Json, Kv, Model, Pp, Quiet, Tp
from attar.cli.terminal import CHECK_FAILED, Progress, emit, errors, fail, progress, require, tell_doubt, tell_shared

if TYPE_CHECKING:
    from attar.model.decoder import Decoder
    from attar.text.tokenizer import Tokenizer


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
    greedy: Annotated[
        int, typer.Option(min=0, metavar="N", help="Continue N prompts of the text greedily: how long do both agree?")
    ] = 0,
    device: Device = "cpu",
    dtype: ComputeDtype = None,
    kv: Kv = None,
    adapter: Adapter = None,
    tp: Tp = 1,
    pp: Pp = 1,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a model on a text or task, against its original.

    Perplexity; with --against also KL divergence, top-1 agreement and the expected acceptance rate; all with 95 %
    intervals. The protocol is that of `compress --eval`, so the figures compare. With --greedy, of 64 tokens of each
    continuation how many both models write the same. With --kv, what keeping keys and values so costs at the context,
    4096 tokens by default where the model has them: against the same model, unless --against names another. An
    --adapter is MODEL's alone. Of a task, perplexity of the target and accuracy, as lm-eval has them.
    """
    with errors(as_json), progress(quiet) as bar:
        require(device)
        if adapter is not None:
            from attar.checkpoints.sources import hub

            tell_doubt(adapter, hub.resolve(model))
        if task is not None:
            from attar.evaluation.tasks import evaluate_task, parse_task

            if greedy or any(given is not None for given in (text, against, stride, max_tokens, kv)):
                raise ValueError("--text, --against, --stride, --max-tokens, --greedy and --kv are not for a --task")
            name, path = parse_task(task)
            subject, tokenizer, beside = _subject(model, adapter, tp, pp, device, dtype, bar)
            found = evaluate_task(
                subject,
                name,
                path,
                tokenizer=tokenizer,
                context=context,
                limit=limit,
                device=device,
                dtype=dtype,
                adapter=beside,
                progress=bar,
            )
            bar.close()
            print(found.table())
            emit(as_json, found.to_dict())
            return
        from attar.evaluation.report import evaluate as run

        if text is None:
            raise ValueError("give the text to measure on: --text heldout.txt, or a --task")
        if limit is not None:
            raise ValueError("--limit is of a --task; of a text, --max-tokens")
        subject, tokenizer, beside = _subject(model, adapter, tp, pp, device, dtype, bar)
        report = run(
            subject, against=against, text=text, tokenizer=tokenizer, context=context, stride=stride,
            max_tokens=max_tokens, device=device, dtype=dtype, kv=kv, adapter=beside, prompts=greedy,
            progress=bar,
        )  # fmt: skip
        bar.close()
        print(report.table())
        emit(as_json, report.to_dict())


def _subject(
    model: str, adapter: Path | None, tp: int, pp: int, device: str, dtype: str | None, bar: Progress
) -> tuple[str | Decoder, Tokenizer | None, Path | None]:
    """What is measured, by its name, and the adapter beside it; or, in several processes, the model itself, which has
    that already, and its tokenizer."""
    if tp * pp == 1:
        return model, None, adapter
    from attar.checkpoints import vocabulary
    from attar.checkpoints.adapters import lora
    from attar.checkpoints.sources import hf, hub
    from attar.execution.parallel.executor import Team

    tell_shared(device, tp, pp)
    path, computed = hub.resolve(model), hf.compute_dtype(dtype, device)
    team = Team(
        path, tp, pp, device=device, dtype=computed, native=device != "cpu",
        progress=lambda done, total: bar("loading", done, total),
    )  # fmt: skip
    if adapter is not None:
        lora.attach(team.decoder, adapter)
    return team.decoder, vocabulary.tokenizer(path), None


def verify(
    model: Model,
    no_hashes: Annotated[bool, typer.Option("--no-hashes", help="Replay the probes only.")] = False,
    device: Device = "cpu",
    dtype: ComputeDtype = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a compressed folder or GGUF file against its receipt.

    Every hash, then every probe on this machine's kernels; where one differs, the first file or layer that does is
    named, and the exit status is 1.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.checkpoints.receipts.verify import verify as run

        verdict = run(model, hashes=not no_hashes, device=device, dtype=dtype, progress=bar)
        bar.close()
        if verdict.ok:
            print(verdict.sentence)
        emit(as_json, verdict.to_dict())
        if not verdict.ok:
            fail(verdict.sentence, CHECK_FAILED)


def report(
    outputs: Annotated[
        list[str], typer.Argument(metavar="OUT...", help="Compressed folders, or GGUF files, with their receipts.")
    ],
    page: Annotated[Path, typer.Option("--page", "-o", help="The HTML file to write.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the charts as PNGs; needs matplotlib.")
    ] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure the speed of each output here, one after another.")
    ] = False,
    speed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OUT=FILE", help="Speed of an output, as `attar bench OUT --json` printed it. Repeatable."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="TEXT", help="Find outlier channels: run the outputs, and --source, over this text."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The original, to compare the outputs' channels with.")
    ] = None,
    profile_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the --profile text at most.")] = 4096,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write an HTML page about what compression cost.

    KL against size and speed, the error of each linear, outlier channels, recipes, hashes. One file; it loads nothing.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.evaluation.summary import Options, write

        options = Options(page, png, bench, tuple(speed or ()), profile, source, profile_tokens)
        written = write(outputs, options, bar)
        bar.close()
        print(f"{page}: {len(outputs)} output{'s' * (len(outputs) != 1)}, {page.stat().st_size:,} bytes")
        emit(as_json, written)
