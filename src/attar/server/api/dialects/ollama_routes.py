"""Routes of Ollama's API. Those that manage models are refused: a server has the model that it was started with."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from attar.protocol.messages import Ready
from attar.server.admission.rate_limits import Caller
from attar.server.api import openai
from attar.server.api.answering import AnswerReader, stream, whole
from attar.server.api.body import Body
from attar.server.api.dialects import answers as types
from attar.server.api.dialects import ollama
from attar.server.api.dialects.ollama import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from attar.server.api.openapi.document import giving, taking
from attar.server.api.response_types.answer import Answer
from attar.server.api.routes import Chat, Routes
from attar.server.api.sampling_params import chat_params, completion_params, ended
from attar.server.api.schemas import ChatBody, CompletionBody, EmbeddingBody
from attar.server.api.status import respond
from attar.server.api.tools.answers import headers
from attar.server.errors import INTERNAL, APIError
from attar.server.http import sse
from attar.server.prompt_room import Room

MANAGED = (
    ("POST", "/api/pull"), ("POST", "/api/push"), ("POST", "/api/create"), ("POST", "/api/copy"),
    ("DELETE", "/api/delete"), ("HEAD", "/api/blobs/{digest}"), ("POST", "/api/blobs/{digest}"),
)  # fmt: skip
_FAILED = ollama.failed(APIError("internal", INTERNAL))


class OllamaRoutes(Routes):
    """Ollama's API over the engine. Bodies are read as those of OpenAI's API."""

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document."""

        def get(path: str, route: Callable[..., Awaitable[Response]], answer: type[Answer]) -> None:
            app.get(path, openapi_extra=giving(answer))(route)
            app.head(path)(route)

        def lines(kind: type[Body]) -> dict[str, Any]:
            found = taking(kind, types.OllamaText)
            found["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
            return found

        get("/api/version", self.version, types.OllamaVersion)
        get("/api/tags", self.tags, types.OllamaModels)
        get("/api/ps", self.running, types.OllamaModels)
        app.post("/api/show", openapi_extra=taking(OllamaShowBody, types.OllamaShown))(self.show)
        app.post("/api/chat", openapi_extra=lines(OllamaChatBody))(self.chat)
        app.post("/api/generate", openapi_extra=lines(OllamaGenerateBody))(self.generate)
        app.post("/api/embed", openapi_extra=taking(OllamaEmbedBody, types.OllamaVectors))(self.embed)
        app.post("/api/embeddings", openapi_extra=taking(OllamaEmbeddingsBody, types.OllamaVector))(self.embeddings)
        for method, path in MANAGED:
            app.add_api_route(path, self.manage, methods=[method], include_in_schema=False)

    async def version(self) -> Response:
        """The version of Ollama's API that this one follows."""
        return respond({"version": ollama.VERSION})

    async def tags(self) -> Response:
        """The served model, its aliases that are whole names, and its adapters."""
        ready = self._dispatcher.ready()
        aliases = [alias for alias in self._dispatcher.aliases if "*" not in alias]
        return respond({"models": [_model(name, ready) for name in (ready.model, *aliases, *ready.adapters)]})

    async def running(self) -> Response:
        """The models in memory: the served one."""
        ready = self._dispatcher.ready()
        told = _model(ready.model, ready)
        more = {"expires_at": ollama.NEVER, "size_vram": 0, "context_length": ready.context}
        return respond({"models": [told | more]})

    async def show(self, request: Request) -> Response:
        """What is known of a model: its context, its template, and what it can do."""
        _, body, _, ready = await self._read(request, OllamaShowBody)
        name, _ = self._dispatcher.model(body.model or body.name)
        templates = self._prompts.tokenizer.chat_templates
        infill = ["insert"] if self._prompts.infill is not None else []
        return respond({
            "modelfile": "", "parameters": "", "template": templates.get("default", ""),
            "details": _model(name, ready)["details"], "modified_at": ollama.NEVER,
            "model_info": {
                "general.architecture": "attar", "attar.context_length": ready.context,
                "attar.embedding_length": ready.dimensions, "attar.vocab_size": ready.vocab_size,
            },
            "capabilities": ["completion", "embedding", *(["tools"] if templates else []), *infill],
        })  # fmt: skip

    async def chat(self, request: Request) -> Response:
        """Ollama's chat."""
        caller, body, model, ready = await self._read(request, OllamaChatBody)
        if not body.messages:
            return respond(ollama.loaded(body.model or model, True))
        return await self._said(request, caller, body, body.as_chat(), (model, ready))

    async def generate(self, request: Request) -> Response:
        """Ollama's generate: a turn, a text to be continued, or one to be filled in."""
        caller, body, model, ready = await self._read(request, OllamaGenerateBody)
        if not body.prompt and not body.suffix:
            return respond(ollama.loaded(body.model or model, False))
        text = body.as_completion()
        if text is None:
            return await self._said(request, caller, body, body.as_chat(), (model, ready))
        return await self._continued(request, caller, body, text, (model, ready))

    async def embed(self, request: Request) -> Response:
        """Ollama's embeddings of one text or several."""
        caller, body, model, ready = await self._read(request, OllamaEmbedBody)
        vectors, tokens = await self._vectors(request, caller, body.as_embedding(), (model, ready))
        spent = round(1e9 * (time.monotonic() - caller.arrived))
        return respond({
            "model": body.model or model, "embeddings": vectors, "total_duration": spent, "load_duration": 0,
            "prompt_eval_count": tokens,
        })  # fmt: skip

    async def embeddings(self, request: Request) -> Response:
        """Ollama's older embedding of one text."""
        caller, body, model, ready = await self._read(request, OllamaEmbeddingsBody)
        asked = EmbeddingBody(input=body.prompt, model=body.model)
        [vector], _ = await self._vectors(request, caller, asked, (model, ready))
        return respond({"embedding": vector})

    async def manage(self, request: Request) -> Response:
        """Refuse to manage models."""
        what = request.url.path.split("/")[2]
        message = f"{what}: models are not managed over HTTP: this server has the one that it was started with"
        raise APIError("not_implemented", message)

    async def _said(
        self, request: Request, caller: Caller, body: OllamaChatBody | OllamaGenerateBody, asked: ChatBody,
        served: tuple[str, Ready],
    ) -> Response:  # fmt: skip
        model, ready = served
        chat = Chat(asked.conversation(), asked.reasoning_request(), asked.tool_use(), asked.constraint())
        ids, section, grammar, calling, reader, images = await self._prepared(request, caller, ready, chat)
        params = chat_params(asked, ids, ready, self._dispatcher.engine.places.most, caller, self._sampling)
        params = self._showing(params, calling)
        handler = self._dispatcher.submit(caller, [ids], params, 1, model, 0, grammar, section, images)
        answer = await _answer(request, handler, body, model, reader)
        answer.headers.update(headers(calling))
        return answer

    async def _continued(
        self, request: Request, caller: Caller, body: OllamaGenerateBody, asked: CompletionBody,
        served: tuple[str, Ready],
    ) -> Response:  # fmt: skip
        (model, ready), salt, vocab = served, caller.cache_salt, served[1].vocab_size
        if asked.suffix is None:
            making = self._prompts.ids(salt, asked.prompts(), Room("prompt", vocab, ready.context))
        else:
            making = self._prompts.infill_ids(salt, asked.prompts(), asked.suffix, Room("suffix", vocab, ready.context))
        ids = await sse.while_wanted(request.receive, making)
        grammar = await self._proven(request, caller, ready, asked.constraint())
        params = completion_params(asked, ids, ready, self._dispatcher.engine.places.most, caller, self._sampling)
        if asked.suffix is not None and grammar is None:
            params = ended(params, self._prompts.infill)
        handler = self._dispatcher.submit(caller, ids, params, 1, model, 0, grammar)
        return await _answer(request, handler, body, model, AnswerReader())

    async def _vectors(
        self, request: Request, caller: Caller, asked: EmbeddingBody, served: tuple[str, Ready]
    ) -> tuple[list[list[float]], int]:
        """Return the embeddings of texts, and the number of their tokens."""
        model, ready = served
        self._check_dimensions(asked, ready)
        room = Room("input", ready.vocab_size, ready.context, 0)
        making = self._prompts.ids(caller.cache_salt, asked.inputs(), room, asked.cut(room.context))
        ids = await sse.while_wanted(request.receive, making)
        handler = self._dispatcher.embed(caller, ids, asked.pooling, model)
        try:
            async with sse.while_connected(request.receive, handler.leave):
                pieces = await openai.embeddings(handler, model, asked)
        finally:
            handler.close()
        told = msgspec.json.decode(b"".join(pieces))
        return [each["embedding"] for each in told["data"]], handler.prompt_tokens


async def _answer(
    request: Request, handler: Any, body: OllamaChatBody | OllamaGenerateBody, model: str, reader: AnswerReader
) -> Response:
    chat, name = isinstance(body, OllamaChatBody), body.model or model
    if body.streams:
        pieces = ollama.stream(handler, name, chat, reader)
        return await stream(request, handler, pieces, _FAILED, ollama.piece(name, "", chat), sse.LineStream)
    return await whole(request, handler, ollama.whole(handler, name, chat, reader))


def _model(name: str, ready: Ready) -> dict[str, Any]:
    parent = "" if name not in ready.adapters else ready.model
    return listed(name, dict(ready.table).get("weights", 0), parent)


def listed(name: str, size: int, parent: str = "") -> dict[str, Any]:
    """Return a model of `size` bytes as Ollama lists it, with the base model of an adapter."""
    return {
        "name": name, "model": name, "modified_at": ollama.NEVER, "size": size,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {
            "parent_model": parent, "format": "", "family": "", "families": [], "parameter_size": "",
            "quantization_level": "",
        },
    }  # fmt: skip
