"""The application without its middleware: all routes, the shape of their errors, and the OpenAPI document."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from attar.server.api.dialects.llamacpp.routes import LlamaCppRoutes
from attar.server.api.dialects.ollama_routes import OllamaRoutes
from attar.server.api.dialects.routes import DialectRoutes
from attar.server.api.openapi.document import Served, document
from attar.server.api.responses.routes import ResponsesRoutes
from attar.server.api.responses.store import ResponseStore
from attar.server.api.routes import Routes
from attar.server.api.status import StatusRoutes
from attar.server.dispatcher import Dispatcher
from attar.server.errors import INTERNAL, APIError
from attar.server.fair_thread_pool import TextThreads
from attar.server.grammars import Grammars
from attar.server.pages.lab import LabRoutes
from attar.server.prompts import Prompts
from attar.strict_json import shown
from attar.version import __version__

NO_DEFAULTS: Mapping[str, Any] = {}
MAX_COMPARED = 64  # characters of an unknown path


def make_app(
    dispatcher: Dispatcher, prompts: Prompts, grammars: Grammars, threads: TextThreads,
    sampling: Mapping[str, Any] = NO_DEFAULTS, keyed: bool = False, root_path: str = "",
    store: ResponseStore | None = None,
) -> FastAPI:  # fmt: skip
    """Make the application. `sampling`: parameters of requests that do not name them. `keyed`: whether its middleware
    requires keys. `root_path`: the prefix that clients give paths. The document states both. `store` keeps answers."""
    app = FastAPI(title="attar", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    add_errors(app)
    StatusRoutes(dispatcher).add_to(app)
    LabRoutes(dispatcher).add_to(app)
    Routes(dispatcher, prompts, grammars, threads, sampling).add_to(app)
    ResponsesRoutes(dispatcher, prompts, grammars, threads, sampling, store).add_to(app)
    for routes in (DialectRoutes, LlamaCppRoutes, OllamaRoutes):
        routes(dispatcher, prompts, grammars, threads, sampling).add_to(app)

    def described() -> dict[str, Any]:
        engine = dispatcher.engine
        return document(app, Served(
            keyed, engine.ready, prompts.shortest, engine.places.most, dispatcher.aliases, root_path,
            prompts.infill is not None, prompts.images is not None,
        ))  # fmt: skip

    app.openapi = described  # type: ignore[method-assign]
    return app


def add_errors(app: FastAPI) -> None:
    """Let an application answer every error in our shape."""
    for kind in (APIError, HTTPException, Exception):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    """Answer every error in our shape: errors of routes, of routing, and unexpected ones, which the middleware logs."""
    path, allowed = request.url.path, None
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = _methods(request.app, request.scope)
        refusal = APIError("method_not_allowed", f"{shown(path)} takes {allowed}, not {shown(request.method)}")
    elif isinstance(error, HTTPException):
        refusal = APIError("not_found", f"no route {shown(path)}: {_nearest(request.app, path)}")
    elif isinstance(error, APIError):
        refusal = error
    else:
        refusal = APIError("internal", INTERNAL)
    return _Refused(refusal, path, allowed)


def _nearest(app: FastAPI, path: str) -> str:
    """Return a hint at the route that was meant: one with another beginning, or of a similar name."""
    known = [route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path]
    found = [each for each in known if each != "/" and (each.endswith(path) or path.endswith(each))]
    found += difflib.get_close_matches(path[:MAX_COMPARED], known, 1, 0.75)
    found.sort(key=lambda each: difflib.SequenceMatcher(None, each, path[:MAX_COMPARED]).ratio(), reverse=True)
    return f"did you mean {found[0]}?" if found else "GET /openapi.json lists the routes"


def _methods(app: FastAPI, scope: Scope) -> str:
    """Return the methods of a path, over all its routes: Starlette reads the first route alone, in any order."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


class _Refused(Response):
    def __init__(self, refusal: APIError, path: str, allowed: str | None) -> None:
        super().__init__()
        self._refusal, self._path, self._allowed = refusal, path, allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._refusal.send(self._path, send, self._allowed)
