"""Routes of other servers' APIs that ask the engine for work."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from attar.protocol.request import SamplingParams
from attar.server.api.answering import stream, whole
from attar.server.api.dialects import answers, infill, rerank
from attar.server.api.dialects.infill import InfillBody
from attar.server.api.dialects.rerank import RerankBody
from attar.server.api.openai import FAILED
from attar.server.api.openapi import taking
from attar.server.api.response_types import Error
from attar.server.api.routes import Routes
from attar.server.api.sampling_params import ended, infill_params
from attar.server.http import sse
from attar.server.prompts import Room
from attar.text.forms.rerank import INSTRUCTION


class DialectRoutes(Routes):
    """Routes that read and answer like those of `Routes`. The document has those that the model is made for."""

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document."""
        middle: dict[str, Any] = {"include_in_schema": self._prompts.infill is not None}
        ranked: dict[str, Any] = {"include_in_schema": self._prompts.reranker is not None}
        filled = taking(InfillBody, answers.Infilled, answers.Infilled, Error)
        app.post("/infill", openapi_extra=filled, **middle)(self.infill)
        app.post("/v1/rerank", openapi_extra=taking(RerankBody, answers.Ranking), **ranked)(self.rerank)
        for path in ("/rerank", "/v2/rerank"):
            app.post(path, include_in_schema=False)(self.rerank)

    async def infill(self, request: Request) -> Response:
        """Text between a prefix and a suffix, as llama.cpp's server fills it in."""
        caller, body, model, ready = await self._read(request, InfillBody)
        new = 0 if body.n_predict == 0 else 1
        room = Room("input_prefix", ready.vocab_size, ready.context, new)
        files = [(file.filename, file.text) for file in body.input_extra or ()]
        prefix = body.input_prefix + (body.prompt or "")
        making = self._prompts.infill_ids(caller.cache_salt, [prefix], body.input_suffix, room, files)
        [ids] = await sse.while_wanted(request.receive, making)
        params = ended(infill_params(body, ids, ready, caller), self._prompts.infill)
        handler = self._dispatcher.submit(caller, [ids], params, 1, model)
        if body.stream:
            return await stream(request, handler, infill.stream(handler, model), FAILED)
        return await whole(request, handler, infill.whole(handler, model, body.response_fields))

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
