"""`attar plan`: what fits, for whom and how fast, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar.cli.options import MODEL, Json, Pp, Tp
from attar.cli.scheduling import (
    KvFraction,
    MaxRunning,
    MaxStepTokens,
    MaxTokensInCache,
    Memory,
    PolicyOption,
    PresetOption,
    Threads,
    parse_size,
)
from attar.cli.terminal import emit, errors, require, tell

if TYPE_CHECKING:
    from attar.plan.cards import Card


def plan(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL)] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model, the shape of a published one, such as llama-3.1-8b.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Of a shape: the scheme of its output matrix, such as w8; default: bf16.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="What to plan for: cpu, this machine, or cuda, the GPU in it; cuda:1 is the second."
        ),
    ] = "cpu",
    card: Annotated[
        str | None, typer.Option(help="Instead, a GPU by its data sheet, such as h100; it need not be here.")
    ] = None,
    memory: Memory = None,
    max_tokens_in_cache: MaxTokensInCache = None,
    kv_fraction: KvFraction = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompt and answer; default: the model's, or what fits."),
    ] = None,
    users: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests of that length at once. --max-running and --max-step-tokens are raised to as many, where "
            "they are not given.",
        ),
    ] = 1,
    kv: Annotated[
        str | None,
        typer.Option("--kv", help="One way to keep keys and values, by `serve`'s words; default: the usual ones."),
    ] = None,
    preset: PresetOption = None,
    policy: PolicyOption = None,
    max_running: MaxRunning = None,
    max_step_tokens: MaxStepTokens = None,
    threads: Threads = None,
    bandwidth: Annotated[
        int | None,
        typer.Option(parser=parse_size, metavar="SIZE", help="Bytes that memory reads a second; default: measured."),
    ] = None,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A LoRA adapter that is served beside the model. Repeatable."),
    ] = None,
    tp: Tp = 1,
    pp: Pp = 1,
    as_json: Json = False,
) -> None:
    """Say what fits, for how many users, and how fast.

    For each precision of weights and of keys and values, before anything is loaded: as `attar serve` would start, given
    the same options. Speeds are what memory, and on a GPU arithmetic, allows at best. What driver and graphs take of a
    GPU is measured when a server starts, and not known here. With --tp or --pp, --memory and --bandwidth are of one
    GPU; of CPU processes too --memory is what each has, where `attar serve` divides what it is given among them.
    """
    with errors(as_json):
        from attar import machine
        from attar.formats.scheme import Scheme
        from attar.kv.schemes import scheme as kv_scheme
        from attar.model.split import Share
        from attar.plan import fit, report
        from attar.plan.costs import Storage
        from attar.plan.steps import StepLimits
        from attar.protocol.settings import Settings

        if (model is None) == (shape is None):
            raise ValueError("name a model or a --shape, one of the two")
        gpu = _gpu(device, card, bandwidth)
        if shape is not None:
            from attar.model import shapes

            name, config = shape, shapes.shape(shape)
            storage = Storage(None, None if head is None else Scheme.parse(head).with_scale_dtype("bfloat16"))
        else:
            from attar.checkpoints.sources import hub
            from attar.checkpoints.sources.stored import stored

            if head is not None:
                raise ValueError("--head is of a shape: a model's output matrix is as it is stored")
            name = str(model)
            config, storage = stored(hub.resolve(name))
        settings = Settings(
            model=name,
            socket="",
            preset=None if preset is None else preset.value,
            policy=None if policy is None else policy.value,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
        )
        chosen = settings.limits()
        if max_running is None and users > chosen.max_running:
            if max_step_tokens is not None and users > max_step_tokens:
                raise ValueError(f"{users} users at once need as many tokens a step: raise --max-step-tokens")
            raised = f"--max-running {users}"
            if users > chosen.max_step_tokens:
                raised += f" --max-step-tokens {users}"
            chosen = replace(chosen, max_running=users, max_step_tokens=max(users, chosen.max_step_tokens))
            tell(f"for {users} users at once, as with {raised}")
        beside = 0
        if adapter:
            from attar.checkpoints.adapters import lora

            beside = lora.memory(adapter, config, chosen.max_step_tokens, Share(0, tp, pp))
        here, rate = machine.examine(), None
        if bandwidth is None and gpu is None:
            from attar.kernels.native import extension, limits

            if extension.loaded():
                roof = limits.measure()
                bandwidth, rate = int(roof.read_gb_s * 1e9), 1e9 * (roof.tile_gops or roof.int8_gops)
            else:
                tell("the kernels do not load, so how fast memory reads is not known: give --bandwidth")
        each = f", each of {tp * pp} processes" if tp * pp > 1 else ""
        free, source = (here.memory, here.limited_by) if gpu is None else (gpu.memory, gpu.name)
        budget = memory
        if budget is None:
            share = machine.SHARE if kv_fraction is None else 1.0
            budget = int(free * share) // (tp * pp if gpu is None else 1)
        made = fit.plan(
            name, config, fit.usual(config, storage), fit.Demand(context, users),
            budget, (source if memory is None else "--memory") + each,
            limits=StepLimits.of(chosen, threads or here.cores), max_tokens=max_tokens_in_cache,
            kv_schemes=None if kv is None else (kv_scheme(kv).name,),
            bandwidth=bandwidth, int8_rate=rate, adapters=beside, share=Share(0, tp, pp),
            fraction=kv_fraction, card=gpu,
        )  # fmt: skip
        print(f"{report.to_text(made)}\n{chosen.told(settings.preset)}")
        emit(as_json, report.to_dict(made))


def _gpu(device: str, card: str | None, bandwidth: int | None) -> Card | None:
    """What is planned for, if it is a GPU: one by its data sheet, or the one at hand as it measures. Raises ValueError
    where there is none."""
    from attar.plan import cards

    if card is not None:
        if device != "cpu":
            raise ValueError("name a --device or a --card, one of the two")
        found = cards.card(card)
    else:
        require(device)
        if device == "cpu":
            return None
        import torch

        from attar.engine import bottleneck
        from attar.engine.memory_profile import CardMemory
        from attar.kernels.triton.weights import knows_float8

        place = torch.device(device)
        free = CardMemory(place).free()
        try:
            gb_s, gops = bottleneck.card_limits(place)
        except torch.OutOfMemoryError:
            raise ValueError(f"{device} has too little memory free to be measured: name its --card") from None
        rates = {kind: 1e9 * rate for kind, rate in gops.items()}
        name = f"free on {device}, {torch.cuda.get_device_name(place)}"
        found = cards.Card(name, free, 1e9 * gb_s, rates, knows_float8(place))
    return found if bandwidth is None else replace(found, bandwidth=float(bandwidth))
