"""Routes of OpenAI's Responses API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from attar.server.api.answering import stream, whole
from attar.server.api.openapi import taking
from attar.server.api.responses import types
from attar.server.api.responses.answer import Answer
from attar.server.api.responses.items import conversation
from attar.server.api.responses.schemas import ResponsesBody
from attar.server.api.routes import Routes
from attar.server.api.sampling_params import chat_params
from attar.server.http import sse
from attar.text.answers.events import Plain


class ResponsesRoutes(Routes):
    """Routes of answers to items of a conversation."""

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document."""
        made = taking(ResponsesBody, types.ResponseObject, *types.RESPONSE_EVENTS)
        app.post("/v1/responses", openapi_extra=made)(self.respond)

    async def respond(self, request: Request) -> Response:
        """OpenAI's responses."""
        caller, body, model, ready = await self._read(request, ResponsesBody)
        messages = conversation(body.instructions, body.items)
        making = self._prompts.chat_ids(caller.cache_salt, messages, ready.context)
        ids = await sse.while_wanted(request.receive, making)
        grammar = await self._proven(request, caller, body, ready)
        most = self._dispatcher.engine.places.most
        params = chat_params(body.as_chat(), ids, ready, most, caller, self._sampling)
        handler = self._dispatcher.submit(caller, [ids], params, 1, model, 0, grammar)
        answer = Answer(handler, body, params, model, Plain())
        if body.stream:
            return await stream(request, handler, answer.stream(), answer.failed)
        return await whole(request, handler, answer.whole())
