"""The door in front of every route: it names requests, decides who comes in, and sees that each gets an answer.

It is plain ASGI around the application, so that nothing is reached without passing it, routes added later included.
Closed is the default: with keys set, only /livez and the page, which holds nothing, answer without one. No body is read
before its request is let in.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from ipaddress import IPv6Address
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from attar.faults import point
from attar.server.admission.rate_limits import Account, Limits, Quotas
from attar.server.dispatcher import Dispatcher
from attar.server.errors import ANTHROPIC, INTERNAL, Refusal
from attar.server.http.limits import MAX_BODY
from attar.server.http.security import KEY_VARIABLE, Keys, host_name, is_loopback
from attar.server.metrics import Metrics
from attar.server.request_handler import Caller

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_TO_ALL = frozenset({"/livez", "/"})  # the page holds nothing but itself
IDENTITY = (b"", b"identity")
METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"})  # that a log may repeat
TOLD = b"x-request-id, request-id, retry-after, x-should-retry"  # headers of an answer that pages may read
_NAMES = re.compile(rb"[\w, -]+")
GONE = 499  # nobody waited for the answer
FULL = 429
SET_KEY = f"--api-key-file FILE, or {KEY_VARIABLE} in the environment"
MAX_BODIES = 256 * MAX_BODY  # of all requests together: what was read is held until the answer has ended

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How the server is reached. Raises ValueError for a public address without a key.

    hosts: names that the Host header may have besides loopback's own; none means those on loopback, and any elsewhere.
    origins: web pages of other servers that may call this one from a browser. max_requests: open at a time, beyond
    which 429 is the answer. limits: what each key may have; with several keys half of max_requests each, where no
    number of requests is given, so that one of them cannot keep the others out of the server (of the engine's queue
    each has its part anyhow, see `places.py`); the same holds of MAX_BODIES. deadline, drain_seconds: of one request,
    and of all when the server ends.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=Keys)
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    max_requests: int = 256
    limits: Limits = field(default_factory=Limits)
    deadline: float = 600.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.keys.hashes and not is_loopback(self.host):
            raise ValueError(
                f"{self.host!r} is no loopback address, so other machines may reach it: set an API key ({SET_KEY})"
            )
        if not self.keys.hashes and self.limits != Limits():
            raise ValueError(f"limits of requests and tokens are for each API key: set one ({SET_KEY})")
        for name in self.hosts:
            if not name or "*" in name or host_name(_in_header(name).encode()) != name:
                raise ValueError(f"{name!r} is no host's name in small letters, without a port: list names one by one")
        if "*" in self.origins:
            raise ValueError("origins are listed one by one: `*` would let every web page in")

    @property
    def shares(self) -> Limits:
        """What each key has."""
        if self.limits.requests is None and len(self.keys.hashes) > 1:
            return replace(self.limits, requests=max(1, self.max_requests // 2))
        return self.limits

    @cached_property
    def names(self) -> frozenset[str]:
        """What the Host header may be; empty for anything."""
        return self.hosts | LOOPBACK_NAMES if self.hosts or is_loopback(self.host) else frozenset()


class Door:
    """ASGI around `app`. `open` counts the requests inside, and `bodies` the bytes of what they send, by key."""

    def __init__(self, app: Starlette, options: Options, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self.app, self.options, self.dispatcher, self.metrics = app, options, dispatcher, metrics
        self.paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
        self.open = 0
        self.bodies: Counter[bytes] = Counter()
        self.quotas = Quotas(options.shares, lambda limit: metrics.limited.labels(limit).inc())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived, name, status = time.monotonic(), secrets.token_hex(12), 0
        headers: dict[bytes, bytes] = dict(scope["headers"])
        extra = [(b"x-request-id", name.encode()), *self._cors(headers)]
        if scope["path"].startswith(ANTHROPIC):
            extra.append((b"request-id", name.encode()))  # where their clients look for it

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        self.open += 1
        self.metrics.open.set(self.open)
        account: Account | None = None
        salt, size = b"", 0
        try:
            if self._preflight(scope, headers):
                await _preflight_answer(headers, tell)
                return
            point("http.door", name)
            salt = self._let_in(scope, headers)
            if scope["method"] == "POST":
                account = self.quotas.enter(salt)
                size = _held(headers)
                self.bodies[salt] += size
            scope["attar"] = Caller(name, arrived, salt, account)
            await self.app(scope, receive, tell)
        except Refusal as refusal:
            await refuse(refusal, scope["path"], tell)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            logger.error("%s failed: %s at %s:%s", name, type(error).__name__, place.filename, place.lineno)
            if not status:
                await refuse(Refusal("internal", INTERNAL), scope["path"], tell)
        finally:
            if account is not None:
                account.close()
                self.bodies[salt] -= size
            self.open -= 1
            self.metrics.open.set(self.open)
            route = getattr(scope.get("route"), "path", None)  # the pattern, not what was asked
            if route is None:
                route = scope["path"] if scope["path"] in self.paths else "none"
            self.metrics.requests.labels(route, str(status or GONE)).inc()
            method = scope["method"] if scope["method"] in METHODS else "?"
            # A crowd that is refused is counted above: a line for each would take time from those who are let in.
            level = logging.INFO if method == "POST" and status != FULL else logging.DEBUG
            logger.log(level, "%s %s %s %d %.3f s", name, method, route, status or GONE, time.monotonic() - arrived)

    def _let_in(self, scope: Scope, headers: dict[bytes, bytes]) -> bytes:
        """The salt of whoever asks. Raises Refusal."""
        if scope["path"] in OPEN_TO_ALL:
            return b""
        names = self.options.names
        if names and host_name(headers.get(b"host", b"localhost")) not in names:
            raise Refusal("host_not_allowed", "this server does not answer to the name in the Host header")
        salt = self.options.keys.salt(headers)
        if salt is None:
            raise Refusal("invalid_api_key", "send a valid key: Authorization: Bearer KEY")
        if scope["method"] == "POST":
            self._check_room(salt, _held(headers))
        return salt

    def _check_room(self, salt: bytes, size: int) -> None:
        if self.dispatcher.draining:
            raise Refusal("draining", "the server is shutting down")
        own = MAX_BODIES // 2 if len(set(self.options.keys.hashes)) > 1 else MAX_BODIES
        large = self.bodies[salt] + size > own or self.bodies.total() + size > MAX_BODIES
        if large or self.open > self.options.max_requests:
            raise self.dispatcher.full("the server is full: try again later")

    def _cors(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        if not self.options.origins:
            return []
        origin = headers.get(b"origin", b"")
        if origin.decode("latin-1") not in self.options.origins:
            return [(b"vary", b"Origin")]
        return [
            (b"vary", b"Origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", TOLD),
        ]

    def _preflight(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        return (
            scope["method"] == "OPTIONS"
            and b"access-control-request-method" in headers
            and headers.get(b"origin", b"").decode("latin-1") in self.options.origins
        )


def _in_header(name: str) -> str:
    """A host's name as a Host header has it: addresses with colons stand in brackets."""
    try:
        return f"[{IPv6Address(name)}]"
    except ValueError:
        return name


def check_body(headers: Mapping[bytes, bytes]) -> None:
    """Before a body is read, by whatever reads one. Raises Refusal: for other than JSON, and for too much of it."""
    if headers.get(b"content-encoding", b"").strip().lower() not in IDENTITY:
        raise Refusal("unsupported_media_type", "Content-Encoding is not supported: send plain JSON")
    # A form of a foreign web page can be posted without a preflight, but not as JSON.
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise Refusal("unsupported_media_type", "send JSON, with Content-Type: application/json")
    if _length(headers) > MAX_BODY:
        raise Refusal("body_too_large", f"the body is larger than {MAX_BODY} bytes")


def _length(headers: Mapping[bytes, bytes]) -> int:
    return int(headers.get(b"content-length", b"0"))


def _held(headers: Mapping[bytes, bytes]) -> int:
    """Bytes of the body: none of one that is too large is read."""
    return length if (length := _length(headers)) <= MAX_BODY else 0


async def _preflight_answer(asked: Mapping[bytes, bytes], send: Send) -> None:
    """To a page that may call: with whatever headers it wants to send, for clients' libraries have their own."""
    wanted = asked.get(b"access-control-request-headers", b"")
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", wanted if _NAMES.fullmatch(wanted) else b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def refuse(refusal: Refusal, path: str, send: Send, allowed: str | None = None) -> None:
    """Answer with a refusal, in the shape that the path's API has. `allowed`: methods, where another was used."""
    body = refusal.body(anthropic=path.startswith(ANTHROPIC))
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in refusal.headers().items()]
    headers += [] if allowed is None else [(b"allow", allowed.encode())]
    await send({"type": "http.response.start", "status": refusal.kind.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
