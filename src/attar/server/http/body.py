"""The body of a request: checks before it is read, and the reading."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from attar.faults import point
from attar.server.errors import CANCELLED, APIError
from attar.server.http.limits import MAX_BODY

IDENTITY = (b"", b"identity")


async def receive(request: Request, name: str) -> bytes:
    """Read the body of the request called `name`; its Content-Length, checked first, bounds it. Raises APIError."""
    _check(dict(request.scope["headers"]))
    body = bytearray()
    more = True
    while more:
        point("http.read_body", name)
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise APIError("cancelled", CANCELLED)
        body += message.get("body", b"")
        assert len(body) <= MAX_BODY, "h11 holds a body to its Content-Length"
        more = message.get("more_body", False)
    return bytes(body)


def _check(headers: Mapping[bytes, bytes]) -> None:
    """Raise APIError for content other than JSON, and for a body that is too large."""
    if headers.get(b"content-encoding", b"").strip().lower() not in IDENTITY:
        raise APIError("unsupported_media_type", "Content-Encoding is not supported: send plain JSON")
    # A form of a foreign web page can be posted without a preflight, but not as JSON.
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise APIError("unsupported_media_type", "send JSON, with Content-Type: application/json")
    if _length(headers) > MAX_BODY:
        raise APIError("body_too_large", f"the body is larger than {MAX_BODY} bytes")


def _length(headers: Mapping[bytes, bytes]) -> int:
    return int(headers.get(b"content-length", b"0"))


def size(headers: Mapping[bytes, bytes]) -> int:
    """Return the bytes of the body to be held: 0 for one that is too large, which is not read."""
    return length if (length := _length(headers)) <= MAX_BODY else 0
