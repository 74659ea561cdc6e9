"""Routes of OpenAI's Responses API."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from attar.faults import point
from attar.server.admission.rate_limits import Caller
from attar.server.api.answering import stream, whole
from attar.server.api.logprobs import Content
from attar.server.api.openapi.document import giving, taking
from attar.server.api.responses import types
from attar.server.api.responses.answer import Answer, Keep
from attar.server.api.responses.input_items import PARAMETERS, Page, identified
from attar.server.api.responses.items import Item, ItemReference, conversation
from attar.server.api.responses.output import Output
from attar.server.api.responses.raw import RawMessages
from attar.server.api.responses.schemas import ResponsesBody
from attar.server.api.responses.store import ResponseStore
from attar.server.api.responses.tools import placing
from attar.server.api.routes import LARGE_BODY, Chat, Routes
from attar.server.api.sampling_params import chat_params
from attar.server.api.status import respond
from attar.server.api.tools.answers import headers
from attar.server.dispatcher import Dispatcher
from attar.server.errors import APIError
from attar.server.fair_thread_pool import TextThreads
from attar.server.grammars import Grammars
from attar.server.http import sse
from attar.server.prompts import Prompts

_MESSAGES = re.compile(r"messages(?:\[\d+\][\w.\[\]]*)?")
NO_STORE = "this server stores no answers, but `attar serve --response-store SIZE` does"

encode, decode = msgspec.json.encode, msgspec.json.decode


class ResponsesRoutes(Routes):
    """Routes of answers to items of a conversation. Without a `store` no answer is kept, whatever a body says."""

    def __init__(
        self, dispatcher: Dispatcher, prompts: Prompts, grammars: Grammars, threads: TextThreads,
        sampling: Mapping[str, Any], store: ResponseStore | None,
    ) -> None:  # fmt: skip
        super().__init__(dispatcher, prompts, grammars, threads, sampling)
        self._store = store

    def add_to(self, app: FastAPI) -> None:
        """Register the routes, in the order of the OpenAPI document."""
        made = taking(ResponsesBody, types.ResponseObject, *types.RESPONSE_EVENTS)
        app.post("/v1/responses", openapi_extra=made)(self.respond)
        app.get("/v1/responses/{name}", openapi_extra=giving(types.ResponseObject))(self.retrieve)
        app.head("/v1/responses/{name}")(self.retrieve)
        listed = {**giving(types.InputItemList), "parameters": PARAMETERS}
        app.get("/v1/responses/{name}/input_items", openapi_extra=listed)(self.input_items)
        app.head("/v1/responses/{name}/input_items")(self.input_items)
        app.delete("/v1/responses/{name}", openapi_extra=giving(types.DeletedResponse))(self.delete)

    async def respond(self, request: Request) -> Response:
        """OpenAI's responses."""
        caller, body, model, ready = await self._read(request, ResponsesBody)
        before = self._before(caller, body.previous_response_id)
        items = [self._found(caller, item) for item in body.items]
        past = await self._past(request, caller, before)
        with _of_input():
            said = conversation(body.instructions, [*past, *items])
        use, spaces, custom = body.toolset()
        chat = Chat(said, body.reasoning_request(), use, body.constraint())
        with _of_input(), placing(body.tools or ()):
            ids, section, grammar, calling, reader, images = await self._prepared(request, caller, ready, chat)
        most = self._dispatcher.engine.places.most
        params = self._showing(chat_params(body.as_chat(), ids, ready, most, caller, self._sampling), calling)
        tokenizer, raw = self._prompts.tokenizer, None
        if body.enable_response_messages:
            raw = RawMessages(tokenizer, ids, await self._prompts.text(caller.cache_salt, ids))
        handler = self._dispatcher.submit(caller, [ids], params, 1, model, 0, grammar, section, images)
        output = Output(calling.new_id, spaces, Content(tokenizer) if body.scored else None, custom, raw)
        answer = Answer(handler, body, params, model, reader, output, self._keep(caller, body, before, items))
        if body.stream:
            made = await stream(request, handler, answer.stream(), answer.failed)
        else:
            made = await whole(request, handler, answer.whole())
        made.headers.update(headers(calling))
        return made

    async def retrieve(self, request: Request, name: str) -> Response:
        """An answer that this key has stored. A stored answer is given whole, not as a stream."""
        if request.query_params.get("stream", "false") != "false":
            raise APIError("unsupported_field", "stream: a stored answer is given whole", "stream")
        store, caller = self._stored(), request.scope["attar"]
        if (stored := store.get(caller.cache_salt, name)) is None:
            raise _unknown("response")
        return Response(stored.answer, media_type="application/json")

    async def input_items(self, request: Request, name: str) -> Response:
        """The items that a stored answer of this key answers, in pages: those of its request, and the conversation that
        it goes on from."""
        store, caller = self._stored(), request.scope["attar"]
        if (stored := store.get(caller.cache_salt, name)) is None:
            raise _unknown("response")
        page = Page.read(request.query_params)
        items = await self._past(request, caller, stored.turns)
        return respond(page.of(items[: len(items) - len(stored.output)]))

    async def delete(self, request: Request, name: str) -> Response:
        """Forget an answer that this key has stored. Later answers of its conversation keep what they build on."""
        store, caller = self._stored(), request.scope["attar"]
        if not store.remove(caller.cache_salt, name):
            raise _unknown("response")
        return respond({"id": name, "object": "response", "deleted": True})

    def _stored(self) -> ResponseStore:
        if self._store is None:
            raise APIError("not_found", NO_STORE)
        return self._store

    def _before(self, caller: Caller, previous: str | None) -> tuple[bytes, ...]:
        """Return the turns of the conversation up to a stored answer. Raises APIError where it is unknown."""
        if previous is None:
            return ()
        if self._store is None:
            raise APIError("not_found", f"previous_response_id: {NO_STORE}", "previous_response_id")
        if (stored := self._store.get(caller.cache_salt, previous)) is None:
            raise _unknown("previous_response_id", "previous_response_id")
        return stored.turns

    async def _past(self, request: Request, caller: Caller, turns: Sequence[bytes]) -> list[Item]:
        """Return the items of turns; many are read in a thread."""

        def read() -> list[Item]:
            return [item for turn in turns for item in decode(turn, type=list[Item])]

        if (size := sum(map(len, turns))) <= LARGE_BODY:
            return read()
        return await sse.while_wanted(request.receive, self._threads.run(caller.cache_salt, size, read))

    def _found(self, caller: Caller, item: Item | ItemReference) -> Item:
        """Return an item, or the stored one that it refers to. Raises APIError where that is unknown."""
        if not isinstance(item, ItemReference):
            return item
        if self._store is None:
            message = (
                f"input: an item is referred to by its id: {NO_STORE}; a client that is told store = false sends it"
            )
            raise APIError("not_found", message, "input")
        if (stored := self._store.item(caller.cache_salt, item.id)) is None:
            raise _unknown("input", "input")
        found: Item = decode(stored, type=Item)
        return found

    def _keep(
        self, caller: Caller, body: ResponsesBody, before: tuple[bytes, ...], items: Sequence[Item]
    ) -> Keep | None:
        """Return what keeps the answer, with the conversation up to it; None where it is not to be kept."""
        store = self._store
        if store is None or body.store is False:
            return None

        def keep(id: str, answer: bytes, output: Sequence[Mapping[str, Any]]) -> bool:
            point("responses.store", caller.id)
            turns = [*before, encode([*identified(items), *output])]
            return store.put(caller.cache_salt, id, answer, turns, [item["id"] for item in output])

        return keep


@contextlib.contextmanager
def _of_input() -> Iterator[None]:
    """Name the input in refusals of the messages that it became."""
    try:
        yield
    except APIError as refusal:
        if refusal.param is None or not refusal.param.startswith("messages"):
            raise
        raise APIError(refusal.code, _MESSAGES.sub("input", refusal.message), "input") from refusal


def _unknown(field: str, param: str | None = None) -> APIError:
    message = f"{field}: no answer of this key is stored under that id: it is another's, too old, or had to make room"
    return APIError("not_found", message, param)
