"""The command `serve`: its options, and settings from a Triton configuration."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attar import logs
from attar.cli import options
from attar.cli.commands import configured, flag, option
from attar.cli.fleet.http_options import HttpOptions, RouterKeyFile
from attar.cli.fleet.transfer_options import KV_TRANSFER, TransferOptions
from attar.cli.scheduling import SchedulerOptions
from attar.cli.terminal import emit, errors, parse_bytes, require_apart, tell, tell_shared
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.protocol.scheduler_config import SchedulerConfig
    from attar.protocol.settings import Settings
    from attar.server.fleet.router_key import RouterKeys
    from attar.server.http.security import Keys
    from attar.server.options import ServerOptions
    from attar.text.tokenizer import Tokenizer

BESIDES = 64  # HTTP requests open besides those that run or wait: being read or refused, or other routes
SINGLE = (
    "name",
    "alias",
    "adapter",
    "triton_config",
    "kv_fraction",
    "chat_template",
    "replicas",
    "replica_cores",
    *KV_TRANSFER,
    "router_key_file",
)  # options of a server with one model
ENGINE = (sys.executable, "-m", "attar.engine.main")  # the command line of its process
FORKS = (sys.executable, "-m", "attar.engine.fork_server")  # that of a process that forks several


@dataclass(frozen=True, kw_only=True)
class ServeConfig(TransferOptions, SchedulerOptions, HttpOptions):
    """Options of `serve`."""

    model: options.Model = "demo"
    models: Annotated[list[str] | None, option(
        "Model", "NAME=PATH", "Instead of MODEL: one of several models, loaded when a request first asks for its NAME. "
        "As many as fit in --memory are loaded at a time; the least recently used is unloaded.", "--model",
    )] = None  # fmt: skip
    name: Annotated[str | None, option(
        "Model", "NAME", "Name that requests give the model.", default="the folder's or file's, or the Hub id",
    )] = None  # fmt: skip
    alias: Annotated[list[str] | None, option(
        "HTTP", "NAME", "Further name of the model for requests; * stands for any letters, as in 'claude-*'.",
    )] = None  # fmt: skip
    context: Annotated[int | None, option(
        "Cache", "N", "Tokens of the longest request.", min=1, default="the model's, or what fits",
    )] = None  # fmt: skip
    adapter: Annotated[list[str] | None, option(
        "Adapter", "NAME=DIR", "LoRA adapter (PEFT folder) for requests whose `model` is NAME.",
    )] = None  # fmt: skip
    triton_config: Annotated[Path | None, option(
        "Model", "FILE", "config.pbtxt of a TensorRT-LLM model: take what is not given here from it. `attar "
        "tritonserver import` shows what that is.",
    )] = None  # fmt: skip
    generation_config: options.GenerationConfig = options.Defaults.attar
    sampling: Annotated[list[str] | None, option(
        "Sampling", "NAME=VALUE", "Sampling parameter of requests that do not name it, such as temperature=0.7, before "
        "that of --generation-config: temperature, top_k, top_p, min_p, seed, or a penalty.",
    )] = None  # fmt: skip
    template_date: options.TemplateDate = None
    chat_template: Annotated[Path | None, option(
        "Model", "FILE", "Jinja file of a chat template to use in place of the model's own.",
    )] = None  # fmt: skip
    reasoning: options.Reasoning = options.Switch.auto
    no_verify: options.NoVerify = False
    device: Annotated[str | None, option("Device", "DEVICE", options.DEVICE, "--device", default="cpu")] = None
    threads: options.Threads = None
    activations: options.Activations = options.Precision.int8g128
    tp: options.Tp = 1
    pp: options.Pp = 1
    replicas: Annotated[int | None, option(
        "Device", "N", "Engines of the model, each a process on cores of its own. A request goes to the engine where "
        "it costs the least, and continues on another if that one dies. --memory is the total.", min=2, max=64,
        default="one",
    )] = None  # fmt: skip
    replica_cores: Annotated[list[str] | None, option(
        "Device", "LIST", "Processors of one replica, such as 0-3,8; once for each.", default="equal shares",
    )] = None  # fmt: skip
    memory: options.Memory = None
    kv: options.Kv = None
    draft: options.Draft = None
    draft_tokens: options.DraftTokens = None
    draft_tree: options.DraftTree = None
    sparse_attention: options.SparseAttention = None
    sparse_prefill: options.SparsePrefill = None
    kv_eviction: Annotated[list[str] | None, option(
        "Cache", "POLICY", "KV eviction that requests may name in `kv_eviction`. sink:4+2044 keeps the first 4 "
        "tokens and the newest 2,044; snapkv:2048, h2o:2048 and expected:2048 keep so many of a prompt. The first "
        "policy is that of requests which name none. CPUs only.",
        parser=options.parse_kv_eviction, default="none are dropped",
    )] = None  # fmt: skip
    image_cache: Annotated[int | None, option(
        "Images", "SIZE", "Memory for what a vision tower makes of images, such as 512MB. With 0 it is not loaded, and "
        "the model takes text alone.", parser=parse_bytes, default="256 MiB, where the model has a tower",
    )] = None  # fmt: skip
    request_metrics: Annotated[bool, flag(
        "HTTP", "Include the times of a chat or completion in its answer, as vLLM's `metrics`.",
    )] = False  # fmt: skip
    max_requests: Annotated[int | None, option(
        "Limits", "N", "Open HTTP requests; excess requests get 429, as do bodies of over 1 GiB together.", min=1,
        default=f"sequences that run and wait, and {BESIDES} more",
    )] = None  # fmt: skip
    max_requests_per_key: Annotated[int | None, option(
        "Limits", "N", "Open requests of one API key; excess requests get 429.", min=1,
        default="half of --max-requests with several keys, no limit with one",
    )] = None  # fmt: skip
    router_key_file: RouterKeyFile = None
    tokens_per_minute: Annotated[int | None, option(
        "Limits", "N", "Tokens of one API key in a minute, prompts and outputs; excess requests get 429. A request "
        "reserves what it asks for until it ends.", min=1,
    )] = None  # fmt: skip
    as_json: options.Json = False

    def check_several(self) -> None:
        """Raise ValueError for options that only a server of one model has."""
        if self.model != "demo":
            raise UserError("option_conflict", "give MODEL, or several by --model NAME=PATH, not both")
        for field in SINGLE:
            if getattr(self, field):
                name = "--" + field.replace("_", "-")
                raise UserError("option_unused", f"{name} needs a server with one MODEL: not with --model NAME=PATH")
        if self.role is not options.Role.both:
            message = f"--role {self.role} needs a server with one MODEL: not with --model NAME=PATH"
            raise UserError("option_unused", message)
        if (self.device or "cpu") != "cpu" or self.tp > 1 or self.pp > 1:
            message = "several models are served on a CPU, each in one process: a GPU's need is known once it is loaded"
            raise UserError("option_conflict", message)
        if self.draft not in (None, "suffix"):
            raise UserError("option_unused", f"--draft {self.draft} needs one MODEL; several take --draft suffix")

    def check_processes(self, device: str) -> None:
        """Raise ValueError for options of replicas, KV transfer and the disk cache that do not go with others."""
        from attar.cli import several

        several.check_engines(
            device, self.replicas, self.replica_cores or (), self.router_key_file is not None,
            {"tp": self.tp, "pp": self.pp},
        )  # fmt: skip
        unlike = {
            "--device": device != "cpu", "--tp": self.tp > 1, "--pp": self.pp > 1,
            "--replicas": self.replicas is not None,
        }  # fmt: skip
        self.check_transfer([name for name, given in unlike.items() if given])

    def routers(self) -> RouterKeys:
        """Return the keys of routers, none where there are none. Raises UserError for a file that is refused."""
        from attar.server.fleet.router_key import RouterKeys
        from attar.server.http.security import read_keys

        return RouterKeys.of(() if self.router_key_file is None else read_keys(self.router_key_file))

    def engine(self, path: Path, name: str, theirs: dict[str, Any]) -> Settings:
        """Make the engine's settings; `theirs`, from a Triton configuration, replace what is not given.

        Raises ValueError for invalid settings, before anything starts.
        """
        from msgspec.structs import replace

        from attar.checkpoints.sources import hub
        from attar.kv.schemes import check_name
        from attar.plan.fit import check_fraction
        from attar.protocol.settings import IMAGE_CACHE, Settings
        from attar.server.options import parse_adapters

        check_name(self.kv)
        theirs = dict(theirs)
        draft, count = theirs.pop("draft", None), theirs.pop("draft_tokens", None)
        given = {key: value for key, value in self.settings().items() if value is not None}
        if given.get("policy", "dynamic") != "dynamic":  # the only policy with a delay
            theirs = {key: value for key, value in theirs.items() if key != "max_delay"}
        settings = replace(
            Settings(
                str(path), "", activations=self.activations.value, kv=self.kv,
                context=self.context, memory=self.memory, threads=self.threads, verify=not self.no_verify, tp=self.tp,
                pp=self.pp, adapters=parse_adapters(self.adapter or (), name), name=name,
                draft=hub.resolve_draft(self.draft or draft),
                draft_tokens=count if self.draft_tokens is None else self.draft_tokens,
                draft_tree=self.draft_tree, sparse_attention=self.sparse_attention,
                sparse_prefill=self.sparse_prefill,
                kv_eviction=tuple(self.kv_eviction or ()), tells_cache=self.router_key_file is not None,
                image_cache=IMAGE_CACHE if self.image_cache is None else self.image_cache,
            ),
            **theirs | given | self.transfer(),
        )  # fmt: skip
        limits = settings.limits()
        _check_reads(settings, bool(self.draft_tree))
        check_fraction(settings.kv_fraction)
        if settings.max_delay is not None and limits.policy != "dynamic":
            message = f"max-delay needs policy=dynamic; with {limits.policy} no request waits for a batch"
            raise UserError("option_unused", message)
        return settings

    def http(
        self, keys: Keys, origins: frozenset[str], limits: SchedulerConfig, path: Path, name: str, engines: int = 1
    ) -> ServerOptions:
        """Make the settings of HTTP for the model at `path`, called `name`, which `engines` engines serve. Raises
        ValueError for a public address without a key, and for wrong names and paths."""
        from attar.checkpoints import generation_config, image_settings
        from attar.server.admission.rate_limits import KeyLimits
        from attar.server.options import ServerOptions, check_aliases

        adapters = [adapter.partition("=")[0] for adapter in self.adapter or ()]
        model_defaults = self.generation_config is options.Defaults.model
        sampling = generation_config.sampling(path) if model_defaults else {}
        sampling |= options.parse_sampling(self.sampling or ())
        most = engines * (limits.together + limits.max_waiting) + BESIDES
        return ServerOptions(
            self.host, self.port, keys, frozenset(self.allowed_host or ()), origins,
            most if self.max_requests is None else self.max_requests,
            KeyLimits(self.max_requests_per_key, self.tokens_per_minute), self.deadline, self.drain_seconds,
            self.template_date, sampling, check_aliases(self.alias or (), (name, *adapters)), self.root_path,
            self.response_store or 0, {"on": True, "off": False}.get(self.reasoning), self.request_metrics,
            None if self.image_cache == 0 else image_settings.read(path), self.routers(),
        )  # fmt: skip


@configured(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve a model by OpenAI's, Anthropic's and other APIs.

    The server prints its memory plan before it loads anything. Ctrl-C or SIGTERM lets open requests finish.

    Examples:
      attar serve ./out
      attar serve ./out --preset throughput --kv int8 --memory 12GB
      attar serve ./out --scheduler policy=static --scheduler max-waiting=64
      attar serve ./out --draft suffix
      attar serve ./large --draft ./small
      attar serve --model chat=./out --model code=./coder.gguf --memory 12GB
      attar serve ./out --replicas 4
      attar serve ./out --host 0.0.0.0 --api-key-file keys.txt
    """
    with errors(config.as_json):
        from attar.checkpoints.sources import hub
        from attar.cli import several
        from attar.server import supervisor
        from attar.server.options import check_name, name_of
        from attar.server.replicas import processes

        name = name_of(config.model) if config.name is None else check_name(config.name)
        logs.begin()
        keys, origins = _security(config)  # first: it takes the key from what children inherit
        if config.models:
            return _serve_several(config, keys, origins)
        theirs = _of_triton(config.triton_config) | ({} if config.device is None else {"device": config.device})
        config.check_processes(theirs["device"])
        require_apart(theirs["device"])
        path = hub.resolve(config.model)
        if config.router_key_file is None:  # which makes salts that stay
            keys = config.with_lasting_salts(keys)
        settings = _marked(keys, config.engine(path, name, theirs))
        tell_shared(settings.device, config.tp, config.pp)
        server_options = config.http(keys, origins, settings.limits(), path, name, config.replicas or 1)
        tokenizer = _tokenizer(path, config.chat_template)
        ready = teller(bool(tokenizer.chat_templates), config.as_json)
        if config.replicas is None:
            _run(config, lambda: supervisor.run(settings, tokenizer, server_options, ENGINE, ready))
        else:
            parts = several.divide_cores(settings, config.replicas, config.replica_cores or ())
            _run(config, lambda: processes.run(parts, tokenizer, server_options, ENGINE, FORKS, ready))


def _tokenizer(path: Path, template: Path | None) -> Tokenizer:
    """Read the model's tokenizer, with the chat template of a file in place of its own. Raises UserError where that
    is no template."""
    from attar.checkpoints import vocabulary
    from attar.text.template import read_template

    found = vocabulary.tokenizer(path)
    if template is not None:
        found.chat_templates = {"default": read_template(template)}
    return found


def _run(config: ServeConfig, server: Callable[[], int]) -> None:
    """Run a server until it ends, and exit by its status. Raises UserError where its address cannot be taken."""
    from attar.server.http.sockets import explained

    try:
        status = server()
    except OSError as error:
        raise explained(error, config.host, config.port) from None
    if status:
        raise typer.Exit(status)


def _security(config: ServeConfig) -> tuple[Keys, frozenset[str]]:
    """Return the keys and the origins of requests; a router's key makes the secret of salts. Raises UserError for a
    host, origin or key file that is refused."""
    keys, origins = config.security()
    routers = config.routers()
    return (dataclasses.replace(keys, secret=routers.secret) if routers.hashes else keys), origins


def _marked(keys: Keys, settings: Settings) -> Settings:
    """Return settings with the salts of the keys, and with fingerprints of the model's files, by which an engine
    notices later changes. Where engines of other hosts or of later starts compare files, their contents are hashed."""
    from msgspec.structs import replace

    from attar.checkpoints.fingerprints import content_hashes, fingerprints

    compared = settings.tells_cache or settings.role != "both" or settings.cache_dir is not None
    contents = content_hashes(settings.folders) if compared else ()
    files = fingerprints(settings.folders)
    return replace(settings, files=files, contents=contents, cache_owners=keys.owners)


def _check_reads(settings: Settings, trees: bool) -> None:
    """Raise ValueError where attention that reads or keeps few tokens does not go with other settings, or with `trees`
    of drafts."""
    from attar.kv.eviction import parse_all
    from attar.kv.schemes import scheme
    from attar.kv.sparse import SparseAttention
    from attar.kv.sparse_prefill import SparsePrefill

    kv, processes = scheme(settings.kv or "float32"), settings.tp * settings.pp
    if settings.sparse_attention is not None:
        SparseAttention.parse(settings.sparse_attention).check(kv, settings.device, processes, trees)
    if settings.sparse_prefill is not None:
        SparsePrefill.parse(settings.sparse_prefill).check(settings.device, processes, trees)
    sparse = bool(settings.sparse_attention or settings.sparse_prefill)
    for policy in parse_all(settings.kv_eviction):
        policy.check(kv, settings.device, processes, trees=trees, sparse=sparse)


def _serve_several(config: ServeConfig, keys: Keys, origins: frozenset[str]) -> None:
    """Serve the models of `--model`. Raises ValueError for options of a single model, and for models that cannot be
    served."""
    from attar.cli import several
    from attar.server.models import server

    config.check_several()
    paths = several.parse_models(config.models or ())
    theirs = {"device": "cpu"}
    asked = {name: config.engine(path, name, theirs) for name, path in paths.items()}
    sharing = several.divide(list(asked.values()), config.memory)
    several.tell_parts(sharing)
    specs = [several.spec(settings, sharing, config.generation_config) for settings in asked.values()]
    limits = specs[0].settings.limits()
    server_options = config.http(keys, origins, limits, next(iter(paths.values())), next(iter(paths)))
    if config.max_requests is None:  # each model has a queue of its own
        most = len(specs) * (limits.together + limits.max_waiting) + BESIDES
        server_options = dataclasses.replace(server_options, max_requests=most)
    templates = any(each.tokenizer.chat_templates for each in specs)
    started = teller(templates, config.as_json, "")
    _run(config, lambda: server.run(specs, sharing.engines, server_options, ENGINE, started))


def teller(templates: bool, as_json: bool, more: str = " (the model is loading)") -> Callable[[str], None]:
    """Make the function called once the server listens: it prints the address with `more`, and starts the chat template
    process where there are `templates`."""

    def started(url: str) -> None:
        if templates:  # so that the first conversation does not wait for it
            from attar.text import template

            threading.Thread(target=template.warm, name="template-start", daemon=True).start()
        tell(f"listening at {url}{more}")
        emit(as_json, {"url": url, "pid": os.getpid()})

    return started


def _of_triton(file: Path | None) -> dict[str, Any]:
    """Read settings of a Triton configuration, the device included; report what is lost, and what holds anyhow."""
    from attar.integrations.triton_server import config as triton_config

    if file is None:
        return {"device": "cpu"}
    imported = triton_config.load(file)
    for note in imported.notes:
        tell(f"{file}: note: {note}")
    for warning in imported.warnings:
        tell(f"{file}: warning: {warning}")
    return {"device": "cpu", **imported.settings()}
