"""The application in front of several models: it picks the model of a request, whose own application answers.

A request's model is the field `model` of its body, which must name one. A body is read and parsed here for that alone;
the model's application reads it again, and checks it as if the model were served alone. Routes that give no engine work
take a model, where they need one, from the query (`?model=NAME`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attar import strict_json
from attar.server.admission.rate_limits import Caller
from attar.server.api.app import add_errors
from attar.server.api.dialects.ollama import NEVER, VERSION
from attar.server.api.dialects.ollama_routes import MANAGED, listed
from attar.server.api.openapi.document import Served, document
from attar.server.api.routes import LARGE_BODY, receive_body
from attar.server.api.status import respond
from attar.server.dispatcher import LATEST, LISTED
from attar.server.errors import APIError
from attar.server.fair_thread_pool import TextThreads
from attar.server.http import sse
from attar.server.models.load_scheduler import State
from attar.server.models.pool import ModelPool
from attar.server.models.served import ServedModel
from attar.server.pages.chat_page import PAGE, POLICY
from attar.strict_json import shown
from attar.version import __version__

BY_NAME = frozenset({"/v1/engine", "/v1/lab", "/tokenizer_info", "/props", "/slots"})  # GET routes of one model


class Front:
    """The application for the models of `pool`. `metrics` writes all metrics as text."""

    def __init__(
        self, pool: ModelPool, threads: TextThreads, metrics: Callable[[], bytes], keyed: bool, root_path: str
    ) -> None:
        self._pool, self._threads, self._metrics = pool, threads, metrics
        self._keyed, self._root_path = keyed, root_path
        self.draining = False
        first = next(iter(pool.models.values()))
        self.app = FastAPI(title="attar", version=__version__, docs_url=None, redoc_url=None, openapi_url=None,
                           redirect_slashes=False)  # fmt: skip
        add_errors(self.app)
        own: dict[str, Callable[..., Awaitable[Response]]] = {
            "/livez": self.livez, "/readyz": self.readyz, "/health": self.readyz, "/ping": self.readyz,
            "/load": self.load, "/version": self.version,
            "/v1/models": self.models, "/models": self.models, "/v1/models/{name:path}": self.one_model,
            "/v1/requests/{name}/why": self.why,
            "/openapi.json": self.described, "/api/version": self.api_version, "/api/tags": self.tags,
            "/api/ps": self.in_memory,
        }  # fmt: skip
        self.app.get("/", response_class=HTMLResponse)(self.page)
        self.app.get("/metrics", response_class=PlainTextResponse)(self.read_metrics)
        for path, answer in own.items():
            self.app.get(path)(answer)
        for path in ("/", "/metrics", *own):
            self.app.head(path)(own.get(path, self.page if path == "/" else self.read_metrics))
        for route in first.app.routes:  # those that every model has
            if not isinstance(route, Route) or route.path in own or route.path in ("/", "/metrics"):
                continue
            taken: ASGIApp = first.app  # where any model's would answer the same: stored answers, and refusals
            if route.path in BY_NAME:
                taken = _ByQuery(self)
            elif "POST" in (route.methods or ()) and not any(route.path == path for _, path in MANAGED):
                taken = _ByBody(self)
            self.app.router.routes.append(Route(route.path, taken, methods=sorted(route.methods or ())))

    def find(self, asked: str | None) -> ServedModel:
        """Return the model of a name. Raises APIError where none is named, or an unknown one."""
        names = list(self._pool.models)
        known = ", ".join(names[:LISTED])
        known += "" if len(names) <= LISTED else ", ... (GET /v1/models lists all)"
        if asked is None:
            raise APIError("missing_field", f"model: this server has several: name one of {known}", "model")
        model = self._pool.models.get(asked) or self._pool.models.get(asked.removesuffix(LATEST))
        if model is None:
            raise APIError("model_not_found", f"model: {shown(asked)} is not served here, but {known}", "model")
        return model

    async def body_of(self, request: Request) -> tuple[Caller, bytes, str | None]:
        """Read a request's body; return it with the model that it names. Raises APIError where it is no JSON."""
        caller: Caller = request.scope["attar"]
        data = await receive_body(request, caller.id)
        if len(data) <= LARGE_BODY:
            return caller, data, _named(data)
        reading = self._threads.run(caller.cache_salt, len(data), lambda: _named(data))
        return caller, data, await sse.while_wanted(request.receive, reading)

    async def forward(self, request: Request, send: Send) -> None:
        """Answer a request by the application of the model that its body names, once that is loaded."""
        caller, data, asked = await self.body_of(request)
        model = self.find(asked)
        bodies = [data]
        del data

        async def replayed() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await request.receive()

        async with self._pool.lease(model, caller, request.receive):
            await model.app(request.scope, replayed, send)

    async def page(self) -> Response:
        """A page to chat with a model and to watch its engine."""
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def livez(self) -> Response:
        """Liveness: the process answers."""
        return respond({"status": "alive"})

    async def readyz(self) -> Response:
        """Readiness: the server is not shutting down, and not every loaded engine is in trouble."""
        if self.draining:
            raise APIError("draining", "the server is shutting down")
        loaded = [model for model in self._pool.models.values() if self._state(model) is State.READY]
        troubles = []
        for model in loaded:
            try:
                model.dispatcher.getting_on()
            except APIError as error:
                troubles.append(error)
        if loaded and len(troubles) == len(loaded):
            raise troubles[0]
        return respond({"status": "ready"})

    async def load(self) -> Response:
        """The number of requests that run or wait, of all models, those included that wait for a load."""
        waiting = sum(len(model.waiting) for model in self._pool.scheduler.models.values())
        running = sum(model.context.traces.open for model in self._pool.models.values())
        return respond({"server_load": waiting + running})

    async def version(self) -> Response:
        """The server's version."""
        return respond({"version": __version__})

    async def read_metrics(self) -> Response:
        """Metrics in Prometheus's text format; those of an engine have a label with its model."""
        return Response(self._metrics(), media_type="text/plain; version=0.0.4")

    async def models(self) -> Response:
        """All models, and whether each is loaded."""
        return respond({"object": "list", "data": [self._told(model) for model in self._pool.models.values()]})

    async def one_model(self, name: str) -> Response:
        """One model by its name."""
        return respond(self._told(self.find(name)))

    async def why(self, request: Request, name: str) -> Response:
        """Account of where a request's time went, or goes, whichever model it asked."""
        salt, unknown = request.scope["attar"].cache_salt, None
        for model in self._pool.models.values():
            try:
                return respond(await model.dispatcher.why(name, salt))
            except APIError as error:
                unknown = error
        assert unknown is not None
        raise unknown

    async def described(self) -> Response:
        """The OpenAPI document: of a server with one model, but for the name of that."""
        models = list(self._pool.models.values())
        shortest, infill = max(each.prompts.shortest for each in models), any(each.prompts.infill for each in models)
        images = any(each.images is not None for each in models)
        served = Served(self._keyed, None, shortest, root_path=self._root_path, infill=infill, images=images)
        made = document(models[0].app, served)
        for schema in made["components"]["schemas"].values():
            if "model" in schema.get("properties", {}) and "user" in schema["properties"]:  # a request's body
                schema["properties"]["model"] = {"type": "string", "enum": list(self._pool.models)}
                schema["required"] = sorted({*schema.get("required", ()), "model"})
        return respond(made)

    async def api_version(self) -> Response:
        """The version of Ollama's API that this one follows."""
        return respond({"version": VERSION})

    async def tags(self) -> Response:
        """All models, as Ollama lists them."""
        return respond({"models": [listed(each.name, each.spec.size) for each in self._pool.models.values()]})

    async def in_memory(self) -> Response:
        """The loaded models, as Ollama lists them."""
        found = [each for each in self._pool.models.values() if each.engine.ready is not None]
        return respond({"models": [
            listed(each.name, each.spec.size)
            | {"expires_at": NEVER, "size_vram": 0, "context_length": each.spec.settings.context} for each in found
        ]})  # fmt: skip

    def _state(self, model: ServedModel) -> State:
        return self._pool.scheduler.models[model.name].state

    def _told(self, model: ServedModel) -> dict[str, Any]:
        state = self._state(model)
        return {
            "id": model.name, "object": "model", "created": 0, "owned_by": "attar", "root": model.name,
            "max_model_len": model.spec.settings.context, "loaded": state in (State.READY, State.DRAINING),
            "state": state.value, "memory": model.spec.size,
        }  # fmt: skip


class _ByBody:
    """A route whose request names its model in its body."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front.forward(Request(scope, receive), send)


class _ByQuery:
    """A route of one model that gives its engine no work: of the model in the query, or else the last one used of those
    that are loaded."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, asked = self._front, Request(scope).query_params.get("model")
        if asked is None:
            known = front._pool.scheduler.models.values()
            loaded = [each for each in known if each.state in (State.READY, State.DRAINING)]
            if not loaded:
                raise APIError("loading", "no model is loaded: one is on the first request that names it")
            asked = max(loaded, key=lambda each: each.used).name
        await front.find(asked).app(scope, receive, send)


def _named(data: bytes) -> str | None:
    """Return the model that a body names. Raises APIError."""
    try:
        value = strict_json.loads(data)
    except strict_json.JSONError as error:
        raise APIError("invalid_json", str(error)) from error
    if not isinstance(value, Mapping):
        raise APIError("invalid_type", "the body: an object is expected")
    found = value.get("model") or value.get("name")  # Ollama's /api/show may have either
    if found is not None and not isinstance(found, str):
        raise APIError("invalid_type", "model: a string is expected", "model")
    return found
