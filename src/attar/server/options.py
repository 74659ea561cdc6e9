"""Options of a server: its address, access, limits of each key, and the names of models that requests may use."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from attar.errors import UserError
from attar.images.settings import ImageSettings
from attar.server.admission.rate_limits import KeyLimits
from attar.server.fleet.router_key import RouterKeys
from attar.server.http.security import KEY_VARIABLE, Keys, host_name, is_loopback

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_ADAPTERS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,255}")  # includes Hub ids; the longest name in a request
ALIAS = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._:@/*-]{0,255}")
_WRITTEN = re.compile(r"[A-Za-z0-9._:@/-]*")
ROOT = re.compile(r"(?:/[A-Za-z0-9._~-]++)++")
SET_KEY = f"--api-key-file FILE, or {KEY_VARIABLE} in the environment"


@dataclass(frozen=True)
class ServerOptions:
    """Options of the HTTP server. Raises ValueError for a public address without a key.

    hosts: names allowed in the Host header besides loopback's; with none, a loopback server allows no others, and a
    public one any. origins: web pages of other servers that may call this one from a browser. max_requests: open at a
    time; more get 429. limits: of each key; with several keys and no limit of requests each has half of max_requests.
    So none can keep the others out of the server; the engine's queue has shares of its own (`fair_queue.py`). The same
    holds of `middleware.MAX_BODIES`. deadline, drain_seconds: seconds for one request, and for all when the
    server ends. template_date: what chat templates print, by default today. sampling: parameters of `SamplingParams`
    for requests that do not name them. aliases: further names of the served model, as `pattern`
    reads them. root_path: the prefix of every path, behind a proxy that passes it on; paths without it are served too.
    response_store: bytes of answers that are kept for `previous_response_id`; 0: none are. reasoning: whether models
    reason where a request does not say; None leaves it to them. request_metrics: whether answers of OpenAI's chats and
    completions tell how long they took, as vLLM's `metrics` do. images: how the model wants images, where it takes
    any. router_keys: of routers (`fleet/`) that this server works for.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=Keys)
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    max_requests: int = 256
    limits: KeyLimits = field(default_factory=KeyLimits)
    deadline: float = 600.0
    drain_seconds: float = 30.0
    template_date: datetime.date | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    root_path: str = ""
    response_store: int = 0
    reasoning: bool | None = None
    request_metrics: bool = False
    images: ImageSettings | None = None
    router_keys: RouterKeys = field(default_factory=RouterKeys)

    def __post_init__(self) -> None:
        if not self.keys.hashes and not is_loopback(self.host):
            raise UserError(
                "exposed_without_key",
                f"{self.host!r} is no loopback address, so other machines may reach it: set an API key ({SET_KEY})",
            )
        if not self.keys.hashes and self.limits != KeyLimits():
            message = f"limits of requests and tokens are for each API key: set one ({SET_KEY})"
            raise UserError("option_missing", message)
        for name in self.hosts:
            if not name or "*" in name or host_name(_in_header(name).encode()) != name:
                message = f"{name!r} is no host's name in small letters, without a port: list names one by one"
                raise UserError("address_invalid", message)
        if self.root_path and not ROOT.fullmatch(self.root_path):
            message = f"--root-path {self.root_path[:160]!r}: write it like /models/chat, without a / at the end"
            raise UserError("option_malformed", message)
        if "*" in self.origins:
            raise UserError("address_invalid", "origins are listed one by one: `*` would let every web page in")

    @property
    def shares(self) -> KeyLimits:
        """Limits of each key."""
        if self.limits.requests is None and len(self.keys.hashes) > 1:
            return replace(self.limits, requests=max(1, self.max_requests // 2))
        return self.limits

    @cached_property
    def names(self) -> frozenset[str]:
        """Names allowed in the Host header; empty for any."""
        return self.hosts | LOOPBACK_NAMES if self.hosts or is_loopback(self.host) else frozenset()


def _in_header(name: str) -> str:
    """Spell a host's name as in a Host header: addresses with colons have brackets."""
    try:
        return f"[{IPv6Address(name)}]"
    except ValueError:
        return name


def name_of(model: str) -> str:
    """Return a model's name: a folder's or file's own name, or a Hub id as given. Raises ValueError for the root, which
    has no name. A link keeps its own name: files in the Hub's cache link to files named by a hash."""
    path = Path(model).expanduser()
    name = Path(os.path.abspath(path)).name if path.exists() else model
    if not name:
        message = f"{model} has no name that requests could ask for: give it one with --name"
        raise UserError("model_name_invalid", message)
    return os.fsencode(name).decode(errors="replace")  # of a file's name, in the locale's encoding


def check_name(name: str) -> str:
    """Return `name`. Raises ValueError where it is no valid model name for requests."""
    if not MODEL_NAME.fullmatch(name):
        message = f"--name {name[:160]!r}: a model's name is of letters, digits and . _ : @ / -, at most 256 of them"
        raise UserError("model_name_invalid", message)
    return name


def check_aliases(given: Sequence[str], taken: Collection[str]) -> tuple[str, ...]:
    """Return aliases of the served model. Raises UserError for an invalid one, and for one among the names `taken`."""
    for alias in given:
        if not ALIAS.fullmatch(alias):
            message = f"--alias {alias[:160]!r}: a name of letters, digits and . _ : @ / -, and * for any of them"
            raise UserError("model_name_invalid", message)
        if alias in taken:
            raise UserError("option_conflict", f"--alias {alias}: the model or an adapter has this name already")
    return tuple(dict.fromkeys(given))


def pattern(alias: str) -> str:
    """Return the regular expression of the names that an alias stands for."""
    return "[A-Za-z0-9._:@/-]*".join(re.escape(part).replace("\\-", "-") for part in alias.split("*"))


def stands_for(alias: str, name: str) -> bool:
    """Return whether a name is one that an alias stands for."""
    return fnmatchcase(name, alias) and _WRITTEN.fullmatch(name) is not None  # linear, however many stars


def parse_adapters(given: Sequence[str], model: str) -> tuple[tuple[str, str], ...]:
    """Parse adapters, each given as NAME=FOLDER, to be served beside `model`: (name, folder) of each.

    Raises ValueError for another form, a name that is invalid or taken, more than MAX_ADAPTERS, and a folder without an
    adapter.
    """
    if len(given) > MAX_ADAPTERS:
        raise UserError("option_out_of_range", f"{len(given)} adapters: at most {MAX_ADAPTERS} are served at a time")
    found: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or not folder or not NAME.fullmatch(name):
            message = f"an adapter is given as NAME=FOLDER, its name of letters, digits and . _ : -, not {each[:160]!r}"
            raise UserError("option_malformed", message)
        if name in found or name == model:
            what = "the model's own name" if name == model else "the name of two adapters"
            message = f"--adapter {name}: requests ask for one by its name, and this is {what}"
            raise UserError("option_conflict", message)
        if not (Path(folder) / "adapter_config.json").is_file():
            message = f"--adapter {name}: {folder} holds no adapter_config.json: not a PEFT adapter's folder"
            raise UserError("adapter_invalid", message)
        found[name] = folder
    return tuple(found.items())
