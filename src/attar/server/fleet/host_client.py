"""A host's engine as its router sees it: `EngineClient` over HTTP.

One stream tells of the engine and its cache. Each request has a connection of its own, which ends it when it is closed.
A host is *lost* when it refuses connections, or has no engine, or answers as no host does. One that is merely silent is
in trouble (`heartbeat.py`), and after a while its requests go on elsewhere. A request whose connection breaks waits for
DOUBT seconds: where the host is lost by then, its death has the blame.

Redirects are not followed, and the environment's proxies are not used: keys reach listed hosts alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from attar.protocol import framing
from attar.protocol.messages import MAX_FRAME, Embed, Embedding, Failed, Finished, Ready, Submit
from attar.server.engine_client.client import Answer, EngineClient
from attar.server.engine_client.connection import AnswerEvent
from attar.server.errors import CATALOGUE
from attar.server.fleet import wire
from attar.server.fleet.router_key import Credentials
from attar.server.fleet.wire import Greeting, Told

CONNECT_SECONDS = 2.0
HEAR_SECONDS = 6.0  # without a byte of events, until the stream is opened again
DOUBT = 0.25
AGAIN_SECONDS = 1.0  # until a host that failed a request may get it once more
WAITS = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds before the next attempt to reach a host
MAX_REFUSAL = 64 << 10  # bytes of a refusal, and of a greeting
_CODES = {
    "context_length_exceeded": "too_long", "grammar_limit": "grammar_limit", "deadline": "deadline",
    "overloaded": "full", "rate_limit_exceeded": "full", "invalid_api_key": "key", "bad_logits": "bad_logits",
}  # fmt: skip
"""Codes of an engine's failures by those of the errors that hosts answer."""

logger = logging.getLogger(__name__)


class NoHost(Exception):
    """What listens there cannot be used; its text says why."""


class HostClient(EngineClient):
    """The engine of the host at `url`, whose greeting must be `expected`. `http` sends requests, with the router's key
    and the `credentials` of clients."""

    def __init__(
        self, url: str, http: httpx2.AsyncClient, key: str, credentials: Credentials, stuck: float, expected: Greeting
    ) -> None:
        super().__init__(Path(), stuck, name=url)
        self.url, self._http, self._credentials, self._expected = url, http, credentials, expected
        self._key = {wire.KEY_HEADER.decode(): key}
        self._decoder, self._answers = msgspec.msgpack.Decoder(Told), msgspec.msgpack.Decoder(list[AnswerEvent])
        self._epoch, self._seq = "", 0
        self._carried: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # those that were dropped and have not ended as well
        self._is_lost = asyncio.Event()
        self._full_until = 0.0

    @property
    def told(self) -> dict[str, Any]:
        """The host's address, for JSON."""
        return {"host": self.url}

    @property
    def full_for(self) -> float:
        """Seconds until the host may have room, as it said last."""
        return max(0.0, self._full_until - time.monotonic())

    async def close(self) -> None:
        """End open requests and the stream of events."""
        for task in self._tasks:
            task.cancel()
        await super().close()

    # ---- requests

    def send(self, answer: Answer, commands: Sequence[Submit | Embed]) -> None:
        """Send requests, whose events go to `answer`."""
        for command in commands:
            self.open[command.id] = answer
            task = asyncio.get_running_loop().create_task(self._carry(command, answer))
            self._carried[command.id] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def drop(self, requests: Iterable[str], tell: bool) -> None:
        """Forget requests that have ended here, and `tell` the host by hanging up."""
        for request in requests:
            self.open.pop(request, None)
            task = self._carried.pop(request, None)
            if tell and task is not None:
                task.cancel()

    async def reports(self, requests: Iterable[str]) -> dict[str, Any]:
        """Return nothing: hosts report requests when they end."""
        return {}

    async def _carry(self, command: Submit | Embed, answer: Answer) -> None:
        """Send a request and hand on its events. It ends in exactly one way, unless it is dropped."""
        id = command.id
        headers = [*self._key.items(), ("content-type", "application/json")]
        headers += [
            (name.decode(), value.decode("latin-1")) for name, value in self._credentials.of(command.cache_salt)
        ]
        body = msgspec.json.encode(msgspec.structs.replace(command, cache_salt=b""))
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS, write=wire.BEAT_SECONDS * 20)
        over = False
        try:
            async with self._http.stream(
                "POST", self.url + wire.REQUESTS, content=body, headers=headers, timeout=timeout
            ) as reply:
                if reply.status_code != 200:
                    failed = await self._refusal(id, reply)
                    over = failed.code != "shutdown"
                    if over:
                        self._hand_on(failed)
                else:
                    over = await self._hand_on_all(id, reply)
        except Exception as error:  # of HTTP or not: the request is not to wait for its deadline
            logger.warning("%s: %s broke off: %s", self.name, id, type(error).__name__)
        if not over and self.open.get(id) is answer:
            await self._broken(id, answer)
        if self._carried.get(id) is asyncio.current_task():
            del self._carried[id]

    async def _hand_on_all(self, id: str, reply: httpx2.Response) -> bool:
        """Hand on the events of an answer; return whether its last one came. Raises ValueError for bytes that are no
        events."""
        buffer = bytearray()
        async for data in reply.aiter_raw():
            buffer += data
            while (body := framing.take(buffer, MAX_FRAME)) is not None:
                for event in self._answers.decode(body):
                    if isinstance(event, Failed) and event.code == "shutdown":
                        return False
                    if id not in self.open:
                        return True
                    self._hand_on(msgspec.structs.replace(event, id=id))
                    ends = isinstance(event, Failed | Embedding)
                    if ends or (isinstance(event, Finished) and event.report is not None):
                        return True
        return False

    async def _refusal(self, id: str, reply: httpx2.Response) -> Failed:
        """Return a refusal as an engine's failure: `shutdown` for one that is no fault of the request."""
        try:
            error = msgspec.json.decode(await read_body(reply, MAX_REFUSAL), type=_Refusal).error
        except (httpx2.HTTPError, ValueError):
            return Failed(id, "shutdown", "")
        if error.code == "draining":
            self.draining = True
        code = _CODES.get(error.code, "shutdown")
        if code == "full":
            self._full_until = time.monotonic() + seconds_of(reply.headers.get("retry-after", "1"))
        elif error.code in CATALOGUE and reply.status_code == 400 and code == "shutdown":
            code = "invalid"
        return Failed(id, code, error.message)

    async def _broken(self, id: str, answer: Answer) -> None:
        """Let a request go on elsewhere, after a while in which the host may prove to be lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DOUBT):
                await self._is_lost.wait()
        if self.open.get(id) is answer:
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._forgive)
            self._hand_on(Failed(id, "shutdown", ""))

    def _forgive(self) -> None:
        if self.ready is not None and self.resumed is not None:
            self.resumed()

    # ---- the stream of events

    async def _run(self) -> None:
        watching = asyncio.get_running_loop().create_task(self._watch(asyncio.Event()))
        attempt = 0
        try:
            while True:
                heard = self._seq, self._epoch
                try:
                    await self._listen()
                except NoHost as error:
                    self._lost_host(str(error))
                except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
                    self._give_up(type(error).__name__)
                except Exception as error:  # frames that are too long, or not of events
                    self._lost_host(f"what it tells cannot be used ({type(error).__name__})")
                self.deaf = True
                attempt = 0 if heard != (self._seq, self._epoch) else attempt + 1
                await asyncio.sleep(WAITS[min(attempt, len(WAITS) - 1)])
        finally:
            watching.cancel()

    async def _listen(self) -> None:
        """Follow the host's events until their stream ends. Raises NoHost, and what HTTP raises."""
        timeout = httpx2.Timeout(HEAR_SECONDS, connect=CONNECT_SECONDS)
        try:
            greeting = await fetch(self._http, self.url + wire.HELLO, self._key, Greeting, MAX_REFUSAL)
        except httpx2.TimeoutException:
            raise
        except httpx2.TransportError as error:  # refused, or broken off
            raise NoHost(f"it does not answer ({type(error).__name__})") from None
        if greeting != self._expected:
            raise NoHost(f"it is not like the first host: {_difference(greeting, self._expected)}")
        asked: dict[str, str | int] = {"epoch": self._epoch, "after": self._seq}
        async with self._http.stream(
            "GET", self.url + wire.EVENTS, params=asked, headers=self._key, timeout=timeout
        ) as reply:
            if reply.status_code != 200:
                code = (await self._refusal("", reply)).code
                if not self.draining:
                    raise NoHost(f"it answers with status {reply.status_code} ({code})")
                return
            self.draining = False
            buffer = bytearray()
            async for data in reply.aiter_raw():
                buffer += data
                while (body := framing.take(buffer, MAX_FRAME)) is not None:
                    self._take(self._decoder.decode(body))

    def _take(self, told: Told) -> None:
        if told.draining:
            self.draining = True
            return
        events = told.events
        if self.ready is not None and self._epoch not in ("", told.epoch):
            self._lost_host("its engine is another one")
        if told.resumed and self.ready is not None:
            events = [each for each in events if not isinstance(each, Ready)]
        self._epoch, self._seq, self.deaf = told.epoch, told.seq, False
        if not self.was_ready or self.ready is None:
            self.heartbeat.begin()
            self._is_lost.clear()
        self._arrived([_without_images(each) if isinstance(each, Ready) else each for each in events])

    def _lost_host(self, why: str) -> None:
        self._give_up(why)
        self._epoch, self._seq = "", 0
        if self.ready is not None:
            self._is_lost.set()
            gone = list(self.open)
            self._lost()
            self.drop(gone, True)
        self.draining = False


def _without_images(ready: Ready) -> Ready:
    """Return an engine's message as a router passes it on: images are not sent to other hosts."""
    if not (ready.images or ready.no_images):
        return ready
    return msgspec.structs.replace(ready, images=False, no_images="attar route")


class _Error(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


def client() -> httpx2.AsyncClient:
    """Make the client of HTTP for all hosts."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0)
    return httpx2.AsyncClient(limits=limits, follow_redirects=False, trust_env=False)


async def fetch(http: httpx2.AsyncClient, url: str, headers: Mapping[str, str], kind: type[Any], most: int) -> Any:
    """Return what a host answers, of a kind and at most so many bytes. Raises NoHost for another answer, and what HTTP
    raises."""
    timeout = httpx2.Timeout(HEAR_SECONDS, connect=CONNECT_SECONDS)
    async with http.stream("GET", url, headers=dict(headers), timeout=timeout) as reply:
        if reply.status_code == 401:
            raise NoHost("it does not accept this router key")
        if reply.status_code == 404:
            raise NoHost("it is no attar server with --router-key-file")
        if reply.status_code != 200:
            raise NoHost(f"it answers with status {reply.status_code}")
        try:
            return msgspec.json.decode(await read_body(reply, most), type=kind)
        except ValueError:
            raise NoHost("its greeting cannot be read") from None


async def read_body(reply: httpx2.Response, most: int) -> bytes:
    """Return the body of an answer. Raises ValueError for one of more than `most` bytes."""
    data = bytearray()
    async for piece in reply.aiter_raw():
        data += piece
        if len(data) > most:
            raise ValueError("an answer is too long")
    return bytes(data)


def seconds_of(text: str) -> float:
    """Read a Retry-After; dates, which attar's servers do not send, count as a second."""
    return min(float(text), 3600.0) if text.isascii() and text.isdigit() else 1.0


def _difference(one: Greeting, other: Greeting) -> str:
    return ", ".join(name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name))
