"""`attar route` in front of any servers that speak OpenAI's API, such as vLLM's and llama.cpp's: a proxy that chooses.

What hosts have cached is guessed from texts (`text_prefixes.py`). An answer that the client has begun to get is never
made again elsewhere: its host's end ends it with one error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import httpx2
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attar import env, faults
from attar.routing.router import Asked, Routed
from attar.server.admission.rate_limits import Caller
from attar.server.admission.retry_after import RetryAfter
from attar.server.api.app import add_errors
from attar.server.api.routes import receive_body
from attar.server.api.status import respond
from attar.server.errors import FULL, APIError
from attar.server.fleet import proxy
from attar.server.fleet.host_client import CONNECT_SECONDS, client
from attar.server.fleet.plain_host import BROKEN, STATES, HostFailed, PlainHost
from attar.server.fleet.proxy import Answer
from attar.server.fleet.router_key import PassedKeys
from attar.server.fleet.text_prefixes import PromptBody, TextRouter
from attar.server.http import sockets, sse
from attar.server.http.middleware import Middleware
from attar.server.metrics import HttpMetrics
from attar.server.options import ServerOptions
from attar.server.serve import HttpServer

ASKED = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/rerank", "/v1/score", "/rerank", "/tokenize", "/detokenize", "/completion", "/infill", "/apply-template",
)  # fmt: skip
"""Paths of requests that are passed on. Others may be of one host's administration, or need what one host keeps."""
READ = ("/v1/models", "/models")


class FleetContext:
    """State that all requests share."""

    takes_images = False
    """Whether bodies may be longer, for images."""

    def __init__(self) -> None:
        self.metrics, self.draining, self.backoff = HttpMetrics(), False, RetryAfter()
        self.hosts: list[PlainHost] = []

    def full(self) -> APIError:
        """Make the refusal of a request for which there is no room: the first host that expects room says when."""
        seconds = self.backoff.retry_after(time.monotonic(), sum(each.open for each in self.hosts))
        return APIError("overloaded", FULL, retry_after=max(seconds, proxy.retry_after(self.hosts)))


class ProxyRoutes:
    """Routes that hosts answer. A request has `deadline` seconds for its first byte, and for each pause."""

    def __init__(self, context: FleetContext, http: httpx2.AsyncClient, deadline: float) -> None:
        self._context, self._http, self._deadline = context, http, deadline
        self._router, self._name = TextRouter(len(context.hosts)), proxy.name()
        self._closing: set[asyncio.Task[None]] = set()
        for host in context.hosts:
            host.went_down = lambda number=host.number: self._router.forget(number)  # type: ignore[misc]

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        for path in ASKED:
            app.post(path)(self.asked)
        for path in READ:
            app.get(path)(self.read)

    async def asked(self, request: Request) -> Response:
        """Pass a request on to the host where it costs the least."""
        caller: Caller = request.scope["attar"]
        headers = proxy.headers_for_host(dict(request.scope["headers"]), self._name)
        data = await receive_body(request, caller.id)
        try:
            asked = msgspec.json.decode(data, type=PromptBody).asked(caller.cache_salt)
        except (ValueError, RecursionError):
            raise APIError("invalid_json", "the body is no JSON object with fields of a known kind") from None
        tried: set[int] = set()
        while True:
            if (left := caller.arrived + self._deadline - time.monotonic()) <= 0:
                raise APIError("deadline", "no host answered in the time that this router allows")
            routed = self._route(caller.id, asked, tried)
            host, kept = self._context.hosts[routed.engine], contextlib.ExitStack()
            kept.enter_context(self._open(caller.id, host))
            try:
                made = self._request("POST", host, request, headers, data)
                asking = host.unless_down(proxy.ask(self._http, host, made, left))
                answer = await sse.while_wanted(request.receive, asking)
            except HostFailed:
                kept.close()
                host.failures += 1
                tried.add(host.number)
                continue
            except BaseException:
                kept.close()
                raise
            self._router.begun(caller.id, host.number, asked.digests)
            answer.learn = partial(self._learn, routed)
            return await self._answered(request, answer, kept)

    async def read(self, request: Request) -> Response:
        """Ask the first host that answers."""
        headers = proxy.headers_for_host(dict(request.scope["headers"]), self._name)
        tried: set[int] = set()
        while (host := next((each for each in self._usable() if each.number not in tried), None)) is not None:
            tried.add(host.number)
            try:
                made = self._request("GET", host, request, headers, b"")
                answer = await proxy.ask(self._http, host, made, self._deadline)
            except HostFailed:
                host.failures += 1
                continue
            return await self._answered(request, answer, contextlib.ExitStack())
        raise self._none()

    def _learn(self, routed: Routed, answer: Answer) -> None:
        """Take the times of an ended stream, whose events are about as many as tokens."""
        prefill, decode = answer.began - answer.sent, time.monotonic() - answer.began
        self._router.router.costs.learn(routed.uncached, prefill, answer.events, decode, routed.choices)

    def _request(
        self, method: str, host: PlainHost, request: Request, headers: dict[str, str], data: bytes
    ) -> httpx2.Request:
        timeout = httpx2.Timeout(self._deadline, connect=CONNECT_SECONDS, pool=None)
        url = host.url + request.scope["route"].path
        return self._http.build_request(method, url, headers=headers, content=data, timeout=timeout)

    def _usable(self) -> list[PlainHost]:
        return [each for each in self._context.hosts if each.usable]

    def _route(self, id: str, asked: Asked, tried: set[int]) -> Routed:
        """Choose a host that was not tried. Raises APIError where none is left."""
        now = time.monotonic()
        among = [each.number for each in self._usable() if each.number not in tried]
        if len(tried) >= proxy.MAX_TRIES:
            among = []
        full = {each for each in among if self._context.hosts[each].full_until > now}
        routed = self._router.router.route(id, asked, among, now, full) if among else None
        if routed is None:
            raise self._none()
        return routed

    def _none(self) -> APIError:
        """Make the refusal where no host can answer."""
        hosts = self._context.hosts
        if any(each.full_until > time.monotonic() for each in hosts):
            return self._context.full()
        if all(each.state == "loading" for each in hosts):
            return APIError("loading", "no host has answered yet")
        return APIError("engine_down", "no host can answer at present")

    @contextlib.contextmanager
    def _open(self, id: str, host: PlainHost) -> Iterator[None]:
        host.open += 1
        host.requests += 1
        try:
            yield
        finally:
            host.open -= 1
            self._router.router.ended(id)

    async def _answered(self, request: Request, answer: Answer, kept: contextlib.ExitStack) -> Response:
        host, status = answer.host, answer.reply.status_code
        if not answer.streams:
            kept.close()
            await answer.close()
            if status == 200:
                self._context.backoff.served(time.monotonic())
            return Response(answer.first, status, answer.headers)
        left = False

        async def pieces() -> AsyncIterator[bytes]:
            yield answer.first
            whole = proxy.ends(answer.first)
            try:
                async for piece in answer.pieces:
                    answer.events += piece.count(b"data: ")
                    yield piece
                    whole = proxy.ends(piece)
            except BROKEN:
                if not left and not whole:
                    host.failures += 1
                    yield proxy.broken(request.url.path)
                return
            answer.learn(answer)
            self._context.backoff.served(time.monotonic())

        def hang_up() -> None:
            task = asyncio.get_running_loop().create_task(answer.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

        def gone() -> None:
            nonlocal left
            left = True
            hang_up()

        def closed() -> None:
            kept.close()
            hang_up()

        stream = sse.EventStream(pieces(), gone, closed, proxy.broken(request.url.path))
        stream.status_code = status
        return stream


class FleetMetrics(Collector):
    """The metrics of hosts, each with its address as a label."""

    def __init__(self, hosts: Sequence[PlainHost]) -> None:
        self._hosts = hosts

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("attar_host_state", "1 for the state of a host", labels=["host", "state"])
        open_ = GaugeMetricFamily("attar_host_requests_open", "Requests at a host", labels=["host"])
        sent = CounterMetricFamily("attar_host_requests", "Requests sent to a host", labels=["host"])
        failed = CounterMetricFamily("attar_host_failures", "Requests that a host failed", labels=["host"])
        for each in self._hosts:
            for state in STATES:
                states.add_metric([each.label, state], float(each.state == state))
            open_.add_metric([each.label], each.open)
            sent.add_metric([each.label], each.requests)
            failed.add_metric([each.label], each.failures)
        yield from (states, open_, sent, failed)


class FleetServer(HttpServer):
    """A router's server. `http` asks the hosts at `urls`."""

    context: FleetContext

    def __init__(
        self, urls: Sequence[str], options: ServerOptions, http: httpx2.AsyncClient,
        listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        keys = PassedKeys(options.keys.hashes, os.urandom(32), keyed=True)
        options = replace(options, keys=keys)
        self.context, self._http, self._watching = FleetContext(), http, list[asyncio.Task[None]]()
        self.hosts = [PlainHost(at, url, urlsplit(url).netloc) for at, url in enumerate(urls)]
        self.context.hosts = self.hosts
        self.context.metrics.registry.register(FleetMetrics(self.hosts))
        app = FastAPI(title="attar", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        add_errors(app)
        self.routes = ProxyRoutes(self.context, http, options.deadline)
        self.routes.add_to(app)
        for path, route in (("/livez", self.livez), ("/readyz", self.readyz), ("/health", self.readyz)):
            app.get(path)(route)
        app.get("/metrics")(self.metrics)
        super().__init__(options, Middleware(app, options, self.context), listener)

    async def livez(self) -> Response:
        """Liveness: the process answers."""
        return respond({"status": "alive"})

    async def readyz(self) -> Response:
        """Readiness: a host is ready, and the router is not shutting down."""
        if self.context.draining:
            raise APIError("draining", "the router is shutting down")
        if not any(each.usable for each in self.hosts):
            raise APIError("engine_down", "no host is ready")
        return respond({"status": "ready", "hosts": {each.url: each.state for each in self.hosts}})

    async def metrics(self) -> Response:
        """Metrics in Prometheus's text format."""
        return PlainTextResponse(self.context.metrics.text(), media_type="text/plain; version=0.0.4")

    def begin(self) -> None:
        """Begin to look at hosts."""
        loop = asyncio.get_running_loop()
        self._watching = [loop.create_task(each.watch(self._http)) for each in self.hosts]

    async def end(self) -> None:
        """Look no more at hosts."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def drain(self) -> None:
        """Take no more requests."""
        self.context.draining = True

    def close(self) -> None:
        """Release nothing."""


def run(urls: Sequence[str], options: ServerOptions, started: Callable[[str], None]) -> None:
    """Route requests to the servers at `urls` until told to stop. Raises OSError where the address is not available,
    ValueError for unknown faults to be armed (`attar/faults.py`)."""
    faults.arm_from(env.get().faults)
    sockets.allow(2 * options.max_requests)
    with sockets.listen(options.host, options.port) as listener:

        async def main() -> None:
            async with client() as http:
                await FleetServer(urls, options, http, listener).run(started)

        gc.freeze()
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(main())
