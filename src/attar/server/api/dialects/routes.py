"""Routes of other servers and services: Jina's and Cohere's reranking, vLLM's load, SageMaker's one route for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Message

from attar import strict_json
from attar.protocol.request import SamplingParams
from attar.server.api.answering import whole
from attar.server.api.dialects import answers, rerank
from attar.server.api.dialects.rerank import RerankBody
from attar.server.api.openapi.document import giving, taking
from attar.server.api.response_types.state import Load
from attar.server.api.routes import Routes, receive_body
from attar.server.api.status import respond
from attar.server.errors import APIError
from attar.server.http import sse
from attar.server.prompt_room import Room
from attar.text.forms.rerank import INSTRUCTION


class DialectRoutes(Routes):
    """Routes that read and answer like those of `Routes`. The document has those that the model is made for."""

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document."""
        ranked: dict[str, Any] = {"include_in_schema": self._prompts.reranker is not None}
        app.post("/v1/rerank", openapi_extra=taking(RerankBody, answers.Ranking), **ranked)(self.rerank)
        for path in ("/rerank", "/v2/rerank"):
            app.post(path, include_in_schema=False)(self.rerank)
        app.get("/load", openapi_extra=giving(Load))(self.load)
        app.head("/load")(self.load)
        app.post("/invocations", include_in_schema=False)(self.invoke)

    async def load(self) -> Response:
        """The number of requests that run or wait, as vLLM tells it."""
        return respond({"server_load": self._dispatcher.context.traces.open})

    async def invoke(self, request: Request) -> Response:
        """A request of any kind, as SageMaker passes it on: its body decides which route answers."""
        data = await receive_body(request, request.scope["attar"].id)
        bodies = [data]

        async def replayed() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await request.receive()

        routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "messages": self.chat, "prompt": self.completions, "input": self.embeddings, "query": self.rerank,
        }  # fmt: skip
        reading = self._threads.run(request.scope["attar"].cache_salt, len(data), lambda: _fields(data))
        fields = await sse.while_wanted(request.receive, reading)
        for name, route in routes.items():
            if name in fields:
                return await route(Request(request.scope, replayed))
        raise APIError("missing_field", f"the body: one of {', '.join(routes)} says what is asked for")

    async def rerank(self, request: Request) -> Response:
        """Jina's rerank: documents by their relevance to a query."""
        caller, body, model, ready = await self._read(request, RerankBody)
        room = Room("documents", ready.vocab_size, ready.context)
        instruction = INSTRUCTION if body.instruction is None else body.instruction
        making = self._prompts.rerank_ids(
            caller.cache_salt, body.query, body.texts(), instruction, room, body.max_tokens_per_doc or None
        )
        ids = await sse.while_wanted(request.receive, making)
        reranker = self._prompts.reranker
        assert reranker is not None
        words = (reranker.no, reranker.yes)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=words)
        handler = self._dispatcher.submit(caller, ids, params, 1, model)
        return await whole(request, handler, rerank.whole(handler, model, body, words))


def _fields(data: bytes) -> frozenset[str]:
    """Return the names of a body's fields. Raises APIError for a body that is no JSON object."""
    try:
        value = strict_json.loads(data)
    except strict_json.JSONError as error:
        raise APIError("invalid_json", str(error)) from error
    if not isinstance(value, dict):
        raise APIError("invalid_type", "the body: an object is expected")
    return frozenset(value)
