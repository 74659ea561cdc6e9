"""Arguments of the Serve application, as its file has them: plain values, which msgspec checks."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec

from attar.checkpoints import image_settings
from attar.protocol.settings import Settings
from attar.server.admission.rate_limits import KeyLimits
from attar.server.http.security import Keys, find_keys
from attar.server.options import ServerOptions


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the HTTP process needs: the model's path for its tokenizer, and the fields of `ServerOptions`. Keys stay in
    their file, which the node of the HTTP process must have."""

    path: str
    places: int = 2  # replicas at a time, at most, with those that are being replaced
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_requests: int = 256
    requests_per_key: int | None = None
    tokens_per_minute: int | None = None
    deadline: float = 600.0
    drain_seconds: float = 30.0
    template_date: datetime.date | None = None
    chat_template: str | None = None
    sampling: dict[str, Any] = {}
    aliases: tuple[str, ...] = ()
    root_path: str = ""
    response_store: int = 0
    reasoning: bool | None = None
    request_metrics: bool = False
    images: bool = True  # whether requests may have images, where the model has a vision tower

    def options(self) -> ServerOptions:
        """Return the options of the server, with the keys of the file. Raises UserError for a key file that is not
        private, and for a public address without a key."""
        file = None if self.api_key_file is None else Path(self.api_key_file)
        return ServerOptions(
            self.host, self.port, Keys.of(find_keys(file, {})), frozenset(self.hosts), frozenset(self.origins),
            self.max_requests, KeyLimits(self.requests_per_key, self.tokens_per_minute), self.deadline,
            self.drain_seconds, self.template_date, self.sampling, self.aliases, self.root_path, self.response_store,
            self.reasoning, self.request_metrics,
            image_settings.read(Path(self.path)) if self.images else None,
        )  # fmt: skip

    @classmethod
    def of(cls, options: ServerOptions, path: Path, places: int, api_key_file: Path | None,
           chat_template: str | None) -> HttpSettings:  # fmt: skip
        """Make the settings of options, without their keys."""
        return cls(
            str(path), places, options.host, options.port, None if api_key_file is None else str(api_key_file),
            tuple(sorted(options.hosts)), tuple(sorted(options.origins)), options.max_requests,
            options.limits.requests, options.limits.tokens_per_minute, options.deadline, options.drain_seconds,
            options.template_date, chat_template, dict(options.sampling), options.aliases, options.root_path,
            options.response_store, options.reasoning, options.request_metrics,
            options.images is not None,
        )  # fmt: skip


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `app.build`. An `insecure` application runs where Ray listens beyond loopback."""

    engine: Settings
    http: HttpSettings
    insecure: bool = False
