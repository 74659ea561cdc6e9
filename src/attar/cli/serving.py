"""The commands about serving: `serve` and `bench-serve`."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import threading
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from attar import logs
from attar.cli.options import DEVICE, MODEL, Activations, Json, Kv, NoVerify, Pp, Quiet, Rounding, Tp
from attar.cli.scheduling import (
    KvFraction,
    MaxDelay,
    MaxPreemptions,
    MaxRunning,
    MaxStepTokens,
    MaxTokensInCache,
    MaxWaiting,
    Memory,
    PolicyOption,
    PresetOption,
    Threads,
)
from attar.cli.terminal import CHECK_FAILED, emit, errors, fail, progress, require_apart, tell, tell_shared

BESIDES = 64  # HTTP requests open besides those that run or wait: read, refused, or about something else
ENGINE = (sys.executable, "-m", "attar.engine.main")  # the command line of its process
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]+")
NO_PAGES = ("*", "null", "file://")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # which browsers leave out


class Arrivals(StrEnum):
    """When requests are sent in an open loop."""

    poisson = "poisson"
    trace = "trace"


def serve(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help=MODEL)] = "demo",
    host: Annotated[str, typer.Option(help="Address; other than loopback needs an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="What requests call the model; default: the folder's or file's own name, or the Hub id."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Keys, one a line, of 32 characters or more, in a file of mode 600; or set ATTAR_API_KEY."),
    ] = None,
    memory: Memory = None,
    max_tokens_in_cache: MaxTokensInCache = None,
    kv_fraction: KvFraction = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Longest request in tokens; default: the model's, or what fits.")
    ] = None,
    kv: Kv = None,
    preset: PresetOption = None,
    policy: PolicyOption = None,
    max_running: MaxRunning = None,
    max_step_tokens: MaxStepTokens = None,
    max_waiting: MaxWaiting = None,
    max_delay: MaxDelay = None,
    max_preemptions: MaxPreemptions = None,
    triton_config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.PBTXT",
            help="Take what is not said here from a Triton Inference Server's configuration of a TensorRT-LLM model; "
            "`attar triton import` shows what that is.",
        ),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="HTTP requests open at a time; more get 429, as do bodies of over 1 GiB together. Default: as many as "
            f"run and wait in the engine (--max-running, --max-waiting), and {BESIDES} more.",
        ),
    ] = None,
    max_requests_per_key: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that one API key may have open; more get 429. Default: with several keys half of "
            "--max-requests, so that one cannot take them all; with one key no limit.",
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
        list[str] | None,
        typer.Option(help="A web page's origin that may call, such as https://chat.example; can be repeated."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name that clients may call this server by, behind a proxy that passes the Host header on; can be "
            "repeated. Loopback's own are always among them. Default: on loopback only those, elsewhere any.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", show_default="cpu", help=DEVICE)] = None,
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
        from msgspec.structs import replace as replaced

        from attar.checkpoints import vocabulary
        from attar.checkpoints.fingerprints import fingerprints
        from attar.checkpoints.sources import hub
        from attar.kv.schemes import scheme
        from attar.plan.fit import check_fraction
        from attar.protocol.settings import Settings
        from attar.server import supervisor
        from attar.server.admission.rate_limits import KeyLimits
        from attar.server.http.security import Keys, find_keys
        from attar.server.model_names import check_name, name_of, parse_adapters
        from attar.server.options import ServerOptions
        from attar.text import template

        _check_host(host)
        origins = frozenset(map(_origin, origin or ()))
        called = name_of(model) if name is None else check_name(name)
        logs.begin()
        keys = Keys.of(find_keys(api_key_file, os.environ))  # first: it takes the key from what children inherit
        theirs = {} if triton_config is None else _of_triton(triton_config)
        if device is None:
            device = str(theirs.get("device", "cpu"))
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
            kv_fraction=kv_fraction,
            preset=None if preset is None else preset.value,
            policy=None if policy is None else policy.value,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_waiting=max_waiting,
            max_delay=max_delay,
            max_preemptions=max_preemptions,
            threads=threads,
            verify=not no_verify,
            tp=tp,
            pp=pp,
            adapters=parse_adapters(adapter or (), called),
            name=called,
        )
        if policy is not None and policy.value != "dynamic":  # of which alone the delay is
            theirs.pop("max_delay", None)
        settings = replaced(
            settings, **{name: value for name, value in theirs.items() if getattr(settings, name) is None}
        )
        chosen = settings.limits()  # refuses what cannot be before anything starts
        check_fraction(settings.kv_fraction)
        if settings.max_delay is not None and chosen.policy != "dynamic":
            raise ValueError(f"--max-delay is of --policy dynamic; with {chosen.policy} nothing waits for company")
        tell_shared(device, tp, pp)
        options = ServerOptions(
            host=host,
            port=port,
            keys=keys,
            hosts=frozenset(allowed_host or ()),
            origins=origins,
            max_requests=chosen.together + chosen.max_waiting + BESIDES if max_requests is None else max_requests,
            limits=KeyLimits(max_requests_per_key, tokens_per_minute),
            deadline=deadline,
            drain_seconds=drain_seconds,
        )
        settings = replaced(
            settings, files=fingerprints(settings.folders)
        )  # first: what is replaced from now on is noticed
        tokenizer = vocabulary.tokenizer(path)

        def started(url: str) -> None:
            if tokenizer.chat_templates:  # so that the first conversation need not wait for it
                threading.Thread(target=template.warm, name="template-start", daemon=True).start()
            tell(f"listening at {url} (the model is loading)")
            emit(as_json, {"url": url, "pid": os.getpid()})

        try:
            status = supervisor.run(settings, tokenizer, options, ENGINE, started)
        except OSError as error:
            raise _named(error, host, port) from None
        if status:
            raise typer.Exit(status)


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
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a made-up prompt.")] = 256,
    gen: Annotated[int, typer.Option(min=1, help="Tokens of its answer.")] = 64,
    spread: Annotated[float, typer.Option(min=0, help="Lengths vary by this fraction either way.")] = 0.0,
    prefixes: Annotated[int, typer.Option(min=0, help="Number of beginnings that made-up prompts share.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each beginning.")] = 0,
    rates: Annotated[
        str | None, typer.Option("--rates", "--rate", help="Open loop: requests a second, one run each: 1,2,4.")
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help="Closed loop: numbers of clients, one run each; default, with neither rates nor a trace: 1,4,16."
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals, typer.Option(help="Of an open loop: random, or a trace's times stretched to the rate.")
    ] = Arrivals.poisson,
    slo: Annotated[str | None, typer.Option(help="Limits in seconds for goodput: ttft=1.0,tpot=0.05.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, tokens and arrival times.")] = 0,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Send nothing after so long.")] = None,
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
    """Load a server and measure latency, throughput and goodput.

    Where the server tells its longest context, longer requests are refused before anything is sent. Requests that fail
    are counted and quoted in the report; the exit status is 1 where none succeeded, and 0 otherwise.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.load import measures, sweep
        from attar.load import plot as drawing
        from attar.load.traces import Synthetic
        from attar.text.tokenizer import Tokenizer

        if plot is not None:
            drawing.check(plot)
        more = {} if extra is None else _object(extra)
        if rates is None and clients is None and trace is None:
            clients = "1,4,16"
        options = sweep.Options(
            url, _key(api_key_file), model, chat, text,
            decode=None if tokenizer is None else Tokenizer.load(tokenizer).decode,
            trace=trace, synthetic=Synthetic(prompt, gen, spread, prefixes, prefix_tokens), requests=requests,
            divisor=divisor, longest=longest, vocabulary=vocabulary, rates=sweep.numbers("--rates", rates),
            clients=sweep.counts("--clients", clients), arrivals=arrivals.value,
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
        if (sentence := sweep.failure(report)) is not None:
            fail(sentence, CHECK_FAILED)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'--extra is a JSON object such as {{"top_k": 1}}: {error}') from None
    if not isinstance(found, dict):
        raise ValueError('--extra is a JSON object such as {"top_k": 1}')
    return found


def _origin(text: str) -> str:
    """As browsers say it: in small letters, without a path, not even `/`, and without a port that goes without saying.
    Raises ValueError for what no page's origin can be. What stands for more than one is the door's affair."""
    if text in NO_PAGES:
        return text
    origin = text.lower().removesuffix("/")
    scheme, _, rest = origin.partition("://")
    if not ORIGIN.fullmatch(origin) or set(rest) & set("/?#@"):
        raise ValueError(
            f"--origin {text!r} is no page's: write scheme, host and port, such as https://chat.example:8443"
        )
    return origin.removesuffix(DEFAULT_PORTS.get(scheme, ""))


def _check_host(host: str) -> None:
    """Raises ValueError for what cannot be a name: a socket would not take it, with an error of another kind; and for
    an empty one, which to it is every address there is."""
    try:
        sound = bool(host.encode("idna"))
    except UnicodeError:
        sound = False
    if not sound:
        raise ValueError(f"--host {host!r} is neither an address nor a name") from None


def _named(error: OSError, host: str, port: int) -> Exception:
    """The error with the address, where that is what cannot be had."""
    if error.filename is not None:
        return error
    at = f"cannot listen at {host}, port {port}: {str(error.strerror).lower()}"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return ValueError(f"{at}; --port takes another, and 0 a free one")
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return ValueError(f"{at}; --host is an address or a name of this machine, such as 127.0.0.1 or ::1")
    return error


def _of_triton(file: Path) -> dict[str, Any]:
    """Settings of a Triton configuration; what is lost of it is said, and what is as it is anyhow."""
    from attar.integrations.triton_server import config as triton_config

    imported = triton_config.load(file)
    for note in imported.notes:
        tell(f"{file}: note: {note}")
    for warning in imported.warnings:
        tell(f"{file}: warning: {warning}")
    return imported.settings()


def _key(file: Path | None) -> str | None:
    """What a client sends: the key of a file or else of the environment, never of the command line, where every user of
    the machine could read it. Raises ValueError where the file holds none, or several."""
    from attar.server.http.security import KEY_VARIABLE

    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    keys = file.read_text(encoding="utf-8").split()
    if len(keys) != 1:
        raise ValueError(f"{file} holds {len(keys)} keys: a client sends one")
    return keys[0]
