"""Where requests become work: what the engine is asked, and what is refused before it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from attar.faults import point
from attar.protocol.messages import Embed, Failed, Ready, Stats, Submit
from attar.protocol.request import SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.errors import Refusal
from attar.server.request_context import RequestContext
from attar.server.request_handler import RequestHandler

WINDOW = 32  # texts to embed that the engine has at once
SHARE_AFTER = 1  # seconds after which a key may ask again that has its share: all keys share the turns of `Backoff`


class Dispatcher:
    """Hands requests to the engine. A request has `deadline` seconds from when it came."""

    def __init__(self, context: RequestContext, deadline: float) -> None:
        self.context, self.engine, self.deadline = context, context.engine, deadline

    @property
    def most_choices(self) -> int:
        """Choices of one prompt that could ever wait together."""
        return self.engine.places.most

    @property
    def stats(self) -> Stats | None:
        """The engine's state, as it last said it."""
        return self.engine.stats

    def ready(self) -> Ready:
        """The engine, ready to be asked. Raises Refusal when it is not."""
        if self.context.draining:
            raise Refusal("draining", "the server is shutting down")
        if self.engine.ready is None:
            if self.engine.was_ready:
                raise Refusal("engine_down", "the engine is not running")
            raise Refusal("loading", "the model is being loaded")
        return self.engine.ready

    def getting_on(self) -> None:
        """Raises Refusal unless the engine is healthy, and in no step that takes far longer than any before."""
        self.healthy()
        if (slow := self.engine.heartbeat.slow) is not None:
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

    def submit(
        self,
        caller: Caller,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        n: int,
        model: str,
        priority: int = 0,
    ) -> RequestHandler:
        """Prompts to be continued, n choices each, by what `model` names. Where there are keys, a `priority` below 0
        counts as 0. Raises Refusal."""
        self.healthy()
        left = self._left(caller)
        self._place(caller, n)  # before the key pays
        caller.take(sum(map(len, prompts)), len(prompts) * n * params.max_tokens)
        if caller.salt:  # nobody goes before those who have another key
            priority = max(0, priority)
        adapter = self._adapter(model)
        commands = [
            Submit(name, prompt, params.seeded(), n, caller.salt, priority, left, adapter)
            for name, prompt in zip(_names(caller, len(prompts)), prompts, strict=True)
        ]
        return self._ask(caller, prompts, n, commands, self._share())

    def embed(self, caller: Caller, prompts: Sequence[tuple[int, ...]], pooling: str, model: str) -> RequestHandler:
        """Prompts whose vectors are wanted, of what `model` names. Raises Refusal."""
        self.healthy()
        left = self._left(caller)
        self._place(caller, 1)
        caller.take(sum(map(len, prompts)), 0)
        commands = [
            Embed(name, prompt, pooling, left, self._adapter(model), caller.salt)
            for name, prompt in zip(_names(caller, len(prompts)), prompts, strict=True)
        ]
        return self._ask(caller, prompts, 1, commands, min(WINDOW, self._share()))

    def _place(self, caller: Caller, count: int) -> None:
        """Raises Refusal where so many choices of the first prompt would be more than the key's share of the queue, or
        than the engine has room for."""
        places = self.engine.places
        if not places.fit(caller.salt, count):
            if places.keys < 2:
                raise self.context.full("the server is full: try again later")
            self.context.metrics.limited.labels("queue").inc()
            waiting = f"this key has {places.waiting(caller.salt)} of the {places.size} places in the queue"
            message = f"{waiting}, and its share has no room for {count} more: try again later"
            raise Refusal("rate_limit_exceeded", message, retry_after=SHARE_AFTER)

    async def why(self, request: str, salt: bytes) -> dict[str, Any]:
        """What became of a request, for JSON; of one that runs, how far it is, unless a long step keeps the engine.
        Raises Refusal where nobody knows of it, or it was another's."""
        trace = self.context.traces.find(request, salt)
        if trace.outcome != "running":
            return trace.told(time.monotonic())
        left = [name for name, ended in zip(trace.names, trace.reports, strict=True) if ended is None]
        running = await self.engine.reports(left)
        return trace.told(time.monotonic(), running)

    def _left(self, caller: Caller) -> float:
        """Seconds of the deadline, which began when the request came. Raises Refusal where it has passed."""
        left = caller.arrived + self.deadline - time.monotonic()
        if left <= 0:
            raise self.context.refusal(Failed(caller.id, "deadline", ""))
        return left

    def _share(self) -> int:
        """Choices of one request that the engine's queue takes at a time: half of what may wait there."""
        return max(1, self.ready().max_waiting // 2)

    def _adapter(self, model: str) -> str:
        """What the engine calls it: nothing where it is the served model itself."""
        return "" if model == self.ready().model else model

    def _ask(
        self, caller: Caller, prompts: Sequence[tuple[int, ...]], n: int, commands: Sequence[Submit | Embed], most: int
    ) -> RequestHandler:
        point("dispatcher.submit", caller.id)
        return RequestHandler(caller, prompts, n, self.engine.ask(commands, most), self.context)


def _names(caller: Caller, count: int) -> list[str]:
    return [caller.id] if count == 1 else [f"{caller.id}.{at}" for at in range(count)]
