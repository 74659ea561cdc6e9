"""One request on its way through: what was asked of the engine, what came back, and how long each part took.

Endpoints differ in how they read a request and write an answer; between the two they all do what is here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from attar.engine.messages import Delta, Embed, Embedding, Failed, Finished, Ready, Report, Submit
from attar.engine.request import SamplingParams, TokenLogprob
from attar.faults import point
from attar.server.client import Answer, EngineClient
from attar.server.connection import AnswerEvent
from attar.server.crowd import Crowd
from attar.server.errors import Refusal
from attar.server.logprobs import PromptScores, Turns, values
from attar.server.metrics import Metrics
from attar.server.quota import Account
from attar.server.schemas import MAX_PROMPTS

REMEMBERED = 1000  # requests that /why can tell of when they have ended
MAX_LOGPROBS = 3_000_000  # of an answer, the likely ones among them: 20 for each token of a context of 128K, and more
WINDOW = 32  # texts to embed that the engine has at once
PROMPT_ANSWER = 1.0  # seconds that a stream's status waits for the engine's first word
LATE_ANSWER = 10.0  # the same where the engine may have to refuse it, at most: clients wait for a status too
SHARE_AFTER = 1  # seconds after which a key may ask again that has its share: no turn of `Crowd`, which all keys share

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what for: the request's id, when it came, the salt of its key, and that key's share."""

    id: str
    arrived: float  # monotonic
    salt: bytes
    account: Account | None = None  # of those that can cost tokens

    def take(self, prompt: int, asked: int) -> None:
        """Take tokens out of the key's share. Raises Refusal."""
        if self.account is not None:
            self.account.take(prompt, asked)


@dataclass(slots=True)
class Choice:
    """One whole choice. `logprob` is the sum of those of its `scored` tokens."""

    number: int
    text: str = ""
    reason: str = ""
    stop: str | None = None
    tokens: int = 0
    logprob: float = 0.0
    scored: int = 0


class Writer(Protocol):
    """Takes the log probabilities of a whole answer as they come."""

    def add(self, at: int, number: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Of a choice of prompt `at`."""

    async def add_prompt(self, at: int, event: PromptScores, turns: Turns) -> None:
        """Of prompt `at`, before anything of its choices."""


@dataclass(slots=True, weakref_slot=True)
class Story:
    """What became of a request, as /why tells it. Times are monotonic."""

    id: str
    salt: bytes
    arrived: float
    reports: list[Report | None]
    """Of its prompts, of those of an embedding the first."""
    outcome: str = "running"
    first: float | None = None
    ended: float | None = None
    generated: int = 0

    def told(self, now: float) -> dict[str, Any]:
        """For JSON."""
        return {
            "id": self.id,
            "outcome": self.outcome,
            "seconds": (now if self.ended is None else self.ended) - self.arrived,
            "seconds_to_first_token": None if self.first is None else self.first - self.arrived,
            "generated_tokens": self.generated,
            "prompts": [None if report is None else msgspec.to_builtins(report) for report in self.reports],
        }


class Work:
    """A request that the engine has. `prompts` are its prompts; choice c of prompt p is number p * n + c.

    Whoever reads it closes it at the end, whatever that was.
    """

    def __init__(
        self, caller: Caller, prompts: Sequence[tuple[int, ...]], n: int, answer: Answer, desk: Desk, story: Story
    ) -> None:
        self.caller, self.prompts, self.n, self.answer = caller, prompts, n, answer
        self.created = int(time.time())
        self.prompt_tokens = sum(map(len, prompts))
        self.reused = 0
        self._desk, self._story = desk, story
        self._last: dict[tuple[str, int], float] = {}
        self._unheard = set(answer.prompts)
        self._peeked: list[AnswerEvent] = []
        self._left = False
        self._outcome = ""
        self._served = True
        self._finished = False
        answer.late = _reader(story, answer.prompts)

    def number(self, event: Delta | Finished) -> int:
        """Which choice of the whole answer an event is about."""
        return self.answer.prompts[event.id] * self.n + event.choice

    async def admitted(self) -> None:
        """Wait a little for the engine's first word, so that a refusal can still be the answer's status."""
        try:
            async with asyncio.timeout(self._desk.patience()):
                self._peeked = await self._take()
        except TimeoutError:
            return
        if isinstance(self._peeked[0], Failed):
            raise self._desk.refusal(self._peeked[0])

    def leave(self) -> None:
        """Its reader is gone, perhaps after the engine has finished and before all is written."""
        self._left = True
        self.answer.cancel()

    def wanted(self) -> None:
        """Between two slices of what is written: what came meanwhile has not been left. Raises Refusal where nobody
        reads it any more."""
        self.answer.reading()
        if self._left or self.answer.failure == "cancelled":
            raise self._desk.refusal(Failed(self.caller.id, "cancelled", ""))

    async def events(self) -> AsyncIterator[list[AnswerEvent]]:
        """All events, those that came together together."""
        if self._peeked:
            yield self._peeked
        while events := await self._take():
            yield events

    async def choices(self, writer: Writer | None = None) -> list[Choice]:
        """The whole answer. `writer` is for one with log probabilities. Raises Refusal."""
        self.answer.whole = True
        choices = [Choice(number) for number in range(len(self.prompts) * self.n)]
        pieces: list[list[str]] = [[] for _ in choices]
        turns = Turns(self.wanted)
        async for events in self.events():
            for event in events:
                if isinstance(event, Delta):
                    number = self.number(event)
                    pieces[number].append(event.text)
                    if event.logprobs and writer is not None:
                        choices[number].logprob += sum(each.logprob for each in event.logprobs)
                        choices[number].scored += len(event.logprobs)
                        writer.add(self.answer.prompts[event.id], number, event.logprobs)
                        await turns.after(values(event.logprobs))
                elif isinstance(event, Finished):
                    choice = choices[self.number(event)]
                    choice.reason, choice.stop, choice.tokens = event.reason, event.stop, event.completion_tokens
                elif isinstance(event, PromptScores) and writer is not None:
                    await writer.add_prompt(self.answer.prompts[event.id], event, turns)
                elif isinstance(event, Failed):
                    raise self._desk.refusal(event)
        for choice, texts in zip(choices, pieces, strict=True):
            choice.text = "".join(texts)
        return choices

    async def vectors(self) -> list[bytes]:
        """The vectors of an embedding request, in order of its prompts. Raises Refusal."""
        self.answer.whole = True
        found: dict[str, bytes] = {}
        async for events in self.events():
            for event in events:
                if isinstance(event, Failed):
                    raise self._desk.refusal(event)
                if isinstance(event, Embedding):
                    found[event.id] = event.vector
        return [found[each] for each in self.answer.prompts]

    def close(self) -> None:
        """Nobody reads on. What has not ended does; where its end was never taken, something here has failed, unless
        it had failed before: whoever ends an answer may also end the task that reads it."""
        outcome = self.answer.failure or "internal"
        self.answer.cancel()
        if not self._finished:
            self._outcome, self._served = outcome, False
            self._finish(time.monotonic())

    async def _take(self) -> list[AnswerEvent]:
        if events := await self.answer.take():
            point("work.take", self.caller.id)
            self._note(events)
        return events

    def _note(self, events: Sequence[AnswerEvent]) -> None:
        """Count, and keep what /why will tell."""
        point("metrics.observe", self.caller.id)
        now, metrics, story = time.monotonic(), self._desk.metrics, self._story
        for event in events:
            if event.id in self._unheard and not isinstance(event, Failed):
                self._unheard.remove(event.id)
                metrics.prompt_tokens.inc(len(self.prompts[self.answer.prompts[event.id]]))
            if isinstance(event, Delta):
                tokens = len(event.token_ids)
                story.generated += tokens
                if self.caller.account is not None:
                    self.caller.account.use(tokens)
                key = (event.id, event.choice)
                last = self._last.get(key)
                if story.first is None:
                    story.first = now
                    metrics.ttft.observe(now - self.caller.arrived)
                if last is not None:
                    for _ in range(tokens):
                        metrics.inter_token.observe((now - last) / tokens)
                self._last[key] = now
                continue
            self.answer.late(event)
            if isinstance(event, Finished):
                self._outcome = event.reason
                self.reused += 0 if event.report is None else event.report.reused_tokens
            elif isinstance(event, Failed):
                self._outcome, self._served = event.code, False
                if event.code == "full" and self.caller.account is not None:
                    self.caller.account.forgive(self.prompt_tokens)
        if self.answer.ended:
            self._finish(now)

    def _finish(self, now: float) -> None:
        self._finished = True
        caller, metrics, story = self.caller, self._desk.metrics, self._story
        story.outcome, story.ended = self._outcome or "stop", now
        if self._served:  # a refusal is quick, and would make a full server look like a fast one
            metrics.end_to_end.observe(now - caller.arrived)
            self._desk.crowd.served(now)
        metrics.generated_tokens.inc(story.generated)
        self._desk.remember(story)
        logger.info(
            "%s ended (%s): %d tokens in, %d reused, %d out, %.3f s",
            caller.id, story.outcome, self.prompt_tokens, self.reused, story.generated, now - caller.arrived,
        )  # fmt: skip


def _reader(story: Story, prompts: Mapping[str, int]) -> Callable[[AnswerEvent], None]:
    """Takes the reports out of events, also of those that come when nobody reads the answer any more."""

    def read(event: AnswerEvent) -> None:
        if isinstance(event, Finished | Embedding | Failed) and event.report is not None:
            at = prompts[event.id]
            if at < len(story.reports):
                story.reports[at] = event.report

    return read


class Desk:
    """Where requests become work: the engine's client, the metrics, and the memory of what became of requests."""

    def __init__(self, engine: EngineClient, metrics: Metrics, deadline: float) -> None:
        self.engine, self.metrics, self.deadline = engine, metrics, deadline
        self.draining = False
        self.crowd = Crowd()
        self._memory: OrderedDict[str, Story] = OrderedDict()
        self._running: WeakValueDictionary[str, Story] = WeakValueDictionary()

    def ready(self) -> Ready:
        """The engine, ready to be asked. Raises Refusal when it is not."""
        if self.draining:
            raise Refusal("draining", "the server is shutting down")
        if self.engine.ready is None:
            if self.engine.was_ready:
                raise Refusal("engine_down", "the engine is not running")
            raise Refusal("loading", "the model is being loaded")
        return self.engine.ready

    def patience(self) -> float:
        """Seconds that a stream's status waits: where the engine's queue may have no room, until it can have said so,
        which it does between two steps."""
        places = self.engine.places
        if places.total <= places.size:
            return PROMPT_ANSWER
        return min(max(PROMPT_ANSWER, 2 * self.engine.pulse.longest), LATE_ANSWER)

    def getting_on(self) -> None:
        """Raises Refusal unless the engine is healthy, and in no step that takes far longer than any before."""
        self.healthy()
        if (slow := self.engine.pulse.slow) is not None:
            raise Refusal("engine_down", slow)

    def healthy(self) -> None:
        """Raises Refusal unless the engine is ready, runs, and gets on."""
        self.ready()
        if (trouble := self.engine.trouble) is not None:
            raise Refusal("engine_down", trouble)

    def model(self, asked: str | None) -> str:
        """The name of what is to answer: the served model's, also where nothing is `asked` for, or an adapter's.
        Raises Refusal."""
        ready = self.ready()
        if asked is not None and asked != ready.model and asked not in ready.adapters:
            raise Refusal("model_not_found", "model: not served here; GET /v1/models lists what is", "model")
        return ready.model if asked is None else asked

    def full(self, message: str) -> Refusal:
        """There is no room; says when there may be."""
        return Refusal("overloaded", message, retry_after=self.crowd.retry_after(time.monotonic()))

    def refusal(self, failed: Failed) -> Refusal:
        """What the engine's refusal is to a user."""
        refusal = Refusal.of(failed)
        return self.full(refusal.message) if refusal.code == "overloaded" else refusal

    def submit(
        self,
        caller: Caller,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        n: int,
        model: str,
        priority: int = 0,
    ) -> Work:
        """Prompts to be continued, n choices each, by what `model` names. Where there are keys, a `priority` below 0
        counts as 0. Raises Refusal."""
        self.healthy()
        left = self._left(caller)
        self._place(caller, n)  # before the key pays
        caller.take(sum(map(len, prompts)), len(prompts) * n * params.max_tokens)
        if caller.salt:  # nobody goes before those who have another key
            priority = max(0, priority)
        seeded, adapter = params.seeded(), self._adapter(model)
        commands = [
            Submit(name, prompt, seeded, n, caller.salt, priority, left, adapter)
            for name, prompt in zip(_names(caller, len(prompts)), prompts, strict=True)
        ]
        return self._work(caller, prompts, n, commands, self._share())

    def embed(self, caller: Caller, prompts: Sequence[tuple[int, ...]], pooling: str, model: str) -> Work:
        """Prompts whose vectors are wanted, of what `model` names. Raises Refusal."""
        self.healthy()
        left = self._left(caller)
        self._place(caller, 1)
        caller.take(sum(map(len, prompts)), 0)
        commands = [
            Embed(name, prompt, pooling, left, self._adapter(model), caller.salt)
            for name, prompt in zip(_names(caller, len(prompts)), prompts, strict=True)
        ]
        return self._work(caller, prompts, 1, commands, min(WINDOW, self._share()))

    def _place(self, caller: Caller, count: int) -> None:
        """Raises Refusal where so many choices of the first prompt would be more than the key's share of the queue, or
        than the engine has room for."""
        places = self.engine.places
        if not places.fit(caller.salt, count):
            if places.keys < 2:
                raise self.full("the server is full: try again later")
            self.metrics.limited.labels("queue").inc()
            waiting = f"this key has {places.waiting(caller.salt)} of the {places.size} places in the queue"
            message = f"{waiting}, and its share has no room for {count} more: try again later"
            raise Refusal("rate_limit_exceeded", message, retry_after=SHARE_AFTER)

    def _left(self, caller: Caller) -> float:
        """Seconds of the deadline, which began when the request came. Raises Refusal where it has passed."""
        left = caller.arrived + self.deadline - time.monotonic()
        if left <= 0:
            raise self.refusal(Failed(caller.id, "deadline", ""))
        return left

    def _share(self) -> int:
        """Choices of one request that the engine's queue takes at a time: half of what may wait there."""
        return max(1, self.ready().max_waiting // 2)

    def _adapter(self, model: str) -> str:
        """What the engine calls it: nothing where it is the served model itself."""
        return "" if model == self.ready().model else model

    def remember(self, story: Story) -> None:
        """Keep what became of a request, for those with the same key; the oldest is forgotten."""
        point("why.remember", story.id)
        self._memory[story.id] = story
        if len(self._memory) > REMEMBERED:
            self._memory.popitem(last=False)

    def story(self, request: str, salt: bytes) -> dict[str, Any]:
        """What became of a request, or how far it is. Raises Refusal when nobody knows, or it was another's."""
        story = self._running.get(request) or self._memory.get(request)
        if story is None or story.salt != salt:
            raise Refusal("not_found", f"no such request is running, or among the last {REMEMBERED}")
        return story.told(time.monotonic())

    def _work(
        self, caller: Caller, prompts: Sequence[tuple[int, ...]], n: int, commands: Sequence[Submit | Embed], most: int
    ) -> Work:
        point("desk.submit", caller.id)
        story = Story(caller.id, caller.salt, caller.arrived, [None] * min(len(prompts), MAX_PROMPTS))
        self._running[caller.id] = story
        return Work(caller, prompts, n, self.engine.ask(commands, most), self, story)


def _names(caller: Caller, count: int) -> list[str]:
    return [caller.id] if count == 1 else [f"{caller.id}.{at}" for at in range(count)]


def written(prompts: Sequence[tuple[int, ...]], params: SamplingParams, n: int, stream: bool) -> None:
    """Raises Refusal, with both numbers, where an answer would have too many log probabilities. A stream keeps none of
    its choices'."""
    read = 0 if params.prompt_logprobs is None else sum(map(len, prompts)) * (params.prompt_logprobs + 1)
    made = 0 if params.logprobs is None or stream else len(prompts) * params.max_tokens * (params.logprobs + 1)
    if (count := n * (read + made)) > MAX_LOGPROBS:
        message = (
            f"logprobs: up to {count} of them are more than the {MAX_LOGPROBS} that an answer may have: ask for fewer "
            "prompts, choices, tokens (max_tokens) or likely ones for each"
        )
        raise Refusal("out_of_range", message, "logprobs")


def fits(n: int, most: int, name: str) -> None:
    """Raises Refusal, with both numbers, where a prompt's choices could never wait together."""
    if n > most:
        message = (
            f"{name}: {n} choices of a prompt are more than the {most} that one key may have waiting: ask for fewer"
        )
        raise Refusal("out_of_range", message, name)


def room(prompts: Sequence[tuple[int, ...]], context: int, name: str, new: int = 1) -> int:
    """Tokens that the longest prompt leaves of the context, at least `new`. Raises Refusal with both numbers."""
    longest = max(map(len, prompts))
    if longest + new > context:
        message = f"{name}: {longest} tokens, which with {new} to come are more than this model's context of {context}"
        raise Refusal("context_length_exceeded", message, name)
    return context - longest
