"""Cross-origin requests (CORS): web pages of other servers that may call this one from a browser."""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.types import Scope, Send

EXPOSED = b"x-request-id, request-id, retry-after, x-should-retry"  # headers of an answer that pages may read
_NAMES = re.compile(rb"[\w, -]+")


def headers_for(origins: frozenset[str], headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the CORS headers of an answer to a request with `headers`, where pages of `origins` may read it."""
    if not origins:
        return []
    origin = headers.get(b"origin", b"")
    if origin.decode("latin-1") not in origins:
        return [(b"vary", b"Origin")]
    return [
        (b"vary", b"Origin"),
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
    ]


def is_preflight(origins: frozenset[str], scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether this is a preflight for a page that may call."""
    return (
        scope["method"] == "OPTIONS"
        and b"access-control-request-method" in headers
        and headers.get(b"origin", b"").decode("latin-1") in origins
    )


async def answer_preflight(asked: Mapping[bytes, bytes], send: Send) -> None:
    """Allow a page's call with any headers that it wants to send: client libraries have their own."""
    wanted = asked.get(b"access-control-request-headers", b"")
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", wanted if _NAMES.fullmatch(wanted) else b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
