"""Submission of requests to the engine, and the checks that refuse one before that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from attar.faults import point
from attar.protocol.grammar import Grammar
from attar.protocol.images import ImageInput
from attar.protocol.messages import Embed, Failed, Ready, Submit
from attar.protocol.reasoning import ReasoningSection
from attar.protocol.request import SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.errors import APIError
from attar.server.options import stands_for
from attar.server.request_handler import RequestContext, RequestHandler
from attar.strict_json import shown

LATEST = ":latest"  # Ollama's clients put it behind every name
LISTED = 8  # adapters in an error
WINDOW = 32  # texts to embed in the engine at a time
SHARE_AFTER = 1  # Retry-After, in seconds, for a key that has its share: all keys share the turns of `RetryAfter`


class Dispatcher:
    """Hands requests to the engine. A request has `deadline` seconds from its arrival. `aliases` are further names of
    the served model (`options.stands_for`)."""

    def __init__(self, context: RequestContext, deadline: float, aliases: Sequence[str] = ()) -> None:
        self.context, self.engine, self.deadline, self.aliases = context, context.engine, deadline, aliases

    def ready(self) -> Ready:
        """Return the engine's description. Raises APIError where it is not ready."""
        if self.context.draining:
            raise APIError("draining", "the server is shutting down")
        if self.engine.ready is None:
            if self.engine.was_ready:
                raise APIError("engine_down", "the engine is not running")
            raise APIError("loading", "the model is being loaded")
        return self.engine.ready

    def getting_on(self) -> None:
        """Raise APIError unless the engine is healthy, and in no step that takes far longer than any before."""
        self.healthy()
        if (slow := self.engine.heartbeat.slow) is not None:
            raise APIError("engine_down", slow)

    def healthy(self) -> None:
        """Raise APIError unless the engine is ready, runs, and makes progress."""
        self.ready()
        if (trouble := self.engine.heartbeat.trouble) is not None:
            raise APIError("engine_down", trouble)

    def model(self, asked: str | None) -> tuple[str, Ready]:
        """Return the model's or adapter's name, the served model's where nothing or an alias is `asked` for, and the
        engine's description. Raises APIError for unknown names."""
        ready = self.ready()
        asked = asked and asked.removesuffix(LATEST)
        if asked is None or any(stands_for(alias, asked) for alias in self.aliases):
            return (asked if asked in ready.adapters else ready.model), ready
        if asked != ready.model and asked not in ready.adapters:
            known = ", ".join((ready.model, *ready.adapters[:LISTED]))
            more = "" if len(ready.adapters) <= LISTED else ", ... (GET /v1/models lists all)"
            message = f"model: {shown(asked)} is not served here, but {known}{more}; `attar serve --alias` adds a name"
            raise APIError("model_not_found", message, "model")
        return asked, ready

    def submit(
        self, caller: Caller, prompts: Sequence[tuple[int, ...]], params: SamplingParams, n: int, model: str,
        priority: int = 0, grammar: Grammar | None = None, reasoning: ReasoningSection | None = None,
        images: tuple[ImageInput, ...] = (),
    ) -> RequestHandler:  # fmt: skip
        """Submit prompts to be continued, n choices each that keep to `grammar` behind their `reasoning`, by `model`.
        `images` are those of the one prompt of a chat. Where there are keys, a `priority` below 0 counts as 0. Raises
        APIError."""
        left = self._admit(caller, prompts, n, params.max_tokens)
        if caller.cache_salt:  # no key goes ahead of another
            priority = max(0, priority)
        adapter = self._adapter(model)
        salt = caller.cache_salt

        def submitted(name: str, prompt: tuple[int, ...]) -> Submit:
            seeded = params.seeded()
            return Submit(
                name, prompt, seeded, n, salt, priority, left, adapter, grammar, reasoning, images=images
            )  # fmt: skip

        commands = [submitted(name, prompt) for name, prompt in _named(caller, prompts)]
        made = self._ask(caller, prompts, n, commands, self._share())
        made.expect(len(prompts) * n * params.max_tokens)
        return made

    def embed(self, caller: Caller, prompts: Sequence[tuple[int, ...]], pooling: str, model: str) -> RequestHandler:
        """Submit prompts to be embedded by `model`. Raises APIError."""
        left = self._admit(caller, prompts, 1, 0)
        adapter, named = self._adapter(model), _named(caller, prompts)
        commands = [Embed(name, prompt, pooling, left, adapter, caller.cache_salt) for name, prompt in named]
        return self._ask(caller, prompts, 1, commands, min(WINDOW, self._share()))

    def forward(self, caller: Caller, command: Submit | Embed) -> RequestHandler:
        """Submit a request of a router, which another host may have begun, for the API key that it passes on. Raises
        APIError."""
        n, new = (command.n, command.params.max_tokens) if isinstance(command, Submit) else (1, 0)
        left = self._admit(caller, [command.prompt], n, new)
        if command.deadline is not None:
            left = min(left, command.deadline)
        command = replace(command, id=caller.id, cache_salt=caller.cache_salt, deadline=left)
        if isinstance(command, Submit) and caller.cache_salt:
            command = replace(command, priority=max(0, command.priority))
        made = self._ask(caller, [command.prompt], n, [command], self._share())
        made.expect(n * new)
        return made

    def _admit(self, caller: Caller, prompts: Sequence[tuple[int, ...]], n: int, new: int) -> float:
        """Return the seconds left until the deadline, counted from the request's arrival, and charge the key for
        prompts with n choices of `new` tokens each. Raises APIError after the deadline, and where the choices of the
        first prompt would exceed the key's share of the queue, or the engine's room."""
        self.healthy()
        left = caller.arrived + self.deadline - time.monotonic()
        if left <= 0:
            raise self.context.refusal(Failed(caller.id, "deadline", ""))
        places = self.engine.places
        if not places.fit(caller.cache_salt, n):
            if places.keys < 2:
                raise self.context.full()
            self.context.metrics.limited.labels("queue").inc()
            waiting = f"this key has {places.waiting(caller.cache_salt)} of the {places.size} places in the queue"
            message = f"{waiting}, and its share has no room for {n} more: try again later"
            raise APIError("rate_limit_exceeded", message, retry_after=SHARE_AFTER)
        caller.take(sum(map(len, prompts)), len(prompts) * n * new)
        return left

    async def why(self, request: str, cache_salt: bytes) -> dict[str, Any]:
        """Return what became of a request, for JSON; for a running one, its progress, unless a long step keeps the
        engine. Raises APIError where it is unknown or another key's."""
        trace = self.context.traces.find(request, cache_salt)
        if trace.outcome != "running":
            return trace.told(time.monotonic())
        running = await self.engine.reports(name for name, ended in trace.reports.items() if ended is None)
        return trace.told(time.monotonic(), running)

    def _share(self) -> int:
        """Return the choices of one request that the engine's queue takes at a time: half of its capacity."""
        return max(1, self.ready().max_waiting // 2)

    def _adapter(self, model: str) -> str:
        """Return the engine's name of an adapter; empty for the served model itself."""
        return "" if model == self.ready().model else model

    def _ask(
        self, caller: Caller, prompts: Sequence[tuple[int, ...]], n: int, commands: Sequence[Submit | Embed], most: int
    ) -> RequestHandler:
        point("dispatcher.submit", caller.id)
        return RequestHandler(caller, prompts, n, self.engine.ask(commands, most), self.context)


def _named(caller: Caller, prompts: Sequence[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return each prompt with its id for the engine."""
    names = [caller.id] if len(prompts) == 1 else [f"{caller.id}.{at}" for at in range(len(prompts))]
    return list(zip(names, prompts, strict=True))
