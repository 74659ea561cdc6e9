"""Commands that make a model smaller, or teach it: `compress`, `finetune`, `merge`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar.cli.options import Device, Folder, Json, Quiet
from attar.cli.terminal import (
    emit,
    errors,
    parse_bytes,
    progress,
    tell,
    tell_doubt,
)

if TYPE_CHECKING:
    from attar.compression.runs.pipeline import Compressed
    from attar.compression.search.target import Target
    from attar.formats.scheme import Scheme


RESUME = "the same command goes on after the last finished block, if there is one; --restart begins anew"


TargetBits = Annotated[
    float | None,
    typer.Option(
        metavar="BITS",
        help="Choose the bits of each layer by what they do to the predictions: so many a weight of the blocks' "
        "linears, on average, less those that an override decides about; a packed output matrix is not counted.",
    ),
]
TargetSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The same, for weight files of at most this size, such as 700MB.")
]
TargetKl = Annotated[
    float | None, typer.Option(metavar="KL", help="The same: as small as this mean KL on calibration text allows.")
]
Ladder = Annotated[
    str | None,
    typer.Option(metavar="SCHEMES", help="What a target chooses among, such as w2g64,w3g128,w4g128,w8; default: the "
                 "recipe's own with 2 to 8 bits."),
]  # fmt: skip


def parse_target(
    bits: float | None, size: str | None, kl: float | None, ladder: str | None
) -> tuple[Target | None, tuple[Scheme, ...] | None]:
    """What the options say. Raises ValueError for two targets, or a ladder without one."""
    from attar.compression.search.target import Target, parse_ladder

    if bits is None and size is None and kl is None:
        if ladder is not None:
            raise ValueError("--ladder is what a target chooses among: give --target-bits, -size or -kl as well")
        return None, None
    target = Target(bits, None if size is None else parse_bytes(size), kl)
    return target, None if ladder is None else parse_ladder(ladder)


def compress(
    source: Folder,
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
            "(the default), iq4_xs or f16; several with commas between, or best-w4g128, to keep the one that does best "
            "on calibration text set aside; ablate- before a name, to keep those of its steps that help there; or a "
            "YAML file with overrides."
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="The output matrix: bf16 (as it is), int8, int4, or a scheme; in OUT.gguf int8 is q8_0 and int4 q4_0. "
            "Default: the recipe's, kept."
        ),
    ] = None,
    target_bits: TargetBits = None,
    target_size: TargetSize = None,
    target_kl: TargetKl = None,
    ladder: Ladder = None,
    calib: Annotated[
        str | None,
        typer.Option(
            help="Calibration text (.txt, .jsonl), or `self`: sampled from the model. rtn and hqq need none, unless "
            "the scheme fixes activation scales (nvfp4, w8a8-static); nor do GGUF mixes, which weigh errors by it."
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            help="Of OUT.gguf: importances to weigh errors by, from `attar imatrix` or llama.cpp's; gptq and its kin "
            "search scales by them, and choose codes by --calib."
        ),
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="Held-out text: measure the cost on it and write it into the receipt.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each calibration sequence.")] = 512,
    drawn: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sequences more that the model itself writes, to go with the calibration text: guided and gptq then "
            "fit the text less, at so much more time.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything drawn at random.")] = 0,
    calib_memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Calibration activations held in memory at most; more is read from disk."),
    ] = "2GiB",
    max_shard: Annotated[
        str, typer.Option(metavar="SIZE", help="Size at which the output is split into another file.")
    ] = "5GB",
    eval_tokens: Annotated[int | None, typer.Option(min=2, help="Use at most this many tokens of --eval.")] = None,
    device: Device = "cpu",
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
        from attar.checkpoints import vocabulary
        from attar.compression.recipe.parser import KEEP
        from attar.compression.runs.pipeline import compress as run
        from attar.compression.runs.pipeline import default_recipe
        from attar.evaluation.table import Row, cost_table

        target, rungs = parse_target(target_bits, target_size, target_kl, ladder)
        done = run(
            source, output, recipe=recipe or default_recipe(output), head=head, target=target, ladder=rungs,
            calibration=calib, imatrix=imatrix, evaluation=evaluation, samples=samples, length=length, seed=seed,
            drawn=drawn, calib_memory=parse_bytes(calib_memory), max_shard_bytes=parse_bytes(max_shard),
            eval_tokens=eval_tokens, overwrite=overwrite, resume=not restart, progress=bar, device=device,
        )  # fmt: skip
        bar.close()
        name = done.recipe if done.head in (KEEP, done.recipe) else f"{done.recipe}, head {done.head}"
        original = {"ppl": (done.cost or {}).get("ppl_base")}
        print(cost_table([
            Row("original", done.source_bytes, None, original),
            Row(name, done.bytes, done.bits_per_weight, done.cost),
        ]))  # fmt: skip
        for line in gains(done):
            print(line)
        share = done.bytes / done.source_bytes
        print(f"{done.path}: {done.bytes:,} bytes, {share:.1%} of the original's, in {done.seconds:.1f} s")
        with_head = " and the output matrix" if done.head != KEEP else ""
        counted = f"bits/weight: all stored bits of the compressed linears{with_head}, over their weights"
        if done.allocated is not None:
            counted += f"; of the linears that the target chose for, {done.allocated:.3f}"
            print(f"KL on the text by which the bits were chosen: {done.reached:.4g}")
        print(counted)
        for sentence in (*done.warnings, *done.notes):
            tell(sentence)
        if done.path.is_dir() and not vocabulary.has_tokenizer(done.path):  # of a file its notes say it
            tell("the original has no tokenizer that attar reads, nor has this: it takes token ids alone")
        emit(as_json, done.to_dict())


def gains(done: Compressed) -> Iterator[str]:
    """What each recipe tried, and tuning, gained on text set aside from calibration, for people."""
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
            f"on {gained['tokens']:,} tokens that calibrated nothing: mean KL {gained['kl']:.3g}, by plain rounding "
            f"{gained['plain']:.3g}"
        )
    if (tuned := done.tuned) is not None:
        yield (
            f"tuning: mean KL {tuned['kl_before']:.3g} before and {tuned['kl_after']:.3g} after, on "
            f"{tuned['held_out_tokens']:,} tokens that it did not train on"
        )


def finetune(
    model: Folder,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The adapter's folder, as PEFT reads it.")],
    text: Annotated[Path, typer.Option(help="What to learn: a text (.txt, .jsonl).")],
    samples: Annotated[int, typer.Option(min=1, help="Sequences taken from the text.")] = 1024,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 512,
    rank: Annotated[int, typer.Option(min=1, help="Rank of each adapter.")] = 16,
    alpha: Annotated[float, typer.Option(help="The adapter counts alpha / rank times.")] = 32.0,
    targets: Annotated[str, typer.Option(help="Patterns of the linears that get one, with commas between.")] = "*",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = 1,
    rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = 2e-4,
    batch: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 2048,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two saves, from which a run resumes.")] = 25,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything drawn at random.")] = 0,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory to use at most; by default, the machine's.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the adapter where it exists.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Do not resume an interrupted run.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a low-rank adapter (LoRA, QLoRA).

    The model stays as it is, compressed or not. A run that was interrupted resumes where it was last saved.
    """
    with errors(as_json, "the same command resumes the run"), progress(quiet) as bar:
        from attar.checkpoints.sources import hub
        from attar.compression.training.finetune import FineTuning, read_ids
        from attar.compression.training.finetune import finetune as run

        path = hub.resolve(model)
        options = FineTuning(rank, alpha, tuple(targets.split(",")), epochs, rate, batch, save_every, seed)
        made = run(
            path, output, read_ids(path, text, samples, length), options, overwrite=overwrite, resume=not restart,
            memory=None if memory is None else parse_bytes(memory), progress=bar,
        )  # fmt: skip
        bar.close()
        print(f"{made.path}: {made.parameters:,} parameters, {len(made.losses)} step{'s' * (len(made.losses) != 1)}")
        print(f"loss of the first step {made.losses[0]:.4f}, of the last {made.losses[-1]:.4f}")
        for sentence in made.notes:
            tell(sentence)
        emit(as_json, made.to_dict())


def merge(
    model: Folder,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT adapter's folder.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The model's folder to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output where it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model with an adapter merged into it.

    A compressed model is dequantized first and the output is dense, because a grid would round most of a small change
    away; how far off it would be on the same grids again is said. `attar compress` makes it small once more.
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
