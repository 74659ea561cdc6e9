"""Routes about the server: its page, liveness and readiness, metrics, models, and requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from attar.protocol.messages import Ready
from attar.server.api.openapi.document import giving
from attar.server.api.response_types import state as state_types
from attar.server.dispatcher import Dispatcher
from attar.server.pages.chat_page import PAGE, POLICY
from attar.server.replicas.group import ReplicaGroup
from attar.version import __version__


def respond(value: Any) -> Response:
    """Answer with JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


class StatusRoutes:
    """Routes that give the engine no work: at most they ask for its state."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document. Each also answers HEAD, which monitors ask."""

        def get(path: str, route: Callable[..., Awaitable[Response]], **described: Any) -> None:
            app.get(path, **described)(route)
            app.head(path, include_in_schema=described.get("include_in_schema", True))(route)

        get("/", self.page, response_class=HTMLResponse, include_in_schema=False)
        for path, route in (("/livez", self.livez), ("/readyz", self.readyz), ("/health", self.readyz)):
            get(path, route, openapi_extra=giving(state_types.Alive))
        get("/ping", self.readyz, include_in_schema=False)  # SageMaker's
        get("/version", self.version, openapi_extra=giving(state_types.Version))
        get("/metrics", self.read_metrics, response_class=PlainTextResponse)
        get("/v1/engine", self.engine, openapi_extra=giving(state_types.Engine))
        get("/v1/models", self.models, openapi_extra=giving(state_types.Models))
        get("/models", self.models, include_in_schema=False)
        get("/v1/models/{name:path}", self.one_model, openapi_extra=giving(state_types.Model))
        get("/v1/requests/{name}/why", self.why, openapi_extra=giving(state_types.Why))

    async def page(self) -> Response:
        """A page to chat with the model and to watch the engine."""
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def livez(self) -> Response:
        """Liveness: the process answers. The engine is not asked."""
        return respond({"status": "alive"})

    async def readyz(self) -> Response:
        """Readiness: the model is loaded, the engine makes progress, and the server is not shutting down."""
        self._dispatcher.getting_on()
        return respond({"status": "ready"})

    async def version(self) -> Response:
        """The server's version."""
        return respond({"version": __version__})

    async def read_metrics(self) -> Response:
        """Metrics in Prometheus's text format."""
        return Response(self._dispatcher.context.metrics.text(), media_type="text/plain; version=0.0.4")

    async def engine(self) -> Response:
        """The engine's message when it became ready, and its state since; `blocks` is base64, a byte each. With several
        replicas it is the first one's message, and the sum of the states."""
        ready, engine = self._dispatcher.ready(), self._dispatcher.engine
        told: dict[str, Any] = {"ready": ready, "stats": engine.stats}
        if isinstance(engine, ReplicaGroup):
            told["replicas"] = [each.told() for each in engine.replicas]
        return respond(told)

    async def models(self) -> Response:
        """The served model, its aliases that are whole names, and its adapters, in a list."""
        ready = self._dispatcher.ready()
        aliases = [alias for alias in self._dispatcher.aliases if "*" not in alias]
        names = (ready.model, *aliases, *ready.adapters)
        return respond({"object": "list", "data": [_model(name, ready) for name in names]})

    async def one_model(self, name: str) -> Response:
        """The served model by its name or an alias, or one of its adapters."""
        _, ready = self._dispatcher.model(name)
        return respond(_model(name, ready))

    async def why(self, request: Request, name: str) -> Response:
        """Account of where a request's time went, or goes. `name` is its `X-Request-Id`, or the `id` of its answer."""
        return respond(await self._dispatcher.why(name, request.scope["attar"].cache_salt))


def _model(name: str, ready: Ready) -> dict[str, Any]:
    described = {
        "id": name, "object": "model", "created": 0, "owned_by": "attar", "max_model_len": ready.context,
        "root": name if name in ready.adapters else ready.model,
    }  # fmt: skip
    return described | {"parent": ready.model} if name in ready.adapters else described
