"""Options of HTTP that servers and routers share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attar.cli import options
from attar.cli.commands import option

if TYPE_CHECKING:
    from attar.server.http.security import Keys

RouterKeyFile = Annotated[Path | None, option(
    "Security", "FILE", "Key of `attar route`, apart from API keys: at least 32 characters, in a file of mode 600. "
    "It opens /internal.", default="no router is served",
)]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Options of a process that speaks HTTP."""

    host: Annotated[str, option("HTTP", "HOST", "Address; others than loopback need an API key.")] = "127.0.0.1"
    port: Annotated[int, option("HTTP", "N", "Port; 0 takes a free one.", min=0, max=65535)] = 8000
    root_path: Annotated[str, option(
        "HTTP", "PATH", "Prefix of every path, such as /chat, behind a proxy that passes it on.", default="none",
    )] = ""  # fmt: skip
    response_store: Annotated[int | None, option(
        "HTTP", "SIZE", "Memory to keep answers of /v1/responses in, such as 64MB, for `previous_response_id`. Only "
        "the key that made an answer can continue it, for a day, until the server ends.", parser=options.parse_size,
        default="none are kept",
    )] = None  # fmt: skip
    deadline: Annotated[float, option("HTTP", "SECONDS", "Time limit of one request.", min=0.1)] = 600.0
    drain_seconds: Annotated[
        float, option("HTTP", "SECONDS", "Time for open requests when the server stops.", min=0)
    ] = 30.0
    api_key_file: Annotated[Path | None, option(
        "Security", "FILE", "API keys of at least 32 characters, one a line, in a file of mode 600; or set "
        "ATTAR_API_KEY.",
    )] = None  # fmt: skip
    origin: Annotated[list[str] | None, option(
        "Security", "URL", "Origin of a web page that may call (CORS), such as https://chat.example.",
    )] = None  # fmt: skip
    allowed_host: Annotated[list[str] | None, option(
        "Security", "NAME", "Host name that clients may use, behind a proxy that passes the Host header on. "
        "Loopback's names are always allowed.", default="on loopback only those, elsewhere any",
    )] = None  # fmt: skip

    def security(self) -> tuple[Keys, frozenset[str]]:
        """Return the keys and the origins of requests. Raises UserError for a host, origin or key file that is
        refused."""
        from attar.server.http.security import Keys, check_host, find_keys, parse_origin

        check_host(self.host)
        origins = frozenset(map(parse_origin, self.origin or ()))
        return Keys.of(find_keys(self.api_key_file, os.environ)), origins
