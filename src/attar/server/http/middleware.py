"""Middleware in front of every route: it names requests, authenticates them, and sees that each gets an answer.

It is plain ASGI around the application, so that every route passes it, routes added later included. Access is denied by
default: with keys set, only /livez, /health and the page answer without one, which hold nothing. A browser without a
key that opens /lab is refused with a page that asks for one. Routes below /internal need a router key, which opens no
other route; only requests to be answered need the client's key too. No body is read before its request is admitted.
Web pages of other servers may call this one from a browser where options list them (CORS).
"""

from __future__ import annotations

import logging
import re
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from attar.faults import point
from attar.server.admission.rate_limits import Account, Caller, Quotas
from attar.server.errors import ANTHROPIC, INTERNAL, INVALID_KEY, APIError
from attar.server.fleet.wire import KEY_HEADER, PATHS, REQUESTS
from attar.server.http.limits import BODY_LIMIT, IMAGE_PATHS, MAX_BODY, MAX_IMAGE_BODY
from attar.server.http.security import host_name
from attar.server.metrics import HttpMetrics
from attar.server.options import ServerOptions
from attar.server.pages.lab_page import LAB, POLICY
from attar.strict_json import shown

OPEN_TO_ALL = frozenset({"/livez", "/health", "/ping", "/"})  # the page holds no data
METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"})  # methods that a log may repeat
GONE = 499  # the client had disconnected
FULL = 429
MAX_BODIES = 256 * MAX_BODY  # of all requests together: a body is held until its answer has ended
EXPOSED = b"x-request-id, request-id, retry-after, x-should-retry"  # headers of an answer that pages may read
_GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,128}")
"""A client's own id of a request."""
_NAMES = re.compile(rb"[\w, -]+")

logger = logging.getLogger(__name__)


class Context(Protocol):
    """State of the server: its metrics, whether it accepts no more requests, and the refusal where it is full."""

    draining: bool

    @property
    def metrics(self) -> HttpMetrics:
        """Return the metrics of HTTP."""

    @property
    def takes_images(self) -> bool:
        """Return whether a model of the server takes images."""

    def full(self) -> APIError:
        """Make the refusal of a request for which there is no room."""


class Middleware:
    """ASGI middleware around `app`. `open` counts open requests, and `bodies` the bytes of their bodies, by key."""

    def __init__(self, app: Starlette, options: ServerOptions, context: Context) -> None:
        self.app, self.options, self.context, self.metrics = app, options, context, context.metrics
        self.paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
        self.open = 0
        self.bodies: Counter[bytes] = Counter()
        self.quotas = Quotas(options.shares, lambda limit: self.metrics.limited.labels(limit).inc())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived, name, status = time.monotonic(), secrets.token_hex(16), 0
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        given = given if _GIVEN.fullmatch(given) else b""
        outer, scope = scope, self._below_root(scope)
        extra = [(b"x-request-id", given or name.encode()), *_cors_headers(self.options.origins, headers)]
        if scope["path"].startswith(ANTHROPIC):
            extra.append((b"request-id", name.encode()))  # where Anthropic's clients look for it

        account: Account | None = None
        cache_salt, size, got = b"", 0, 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        async def measured() -> Message:
            """Count the body's own size once it has arrived: of one in chunks it was not known."""
            nonlocal size, got
            message = await receive()
            got += len(message.get("body", b""))
            if account is not None and not message.get("more_body", False):
                self.bodies[cache_salt] += got - size
                size = got
            return message

        self.open += 1
        self.metrics.open.set(self.open)
        try:
            if _is_preflight(self.options.origins, scope, headers):
                await _answer_preflight(headers, tell)
                return
            point("http.door", name)
            cache_salt = self._let_in(scope, headers)
            most = outer[BODY_LIMIT] = self._body_limit(scope)
            if scope["method"] == "POST":
                account = self.quotas.enter(cache_salt)
                size = _size(headers, most)
                self.bodies[cache_salt] += size
            scope["attar"] = Caller(name, arrived, cache_salt, account, given.decode(), most)
            await self.app(scope, measured, tell)
        except APIError as refusal:
            if refusal.code == "invalid_api_key" and scope["path"] == "/lab" and _wants_page(headers):
                await _send_lab(refusal.kind.status, tell)
            else:
                await refusal.send(scope["path"], tell)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            logger.error("%s failed: %s at %s:%s", name, type(error).__name__, place.filename, place.lineno)
            if not status:
                await APIError("internal", INTERNAL).send(scope["path"], tell)
        finally:
            if account is not None:
                account.close()
                self.bodies[cache_salt] -= size
            self.open -= 1
            self.metrics.open.set(self.open)
            route = getattr(scope.get("route"), "path", None)  # the pattern, not the requested path
            if route is None:
                route = scope["path"] if scope["path"] in self.paths else "none"
            self.metrics.requests.labels(route, str(status or GONE)).inc()
            method = scope["method"] if scope["method"] in METHODS else "?"
            # Refused crowds are counted above: a line for each would take time from admitted requests.
            level = logging.INFO if method == "POST" and status != FULL else logging.DEBUG
            id = f"{name} ({given.decode()})" if given else name
            logger.log(level, "%s %s %s %d %.3f s", id, method, route, status or GONE, time.monotonic() - arrived)

    def _below_root(self, scope: Scope) -> Scope:
        """Return a scope whose path is without the root path, where it has it."""
        root = self.options.root_path
        if root and scope["path"].startswith(root + "/"):
            return {**scope, "path": scope["path"].removeprefix(root)}
        return scope

    def _body_limit(self, scope: Scope) -> int:
        """Return the bytes that the body of a request may have."""
        return MAX_IMAGE_BODY if scope["path"] in IMAGE_PATHS and self.context.takes_images else MAX_BODY

    def _let_in(self, scope: Scope, headers: dict[bytes, bytes]) -> bytes:
        """Return the cache salt of the caller's key. Raises APIError."""
        if scope["path"] in OPEN_TO_ALL:
            return b""
        names = self.options.names
        if names and (host := host_name(headers.get(b"host", b"localhost"))) not in names:
            message = (
                f"this server does not answer to the name in the Host header: --allowed-host {shown(host)} allows it"
            )
            raise APIError("host_not_allowed", message)
        if scope["path"].startswith(PATHS):
            if not self.options.router_keys.accept(headers.get(KEY_HEADER, b"")):
                raise APIError("invalid_api_key", "this route is for routers: it needs a valid router key")
            if scope["path"] != REQUESTS:
                return b""
        cache_salt = self.options.keys.cache_salt(headers)
        if cache_salt is None:
            raise APIError("invalid_api_key", INVALID_KEY)
        if scope["method"] == "POST":
            if self.context.draining:
                raise APIError("draining", "the server is shutting down")
            size = _size(headers, self._body_limit(scope))
            own = MAX_BODIES // 2 if len(set(self.options.keys.hashes)) > 1 else MAX_BODIES
            large = self.bodies[cache_salt] + size > own or self.bodies.total() + size > MAX_BODIES
            if large or self.open > self.options.max_requests:
                raise self.context.full()
        return cache_salt


def _cors_headers(origins: frozenset[str], headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the CORS headers of an answer to a request with `headers`, where pages of `origins` may read it."""
    if not origins:
        return []
    origin = headers.get(b"origin", b"")
    if origin.decode("latin-1") not in origins:
        return [(b"vary", b"Origin")]
    allowed = [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]
    return [(b"vary", b"Origin"), *allowed]


def _is_preflight(origins: frozenset[str], scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether this is a preflight for a page that may call."""
    return (
        scope["method"] == "OPTIONS"
        and b"access-control-request-method" in headers
        and headers.get(b"origin", b"").decode("latin-1") in origins
    )


async def _answer_preflight(asked: Mapping[bytes, bytes], send: Send) -> None:
    """Allow a page's call with any headers that it wants to send: client libraries have their own."""
    wanted = asked.get(b"access-control-request-headers", b"")
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", wanted if _NAMES.fullmatch(wanted) else b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _wants_page(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a browser asks for a page, which it then shows."""
    return b"text/html" in headers.get(b"accept", b"")


async def _send_lab(status: int, send: Send) -> None:
    """Refuse with the lab's page, which holds no data and asks for a key."""
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", POLICY.encode())]
    headers.append((b"content-length", str(len(LAB)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": LAB})


def _size(headers: Mapping[bytes, bytes], most: int) -> int:
    """Return the bytes of the body to be held: 0 for one of more than `most`, which is not read. One in chunks may
    become as large as any."""
    if b"transfer-encoding" in headers:
        return most
    return length if (length := int(headers.get(b"content-length", b"0"))) <= most else 0
