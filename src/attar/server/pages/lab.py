"""Routes of the lab: the page, and its data about this server, of which a key sees its own requests only."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response

from attar.lab.facts import facts
from attar.server.api.openapi.document import giving
from attar.server.api.response_types import state as state_types
from attar.server.api.status import respond
from attar.server.dispatcher import Dispatcher
from attar.server.pages.lab_page import LAB, POLICY

MOST = 64  # running requests that are told


class LabRoutes:
    """Routes of the lab. They give the engine no work."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        app.get("/lab", response_class=HTMLResponse, include_in_schema=False)(self.page)
        app.head("/lab", include_in_schema=False)(self.page)
        app.get("/v1/lab", openapi_extra=giving(state_types.Lab))(self.data)
        app.head("/v1/lab")(self.data)

    async def page(self) -> Response:
        """The lab: simulators of this model and server."""
        return Response(LAB, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def data(self, request: Request) -> Response:
        """Data of the lab: the model's shape, the machine's rates, the engine's state, and the caller's requests."""
        ready, engine = self._dispatcher.ready(), self._dispatcher.engine
        running = self._dispatcher.context.traces.running(request.scope["attar"].cache_salt)[:MOST]
        found: dict[str, Any] = facts(ready.shape, ready.machine, live=True)
        found["engine"] = {"ready": ready, "stats": engine.stats}
        found["sequences"] = [
            {"id": each.id, "tokens": each.prompt_tokens + each.generated, "max_tokens": each.max_tokens}
            for each in running
        ]
        # A step's rows and cached tokens tell of all keys' requests.
        found["steps"] = list(engine.recent_steps) if engine.places.keys < 2 else None
        return respond(found)
