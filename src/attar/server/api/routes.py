"""Routes that ask the engine for work: what each reads, requests of the engine, and answers.

A body's headers are checked before it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import Response

from attar.faults import point
from attar.protocol.grammar import Grammar
from attar.protocol.images import ImageInput
from attar.protocol.messages import Ready
from attar.protocol.reasoning import ReasoningSection
from attar.protocol.request import SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.api import anthropic, openai
from attar.server.api.answering import AnswerReader
from attar.server.api.answering import stream as _stream
from attar.server.api.answering import whole as _whole
from attar.server.api.anthropic import AnthropicBody, AnthropicPrompt
from attar.server.api.constraints import Asked, refused
from attar.server.api.dialects.extras import Extras
from attar.server.api.dialects.tokenizing import DetokenizeBody, TokenizeBody
from attar.server.api.openapi.document import giving, taking
from attar.server.api.reasoning import ReasoningRequest
from attar.server.api.response_types import anthropic as anthropic_types
from attar.server.api.response_types import openai as openai_types
from attar.server.api.response_types import state as state_types
from attar.server.api.sampling_params import anthropic_params, chat_params, completion_params, context, ended
from attar.server.api.schemas import ChatBody, CompletionBody, EmbeddingBody
from attar.server.api.status import respond
from attar.server.api.tools.answers import headers
from attar.server.api.tools.anthropic import anthropic_refusal
from attar.server.api.tools.fields import ToolUse
from attar.server.api.tools.fields import refused as refused_tools
from attar.server.api.validation import BodyType, read
from attar.server.dispatcher import Dispatcher
from attar.server.errors import CANCELLED, APIError
from attar.server.fair_thread_pool import TextThreads
from attar.server.grammars import Grammars
from attar.server.http import sse
from attar.server.http.limits import MAX_BODY
from attar.server.images import has_images, require_images
from attar.server.prompt_room import Room
from attar.server.prompts import ChatPrompt, Cut, Prompts, Turn
from attar.text.answers.events import AnswerParser
from attar.text.answers.reasoning import ReasoningParser
from attar.text.grammars import GrammarError
from attar.text.tools.calling import NO_CALLS, Calling
from attar.text.tools.tool import ToolError

logger = logging.getLogger(__name__)

LARGE_BODY = 16 << 10  # bytes: smaller ones are parsed on the spot, in less time than a thread is asked


class Chat(NamedTuple):
    """A conversation to be answered, of whichever API: what it asks of the model's reasoning, its tools, the constraint
    of its answer, what it ends with, and what cuts its prompt. The `ids` of its prompt are given where another server
    has made them."""

    messages: list[dict[str, Any]]
    reasoning: ReasoningRequest
    use: ToolUse
    asked: Asked | None = None
    turn: Turn = Turn.OPENED
    cut: Cut | None = None
    ids: Sequence[int] | None = None


class PreparedChat(NamedTuple):
    """What the engine needs for an answer to a conversation beside sampling parameters, and the answer's reader."""

    ids: tuple[int, ...]
    section: ReasoningSection | None
    grammar: Grammar | None
    calling: Calling
    reader: AnswerReader
    images: tuple[ImageInput, ...] = ()


class Routes:
    """Routes with a body. A request is cancelled once its client has disconnected. Those that do not name a sampling
    parameter get that of `sampling`, if any."""

    def __init__(
        self, dispatcher: Dispatcher, prompts: Prompts, grammars: Grammars, threads: TextThreads,
        sampling: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._dispatcher, self._prompts, self._grammars, self._threads = dispatcher, prompts, grammars, threads
        self._sampling = sampling

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document."""
        chat = taking(ChatBody, openai_types.ChatCompletion, openai_types.ChatChunk, openai_types.Error)
        completions = taking(CompletionBody, openai_types.Completion, openai_types.CompletionChunk, openai_types.Error)
        messages = taking(AnthropicBody, anthropic_types.AnthropicReply, *anthropic_types.ANTHROPIC_EVENTS)
        app.post("/v1/chat/completions", openapi_extra=chat)(self.chat)
        app.post("/v1/completions", openapi_extra=completions)(self.completions)
        app.post("/v1/messages", openapi_extra=messages)(self.messages)
        app.post("/v1/messages/count_tokens", openapi_extra=taking(AnthropicPrompt, anthropic_types.TokenCount))(
            self.count_tokens
        )
        app.post("/v1/embeddings", openapi_extra=taking(EmbeddingBody, openai_types.Embeddings))(self.embeddings)
        app.post("/tokenize", openapi_extra=taking(TokenizeBody, state_types.Tokenized))(self.tokenize)
        app.post("/detokenize", openapi_extra=taking(DetokenizeBody, state_types.Detokenized))(self.detokenize)
        app.get("/tokenizer_info", openapi_extra=giving(state_types.TokenizerInfo))(self.tokenizer_info)
        app.head("/tokenizer_info")(self.tokenizer_info)

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._chat(request, openai.NO_TEXT)

    async def _chat(self, request: Request, no_text: bytes) -> Response:
        """Answer a chat. `no_text` is the content of a stream's first delta, as JSON."""
        caller, body, model, ready = await self._read(request, ChatBody)
        turn = Turn.of(body.add_generation_prompt, body.continue_final_message)
        room, given = context(body, ready), body.kv_transfer_params
        chat = Chat(
            body.conversation(), body.reasoning_request(), body.tool_use(), body.constraint(), turn,
            body.cut(room - max(1, body.most or 0)), None if given is None else given.prompt_token_ids,
        )  # fmt: skip
        ids, section, grammar, calling, reader, images = await self._prepared(request, caller, ready, chat, room)
        params = chat_params(body, ids, ready, self._dispatcher.engine.places.most, caller, self._sampling)
        params, tokenizer = self._showing(params, calling), self._prompts.tokenizer
        extras = Extras(body, tokenizer, [ids])
        form = openai.ChatFormat(tokenizer, bool(body.logprobs), extras, reader, no_text, body.echoed)
        handler = self._dispatcher.submit(
            caller, [ids], params, body.n or 1, model, body.priority or 0, grammar, section, images
        )
        if body.stream:
            pieces = openai.stream(handler, model, form, body.stream_options or openai.NO_OPTIONS)
            answer = await _stream(request, handler, pieces, openai.FAILED)
        else:
            answer = await _whole(request, handler, openai.whole(handler, model, form))
        answer.headers.update(headers(calling))
        return answer

    async def completions(self, request: Request) -> Response:
        """OpenAI's text completions."""
        caller, body, model, ready = await self._read(request, CompletionBody)
        asked = body.prompts()
        if body.suffix is None:
            room = Room("prompt", ready.vocab_size, context(body, ready), 0 if body.limit == 0 else 1)
            cut = body.cut(room.context - max(room.new, body.limit or 0))
            making = self._prompts.ids(caller.cache_salt, asked, room, cut)
        else:
            room = Room("suffix", ready.vocab_size, context(body, ready))
            making = self._prompts.infill_ids(caller.cache_salt, asked, body.suffix, room)
        ids = await sse.while_wanted(request.receive, making)
        grammar = await self._proven(request, caller, ready, body.constraint())
        params = completion_params(body, ids, ready, self._dispatcher.engine.places.most, caller, self._sampling)
        if body.suffix is not None and grammar is None:
            params = ended(params, self._prompts.infill)
        n, scored, echoes = body.n or 1, body.logprobs is not None, None
        if body.echo:
            making_echoes = self._prompts.echoes(caller.cache_salt, asked, scored)
            echoes = await sse.while_wanted(request.receive, making_echoes)
        tokenizer = self._prompts.tokenizer
        form = openai.CompletionFormat(tokenizer, scored, n, ids, echoes, Extras(body, tokenizer, ids))
        made = body.best_of or n
        handler = self._dispatcher.submit(caller, ids, params, made, model, body.priority or 0, grammar)
        if body.stream:
            options = body.stream_options or openai.NO_OPTIONS
            return await _stream(request, handler, openai.stream(handler, model, form, options), openai.FAILED)
        return await _whole(request, handler, openai.whole(handler, model, form))

    async def messages(self, request: Request) -> Response:
        """Anthropic's messages."""
        caller, body, model, ready = await self._read(request, AnthropicBody)
        chat = Chat(body.conversation(), body.reasoning_request(), body.tool_use(), body.constraint(), body.turn)
        try:
            ids, section, grammar, calling, reader, images = await self._prepared(request, caller, ready, chat)
        except APIError as error:
            raise anthropic_refusal(error) from error
        params = self._showing(anthropic_params(body, ready.context - len(ids), self._sampling), calling)
        handler = self._dispatcher.submit(caller, [ids], params, 1, model, 0, grammar, section, images)
        if body.stream:
            pieces = anthropic.stream(handler, model, reader)
            answer = await _stream(request, handler, pieces, anthropic.FAILED, anthropic.PING)
        else:
            answer = await _whole(request, handler, anthropic.whole(handler, model, reader))
        answer.headers.update(headers(calling))
        return answer

    async def count_tokens(self, request: Request) -> Response:
        """Count the prompt tokens that /v1/messages would read."""
        caller, body, _, _ = await self._read(request, AnthropicPrompt)
        variables = body.reasoning_request().for_template(self._prompts.template)
        making = self._prompts.chat_ids(
            caller.cache_salt, body.conversation(), None, body.turn, variables, body.tool_use().tools
        )
        ids = await sse.while_wanted(request.receive, making)
        return respond({"input_tokens": len(ids)})

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's embeddings, from the model's final hidden states, each at unit length."""
        caller, body, model, ready = await self._read(request, EmbeddingBody)
        self._check_dimensions(body, ready)
        room = Room("input", ready.vocab_size, ready.context, 0)
        making = self._prompts.ids(caller.cache_salt, body.inputs(), room, body.cut(room.context))
        ids = await sse.while_wanted(request.receive, making)
        handler = self._dispatcher.embed(caller, ids, body.pooling, model)
        return await _whole(request, handler, openai.embeddings(handler, model, body))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a conversation as the chat endpoint renders it. `add_special_tokens` applies to a
        text; a chat template writes the special tokens itself."""
        caller, body, _, ready = await self._read(request, TokenizeBody)
        making: Awaitable[Sequence[int]]
        if body.messages is not None:
            turn = Turn.of(body.add_generation_prompt, body.continue_final_message)
            variables = body.chat_template_kwargs or {}
            tools = body.tool_use().tools
            making = self._prompts.chat_ids(caller.cache_salt, body.conversation(), None, turn, variables, tools)
        else:
            text, special = body.content, bool(body.add_special)
            if text is None:
                text, special = body.prompt or "", body.add_special_tokens is not False
            making = self._prompts.text_ids(caller.cache_salt, text, special)
        ids = await sse.while_wanted(request.receive, making)
        tokens: Any = [self._piece(token) for token in ids] if body.with_pieces else ids
        found = {"tokens": tokens, "count": len(ids), "max_model_len": ready.context}
        if body.return_token_strs:
            found["token_strs"] = [self._prompts.tokenizer.id_to_token(token) for token in ids]
        return respond(found)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        caller, body, _, ready = await self._read(request, DetokenizeBody)
        making = self._prompts.text(caller.cache_salt, body.tokens, ready.vocab_size)
        text = await sse.while_wanted(request.receive, making)
        return respond({"prompt": text, "content": text})

    def _piece(self, token: int) -> dict[str, Any]:
        raw = self._prompts.tokenizer.id_to_bytes(token)
        try:
            return {"id": token, "piece": raw.decode()}
        except UnicodeDecodeError:
            return {"id": token, "piece": list(raw)}

    def _check_dimensions(self, body: EmbeddingBody, ready: Ready) -> None:
        if body.dimensions is not None and body.dimensions > ready.dimensions:
            message = f"dimensions: this model's vectors have {ready.dimensions} numbers, not {body.dimensions}"
            raise APIError("out_of_range", message, "dimensions")

    async def tokenizer_info(self) -> Response:
        """The tokenizer's special tokens and chat template, as lm-eval's remote tokenizer reads them."""
        ready, tokenizer = self._dispatcher.ready(), self._prompts.tokenizer
        return respond({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token, "pad_token": None,
            "chat_template": tokenizer.chat_templates.get("default"), "vocab_size": ready.vocab_size,
            "model_max_length": ready.context,
        })  # fmt: skip

    async def _prepared(
        self, request: Request, caller: Caller, ready: Ready, chat: Chat, room: int | None = None
    ) -> PreparedChat:
        """Render a conversation of at most `room` tokens, by default the context, and prove the grammar of its answer.

        Raises APIError for what is refused, with the fields of OpenAI's chats: other APIs name their own.
        """
        require_images(chat.messages, ready, self._prompts.images)
        template, asked = self._prompts.template, chat.asked
        prompt = await sse.while_wanted(request.receive, self._rendered(caller, ready, chat, room or ready.context))
        constrained = "tools" if chat.use.may_call else asked and asked.field
        section = chat.reasoning.section(self._prompts.reasoning, prompt.place, template, constrained)
        grammar = await self._proven(request, caller, ready, asked)
        calling = await self._calling(request, caller, ready, chat.use, asked)
        reader = self._reader(chat.reasoning, prompt, asked is not None, calling)
        return PreparedChat(prompt.ids, section, calling.grammar or grammar, calling, reader, prompt.images)

    async def _rendered(self, caller: Caller, ready: Ready, chat: Chat, room: int) -> ChatPrompt:
        """Return the prompt of a conversation. Raises APIError where it has no room."""
        if has_images(chat.messages) and (chat.ids is not None or chat.cut is not None):
            message = "messages: images go neither with truncate_prompt_tokens nor with kv_transfer_params"
            raise APIError("unsupported_field", message, "messages")
        if chat.ids is not None:
            fits = Room("kv_transfer_params.prompt_token_ids", ready.vocab_size, room)
            return await self._prompts.given(caller.cache_salt, chat.ids, fits)
        variables = chat.reasoning.for_template(self._prompts.template)
        context = room if chat.cut is None else None
        prompt = await self._prompts.chat(
            caller.cache_salt, chat.messages, context, chat.turn, variables, chat.use.tools
        )  # fmt: skip
        if chat.cut is None:
            return prompt
        ids = await self._prompts.ids(
            caller.cache_salt, [prompt.ids], Room("messages", ready.vocab_size, room), chat.cut
        )
        return prompt._replace(ids=ids[0])

    async def _proven(self, request: Request, caller: Caller, ready: Ready, asked: Asked | None) -> Grammar | None:
        """Return the grammar of a constraint, once it is proven. Raises APIError where it cannot be enforced."""
        if asked is None:
            return None
        try:
            proof = self._grammars.prove(caller.cache_salt, asked.grammar, ready.vocab_size)
            await sse.while_wanted(request.receive, proof)
        except GrammarError as error:
            raise refused(asked, error) from error
        return asked.grammar

    async def _calling(
        self, request: Request, caller: Caller, ready: Ready, use: ToolUse, asked: Asked | None
    ) -> Calling:
        """Return what a request may call, once its grammar is proven: calls or JSON where that was asked for. Raises
        APIError where a tool with `strict` cannot be enforced."""
        if not use.may_call:
            return NO_CALLS

        def make(prove: Callable[[Grammar], None]) -> Calling:
            final, field = (None, "") if asked is None else (asked.grammar, asked.field)
            try:
                return Calling.of(self._prompts.tool_format(), use.tools, use.choice, prove, final, field)
            except ToolError as error:
                raise refused_tools(error) from error

        work = self._grammars.work(caller.cache_salt, make, ready.vocab_size)
        calling = await sse.while_wanted(request.receive, work)
        if calling.loosened:
            self._dispatcher.context.metrics.loosened.inc(len(calling.loosened))
            names = ", ".join(calling.loosened)
            logger.info("%s: arguments are only held to be JSON objects: %s", caller.id, names)
        return calling

    def _showing(self, params: SamplingParams, calling: Calling) -> SamplingParams:
        """Return parameters of a chat, whose text shows the markers of reasoning and of calls also where they are
        special tokens."""
        markers = self._prompts.reasoning
        return calling.shown(params, () if markers is None else tuple(markers.visible))

    def _reader(self, reasoning: ReasoningRequest, prompt: ChatPrompt, exact: bool, calling: Calling) -> AnswerReader:
        """Return the reader of answers to a prompt. With `exact`, as a constraint needs it, line breaks behind the
        reasoning stay in the text."""
        if (markers := self._prompts.reasoning) is None:
            return AnswerReader(calling.parser, calling=calling)

        def make() -> AnswerParser:
            return ReasoningParser(markers, prompt.place, calling.parser(), exact)

        return AnswerReader(make, True, reasoning.shown, calling)

    async def _read(self, request: Request, kind: type[BodyType]) -> tuple[Caller, BodyType, str, Ready]:
        """Read the request's body. Returns the caller, the body, the name of the requested model, and the engine that
        runs it."""
        caller: Caller = request.scope["attar"]
        data = await receive_body(request, caller.id)
        point("http.parse", caller.id)
        if len(data) <= LARGE_BODY:
            body = read(kind, data)
        else:
            reading = self._threads.run(caller.cache_salt, len(data), lambda: read(kind, data))
            body = await sse.while_wanted(request.receive, reading)
        model, ready = self._dispatcher.model(body.model)
        if len(data) > MAX_BODY and not ready.images:  # several models: this one takes no images
            raise APIError("body_too_large", _too_large(MAX_BODY))
        return caller, body, model, ready


def _too_large(most: int) -> str:
    return f"the body is larger than {most} bytes"


async def receive_body(request: Request, name: str) -> bytes:
    """Read the body of the request called `name`. Raises APIError for content other than JSON, and for a large body."""
    headers: dict[bytes, bytes] = dict(request.scope["headers"])
    most = request.scope["attar"].body_limit
    if headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
        raise APIError("unsupported_media_type", "Content-Encoding is not supported: send plain JSON")
    # A form of a foreign web page can be posted without a preflight, but not as JSON.
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise APIError("unsupported_media_type", "send JSON, with Content-Type: application/json")
    if int(headers.get(b"content-length", b"0")) > most:
        raise APIError("body_too_large", _too_large(most))
    body, more = bytearray(), True
    while more:
        point("http.read_body", name)
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise APIError("cancelled", CANCELLED)
        body += message.get("body", b"")
        if len(body) > most:  # in chunks
            raise APIError("body_too_large", _too_large(most))
        more = message.get("more_body", False)
    return bytes(body)
