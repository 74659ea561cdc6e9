"""One request between its engine and its reader: what it has got so far, so that another engine can continue it.

A continued request is sent with the tokens of each choice, except the last one. The new engine draws that one again,
and the relay takes it instead of the reader. Should it be another token, then the engines' bits differ, and the request
ends as `internal`: no answer is ever mixed of two. A request that trusts forced tokens is continued behind its last
token, because that one need not be the model's draw.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from attar.protocol.messages import Delta, Embed, Failed, Finished, Submit
from attar.server.engine_client.connection import AnswerEvent, PromptScores
from attar.server.engine_client.response_stream import ResponseStream

logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """The group that a relay belongs to."""

    def heard(self, relay: Relay, event: AnswerEvent) -> None:
        """Take note of an event before its reader does."""

    def refused(self, relay: Relay, failed: Failed) -> None:
        """Decide about a request that its engine did not take, or gave up at its own end."""


class Relay:
    """A request of `stream`, first sent at `since` on the caller's clock."""

    def __init__(self, keeper: Keeper, stream: ResponseStream, command: Submit | Embed, since: float) -> None:
        self.keeper, self.stream, self.command, self.since = keeper, stream, command, since
        self.engine: int | None = None
        """The engine that has it; None while it waits for one."""
        self.deaths: list[int] = []
        """Engines that have died with it."""
        self.replays = 0
        self.counted = 0
        """Replays but those behind a drain."""
        self.bits = ""
        """What the bits of the engine that began it depend on (`Ready.bits`)."""
        self.digests: Sequence[int] | None = None  # of its prompt's blocks, once they are made
        self.left: set[int] = set()  # engines that it was taken from, which may still have it
        self.declined: set[int] = set()  # engines without room for it, since it last began to wait
        count = command.n if isinstance(command, Submit) else 1
        self._tokens = [array("i") for _ in range(count)]
        self._ended: set[int] = set()
        self._scored = False
        self._again: dict[int, int] = {}  # token that a choice will have drawn again

    @property
    def begun(self) -> bool:
        """Whether the reader has got anything: then only the same bits continue it."""
        return self._scored or bool(self._ended) or any(self._tokens)

    @property
    def late(self) -> Callable[[AnswerEvent], None]:
        """What takes events that come after the end."""
        return self.stream.late

    @property
    def choices(self) -> int:
        """Choices that have not ended."""
        return len(self._tokens) - len(self._ended)

    @property
    def known(self) -> int:
        """Tokens to be computed beside the prompt: those of the longest choice."""
        return max((len(each) for at, each in enumerate(self._tokens) if at not in self._ended), default=0)

    def put(self, event: AnswerEvent) -> None:
        """Take an event of the engine, and pass it on unless the reader has it."""
        if isinstance(event, Failed) and event.code in ("full", "shutdown"):
            self.keeper.refused(self, event)
            return
        self.keeper.heard(self, event)
        if isinstance(event, Delta):
            if (expected := self._again.pop(event.choice, None)) is not None:
                if event.token_ids != (expected,):
                    logger.error("%s: engine %s draws another token than the one before it", event.id, self.engine)
                    self.stream.cancel("internal")
                return
            self._tokens[event.choice].extend(event.token_ids)
        elif isinstance(event, PromptScores):
            self._scored = True
        elif isinstance(event, Finished):
            self._ended.add(event.choice)
        self.stream.put(event)

    def cancel(self, code: str = "cancelled") -> None:
        """End the whole stream."""
        self.stream.cancel(code)

    def next_command(self, now: float) -> Submit | Embed:
        """Return the request as the next engine is to take it up, with what is left of its deadline."""
        command, self._again = self.command, {}
        if (deadline := command.deadline) is not None:
            command = msgspec.structs.replace(command, deadline=max(0.0, deadline - (now - self.since)))
        if not self.begun or not isinstance(command, Submit):
            return command
        generated = list[tuple[int, ...] | None]()
        for choice, tokens in enumerate(self._tokens):
            if choice in self._ended:
                generated.append(None)
            elif tokens and not command.params.trust_forced:
                self._again[choice] = tokens[-1]
                generated.append(tuple(tokens[:-1]))
            else:
                generated.append(tuple(tokens))
        return msgspec.structs.replace(command, generated=tuple(generated))
