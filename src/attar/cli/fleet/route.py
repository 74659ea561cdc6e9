"""The command `route`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar import logs
from attar.cli import options, serving
from attar.cli.commands import configured, option
from attar.cli.fleet.http_options import HttpOptions
from attar.cli.terminal import errors
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.server.options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class RouteConfig(HttpOptions):
    """Options of `route`."""

    urls: Annotated[list[str], typer.Argument(metavar="URL", help="Addresses of the servers.", show_default=False)]
    router_key_file: Annotated[Path | None, option(
        "Security", "FILE", "The --router-key-file of all hosts, which are attar's servers. Its first key is sent.",
        default="hosts are any OpenAI-compatible servers",
    )] = None  # fmt: skip
    max_requests: Annotated[int, option(
        "Limits", "N", "Open HTTP requests; excess requests get 429.", min=1,
    )] = 1024  # fmt: skip
    as_json: options.Json = False

    def http(self) -> ServerOptions:
        """Make the settings of HTTP. Raises UserError for a public address without a key, and for wrong names."""
        from attar.server.options import ServerOptions

        keys, origins = self.security()
        return ServerOptions(
            self.host, self.port, keys, frozenset(self.allowed_host or ()), origins, self.max_requests,
            deadline=self.deadline, drain_seconds=self.drain_seconds, root_path=self.root_path,
            response_store=self.response_store or 0,
        )  # fmt: skip


@configured(RouteConfig)
def route(config: RouteConfig) -> None:
    """Route requests to servers on other hosts.

    With --router-key-file the hosts are attar's servers of one model, started with the same file. A request goes where
    it costs the least, by its tokens and by what each host has cached. When a host dies, its answers continue on
    another, with the same tokens.

    Without it the hosts are any servers that speak OpenAI's API, such as vLLM's and llama.cpp's. What they have cached
    is guessed from texts, and an answer that has begun ends with its host.

    Examples:
      attar route http://host1:8000 http://host2:8000 --router-key-file r.key
      attar route http://host1:8000 http://host2:8080
    """
    with errors(config.as_json):
        from attar.server.fleet import attar_hosts, plain_hosts
        from attar.server.http.security import read_keys
        from attar.server.http.sockets import explained

        logs.begin()
        http = config.http()
        urls = attar_hosts.check_urls(config.urls)
        key = None if config.router_key_file is None else read_keys(config.router_key_file)[0]
        if key is None and config.response_store is not None:
            raise UserError(
                "option_unused", "--response-store needs --router-key-file: other servers keep their own answers"
            )
        started = serving.teller(False, config.as_json, "")
        try:
            if key is None:
                plain_hosts.run(urls, http, started)
            else:
                attar_hosts.run(urls, key, http, started)
        except OSError as error:
            raise explained(error, config.host, config.port) from None
