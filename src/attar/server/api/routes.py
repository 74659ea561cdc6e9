"""The routes: what each reads, asks of the engine, and answers. All share `door.py`, `dispatcher.py` and `work.py`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import importlib.resources
import math
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from attar.faults import point
from attar.protocol.messages import Ready
from attar.server.admission.request_limits import fits, room, written
from attar.server.api import anthropic, openai, response_types
from attar.server.api.openapi import Served, document, giving, taking
from attar.server.api.sampling_params import anthropic_params, chat_params, completion_params
from attar.server.api.schemas import (
    AnthropicBody,
    AnthropicPrompt,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from attar.server.dispatcher import Dispatcher
from attar.server.errors import CANCELLED, INTERNAL, Refusal
from attar.server.http import sse
from attar.server.http.limits import MAX_BODY
from attar.server.http.middleware import check_body, refuse
from attar.server.metrics import Metrics
from attar.server.prompts import BodyType, Prompts, anthropic_messages, chat_messages
from attar.server.request_handler import Caller, Work
from attar.version import __version__

PAGE = importlib.resources.files("attar.server").joinpath("page.html").read_bytes()


def _policy(page: bytes) -> str:
    """What the page may do: run its own script, and talk to this server."""
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


POLICY = _policy(PAGE)

encode = msgspec.json.encode


def make_app(dispatcher: Dispatcher, prompts: Prompts, metrics: Metrics, keyed: bool = False) -> FastAPI:
    """The application, without its door. `keyed`: whether that asks for keys, which the document then says."""
    app = FastAPI(title="attar", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    _refusals(app)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        """A page to talk to the model and to watch the engine."""
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    @app.head("/livez")
    @app.get("/livez", openapi_extra=giving(response_types.Alive))
    async def livez() -> Response:
        """The process is alive. Asks nobody."""
        return _json({"status": "alive"})

    @app.head("/readyz")
    @app.get("/readyz", openapi_extra=giving(response_types.Alive))
    async def readyz() -> Response:
        """The model is loaded, the engine runs and gets on, and the server is not shutting down."""
        dispatcher.getting_on()
        return _json({"status": "ready"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Metrics in Prometheus's text format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/engine", openapi_extra=giving(response_types.Engine))
    async def engine() -> Response:
        """What the engine said when it was ready, and its state since; `blocks` is base64, a byte each."""
        return _json({"ready": dispatcher.ready(), "stats": dispatcher.engine.stats})

    @app.get("/v1/models", openapi_extra=giving(response_types.Models))
    async def models() -> Response:
        """The served model and its adapters, in a list."""
        ready = dispatcher.ready()
        return _json({"object": "list", "data": [_model(name, ready) for name in (ready.model, *ready.adapters)]})

    @app.get("/v1/models/{name:path}", openapi_extra=giving(response_types.Model))
    async def one_model(name: str) -> Response:
        """The served model, or one of its adapters."""
        return _json(_model(dispatcher.model(name), dispatcher.ready()))

    @app.get("/v1/requests/{name}/why", openapi_extra=giving(response_types.Why))
    async def why(request: Request, name: str) -> Response:
        """Where a request's time went, or goes. `name` is its `X-Request-Id`, or the `id` of its answer."""
        trace = dispatcher.traces.find(name.rpartition("-")[2].removeprefix("msg_"), _caller(request).salt)
        return _json(await dispatcher.why(trace))

    @app.post(
        "/v1/chat/completions",
        openapi_extra=taking(ChatBody, response_types.ChatCompletion, response_types.ChatChunk, response_types.Error),
    )
    async def chat(request: Request) -> Response:
        """OpenAI's chat completions."""
        body = await _read(prompts, request, ChatBody)
        model, ready = dispatcher.model(body.model), dispatcher.ready()
        async with _there(request):
            ids = await prompts.chat_ids(_caller(request).salt, chat_messages(body), ready.context)
        n = body.n or 1
        left, allowance = room([ids], ready.context, "messages"), _caller(request).allowance(len(ids), n)
        params = chat_params(body, left, ready.vocab_size, allowance)
        fits(n, dispatcher.engine.places.most, "n")
        written([ids], params, n, bool(body.stream))
        form = openai.ChatFormat(prompts.tokenizer, bool(body.logprobs))
        work = dispatcher.submit(_caller(request), [ids], params, n, model, body.priority or 0)
        if body.stream:
            return await _stream(request, work, openai.stream(work, model, form, body.with_usage), openai.failed)
        return await _whole(request, work, openai.whole(work, model, form))

    @app.post(
        "/v1/completions",
        openapi_extra=taking(
            CompletionBody, response_types.Completion, response_types.CompletionChunk, response_types.Error
        ),
    )
    async def completions(request: Request) -> Response:
        """OpenAI's text completions."""
        body = await _read(prompts, request, CompletionBody)
        model, ready = dispatcher.model(body.model), dispatcher.ready()
        asked = body.prompts()
        async with _there(request):
            ids = await prompts.ids(_caller(request).salt, asked, ready.vocab_size, "prompt", ready.context)
        left = room(ids, ready.context, "prompt", new=0 if body.max_tokens == 0 else 1)
        params = completion_params(body, left, ready.vocab_size)
        echoed = None
        if body.echo:
            async with _there(request):
                echoed = [
                    text if isinstance(text, str) else await prompts.text(_caller(request).salt, text) for text in asked
                ]
        n = body.n or 1
        made = body.best_of or n
        fits(made, dispatcher.engine.places.most, "best_of" if made > n else "n")
        scored = body.logprobs is not None
        if scored:
            written(ids, params, made, bool(body.stream))
        form = openai.CompletionFormat(prompts.tokenizer, scored, n, ids, echoed)
        work = dispatcher.submit(_caller(request), ids, params, made, model, body.priority or 0)
        if body.stream:
            return await _stream(request, work, openai.stream(work, model, form, body.with_usage), openai.failed)
        return await _whole(request, work, openai.whole(work, model, form))

    @app.post(
        "/v1/messages",
        openapi_extra=taking(AnthropicBody, response_types.AnthropicReply, *response_types.ANTHROPIC_EVENTS),
    )
    async def messages(request: Request) -> Response:
        """Anthropic's messages."""
        body = await _read(prompts, request, AnthropicBody)
        model, ready = dispatcher.model(body.model), dispatcher.ready()
        async with _there(request):
            ids = await prompts.chat_ids(_caller(request).salt, anthropic_messages(body), ready.context)
        params = anthropic_params(body, room([ids], ready.context, "messages"))
        work = dispatcher.submit(_caller(request), [ids], params, 1, model)
        if body.stream:
            return await _stream(request, work, anthropic.stream(work, model), anthropic.failed, anthropic.PING)
        return await _whole(request, work, anthropic.whole(work, model))

    @app.post("/v1/messages/count_tokens", openapi_extra=taking(AnthropicPrompt, response_types.TokenCount))
    async def count_tokens(request: Request) -> Response:
        """How many tokens of prompt /v1/messages would read."""
        body = await _read(prompts, request, AnthropicPrompt)
        dispatcher.model(body.model)
        async with _there(request):
            ids = await prompts.chat_ids(_caller(request).salt, anthropic_messages(body))
        return _json({"input_tokens": len(ids)})

    @app.post("/v1/embeddings", openapi_extra=taking(EmbeddingBody, response_types.Embeddings))
    async def embeddings(request: Request) -> Response:
        """OpenAI's embeddings, of the model's final hidden states, each at unit length."""
        body = await _read(prompts, request, EmbeddingBody)
        model, ready = dispatcher.model(body.model), dispatcher.ready()
        async with _there(request):
            ids = await prompts.ids(_caller(request).salt, body.inputs(), ready.vocab_size, "input", ready.context)
        room(ids, ready.context, "input", new=0)
        work = dispatcher.embed(_caller(request), ids, body.pooling, model)
        return await _whole(request, work, _embedded(work, model, body.encoding_format == "base64"))

    @app.post("/tokenize", openapi_extra=taking(TokenizeBody, response_types.Tokenized))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation as the chat endpoint renders it, whose template writes the special
        tokens itself: `add_special_tokens` is about a text."""
        body = await _read(prompts, request, TokenizeBody)
        dispatcher.model(body.model)
        async with _there(request):
            if body.prompt is None:
                ids = list(await prompts.chat_ids(_caller(request).salt, chat_messages(body)))
            else:
                ids = await prompts.text_ids(_caller(request).salt, body.prompt, body.add_special_tokens)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": dispatcher.ready().context})

    @app.post("/detokenize", openapi_extra=taking(DetokenizeBody, response_types.Detokenized))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await _read(prompts, request, DetokenizeBody)
        dispatcher.model(body.model)
        vocab = dispatcher.ready().vocab_size
        async with _there(request):
            text = await prompts.text(_caller(request).salt, body.tokens, vocab)
        return _json({"prompt": text})

    def described() -> dict[str, Any]:
        return document(app, Served(keyed, dispatcher.engine.ready, prompts.shortest, dispatcher.engine.places.most))

    app.openapi = described  # type: ignore[method-assign]
    return app


def _refusals(app: FastAPI) -> None:
    """Every error in our shape: those of routes, of routing, and the unexpected, which the door logs."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            code, message = {
                404: ("not_found", "no such route"),
                405: ("method_not_allowed", "this route does not take this method"),
            }[error.status_code]
            refusal = Refusal(code, message)
        elif isinstance(error, Refusal):
            refusal = error
        else:
            refusal = Refusal("internal", INTERNAL)
        allowed = _methods(app, request.scope) if refusal.code == "method_not_allowed" else None
        return _Refused(refusal, request.url.path, allowed)

    for kind in (Refusal, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _methods(app: FastAPI, scope: Scope) -> str:
    """What a path takes, by all of its routes: Starlette asks the first alone, and says them in any order."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


class _Refused(Response):
    def __init__(self, refusal: Refusal, path: str, allowed: str | None) -> None:
        super().__init__()
        self._refusal, self._path, self._allowed = refusal, path, allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await refuse(self._refusal, self._path, send, self._allowed)


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def _caller(request: Request) -> Caller:
    caller = request.scope["attar"]
    assert isinstance(caller, Caller)
    return caller


async def _read(prompts: Prompts, request: Request, kind: type[BodyType]) -> BodyType:
    """The request's body, as it comes in; its Content-Length, checked first, bounds it."""
    check_body(dict(request.scope["headers"]))
    body = bytearray()
    more = True
    while more:
        point("http.read_body", _caller(request).id)
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Refusal("cancelled", CANCELLED)
        body += message.get("body", b"")
        assert len(body) <= MAX_BODY, "h11 holds a body to its Content-Length"
        more = message.get("more_body", False)
    point("http.parse", _caller(request).id)
    async with _there(request):
        return await prompts.read(_caller(request).salt, kind, bytes(body))


@contextlib.asynccontextmanager
async def _there(request: Request) -> AsyncIterator[None]:
    """Before the engine is asked, while a body is read or a prompt is made, or waits to be: given up once the client
    has gone. Raises Refusal then."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    async with sse.while_connected(request.receive, leave):
        try:
            yield
        except asyncio.CancelledError:
            if gone and not task.uncancel():  # else somebody ends the server as well
                raise Refusal("cancelled", CANCELLED) from None
            raise


async def _whole(request: Request, work: Work, answer: Awaitable[Iterable[bytes | bytearray]]) -> Response:
    try:
        async with sse.while_connected(request.receive, work.leave):
            pieces = await answer
    finally:
        work.close()
    return sse.whole(pieces)


async def _stream(
    request: Request,
    work: Work,
    pieces: AsyncIterator[bytes],
    failed: Callable[[Refusal], bytes],
    ping: bytes = sse.COMMENT,
) -> Response:
    try:
        async with sse.while_connected(request.receive, work.leave):
            await work.admitted()
        last = failed(Refusal("internal", INTERNAL))
        return sse.EventStream(pieces, work.leave, work.close, last, work.caller.id, ping)
    except BaseException:
        work.close()
        raise


def _model(name: str, ready: Ready) -> dict[str, Any]:
    described = {"id": name, "object": "model", "created": 0, "owned_by": "attar", "max_model_len": ready.context}
    return described if name == ready.model else described | {"parent": ready.model}


def _unit(vector: bytes) -> array[float]:
    """Numbers of float32 at length 1, as OpenAI's are: clients compare by dot products. Zeros stay as they are."""
    numbers = array("f", vector)
    length = math.hypot(*numbers)  # a double: no square of float32's is beyond it
    return array("f", [number / length for number in numbers]) if length else numbers


async def _embedded(work: Work, model: str, as_base64: bool) -> Iterator[bytes]:
    vectors = await work.vectors()
    point("embeddings.whole")
    return _vectors(vectors, model, work.prompt_tokens, as_base64)


def _vectors(vectors: Sequence[bytes], model: str, tokens: int, as_base64: bool) -> Iterator[bytes]:
    """The answer, a vector at a time: as text each is several times as long, and thousands would hold up the loop."""
    yield b'{"object":"list","model":%b,"data":[' % encode(model)
    for at, vector in enumerate(vectors):
        numbers = _unit(vector)
        shown = base64.b64encode(numbers).decode() if as_base64 else numbers.tolist()
        yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (b"," if at else b"", at, encode(shown))
    yield b'],"usage":%b}' % encode({"prompt_tokens": tokens, "total_tokens": tokens})
