"""The routes below /internal, by which a router (`attar route`) uses this server. The middleware checks its key.

They are in no document: only attar's router of the same version calls them. A request comes with its token ids, and is
checked like any other: its API key, its length, its grammar, and the engine's own checks. Events go out as the engine
makes them. When the router hangs up, the request is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from attar.protocol.messages import Beat, Embed, Failed, Stats, Submit
from attar.server.admission.rate_limits import Caller
from attar.server.api.answering import stream
from attar.server.api.routes import receive_body
from attar.server.api.status import respond
from attar.server.dispatcher import Dispatcher
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.connection import AnswerEvent, Event
from attar.server.engine_client.heartbeat import SILENCE
from attar.server.errors import APIError
from attar.server.fleet import wire
from attar.server.fleet.journal import Journal
from attar.server.fleet.wire import Greeting, Told
from attar.server.grammars import Grammars
from attar.server.http import sse
from attar.server.options import ServerOptions
from attar.server.request_handler import RequestHandler
from attar.text.grammars import GrammarError
from attar.text.tokenizer import Tokenizer
from attar.version import __version__

MAX_ROUTERS = 16  # streams of events at a time
GATHER_SECONDS = 0.02  # for changes to be told together


class InternalRoutes:
    """The routes of a server with one engine, which tells changes of its cache."""

    def __init__(
        self, dispatcher: Dispatcher, grammars: Grammars, tokenizer: Tokenizer, options: ServerOptions
    ) -> None:
        assert isinstance(dispatcher.engine, EngineClient)
        self._dispatcher, self._grammars, self._engine = dispatcher, grammars, dispatcher.engine
        self._journal, self._routers = Journal(), 0
        self._engine.begun, self._engine.cached = self._journal.begin, self._journal.take
        self._engine.lost = lambda gone: self._journal.begin()  # streams of events end at once
        self._tokenizer = msgspec.json.encode(tokenizer_files(tokenizer))
        self._greeting = Greeting(
            wire.PROTOCOL, __version__, bool(options.keys.hashes), hashlib.sha256(self._tokenizer).hexdigest(),
            options.aliases, dict(options.sampling), options.reasoning,
            None if options.template_date is None else options.template_date.isoformat(),
        )  # fmt: skip

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        app.get(wire.HELLO, include_in_schema=False)(self.hello)
        app.get(wire.TOKENIZER, include_in_schema=False)(self.tokenizer)
        app.get(wire.EVENTS, include_in_schema=False)(self.events)
        app.post(wire.REQUESTS, include_in_schema=False)(self.requests)

    async def hello(self) -> Response:
        """What this host is."""
        return respond(self._greeting)

    async def tokenizer(self) -> Response:
        """The tokenizer and the chat templates."""
        return Response(self._tokenizer, media_type="application/json")

    async def events(self, epoch: str = "", after: int = 0) -> Response:
        """The engine's state, and changes of its cache behind number `after` of the engine `epoch`."""
        self._dispatcher.ready()
        if self._routers >= MAX_ROUTERS:
            raise APIError("overloaded", f"{MAX_ROUTERS} routers listen already")
        self._routers += 1

        def closed() -> None:
            self._routers -= 1

        left = asyncio.Event()
        return _Frames(self._follow(epoch, after, left), left.set, closed, b"", "events")

    async def _follow(self, epoch: str, seq: int, left: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield frames until the router has left, the server drains or the engine is gone."""
        engine, journal, known = self._engine, self._journal, None
        own, first = journal.epoch, True
        context = self._dispatcher.context
        while not (left.is_set() or context.draining or engine.ready is None or journal.epoch != own):
            changed = journal.changed
            if engine.heartbeat.silent < SILENCE:  # else the router is to see the silence
                changes = journal.since(epoch, seq)
                resumed = first and changes is not None
                events: list[Event] = [engine.ready] if first else []
                events += [journal.whole()] if changes is None else changes
                if engine.stats is not known:
                    known = engine.stats
                    events += [] if known is None else [_brief(known)]
                epoch, seq, first = own, journal.seq, False
                yield wire.framed(Told(own, seq, [*events, Beat(engine.heartbeat.busy)], resumed))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wire.BEAT_SECONDS):
                    await changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
        if context.draining:  # also where the engine has ended meanwhile: the host did not die
            yield wire.framed(Told(own, seq, draining=True))

    async def requests(self, request: Request) -> Response:
        """One request of the engine, and its events."""
        caller: Caller = request.scope["attar"]
        command = _read(await receive_body(request, caller.id))
        if isinstance(command, Submit):
            await self._check(request, caller, command)
        handler = self._dispatcher.forward(caller, command)
        failed = wire.framed([Failed(caller.id, "internal", "")])
        return await stream(request, handler, _pieces(handler), failed, wire.framed([]), _Frames)

    async def _check(self, request: Request, caller: Caller, command: Submit) -> None:
        """Raise APIError for choices of no number, and for a grammar that cannot be kept."""
        if command.n < 1:
            raise APIError("out_of_range", "n: at least one choice is asked for", "n")
        if command.images:
            raise APIError("unsupported_field", "images: a router sends none", "images")
        if command.grammar is not None:
            ready = self._dispatcher.ready()
            proof = self._grammars.prove(caller.cache_salt, command.grammar, ready.vocab_size)
            try:
                await sse.while_wanted(request.receive, proof)
            except GrammarError as error:
                raise APIError("invalid_value", "grammar: this host cannot keep it", "grammar") from error


class _Frames(sse.EventStream):
    media_type = wire.FRAMES


def _read(data: bytes) -> Submit | Embed:
    """Return the request of a body. Raises APIError for another value."""
    try:
        return msgspec.json.decode(data, type=Submit | Embed)
    except ValueError as error:  # of msgspec, and of sampling parameters out of range
        raise APIError("invalid_value", "the body is no request of the engine") from error


def _brief(stats: Stats) -> Stats:
    """Return the engine's state without the state of each block, which only its own page shows."""
    return msgspec.structs.replace(stats, blocks=b"")


async def _pieces(handler: RequestHandler) -> AsyncIterator[bytes]:
    async for events in handler.events():
        told: list[AnswerEvent] = events
        yield wire.framed(told)


def tokenizer_files(tokenizer: Tokenizer) -> wire.TokenizerFiles:
    """Return a tokenizer as a value that can be sent."""
    return wire.TokenizerFiles(
        tokenizer.backend_text(), tokenizer.bos_token, tokenizer.eos_token, tuple(sorted(tokenizer.eos_ids)),
        tokenizer.chat_templates,
    )  # fmt: skip
