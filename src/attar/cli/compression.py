"""Commands that compress a model or train an adapter for it: `compress`, `finetune`, `merge`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar.cli import options
from attar.cli.commands import configured, flag, option
from attar.cli.terminal import emit, errors, parse_bytes, progress, require, tell, tell_doubt
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.compression.request.request import Target
    from attar.compression.runs.pipeline import Compressed
    from attar.compression.training.finetune import FineTuning


RESUME = "the same command resumes after the last finished block, if there is one; --restart starts over"


@dataclass(frozen=True, kw_only=True)
class CompressConfig(options.OutputConfig):
    """Options of `compress`."""

    source: options.Model
    output: Annotated[str, typer.Argument(
        metavar="OUTPUT", help="The folder to write, or a file OUT.gguf. It is written atomically: complete or absent.",
    )]  # fmt: skip
    recipe: Annotated[str | None, option(
        "Recipe", "RECIPE", "method[+method]-scheme, such as gptq-w4g128, or a YAML file with overrides. For "
        "OUT.gguf: a type or mix, such as q4_k_m, iq4_xs or f16. Several names with commas, or best-w4g128: keep the "
        "best on held-out calibration text. ablate-NAME: keep the steps that help there.",
        default="gptq-w4g128, or q4_k_m for OUT.gguf",
    )] = None  # fmt: skip
    as_draft: Annotated[bool, flag(
        "Recipe", "Make a copy that drafts for the model itself (--draft). The recipe is hqq-w4g64, and q4_k_s for "
        "OUT.gguf, unless another is named; a compressed model is taken too.", "--as-draft",
    )] = False  # fmt: skip
    requantize: Annotated[
        bool, flag("Recipe", "Compress a model that is compressed already: its decoded values.", "--requantize")
    ] = False
    head: Annotated[str | None, option(
        "Recipe", "SCHEME", "Scheme of the LM head: bf16 (unchanged), int8, int4, or another; in OUT.gguf int8 is "
        "q8_0 and int4 q4_0.", default="the recipe's, unchanged",
    )] = None  # fmt: skip
    vision: Annotated[str, option(
        "Recipe", "SCHEME", "Vision tower and projector of a vision-language model: 16bit (as they are), w8 or w8a8, "
        "int8 weights rounded to nearest; w8a8 rounds their inputs too. For folders in compressed-tensors.",
    )] = "16bit"  # fmt: skip
    target_bits: Annotated[float | None, option(
        "Mixed precision", "BITS", "Choose a bit width per layer for the lowest KL at this average number of bits per "
        "weight. Layers that an override decides about and a packed LM head are not counted.",
    )] = None  # fmt: skip
    target_size: Annotated[int | None, option(
        "Mixed precision", "SIZE", "The same, for weight files of at most this size.", parser=parse_bytes,
    )] = None  # fmt: skip
    target_kl: Annotated[float | None, option(
        "Mixed precision", "KL", "The same, for the smallest size at this mean KL on calibration text.",
    )] = None  # fmt: skip
    candidates: Annotated[str | None, option(
        "Mixed precision", "SCHEMES", "Schemes to choose among, such as w2g64,w3g128,w4g128,w8.",
        default="the recipe's own, with 2 to 8 bits",
    )] = None  # fmt: skip
    calib: Annotated[str | None, option(
        "Calibration", "FILE", f"{options.CALIBRATION_TEXT} rtn and hqq need none, unless the scheme fixes activation "
        "scales (nvfp4, w8a8-static). GGUF mixes need none, and weight errors by it if given.",
    )] = None  # fmt: skip
    calib_images: Annotated[Path | None, option(
        "Calibration", "FOLDER", "Images beside --calib, for a vision-language model: a folder whose metadata.jsonl "
        "has lines with file_name and text. At most --samples are used; what a sequence has left is filled with text.",
    )] = None  # fmt: skip
    imatrix: Annotated[Path | None, option(
        "Calibration", "FILE", "Importance matrix for OUT.gguf, from `attar imatrix` or llama.cpp. gptq and its "
        "variants search scales by it, and choose codes by --calib.",
    )] = None  # fmt: skip
    samples: options.Samples = 128
    length: options.Length = 512
    self_samples: Annotated[int, option(
        "Calibration", "N", "Sequences sampled from the model in addition to the calibration text. They keep guided "
        "and gptq from overfitting the text, and take time.", min=0,
    )] = 0  # fmt: skip
    seed: options.Seed = 0
    calib_memory: options.CalibrationMemory = options.CALIBRATION_MEMORY
    evaluation: Annotated[Path | None, option(
        "Comparison", "FILE", "Held-out text: measure the cost on it and add it to the receipt.", "--eval",
    )] = None  # fmt: skip
    evaluation_images: Annotated[Path | None, option(
        "Comparison", "FOLDER", "Images with held-out texts, laid out as for --calib-images: measure the cost on the "
        "texts behind them too.", "--eval-images",
    )] = None  # fmt: skip
    eval_tokens: Annotated[int | None, option("Comparison", "N", "Tokens of --eval to use at most.", min=2)] = None
    device: options.Device = "cpu"
    max_shard: options.MaxShard = None
    overwrite: options.Overwrite = False
    restart: options.Restart = False


def parse_target(bits: float | None, size: int | None, kl: float | None, candidates: str | None) -> Target | None:
    """Make a target of the options. Raises ValueError for two targets, or candidates without one."""
    from attar.compression.request.request import Target, parse_candidates

    if bits is None and size is None and kl is None:
        if candidates is not None:
            message = "--candidates is what a target chooses among: give --target-bits, -size or -kl as well"
            raise UserError("option_missing", message)
        return None
    return Target(bits, size, kl, None if candidates is None else parse_candidates(candidates))


@configured(CompressConfig)
def compress(config: CompressConfig) -> None:
    """Compress a checkpoint and measure the cost.

    Libraries that read compressed-tensors load an output folder; bitsandbytes loads its own schemes. The model card
    lists them. Programs that read GGUF load OUT.gguf. The same command resumes an interrupted run.

    Examples:
      attar compress demo ./small --recipe gptq-w4g128 --calib self
      attar compress org/name ./out --calib text.txt --eval heldout.txt
      attar compress ./model out.gguf --recipe q4_k_m --calib text.txt
      attar compress ./vision ./out --calib text.txt --calib-images ./pictures
      attar compress ./vision ./out --recipe rtn-w8a8 --vision w8a8
      attar compress ./model ./mixed --target-bits 3.5 --calib text.txt
      attar compress model.gguf ./out --requantize --calib text.txt
      attar compress ./model ./draft --as-draft
    """
    with errors(config.as_json, after_interrupt=RESUME), progress(config.quiet) as bar:
        from attar.compression.request.request import CompressionRequest, default_head, default_recipe
        from attar.compression.runs.mistakes import check

        request = CompressionRequest(
            config.source, config.output, recipe=config.recipe or default_recipe(config.output, config.as_draft),
            head=config.head or default_head(config.output, config.as_draft and config.recipe is None),
            vision=config.vision,
            target=parse_target(config.target_bits, config.target_size, config.target_kl, config.candidates),
            calibration=config.calib, calib_images=config.calib_images, imatrix=config.imatrix,
            evaluation=config.evaluation, evaluation_images=config.evaluation_images, samples=config.samples,
            length=config.length, seed=config.seed, drawn=config.self_samples, calib_memory=config.calib_memory,
            eval_tokens=config.eval_tokens, max_shard_bytes=config.max_shard, overwrite=config.overwrite,
            resume=not config.restart, device=config.device, as_draft=config.as_draft,
            requantize=config.requantize or config.as_draft,
        )  # fmt: skip
        check(request)
        require(config.device)

        from attar.compression.runs.pipeline import compress_request  # imports torch, which takes seconds

        done = compress_request(request, bar)
        bar.close()
        for line in summary(done):
            print(line)
        for sentence in warnings(done):
            tell(sentence)
        emit(config.as_json, done.to_dict())


def summary(done: Compressed) -> Iterator[str]:
    """Yield the cost of compression, for people: a table, gains on text set aside, size and bits."""
    from attar.compression.recipe.parser import KEEP
    from attar.evaluation.table import Row, cost_table

    name = done.recipe if done.head in (KEEP, done.recipe) else f"{done.recipe}, head {done.head}"
    yield cost_table([
        Row("original", done.source_bytes, None, {"ppl": (done.cost or {}).get("ppl_base")}),
        Row(name, done.bytes, done.bits_per_weight, done.cost),
    ])  # fmt: skip
    if (seen := done.images) is not None:
        kl, images = seen["kl_mean"], seen["protocol"]["images"]
        yield f"on {seen['tokens']:,} tokens behind {images} image{'s' * (images != 1)}: mean KL {kl:.3g}"
    if (error := (done.vision or {}).get("relative_error")) is not None and done.vision is not None:
        yield (
            f"vision tower and projector in {done.vision['scheme']}: {done.vision['linears']} linears; rows of a "
            f"generated image are off by {error:.2%} on average"
        )
    yield from gains(done)
    share = done.bytes / done.source_bytes
    yield f"{done.path}: {done.bytes:,} bytes, {share:.1%} of the original's, in {done.seconds:.1f} s"
    if done.block_seconds:
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in done.block_seconds.items())
        yield f"seconds a block: {sum(done.block_seconds.values()):.2f} ({stages})"
    with_head = " and the LM head" if done.head != KEEP else ""
    counted = f"bits/weight: all stored bits of the compressed linears{with_head}, over their weights"
    if done.allocated is not None:
        counted += f"; of the linears that the target chose for, {done.allocated:.3f}"
        yield f"KL on the text by which the bits were chosen: {done.reached:.4g}"
    yield counted


def warnings(done: Compressed) -> Iterator[str]:
    """Yield warnings about an output, for stderr."""
    from attar.checkpoints import vocabulary

    yield from (*done.warnings, *done.notes, *(done.images or {}).get("warnings", ()))
    if done.path.is_dir() and not vocabulary.has_tokenizer(done.path):  # a file's notes include it
        yield "the original has no tokenizer that attar reads, nor has this: it takes token ids alone"


def gains(done: Compressed) -> Iterator[str]:
    """Yield the gains of each recipe tried, and of tuning, on text set aside from calibration, for people."""
    from attar.evaluation.table import Row, cost_table

    if (chosen := done.selection) is not None:
        if chosen["tried"]:
            yield f"recipes tried, on {chosen['tokens']:,} tokens set aside to choose by:"
        rows = []
        for each in chosen["tried"]:
            ends = None if each["low"] is None else [each["low"], each["high"]]
            figures = {"kl_mean": each["kl"], "intervals": {"kl_mean": ends}}
            name = each["recipe"] + (" (kept)" if each["recipe"] == chosen["kept"] else "")
            rows.append(Row(name, None, each["bits_per_weight"], figures))
        if rows:
            yield cost_table(rows)
        for each in chosen["left_out"]:
            yield f"left out: {each['recipe']} ({each['why']})"
    if (gained := done.gain) is not None:
        yield (
            f"on {gained['tokens']:,} tokens held out from calibration: mean KL {gained['kl']:.3g}; plain rounding has "
            f"{gained['plain']:.3g}"
        )
    if (tuned := done.tuned) is not None:
        yield (
            f"tuning: mean KL {tuned['kl_before']:.3g} before and {tuned['kl_after']:.3g} after, on "
            f"{tuned['held_out_tokens']:,} tokens that it did not train on"
        )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(options.OutputConfig):
    """Options of `finetune`."""

    model: options.Folder
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The adapter's folder, in PEFT's format.")]
    text: Annotated[Path, option("Data", "FILE", "Training text (.txt, .jsonl).")]
    samples: Annotated[int, option("Data", "N", "Sequences taken from the text.", min=1)] = 1024
    length: Annotated[int, option("Data", "N", "Tokens of each sequence.", min=2)] = 512
    rank: Annotated[int, option("Adapter", "N", "Rank of each adapter.", min=1)] = 16
    alpha: Annotated[float, option("Adapter", "ALPHA", "Scale of the adapter: ALPHA / rank.")] = 32.0
    targets: Annotated[str, option("Adapter", "PATTERNS", "Linear layers to adapt: patterns with commas.")] = "*"
    epochs: Annotated[int, option("Training", "N", "Passes over the text.", min=1)] = 1
    rate: Annotated[float, option("Training", "RATE", "Learning rate (Adam).")] = 2e-4
    batch: Annotated[int, option("Training", "N", "Tokens of a step.", min=1)] = 2048
    save_every: Annotated[int, option("Training", "N", "Steps between two checkpoints of the run.", min=1)] = 25
    seed: Annotated[int, option("Training", "N", "Seed of all random numbers.", min=0)] = 0
    memory: Annotated[
        int | None, option("Device", "SIZE", "Memory to use at most.", parser=parse_bytes, default="the machine's")
    ] = None
    overwrite: options.Overwrite = False
    restart: options.Restart = False

    def training(self) -> FineTuning:
        """Make the settings of a training. Raises ValueError for settings that make no sense."""
        from attar.compression.training.finetune import FineTuning

        return FineTuning(
            self.rank, self.alpha, tuple(self.targets.split(",")), self.epochs, self.rate, self.batch, self.save_every,
            self.seed,
        )  # fmt: skip


@configured(FinetuneConfig)
def finetune(config: FinetuneConfig) -> None:
    """Train a low-rank adapter (LoRA, QLoRA).

    The model, compressed or not, is not changed. The same command resumes an interrupted run from its last checkpoint.

    Examples:
      attar finetune ./out ./tone --text text.txt
      attar finetune org/name ./tone --text chat.jsonl --rank 8 --epochs 2
    """
    with errors(config.as_json, "the same command resumes the run"), progress(config.quiet) as bar:
        from attar.checkpoints.sources import hub
        from attar.compression.training.finetune import finetune as run
        from attar.compression.training.finetune import read_ids

        path = hub.resolve(config.model)
        training = config.training()
        made = run(
            path, config.output, read_ids(path, config.text, config.samples, config.length), training,
            overwrite=config.overwrite, resume=not config.restart, memory=config.memory, progress=bar,
        )  # fmt: skip
        bar.close()
        print(f"{made.path}: {made.parameters:,} parameters, {len(made.losses)} step{'s' * (len(made.losses) != 1)}")
        print(f"loss of the first step {made.losses[0]:.4f}, of the last {made.losses[-1]:.4f}")
        for sentence in made.notes:
            tell(sentence)
        emit(config.as_json, made.to_dict())


def merge(
    model: options.Folder,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT adapter's folder.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The model's folder to write.")],
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Write a model with an adapter merged into it.

    A compressed model is dequantized first, and the output is dense. Its grids would round most of a small change away.
    The command prints how large the error on the same grids would be. `attar compress` compresses the output again.

    Examples:
      attar merge ./out ./tone ./merged
      attar merge org/name ./tone ./merged --overwrite
    """
    with errors(as_json):
        from attar.checkpoints.adapters.merge import merge as run
        from attar.checkpoints.sources import hub

        base = hub.resolve(model)
        tell_doubt(adapter, base)
        done = run(base, adapter, output, overwrite=overwrite)
        print(f"{output}: {len(done.linears)} linears changed")
        for sentence in done.sentences():
            print(sentence)
        emit(as_json, done.to_dict())
