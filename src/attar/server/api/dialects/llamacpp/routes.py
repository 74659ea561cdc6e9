"""Routes of llama.cpp's server. Where its paths mean the same as OpenAI's with /v1, they are the same routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from attar.protocol.messages import Ready
from attar.protocol.request import SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.api import openai
from attar.server.api.answering import stream, whole
from attar.server.api.dialects.llamacpp import answers, writing
from attar.server.api.dialects.llamacpp.completion import NativeCompletionBody
from attar.server.api.dialects.llamacpp.embedding import NativeEmbeddingBody
from attar.server.api.dialects.llamacpp.fields import DEFAULTS, NativeSampling
from attar.server.api.dialects.llamacpp.infill import InfillBody
from attar.server.api.dialects.llamacpp.params import biases, native_params, settings
from attar.server.api.dialects.llamacpp.template import TemplateBody
from attar.server.api.openai import FAILED
from attar.server.api.openapi.document import Form, giving, taking
from attar.server.api.response_types.openai import Error
from attar.server.api.routes import Routes
from attar.server.api.sampling_params import ended
from attar.server.api.schemas import ChatBody, EmbeddingBody
from attar.server.api.status import respond
from attar.server.http import sse
from attar.server.prompt_room import Room
from attar.server.prompts import Turn
from attar.version import __version__


class LlamaCppRoutes(Routes):
    """Routes that read and answer like those of `Routes`. The document has those that the model is made for."""

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document."""
        middle: dict[str, Any] = {"include_in_schema": self._prompts.infill is not None}
        written = (answers.NativeCompletion, answers.NativeCompletion, Error)
        app.post("/completion", openapi_extra=taking(NativeCompletionBody, *written, form=Form.CHOSEN))(self.completion)
        app.post("/infill", openapi_extra=taking(InfillBody, *written, form=Form.CHOSEN), **middle)(self.infill)
        app.post("/apply-template", openapi_extra=taking(TemplateBody, answers.AppliedTemplate))(self.apply_template)
        vectors = taking(NativeEmbeddingBody, answers.NativeVector, form=Form.MANY)
        app.post("/embedding", openapi_extra=vectors)(self.embedding)
        for path, route, given in (
            ("/props", self.props, giving(answers.Properties)),
            ("/slots", self.slots, giving(answers.Slot, Form.MANY)),
        ):
            app.get(path, openapi_extra=given)(route)
            app.head(path)(route)
        for path, post in (
            ("/completions", self.completion), ("/chat/completions", self.native_chat), ("/embeddings", self.embedding),
            ("/chat/completions/input_tokens", self.input_tokens),
            ("/v1/chat/completions/input_tokens", self.input_tokens),
        ):  # fmt: skip
            app.post(path, include_in_schema=False)(post)

    async def completion(self, request: Request) -> Response:
        """Completions of one prompt or several, in llama.cpp's form."""
        caller, body, model, ready = await self._read(request, NativeCompletionBody)
        room = Room("prompt", ready.vocab_size, ready.context, 0 if body.limit == 0 else 1)
        making = self._prompts.ids(caller.cache_salt, body.prompts(), room)
        ids = await sse.while_wanted(request.receive, making)
        grammar = await self._proven(request, caller, ready, body.constraint())
        params = await self._native(caller, body, ids, ready)
        texts = [await self._prompts.text(caller.cache_salt, prompt) for prompt in ids]
        asked = writing.Asked(
            model, self._prompts.tokenizer, params, texts, body.limit, bool(body.return_tokens),
            body.response_fields or (),
        )  # fmt: skip
        handler = self._dispatcher.submit(caller, ids, params, body.n_cmpl or 1, model, 0, grammar)
        if body.stream:
            return await stream(request, handler, writing.stream(handler, asked), FAILED)
        return await whole(request, handler, writing.whole(handler, asked))

    async def native_chat(self, request: Request) -> Response:
        """OpenAI's chat completions, as llama.cpp answers them: a stream's first content is null."""
        return await self._chat(request, b"null")

    async def infill(self, request: Request) -> Response:
        """Text between a prefix and a suffix, as llama.cpp's server fills it in."""
        caller, body, model, ready = await self._read(request, InfillBody)
        new = 0 if body.limit == 0 else 1
        room = Room("input_prefix", ready.vocab_size, ready.context, new)
        files = [(file.filename, file.text) for file in body.input_extra or ()]
        prefix = body.input_prefix + (body.prompt or "")
        making = self._prompts.infill_ids(caller.cache_salt, [prefix], body.input_suffix, room, files)
        ids = await sse.while_wanted(request.receive, making)
        params = ended(await self._native(caller, body, ids, ready), self._prompts.infill)
        texts = [await self._prompts.text(caller.cache_salt, ids[0])]
        fields = body.response_fields or ()
        asked = writing.Asked(model, self._prompts.tokenizer, params, texts, body.limit, True, fields)
        handler = self._dispatcher.submit(caller, ids, params, 1, model)
        if body.stream:
            return await stream(request, handler, writing.stream(handler, asked), FAILED)
        return await whole(request, handler, writing.whole(handler, asked))

    async def apply_template(self, request: Request) -> Response:
        """The text of a conversation's prompt. Special tokens that its messages spell are text in chats, but not where
        this text is a prompt again."""
        caller, body, _, _ = await self._read(request, TemplateBody)
        turn = Turn.of(body.add_generation_prompt, body.continue_final_message)
        variables, tools = body.variables(self._prompts.template), body.tool_use().tools
        making = self._prompts.chat_text(caller.cache_salt, body.conversation(), turn, variables, tools)
        return respond({"prompt": await sse.while_wanted(request.receive, making)})

    async def input_tokens(self, request: Request) -> Response:
        """The number of tokens of a conversation's prompt."""
        caller, body, _, _ = await self._read(request, ChatBody)
        turn = Turn.of(body.add_generation_prompt, body.continue_final_message)
        variables = body.reasoning_request().for_template(self._prompts.template)
        tools = body.tool_use().tools
        making = self._prompts.chat_ids(caller.cache_salt, body.conversation(), None, turn, variables, tools)
        ids = await sse.while_wanted(request.receive, making)
        return respond({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def embedding(self, request: Request) -> Response:
        """Embeddings of one text or several, each at unit length, in llama.cpp's form."""
        caller, body, model, ready = await self._read(request, NativeEmbeddingBody)
        room = Room("input", ready.vocab_size, ready.context, 0)
        making = self._prompts.ids(caller.cache_salt, body.inputs(), room)
        ids = await sse.while_wanted(request.receive, making)
        handler = self._dispatcher.embed(caller, ids, body.pooling, model)
        try:
            async with sse.while_connected(request.receive, handler.leave):
                pieces = await openai.embeddings(handler, model, EmbeddingBody(input=""))
        finally:
            handler.close()
        told = msgspec.json.decode(b"".join(pieces))["data"]
        return respond([{"index": at, "embedding": [each["embedding"]]} for at, each in enumerate(told)])

    async def props(self) -> Response:
        """What llama.cpp's front ends read about the server."""
        ready, tokenizer = self._dispatcher.ready(), self._prompts.tokenizer
        told = settings(SamplingParams(**{**DEFAULTS, **self._sampling}))
        return respond({
            "default_generation_settings": {"id": 0, "n_ctx": ready.context, "is_processing": False, "params": told},
            "total_slots": ready.max_running, "model_alias": ready.model, "model_path": ready.model,
            "modalities": {"vision": False, "audio": False}, "chat_template": self._prompts.template,
            "bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or "",
            "build_info": f"attar {__version__}", "is_sleeping": False,
        })  # fmt: skip

    async def slots(self) -> Response:
        """The choices that can run at a time, as llama.cpp's slots; nothing of what they say."""
        ready, stats = self._dispatcher.ready(), self._dispatcher.engine.stats
        busy = 0 if stats is None else stats.running
        return respond([
            {"id": at, "n_ctx": ready.context, "speculative": False, "is_processing": at < busy}
            for at in range(ready.max_running)
        ])  # fmt: skip

    async def _native(
        self, caller: Caller, body: NativeSampling, ids: Sequence[Sequence[int]], ready: Ready
    ) -> SamplingParams:
        async def encode(text: str) -> list[int]:
            return await self._prompts.text_ids(caller.cache_salt, text, False)

        biased = await biases(body, ready.vocab_size, encode)
        return native_params(body, ids, ready, self._dispatcher.engine.places.most, caller, biased, self._sampling)
