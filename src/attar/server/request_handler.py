"""One request on its way through: what came back of the engine, and how long each part took.

Endpoints differ in how they read a request and write an answer; between the two they all do what is here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from attar.faults import point
from attar.protocol.messages import Delta, Embedding, Failed, Finished
from attar.protocol.request import TokenLogprob
from attar.server.admission.rate_limits import Account
from attar.server.engine_client.client import Answer
from attar.server.engine_client.connection import AnswerEvent
from attar.server.logprobs import PromptScores, Turns, values
from attar.server.request_trace import RequestTrace

if TYPE_CHECKING:
    from attar.server.dispatcher import Dispatcher  # which makes them

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what for: the request's id, when it came, the salt of its key, and that key's share."""

    id: str
    arrived: float  # monotonic
    salt: bytes
    account: Account | None = None  # of those that can cost tokens

    def allowance(self, prompt: int, n: int) -> int | None:
        """Tokens for each of n answers that its key's share has room for; None: any number."""
        return None if self.account is None else self.account.allowance(prompt, n)

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


class Work:
    """A request that the engine has. `prompts` are its prompts; choice c of prompt p is number p * n + c.

    Whoever reads it closes it at the end, whatever that was.
    """

    def __init__(
        self,
        caller: Caller,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        answer: Answer,
        dispatcher: Dispatcher,
        trace: RequestTrace,
    ) -> None:
        self.caller, self.prompts, self.n, self.answer = caller, prompts, n, answer
        self.created = int(time.time())
        self.prompt_tokens = sum(map(len, prompts))
        self.reused = 0
        self._dispatcher, self._trace = dispatcher, trace
        self._last: dict[tuple[str, int], float] = {}
        self._unheard = set(answer.prompts)
        self._peeked: list[AnswerEvent] = []
        self._left = False
        self._outcome = ""
        self._served = True
        self._finished = False
        self._reported = trace.reader(answer.prompts)
        answer.late = self._late

    def number(self, event: Delta | Finished) -> int:
        """Which choice of the whole answer an event is about."""
        return self.answer.prompts[event.id] * self.n + event.choice

    async def admitted(self) -> None:
        """Wait a little for the engine's first word, so that a refusal can still be the answer's status."""
        try:
            async with asyncio.timeout(self._dispatcher.patience()):
                self._peeked = await self._take()
        except TimeoutError:
            return
        if isinstance(self._peeked[0], Failed):
            raise self._dispatcher.refusal(self._peeked[0])

    def leave(self) -> None:
        """Its reader is gone, perhaps after the engine has finished and before all is written."""
        self._left = True
        self.answer.cancel()

    def wanted(self) -> None:
        """Between two slices of what is written: what came meanwhile has not been left. Raises Refusal where nobody
        reads it any more."""
        self.answer.reading()
        code = "cancelled" if self._left else self.answer.failure
        if code in ("cancelled", "slow_reader"):
            raise self._dispatcher.refusal(Failed(self.caller.id, code, ""))

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
                    raise self._dispatcher.refusal(event)
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
                    raise self._dispatcher.refusal(event)
                if isinstance(event, Embedding):
                    found[event.id] = event.vector
        return [found[each] for each in self.answer.prompts]

    def close(self) -> None:
        """Nobody reads on. What has not ended does; where its end was never taken, something here has failed, unless
        it had failed before: whoever ends an answer may also end the task that reads it."""
        outcome = self.answer.failure or "internal"
        self.answer.close()
        if not self._finished:
            self._outcome, self._served = outcome, False
            self._finish(time.monotonic())

    async def _take(self) -> list[AnswerEvent]:
        if events := await self.answer.take():
            point("work.take", self.caller.id)
            self._note(events)
        return events

    def _late(self, event: AnswerEvent) -> None:
        """What is said of it though nobody reads it: its tokens were generated all the same."""
        if isinstance(event, Delta):
            self._generated(len(event.token_ids))
        self._reported(event)

    def _generated(self, tokens: int) -> None:
        self._trace.generated += tokens
        self._dispatcher.metrics.generated_tokens.inc(tokens)
        if self.caller.account is not None:
            self.caller.account.use(tokens)

    def _note(self, events: Sequence[AnswerEvent]) -> None:
        """Count, and keep what /why will tell."""
        point("metrics.observe", self.caller.id)
        now, metrics, trace = time.monotonic(), self._dispatcher.metrics, self._trace
        for event in events:
            if event.id in self._unheard and not isinstance(event, Failed):
                self._unheard.remove(event.id)
                metrics.prompt_tokens.inc(len(self.prompts[self.answer.prompts[event.id]]))
            if isinstance(event, Delta):
                tokens = len(event.token_ids)
                self._generated(tokens)  # as they come: rates look at less than an answer
                key = (event.id, event.choice)
                last = self._last.get(key)
                if trace.first is None:
                    trace.first = now
                    metrics.ttft.observe(now - self.caller.arrived)
                if last is not None:
                    for _ in range(tokens):
                        metrics.inter_token.observe((now - last) / tokens)
                self._last[key] = now
                continue
            self._reported(event)
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
        # Its account is settled; and no circle stays for the collector, which would hold up every stream.
        self.answer.late = self._reported
        caller, metrics, trace = self.caller, self._dispatcher.metrics, self._trace
        trace.outcome, trace.ended = self._outcome or "stop", now
        if self._served:  # a refusal is quick, and would make a full server look like a fast one
            metrics.end_to_end.observe(now - caller.arrived)
            self._dispatcher.backoff.served(now)
        metrics.ended.labels(trace.outcome).inc()
        self._dispatcher.traces.remember(trace)
        logger.info(
            "%s ended (%s): %d tokens in, %d reused, %d out, %.3f s",
            caller.id, trace.outcome, self.prompt_tokens, self.reused, trace.generated, now - caller.arrived,
        )  # fmt: skip
