"""Driver of a load: sends requests to a server and records the arrival of the answers.

Requests are encoded before the first is sent, so that the client only waits, reads and records while the clock runs.
Its own lateness is measured too: the time from when a request was due to when it was sent, the event loop's delay, and
the used fraction of a core. Where these are large, the run reports it instead of blaming the server.

Cost of this client per event, measured with 32 streams on one core and a trivial server on the other: 9 us where events
come in a rush, 120 us where each wakes the process. The library httpx2 took 25 to 34 us and 280 us.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attar.errors import UserError
from attar.load.client import Answer, Server, complete, fetch, request
from attar.load.schedule import Load
from attar.load.traces import LOW, Ask
from attar.progress import Progress

HEARTBEAT = 0.05  # seconds between measurements of the loop's delay
LEAD = 0.1  # seconds from the first sleep to the beginning of a run
REDRAWN = 0.2  # seconds between progress reports

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea kid body information back parent face
level office door health person art war history party result change morning reason research girl guy moment air
teacher force education
"""
WORDS = tuple(_COMMON.split())
"""Words of about one token in most vocabularies: they replace ids where a server takes only text."""


@dataclass(frozen=True)
class Target:
    """A server, and the form of requests to it.

    With `text`, and always in a chat, prompts are sent as words: by `decode` where there is a tokenizer, else one of
    `WORDS` an id, so that equal prefixes stay equal and lengths about right. `extra` goes into every request.
    """

    server: Server
    model: str
    chat: bool = False
    text: bool = False
    decode: Callable[[Sequence[int]], str] | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the JSON object of one request."""
        body: dict[str, Any] = {
            "model": self.model, "max_tokens": ask.output, "temperature": self.temperature, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.words(ask.prompt)}]
        else:
            body["prompt"] = self.words(ask.prompt) if self.text else list(ask.prompt)
        return body | dict(self.extra)

    def words(self, prompt: Sequence[int]) -> str:
        if self.decode is not None:
            return self.decode(prompt)
        return " ".join(WORDS[i % len(WORDS)] for i in prompt)


@dataclass(slots=True)
class Sent:
    """One request of a run: the time it was due, in the clock of its answer, and the answer."""

    ask: Ask
    due: float
    answer: Answer


@dataclass(slots=True)
class Run:
    """A sent load: its requests in the order of the load, without those past the time limit and those that are not
    counted. Of the latter the failed ones are kept."""

    load: Load
    sent: list[Sent]
    started: float
    ended: float
    loop_lags: list[float]  # seconds, at every heartbeat
    cpu: float  # seconds of this process

    @property
    def seconds(self) -> float:
        return self.ended - self.started


async def first_model(server: Server) -> str:
    """Return the first model that a server lists. Raises ValueError where it lists none."""
    listed = await fetch(server, "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise UserError("answer_invalid", "the server lists no model under /v1/models: name one with --model") from None


async def context(server: Server, model: str) -> int | None:
    """Return the most tokens of a prompt and its answer, None where the server does not state it as vLLM and
    attar do."""
    try:
        listed = await fetch(server, "/v1/models")
        said = next(each["max_model_len"] for each in listed["data"] if each["id"] == model)
    except (ValueError, TypeError, KeyError, StopIteration):
        return None
    return said if type(said) is int and said > 0 else None


async def probe(target: Target) -> str | None:
    """Request two tokens. Return None where that works, else the reason. Raises ValueError where no server listens."""
    ask = Ask(0.0, (LOW, LOW + 1, LOW + 2, LOW + 3), 2)
    answer = await complete(target.server, request(target.server, "POST", target.path, target.body(ask)), 60.0)
    if answer.error == "refused":
        raise UserError("server_unreachable", answer.detail)
    return None if answer.error is None else ": ".join(filter(None, (answer.error, answer.detail)))


async def run(load: Load, target: Target, limit: float | None = None, progress: Progress | None = None) -> Run:
    """Send the whole load, or the part due within `limit` seconds, and wait for every answer."""
    posts = [request(target.server, "POST", target.path, target.body(ask)) for ask in load.asks]
    lags: list[float] = []
    heart = asyncio.create_task(_listen(lags))
    sent: list[Sent | None] = [None] * len(posts)
    started = time.perf_counter() + LEAD
    done, told = 0, 0.0

    async def one(i: int, due: float) -> None:
        nonlocal done, told
        answer = await complete(target.server, posts[i], target.timeout)
        sent[i] = Sent(load.asks[i], due, answer)
        done += 1
        if progress is not None and (answer.ended - told > REDRAWN or done == len(posts)):
            told = answer.ended
            progress(load.label, done, len(posts))

    try:
        await asyncio.sleep(LEAD)
        cpu = time.process_time()  # of the run alone, because its fraction is of the run's time
        if load.clients is None:
            await _open(load, started, limit, one)
        else:
            await _closed(load, load.clients, started, limit, one)
    finally:
        heart.cancel()
    made = [(i, each) for i, each in enumerate(sent) if each is not None]
    kept = [each for i, each in made if i >= load.warm or each.answer.error is not None]
    if load.warm:
        started = min((each.due for each in kept), default=started)
    ended = max((each.answer.ended for each in kept), default=started)
    return Run(load, kept, started, ended, lags, time.process_time() - cpu)


One = Callable[[int, float], Any]


async def _open(load: Load, started: float, limit: float | None, one: One) -> None:
    async with asyncio.TaskGroup() as group:
        for i, ask in enumerate(load.asks):
            if limit is not None and ask.at > limit:
                break
            await asyncio.sleep(max(0.0, started + ask.at - time.perf_counter()))
            group.create_task(one(i, started + ask.at))


async def _closed(load: Load, clients: int, started: float, limit: float | None, one: One) -> None:
    queue = iter(range(len(load.asks)))

    async def client() -> None:
        for i in queue:
            await asyncio.sleep(max(0.0, started + load.asks[i].at - time.perf_counter()))
            now = time.perf_counter()
            if limit is not None and now - started > limit:
                break
            await one(i, now)

    await asyncio.sleep(max(0.0, started - time.perf_counter()))
    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(load.asks))):
            group.create_task(client())


async def _listen(lags: list[float]) -> None:
    """Record how much later than requested the loop wakes."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(HEARTBEAT)
        lags.append(time.perf_counter() - before - HEARTBEAT)
