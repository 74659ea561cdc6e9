"""Commands that measure a compressed model or show what was measured: `eval`, `verify`, `report`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar.cli import options
from attar.cli.commands import configured, flag, option
from attar.cli.terminal import (
    CHECK_FAILED,
    Progress,
    emit,
    errors,
    fail,
    progress,
    require,
    tell,
    tell_doubt,
    tell_shared,
)
from attar.errors import UserError
from attar.protocol.speculation import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from attar.checkpoints.receipts.receipt import Verdict
    from attar.evaluation.draft_quality import DraftQuality
    from attar.evaluation.head_quality import HeadQuality
    from attar.evaluation.long_context.report import LongContextReport
    from attar.evaluation.speculation_audit import Audit
    from attar.evaluation.tasks.run import TaskReport
    from attar.metrics.measure import Report
    from attar.model.decoder import Decoder
    from attar.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EvalConfig(options.OutputConfig):
    """Options of `eval`."""

    model: options.Model
    text: Annotated[Path | None, option("Data", "FILE", "Held-out text (.txt, .jsonl).")] = None
    task: Annotated[list[str] | None, option(
        "Task", "NAME", "Task of lm-eval instead of a text: arc, chartqa, gsm8k, hellaswag, ifeval, lambada, mmlu, "
        "piqa, truthfulqa or winogrande. NAME=PATH reads its items from files, NAME alone from the Hub.",
    )] = None  # fmt: skip
    images: Annotated[Path | None, option(
        "Data", "FOLDER", "Images with texts instead of a text: a folder whose metadata.jsonl has lines with file_name "
        "and text. The tokens behind each image are measured.",
    )] = None  # fmt: skip
    limit: Annotated[
        int | None, option("Task", "N", "Items of each task, or images of --images, to use at most.", min=1)
    ] = None
    shots: Annotated[
        int | None, option("Task", "N", "Examples in front of each item.", min=0, default="the task's own")
    ] = None
    record: Annotated[bool, flag(
        "Task", "Add the figures of tasks or images to MODEL's receipt, for `attar report`.", "--record",
    )] = False  # fmt: skip
    context: Annotated[
        int | None, option("Data", "N", "Tokens of a window.", min=2, default="the model's context, at most 2048")
    ] = None
    stride: Annotated[int | None, option("Data", "N", "Tokens between windows.", min=1, default="the context")] = None
    max_tokens: Annotated[int | None, option("Data", "N", "Tokens of the text to use at most.", min=2)] = None
    against: Annotated[
        str | None, option("Comparison", "MODEL", "The original: also measure KL divergence, top-1 agreement and EAR.")
    ] = None
    greedy: Annotated[int, option(
        "Comparison", "N", "Continue N prompts of the text greedily and count the tokens that agree.", min=0,
    )] = 0  # fmt: skip
    draft: Annotated[str | None, option(
        "Comparison", "DRAFT", "Instead: how often this draft model or head guesses MODEL's tokens, and what it gains.",
    )] = None  # fmt: skip
    temperature: Annotated[float, option("Comparison", "T", "Temperature of --draft.", min=0)] = 1.0
    kv: options.Kv = None
    sparse_attention: options.SparseAttention = None
    sparse_prefill: options.SparsePrefill = None
    passkeys: Annotated[int | None, option(
        "Data", "N", "With --sparse-attention, --sparse-prefill or --kv-eviction: texts that are asked for a passkey "
        "at each of five depths; 0: none.", min=0, default="1",
    )] = None  # fmt: skip
    kv_eviction: options.KvEviction = None
    adapter: Annotated[Path | None, option("Model", "DIR", "LoRA adapter of MODEL alone (PEFT folder).")] = None
    device: options.Device = "cpu"
    dtype: options.ComputeDtype = None
    tp: options.Tp = 1
    pp: options.Pp = 1


@configured(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure a model on a text, on images with texts, or on a task.

    A text gives perplexity. --against adds KL divergence, top-1 agreement and the expected acceptance rate (EAR). All
    figures have 95 % intervals, and are measured as by `compress --eval`. --greedy continues each prompt by 64 tokens.
    --kv measures the cost of a KV cache format, against the same model unless --against names another; windows then
    have up to 4096 tokens. Formats for measurements alone are kivi4-published, kivi2-published, nuq4-published,
    nuq3-published and nuq2-published. A task has the prompts and rules of lm-eval, which the extra [eval] installs.

    --draft continues prompts of the text. It prints tokens a step and speed, predicted and measured. For a head it adds
    the share of right drafts, and for a draft model distances and rejections.

    --images measures the tokens behind each image, as a text is measured; intervals are over images.

    --sparse-attention prints the KL divergence of the last rows of long windows from full attention, and their time.
    --sparse-prefill prints the KL divergence of the tokens after a prompt from full prefill, and its time.
    --kv-eviction prints the KL divergence of the tokens after a prompt from the full cache. All three ask for a passkey
    at five depths of the text, with the question in the prompt and with the question after it.

    Examples:
      attar eval ./out --against ./model --text heldout.txt
      attar eval ./out --kv int4 --text heldout.txt
      attar eval ./out --images ./pictures --against ./model
      attar eval ./out --task hellaswag --task lambada=lambada.jsonl --limit 500
      attar eval ./large --draft ./small --text heldout.txt
      attar eval ./out --sparse-attention topk:1/16 --text heldout.txt
      attar eval ./out --sparse-prefill tri-shape --text heldout.txt
      attar eval ./out --kv-eviction sink:4+1020 --text heldout.txt
    """
    with errors(config.as_json), progress(config.quiet) as bar:
        require(config.device)
        if config.adapter is not None:
            from attar.checkpoints.sources import hub

            tell_doubt(config.adapter, hub.resolve(config.model))
        report: DraftQuality | HeadQuality | LongContextReport | Report | TaskReport
        if config.images is not None:
            report = _on_images(config, config.images, bar)
        elif (config.sparse_attention, config.sparse_prefill, config.kv_eviction) != (None, None, None):
            report = _of_long_context(config, bar)
        elif config.passkeys is not None:
            message = "--passkeys needs --sparse-attention, --sparse-prefill or --kv-eviction"
            raise UserError("option_unused", message)
        elif config.draft is not None:
            report = _of_draft(config, config.draft, bar)
        else:
            report = _on_task(config, config.task, bar) if config.task else _on_text(config, bar)
        bar.close()
        print(report.table())
        for sentence in getattr(report, "notes", ()):
            tell(sentence)
        emit(config.as_json, report.to_dict())


def _on_images(config: EvalConfig, images: Path, bar: Progress) -> Report:
    """Measure on images with texts. Raises ValueError for options of other measurements."""
    from attar.evaluation.image_report import evaluate_images

    others = (
        config.text, config.task, config.shots, config.context, config.stride, config.max_tokens, config.draft,
        config.kv, config.sparse_attention, config.sparse_prefill, config.kv_eviction, config.passkeys,
    )  # fmt: skip
    if config.greedy or config.device != "cpu" or config.tp * config.pp > 1 or any(each is not None for each in others):
        names = "--against, --limit, --adapter, --dtype and --record"
        raise UserError("option_conflict", f"--images takes {names} alone, on a CPU in one process")
    if config.record and config.against is None:
        raise UserError("option_missing", "--record of --images is a divergence: give the original as --against")
    recorded = _recorded(config) if config.record else None
    found = evaluate_images(
        config.model if recorded is None else recorded, images, against=config.against, limit=config.limit,
        dtype=config.dtype, adapter=config.adapter, progress=bar,
    )  # fmt: skip
    if recorded is not None:
        from attar.checkpoints.receipts.recorded import record_images

        record_images(recorded, found.to_dict())
    return found


def _of_long_context(config: EvalConfig, bar: Progress) -> LongContextReport:
    """Measure sparse attention, sparse prefill and KV eviction. Raises ValueError without a text, and for other
    options."""
    from attar.evaluation.long_context.report import PASSKEYS, measure
    from attar.evaluation.long_context.windows import Reading
    from attar.kv.eviction import Eviction
    from attar.kv.sparse import SparseAttention
    from attar.kv.sparse_prefill import SparsePrefill

    others = (
        config.task, config.against, config.stride, config.draft, config.limit, config.shots, config.adapter,
        config.dtype,
    )  # fmt: skip
    if config.greedy or config.device != "cpu" or config.tp * config.pp > 1 or any(each is not None for each in others):
        names = "--text, --context, --max-tokens, --passkeys and --kv"
        message = f"--sparse-attention, --sparse-prefill and --kv-eviction take {names} alone, on a CPU in one process"
        raise UserError("option_conflict", message)
    if config.text is None:
        raise UserError("option_missing", "give the text to measure on: --text heldout.txt")
    few, of_prompts, policy = config.sparse_attention, config.sparse_prefill, config.kv_eviction
    reading = Reading(
        None if few is None else SparseAttention.parse(few),
        None if of_prompts is None else SparsePrefill.parse(of_prompts),
        None if policy is None else Eviction.parse(policy),
    )
    return measure(
        config.model, config.text, reading, context=config.context, max_tokens=config.max_tokens, kv=config.kv,
        progress=bar, prompts=PASSKEYS if config.passkeys is None else config.passkeys,
    )  # fmt: skip


def _of_draft(config: EvalConfig, draft: str, bar: Progress) -> DraftQuality | HeadQuality:
    """Measure a draft model or head. Raises ValueError without a text, and for options of other measurements."""
    from attar.checkpoints.drafts.files import kind_of
    from attar.evaluation import draft_quality, head_quality

    others = (
        config.task, config.against, config.stride, config.context, config.max_tokens, config.kv, config.adapter,
        config.shots, config.limit,
    )  # fmt: skip
    if config.greedy or config.device != "cpu" or config.tp * config.pp > 1 or any(each is not None for each in others):
        raise UserError("option_conflict", "--draft takes --text and --temperature alone, on a CPU in one process")
    if config.text is None:
        raise UserError("option_missing", "give the text whose prompts are continued: --text heldout.txt")
    measure = draft_quality.measure if kind_of(Path(draft)) is None else head_quality.measure
    return measure(config.model, draft, config.text, temperature=config.temperature, progress=bar)


def _on_text(config: EvalConfig, bar: Progress) -> Report:
    """Measure on a text. Raises ValueError where there is none, or for options of a task."""
    from attar.evaluation.report import evaluate as run

    if config.text is None:
        raise UserError("option_missing", "give the text to measure on: --text heldout.txt, or --images, or a --task")
    if config.limit is not None or config.shots is not None or config.record:
        message = "--limit, --shots and --record need a --task or --images; --max-tokens limits a text"
        raise UserError("option_unused", message)
    subject, tokenizer, beside = _subject(config, bar)
    return run(
        subject, against=config.against, text=config.text, tokenizer=tokenizer, context=config.context,
        stride=config.stride, max_tokens=config.max_tokens, device=config.device, dtype=config.dtype, kv=config.kv,
        adapter=beside, prompts=config.greedy, progress=bar,
    )  # fmt: skip


def _on_task(config: EvalConfig, tasks: list[str], bar: Progress) -> TaskReport:
    """Measure on tasks. Raises ValueError for options of a text."""
    from attar.evaluation.tasks.catalogue import TaskSource
    from attar.evaluation.tasks.run import evaluate_tasks

    others = (config.text, config.against, config.stride, config.max_tokens, config.kv)
    if config.greedy or any(given is not None for given in others):
        message = "--text, --against, --stride, --max-tokens, --greedy and --kv are not for a --task"
        raise UserError("option_conflict", message)
    sources = [TaskSource.parse(task) for task in tasks]
    recorded = _recorded(config) if config.record else None
    if recorded is not None:
        config = replace(config, model=str(recorded))
    subject, tokenizer, beside = _subject(config, bar)
    found = evaluate_tasks(
        subject, sources, tokenizer=tokenizer, context=config.context, limit=config.limit, shots=config.shots,
        device=config.device, dtype=config.dtype, adapter=beside, progress=bar,
    )  # fmt: skip
    if recorded is not None:
        from attar.checkpoints.receipts.recorded import record_tasks

        record_tasks(recorded, found.to_dict()["tasks"])
    return found


def _recorded(config: EvalConfig) -> Path:
    """Return the output whose receipt gets the figures. Raises UserError, before hours of work, where the model has no
    receipt, or the figures are not its own or not of all items."""
    from attar.checkpoints.receipts.receipt import missing, read_receipt
    from attar.checkpoints.sources import hub

    if config.adapter is not None or config.limit is not None:
        raise UserError(
            "option_conflict", "--record keeps figures of the model alone on all items: not with --adapter or --limit"
        )
    if read_receipt(path := hub.resolve(config.model)) is None:
        raise UserError("receipt_invalid", f"{path}: {missing(path)}")
    return path


def _subject(config: EvalConfig, bar: Progress) -> tuple[str | Decoder, Tokenizer | None, Path | None]:
    """Return what to measure, and its adapter; for several processes, load the model with both, and its tokenizer."""
    if config.tp * config.pp == 1:
        return config.model, None, config.adapter
    from attar.checkpoints import vocabulary
    from attar.checkpoints.adapters import lora
    from attar.checkpoints.sources import hf, hub
    from attar.execution.parallel.executor import ParallelExecutor

    tell_shared(config.device, config.tp, config.pp)
    path, computed = hub.resolve(config.model), hf.compute_dtype(config.dtype, config.device)
    executor = ParallelExecutor(
        path, config.tp, config.pp, device=config.device, dtype=computed, native=config.device != "cpu",
        progress=lambda done, total: bar("loading", done, total),
    )  # fmt: skip
    if config.adapter is not None:
        lora.attach(executor.decoder, config.adapter, path)
    return executor.decoder, vocabulary.tokenizer(path), None


def verify(
    model: options.Model,
    no_hashes: Annotated[bool, flag("Model", "Replay the probes only.", "--no-hashes")] = False,
    speculation: Annotated[int | None, option(
        "Speculation", "N", "Instead, run N seeded requests with drafts and without, and compare every token and log "
        "probability. Needs no receipt.", min=1,
    )] = None,
    draft: options.Draft = None,
    device: options.Device = "cpu",
    dtype: options.ComputeDtype = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Check a model against its receipt, or speculative decoding.

    The command checks every hash, then replays every probe on this machine's kernels. It names the first file or layer
    that differs; the exit status is then 1. So it is where a request differs with --speculation.

    Examples:
      attar verify ./out
      attar verify out.gguf --no-hashes
      attar verify ./out --speculation 100 --draft suffix
    """
    with errors(as_json), progress(quiet) as bar:
        verdict: Audit | Verdict
        if speculation is not None:
            from attar.engine.llm.llm import LLM
            from attar.evaluation.speculation_audit import audit

            if draft is None:
                raise UserError("option_missing", "name what makes the drafts: --draft suffix, or a model")
            if no_hashes:
                raise UserError("option_unused", "--no-hashes does not go with --speculation, which reads no receipt")
            llm = LLM(
                model, device=device, dtype=dtype, draft=draft, draft_tokens=MAX_DRAFT_TOKENS, verify=False,
                progress=bar,
            )  # fmt: skip
            verdict = audit(llm, speculation, bar)
        elif draft is not None:
            raise UserError("option_unused", "--draft needs --speculation N")
        else:
            from attar.checkpoints.receipts.verify import verify as run

            verdict = run(model, hashes=not no_hashes, device=device, dtype=dtype, progress=bar)
        bar.close()
        if verdict.ok:
            print(verdict.sentence)
        emit(as_json, verdict.to_dict())
        if not verdict.ok:
            fail(verdict.sentence, CHECK_FAILED)


@dataclass(frozen=True, kw_only=True)
class ReportConfig(options.OutputConfig):
    """Options of `report`."""

    outputs: Annotated[
        list[str], typer.Argument(metavar="OUT", help="Compressed folders or GGUF files, with their receipts.")
    ]
    source: Annotated[
        str | None, option("Comparison", "MODEL", "The original, to compare the channels of the outputs with.")
    ] = None
    profile: Annotated[Path | None, option(
        "Comparison", "FILE", "Find outlier channels: run the outputs, and --source, over this text.",
    )] = None  # fmt: skip
    profile_tokens: Annotated[int, option("Comparison", "N", "Tokens of --profile to use at most.", min=2)] = 4096
    bench: Annotated[bool, flag("Comparison", "Measure the speed of each output here, one by one.", "--bench")] = False
    speed: Annotated[
        list[str] | None, option("Comparison", "OUT=FILE", "Speed of an output: the JSON of `attar bench OUT --json`.")
    ] = None
    page: Annotated[Path, option("Output", "FILE", "The HTML file to write.", "--page", "-o")] = Path("report.html")
    png: Annotated[Path | None, option("Output", "DIR", "Also write the charts as PNG files (needs matplotlib).")] = (
        None
    )


@configured(ReportConfig)
def report(config: ReportConfig) -> None:
    """Write an HTML page about what compression cost.

    It shows KL against size and speed, the error of each linear layer, outlier channels, recipes and hashes. The page
    is one file, and loads nothing else.

    Examples:
      attar report ./out out.gguf -o report.html
      attar report ./out --profile heldout.txt --source ./model
    """
    with errors(config.as_json), progress(config.quiet) as bar:
        from attar.evaluation.summary import Options, write

        options = Options(
            config.page, config.png, config.bench, tuple(config.speed or ()), config.profile, config.source,
            config.profile_tokens,
        )  # fmt: skip
        written = write(config.outputs, options, bar)
        bar.close()
        count = len(config.outputs)
        print(f"{config.page}: {count} output{'s' * (count != 1)}, {config.page.stat().st_size:,} bytes")
        emit(config.as_json, written)
