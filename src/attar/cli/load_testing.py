"""The command `bench-serve`: load a server and measure it."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attar.cli.commands import configured, flag, option
from attar.cli.options import OutputConfig
from attar.cli.terminal import CHECK_FAILED, emit, errors, fail, progress, tell
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.load.sweep import Options
    from attar.progress import Progress


URL = "http://127.0.0.1:8000"


class Arrivals(StrEnum):
    """A timing of requests in an open loop."""

    poisson = "poisson"
    trace = "trace"


@dataclass(frozen=True, kw_only=True)
class BenchServeConfig(OutputConfig):
    """Options of `bench-serve`."""

    url: Annotated[str | None, option(
        "Server", "URL", "A server of OpenAI's API.", default=URL,
    )] = None  # fmt: skip
    model: Annotated[
        str | None, option("Server", "NAME", "The model's name there.", default="the first that the server lists")
    ] = None
    api_key_file: Annotated[
        Path | None, option("Server", "FILE", "File with the key to send as bearer token; or set ATTAR_API_KEY.")
    ] = None
    batching: Annotated[str | None, option(
        "Server", "LIST", "Start a server of --model, a model on disk, a Hub id or demo, for each of these policies: "
        "none, static, dynamic, continuous. The same requests are driven through each.",
    )] = None  # fmt: skip
    serve: Annotated[str | None, option(
        "Server", "OPTIONS", "Options of attar serve for these servers, such as '--max-running 16 --kv int8'.",
    )] = None  # fmt: skip
    timeout: Annotated[float, option("Server", "SECONDS", "Time limit of one response.", min=0.1)] = 600.0
    trace: Annotated[
        Path | None, option("Trace", "FILE", "Requests of a trace: ShareGPT ids, Mooncake blocks or Azure lengths.")
    ] = None
    divisor: Annotated[int, option("Trace", "N", "Divide the lengths of the trace.", min=1)] = 1
    longest: Annotated[
        int | None, option("Trace", "N", "Leave out requests of more tokens, prompt and output together.", min=2)
    ] = None
    prompt: Annotated[int, option("Synthetic prompts", "N", "Tokens of a prompt.", min=1)] = 256
    gen: Annotated[int, option("Synthetic prompts", "N", "Tokens of an output.", min=1)] = 64
    spread: Annotated[
        float, option("Synthetic prompts", "FRACTION", "Vary lengths by this fraction either way.", min=0)
    ] = 0.0
    prefixes: Annotated[int, option("Synthetic prompts", "N", "Number of shared prefixes.", min=0)] = 0
    prefix_tokens: Annotated[int, option("Synthetic prompts", "N", "Tokens of each shared prefix.", min=0)] = 0
    requests: Annotated[int, option("Requests", "N", "Requests of each run at most.", min=1)] = 100
    chat: Annotated[bool, flag("Requests", "Use /v1/chat/completions.", "--chat")] = False
    text: Annotated[bool, flag("Requests", "Send prompts as text, not as token ids.", "--text")] = False
    tokenizer: Annotated[
        Path | None, option("Requests", "DIR", "Folder of the tokenizer that turns ids into text.")
    ] = None
    vocabulary: Annotated[int | None, option("Requests", "N", "Keep token ids below N.", min=1)] = None
    temperature: Annotated[float, option("Requests", "T", "Temperature of every request.", min=0)] = 0.0
    no_ignore_eos: Annotated[bool, flag(
        "Requests", "Let outputs end early; for servers without ignore_eos.", "--no-ignore-eos",
    )] = False  # fmt: skip
    extra: Annotated[str | None, option("Requests", "JSON", "JSON object to add to every request.")] = None
    rates: Annotated[str | None, option(
        "Load", "LIST", "Open loop: requests a second, one run each, such as 1,2,4.", "--rates", "--rate",
    )] = None  # fmt: skip
    clients: Annotated[str | None, option(
        "Load", "LIST", "Closed loop: numbers of clients, one run each.", default="1,4,16 without rates and trace",
    )] = None  # fmt: skip
    arrivals: Annotated[
        Arrivals, option("Load", "KIND", "Open loop: poisson, or trace (its times stretched to the rate).")
    ] = Arrivals.poisson
    slo: Annotated[str | None, option("Load", "LIMITS", "Goodput limits in seconds, such as ttft=1.0,tpot=0.05.")] = (
        None
    )
    seed: Annotated[int, option("Load", "N", "Seed of lengths, tokens and arrival times.", min=0)] = 0
    seconds: Annotated[float | None, option("Load", "SECONDS", "Send nothing after this time.", min=0.1)] = None
    plot: Annotated[Path | None, option("Output", "FILE", "Draw latency against load: .html or .png.")] = None

    def options(self) -> Options:
        """Make the settings of a load test. Raises ValueError for what cannot be parsed."""
        from attar.load import measures, sweep
        from attar.load.traces import Synthetic
        from attar.text.tokenizer import Tokenizer

        unsaid = self.rates is None and self.clients is None and self.trace is None
        clients = "1,4,16" if unsaid else self.clients
        return sweep.Options(
            self.url or URL, _key(self.api_key_file), None if self.batching else self.model, self.chat, self.text,
            decode=None if self.tokenizer is None else Tokenizer.load(self.tokenizer).decode, trace=self.trace,
            synthetic=Synthetic(self.prompt, self.gen, self.spread, self.prefixes, self.prefix_tokens),
            requests=self.requests, divisor=self.divisor, longest=self.longest, vocabulary=self.vocabulary,
            rates=sweep.parse_list("--rates", self.rates, float),
            clients=sweep.parse_list("--clients", clients, int),
            arrivals=self.arrivals.value, seed=self.seed, slo={} if self.slo is None else measures.parse_slo(self.slo),
            temperature=self.temperature, ignore_eos=not self.no_ignore_eos, timeout=self.timeout, seconds=self.seconds,
            extra={} if self.extra is None else _object(self.extra),
        )  # fmt: skip

    def run(self, bar: Progress) -> dict[str, Any]:
        """Drive the loads through a server, or through one of each policy. Raises ValueError where options conflict."""
        from attar.load import policies, sweep

        if self.batching is None:
            if self.serve is not None:
                raise UserError("option_unused", "--serve is for the servers that --batching starts")
            return sweep.bench_serve(self.options(), bar)
        if self.url is not None or self.api_key_file is not None:
            raise UserError(
                "option_conflict", "--batching starts servers of its own: leave --url and --api-key-file out"
            )
        if self.model is None:
            raise UserError("option_missing", "--batching needs --model: the model to serve, such as demo")
        chosen = policies.parse(self.batching)
        return policies.compare(chosen, self.model, shlex.split(self.serve or ""), self.options(), bar)


@configured(BenchServeConfig)
def bench_serve(config: BenchServeConfig) -> None:
    """Load a server and measure latency, throughput and goodput.

    Requests longer than the server's context are refused before anything is sent. The report counts and quotes failed
    requests. The exit status is 1 if none succeeded.

    Examples:
      attar bench-serve --clients 1,8,32 --slo ttft=1.0,tpot=0.05 --plot load.html
      attar bench-serve --trace mooncake.jsonl --rates 0.5,1,2
      attar bench-serve --batching static,continuous --model demo --clients 8
    """
    with errors(config.as_json), progress(config.quiet) as bar:
        from attar.load import plot, sweep

        if config.plot is not None:
            plot.check(config.plot)
        report = config.run(bar)
        bar.close()
        table = sweep.to_text(report)
        print(table)
        if config.plot is not None:
            plot.save(config.plot, report["runs"], f"{report['model']}: latency against load", table)
            tell(f"drawn into {config.plot}")
        emit(config.as_json, report)
        if (sentence := sweep.failure(report)) is not None:
            fail(sentence, CHECK_FAILED)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError("option_malformed", f'--extra is a JSON object such as {{"top_k": 1}}: {error}') from None
    if not isinstance(found, dict):
        raise UserError("option_malformed", '--extra is a JSON object such as {"top_k": 1}')
    return found


def _key(file: Path | None) -> str | None:
    """Return the key that a client sends: the file's, or else the environment's.

    It never comes from the command line, which every user of the machine can read. Raises ValueError where the file
    holds none, or several.
    """
    from attar.server.http.security import KEY_VARIABLE

    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    keys = file.read_text(encoding="utf-8").split()
    if len(keys) != 1:
        raise UserError("key_invalid", f"{file} holds {len(keys)} keys: a client sends one")
    return keys[0]
