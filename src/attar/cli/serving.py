"""The commands about serving: `serve`, `plan` and `bench-serve`."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attar.cli.options import MODEL, Activations, Device, Json, Kv, NoVerify, Pp, Quiet, Rounding, Tp
from attar.cli.terminal import emit, errors, parse_bytes, progress, require_apart, tell, tell_shared

Memory = Annotated[
    int | None,
    typer.Option(
        parser=parse_bytes, metavar="SIZE", help="Memory to use, such as 16GB; default: 90 % of what is free."
    ),
]


class Preset(StrEnum):
    """Scheduler settings for a purpose."""

    latency = "latency"
    throughput = "throughput"
    long_context = "long-context"


class Policy(StrEnum):
    """How requests share steps."""

    continuous = "continuous"
    dynamic = "dynamic"
    static = "static"
    none = "none"


MaxTokensInCache = Annotated[
    int | None, typer.Option(min=1, help="Size of the KV cache in tokens; default: what the memory leaves.")
]
PresetOption = Annotated[Preset | None, typer.Option("--preset", help="Scheduler settings for a purpose.")]
PolicyOption = Annotated[Policy | None, typer.Option("--policy", help="How requests share steps; default: continuous.")]
MaxRunning = Annotated[int | None, typer.Option(min=1, help="Sequences that run together.")]
MaxStepTokens = Annotated[int | None, typer.Option(min=1, help="Tokens in one step.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of a CPU; default: one a core.")]


class Arrivals(StrEnum):
    """When requests are sent in an open loop."""

    poisson = "poisson"
    trace = "trace"


def serve(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help=MODEL)] = "demo",
    host: Annotated[str, typer.Option(help="Address; other than loopback needs an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Keys, one a line, of 32 characters or more, in a file of mode 600; or set ATTAR_API_KEY."),
    ] = None,
    memory: Memory = None,
    max_tokens_in_cache: MaxTokensInCache = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Longest request in tokens; default: the model's, or what fits.")
    ] = None,
    kv: Kv = None,
    preset: PresetOption = None,
    policy: PolicyOption = None,
    max_running: MaxRunning = None,
    max_step_tokens: MaxStepTokens = None,
    max_waiting: Annotated[int | None, typer.Option(min=1, help="Sequences that may wait; more get 429.")] = None,
    max_delay: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that policy dynamic waits for more to start together with; default: 0.1."),
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="HTTP requests open at a time; more get 429.")] = 256,
    max_requests_per_key: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that one API key may have open; more get 429. Default: with several keys half of "
            "--max-requests, so that one cannot take them all; with one key no limit. What waits in the engine, "
            "--max-waiting, is of all keys together.",
        ),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that one API key may use in a minute, prompts and answers; more get 429. What a request asks "
            "for is set aside until it ends.",
        ),
    ] = None,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 600.0,
    drain_seconds: Annotated[float, typer.Option(min=0, help="Seconds for open requests at the end.")] = 30.0,
    origin: Annotated[
        list[str] | None, typer.Option(help="A web page's origin that may call; can be repeated.")
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    activations: Activations = Rounding.int8g128,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="A LoRA adapter, as PEFT stores it, for requests whose `model` is NAME. Repeatable.",
        ),
    ] = None,
    tp: Tp = 1,
    pp: Pp = 1,
    no_verify: NoVerify = False,
    as_json: Json = False,
) -> None:
    """Serve a model over HTTP, to OpenAI's and Anthropic's clients.

    Where the memory goes is computed and shown before anything is loaded. Ctrl-C or SIGTERM lets open requests finish.
    """
    with errors(as_json):
        from attar.checkpoints import hub, vocabulary
        from attar.engine.settings import Settings, parse_adapters
        from attar.formats.kv import scheme
        from attar.server import supervisor
        from attar.server.door import Options
        from attar.server.quota import Limits
        from attar.server.security import Keys, find_keys

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        keys = Keys.of(find_keys(api_key_file, os.environ))  # first: it takes the key from what children inherit
        require_apart(device)
        path = hub.resolve(model)
        settings = Settings(
            model=str(path),
            socket="",
            device=device,
            activations=activations.value,
            kv=None if kv is None else scheme(kv).name,
            context=context,
            memory=memory,
            max_cached_tokens=max_tokens_in_cache,
            preset=None if preset is None else preset.value,
            policy=None if policy is None else policy.value,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_waiting=max_waiting,
            max_delay=max_delay,
            threads=threads,
            verify=not no_verify,
            tp=tp,
            pp=pp,
            adapters=parse_adapters(adapter or (), path.name),
        )
        chosen = settings.limits()  # refuses what cannot be before anything starts
        if max_delay is not None and chosen.policy != "dynamic":
            raise ValueError(f"--max-delay is of --policy dynamic; with {chosen.policy} nothing waits for company")
        tell_shared(device, tp, pp)
        options = Options(
            host=host,
            port=port,
            keys=keys,
            origins=frozenset(origin or ()),
            max_requests=max_requests,
            limits=Limits(max_requests_per_key, tokens_per_minute),
            deadline=deadline,
            drain_seconds=drain_seconds,
        )
        tokenizer = vocabulary.tokenizer(path)

        def started(url: str) -> None:
            tell(f"listening at {url} (the model is loading)")
            emit(as_json, {"url": url, "pid": os.getpid()})

        status = supervisor.run(settings, tokenizer, options, started)
        if status:
            raise typer.Exit(status)


def plan(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL)] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model, the shape of a published one, such as llama-3.1-8b.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Of a shape: the scheme of its output matrix, such as w8; default: bf16.")
    ] = None,
    memory: Memory = None,
    max_tokens_in_cache: MaxTokensInCache = None,
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
        typer.Option(parser=parse_bytes, metavar="SIZE", help="Bytes that memory reads a second; default: measured."),
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
    the same options. Speeds are what memory allows at best. With --tp or --pp, --memory and --bandwidth are of one GPU;
    of CPU processes too --memory is what each has, where `attar serve` divides what it is given among them.
    """
    with errors(as_json):
        from attar import machine
        from attar.engine.settings import Settings
        from attar.formats.kv import scheme as kv_scheme
        from attar.formats.scheme import Scheme
        from attar.model.split import Share
        from attar.plan import fit, report
        from attar.plan.costs import Storage

        if (model is None) == (shape is None):
            raise ValueError("name a model or a --shape, one of the two")
        if shape is not None:
            from attar.model import shapes

            name, config = shape, shapes.shape(shape)
            storage = Storage(None, None if head is None else Scheme.parse(head).with_scale_dtype("bfloat16"))
        else:
            from attar.checkpoints import hub
            from attar.checkpoints.stored import stored

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
            from attar.checkpoints import lora

            beside = lora.memory(adapter, config, chosen.max_step_tokens)
        here, rate = machine.examine(), None
        if bandwidth is None:
            from attar.kernels.native import extension, limits

            if extension.loaded():
                roof = limits.measure()
                bandwidth, rate = int(roof.read_gb_s * 1e9), 1e9 * (roof.tile_gops or roof.int8_gops)
            else:
                tell("the kernels do not load, so how fast memory reads is not known: give --bandwidth")
        each = f", each of {tp * pp} processes" if tp * pp > 1 else ""
        made = fit.plan(
            name, config, fit.usual(config, storage), fit.Demand(context, users),
            memory or here.budget // (tp * pp), ("--memory" if memory else here.limited_by) + each,
            limits=chosen.steps(threads or here.cores), max_tokens=max_tokens_in_cache,
            kv_schemes=None if kv is None else (kv_scheme(kv).name,),
            bandwidth=bandwidth, int8_rate=rate, adapters=beside, share=Share(0, tp, pp),
        )  # fmt: skip
        print(f"{report.to_text(made)}\n{chosen.told(settings.preset)}")
        emit(as_json, report.to_dict(made))


def bench_serve(
    url: Annotated[str, typer.Option(help="A server that speaks OpenAI's API.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Its name there; default: the first that the server lists.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the key that is sent as a bearer token; or set ATTAR_API_KEY.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Send prompts as words, not as token ids.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the tokenizer that turns ids into text.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Requests of a trace file: ShareGPT ids, Mooncake blocks or Azure lengths.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each run, at most.")] = 100,
    divisor: Annotated[int, typer.Option(min=1, help="Divide the lengths of a trace.")] = 1,
    longest: Annotated[int | None, typer.Option(min=2, help="Leave out requests of more tokens in all.")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Keep token ids below this.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a made-up prompt.")] = 512,
    gen: Annotated[int, typer.Option(min=1, help="Tokens of its answer.")] = 128,
    spread: Annotated[float, typer.Option(min=0, help="Lengths vary by this fraction either way.")] = 0.0,
    prefixes: Annotated[int, typer.Option(min=0, help="Number of beginnings that made-up prompts share.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each beginning.")] = 0,
    rates: Annotated[
        str | None, typer.Option("--rates", "--rate", help="Open loop: requests a second, one run each: 1,2,4.")
    ] = None,
    clients: Annotated[str | None, typer.Option(help="Closed loop: numbers of clients, one run each: 1,8,32.")] = None,
    arrivals: Annotated[
        Arrivals, typer.Option(help="Of an open loop: random, or a trace's times stretched to the rate.")
    ] = Arrivals.poisson,
    slo: Annotated[str | None, typer.Option(help="Limits in seconds for goodput: ttft=1.0,tpot=0.05.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, tokens and arrival times.")] = 0,
    seconds: Annotated[float | None, typer.Option(min=0, help="Send nothing after so long.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one answer may take.")] = 600.0,
    temperature: Annotated[float, typer.Option(min=0, help="Of every request.")] = 0.0,
    no_ignore_eos: Annotated[
        bool, typer.Option("--no-ignore-eos", help="Let answers end early; for servers that do not know ignore_eos.")
    ] = False,
    extra: Annotated[str | None, typer.Option(help="A JSON object that goes into every request.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against load: a .html or .png file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Load a server and measure latency, throughput and goodput."""
    with errors(as_json), progress(quiet) as bar:
        from attar.load import measures, sweep
        from attar.load import plot as drawing
        from attar.load.traces import Synthetic
        from attar.text.tokenizer import Tokenizer

        if plot is not None:
            drawing.check(plot)
        more = {} if extra is None else json.loads(extra)
        if not isinstance(more, dict):
            raise ValueError('--extra is a JSON object such as {"top_k": 1}')
        options = sweep.Options(
            url, _key(api_key_file), model, chat, text,
            decode=None if tokenizer is None else Tokenizer.load(tokenizer).decode,
            trace=trace, synthetic=Synthetic(prompt, gen, spread, prefixes, prefix_tokens), requests=requests,
            divisor=divisor, longest=longest, vocabulary=vocabulary, rates=sweep.numbers("--rates", rates),
            clients=tuple(int(each) for each in sweep.numbers("--clients", clients)), arrivals=arrivals.value,
            seed=seed, slo={} if slo is None else measures.parse_slo(slo), temperature=temperature,
            ignore_eos=not no_ignore_eos, timeout=timeout, seconds=seconds, extra=more,
        )  # fmt: skip
        report = sweep.bench_serve(options, bar)
        bar.close()
        table = sweep.to_text(report)
        print(table)
        if plot is not None:
            drawing.save(plot, report["runs"], f"{report['model']}: latency against load", table)
            tell(f"drawn into {plot}")
        emit(as_json, report)


def _key(file: Path | None) -> str | None:
    """What a client sends: the key of a file or else of the environment, never of the command line, where every user of
    the machine could read it. Raises ValueError where the file holds none, or several."""
    from attar.server.security import KEY_VARIABLE

    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    keys = file.read_text(encoding="utf-8").split()
    if len(keys) != 1:
        raise ValueError(f"{file} holds {len(keys)} keys: a client sends one")
    return keys[0]
