"""Choices of a whole answer, assembled from its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from attar.protocol.messages import Delta, Failed, Finished
from attar.protocol.request import TokenLogprob
from attar.server.api.logprobs import Turns, values
from attar.server.engine_client.connection import PromptScores
from attar.server.request_handler import RequestHandler


@dataclass(slots=True)
class Choice:
    """One whole choice. `logprob` is the sum over its `scored` tokens."""

    number: int
    text: str = ""
    reason: str = ""
    stop: str | None = None
    tokens: int = 0
    logprob: float = 0.0
    scored: int = 0


class Writer(Protocol):
    """Writes the log probabilities of a whole answer as they come."""

    def add(self, at: int, number: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Write more log probabilities of choice `number` of prompt `at`."""

    async def add_prompt(self, at: int, event: PromptScores, turns: Turns) -> None:
        """Write the log probabilities of prompt `at`, before anything of its choices."""


async def collect(request: RequestHandler, writer: Writer | None = None) -> list[Choice]:
    """Wait for all choices of a request. `writer` takes log probabilities. Raises APIError."""
    choices = [Choice(number) for number in range(len(request.prompts) * request.n)]
    pieces: list[list[str]] = [[] for _ in choices]
    turns = Turns(request.wanted)
    async for events in request.events(whole=True):
        for event in events:
            if isinstance(event, Delta):
                number = request.number(event)
                pieces[number].append(event.text)
                if event.logprobs and writer is not None:
                    choices[number].logprob += sum(each.logprob for each in event.logprobs)
                    choices[number].scored += len(event.logprobs)
                    writer.add(request.stream.prompts[event.id], number, event.logprobs)
                    await turns.after(values(event.logprobs))
            elif isinstance(event, Finished):
                choice = choices[request.number(event)]
                choice.reason, choice.stop, choice.tokens = event.reason, event.stop, event.completion_tokens
            elif isinstance(event, PromptScores) and writer is not None:
                await writer.add_prompt(request.stream.prompts[event.id], event, turns)
            elif isinstance(event, Failed):
                raise request.refusal(event)
    for choice, texts in zip(choices, pieces, strict=True):
        choice.text = "".join(texts)
    return choices
