"""Jina's and Cohere's routes, which ask the engine for work."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from attar.protocol.request import SamplingParams
from attar.server.api.answering import whole
from attar.server.api.dialects import answers, rerank
from attar.server.api.dialects.rerank import RerankBody
from attar.server.api.openapi import taking
from attar.server.api.routes import Routes
from attar.server.http import sse
from attar.server.prompts import Room
from attar.text.forms.rerank import INSTRUCTION


class DialectRoutes(Routes):
    """Routes that read and answer like those of `Routes`. The document has those that the model is made for."""

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document."""
        ranked: dict[str, Any] = {"include_in_schema": self._prompts.reranker is not None}
        app.post("/v1/rerank", openapi_extra=taking(RerankBody, answers.Ranking), **ranked)(self.rerank)
        for path in ("/rerank", "/v2/rerank"):
            app.post(path, include_in_schema=False)(self.rerank)

    async def rerank(self, request: Request) -> Response:
        """Jina's rerank: documents by their relevance to a query."""
        caller, body, model, ready = await self._read(request, RerankBody)
        room = Room("documents", ready.vocab_size, ready.context)
        instruction = INSTRUCTION if body.instruction is None else body.instruction
        making = self._prompts.rerank_ids(caller.cache_salt, body.query, body.texts(), instruction, room)
        ids = await sse.while_wanted(request.receive, making)
        reranker = self._prompts.reranker
        assert reranker is not None
        words = (reranker.no, reranker.yes)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=words)
        handler = self._dispatcher.submit(caller, ids, params, 1, model)
        return await whole(request, handler, rerank.whole(handler, model, body, words))
