"""Requests of calls to an `LLM` that are under way: they share an engine and each of its steps.

A call that wants more runs the next step of all calls (`Running._step`). Events for other calls wait in these calls'
own queues, until they are read.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.engine.llm.answer import Answer, Said
from attar.engine.loader import LoadedModel
from attar.execution.parallel.executor import WorkerLost
from attar.kv.eviction import Eviction
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.cache import BLOCK
from attar.model.sparse_layers import SparseLayers
from attar.plan.fit import cache_shape
from attar.protocol.messages import Delta, Failed, Finished, Submit
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.speculation import FORCED_STEP_DRAFTS, MAX_STEP_DRAFTS
from attar.sampling.drafters.drafter import Drafter

PREFILL_ROWS = 2048  # rows of one step: bounds the memory of activations
TOGETHER = 16  # prompts
ROOM = 2048  # least tokens of an engine's cache, for one prompt or several: a second stream is to find some


@dataclass(eq=False)
class Call:
    """Requests of one call, and their events that it has not read."""

    answers: dict[str, Answer]
    said: deque[Said] = field(default_factory=deque)
    broken: bool = False  # True where the engine was lost with the call's requests


class Running:
    """The engine of an `LLM`, made and enlarged as calls need it, and the requests in it. `context` is the model's."""

    def __init__(
        self,
        model: LoadedModel,
        context: int,
        drafter: Drafter | None,
        draft_tokens: int | None,
        draft_tree: int | None = None,
        sparse: SparseLayers | None = None,
        prefill: SparsePrefill | None = None,
        evictions: tuple[Eviction, ...] = (),
    ) -> None:
        self._model, self._context, self._sparse, self._prefill = model, context, sparse, prefill
        self._evictions = evictions
        self._drafter, self._draft_tokens, self._draft_tree = drafter, draft_tokens, draft_tree
        self.engine: Engine | None = None
        self.calls: dict[str, Call] = {}  # calls of open requests, by request id
        self._ids = itertools.count()
        self._left: list[str] = []  # requests to be ended, whose calls were given up
        self._busy = threading.Lock()

    def run(self, answers: Sequence[Answer]) -> Iterator[Delta]:
        """Run requests to their ends, and yield their new tokens. Raises ValueError for one that fails, RuntimeError
        where the engine was lost."""
        if not answers:
            return
        engine = self._engine_for(answers)
        call = Call({f"{next(self._ids)}": answer for answer in answers})
        left = set(call.answers)
        try:
            with self._alone():
                self.calls |= dict.fromkeys(call.answers, call)
                for id, answer in call.answers.items():
                    ask = Submit(
                        id, answer.prompt, answer.params, grammar=answer.grammar, reasoning=answer.section,
                        images=answer.images,
                    )  # fmt: skip
                    engine.submit(ask)
            del engine  # a larger one may replace it before all is read
            while left:
                while not call.said:
                    if call.broken:
                        raise RuntimeError("this answer shared a step with another call, and that was broken off")
                    self._step()
                event = call.said.popleft()
                call.answers[event.id].take(event)
                if isinstance(event, Finished):
                    left.remove(event.id)
                elif isinstance(event, Delta):
                    yield event
        finally:  # the reader may stop early
            self._let_go(left)

    def renew(self) -> None:
        """Forget the engine, since the weights change: recorded steps and cached prefixes are those of the old ones.
        Raises RuntimeError while an answer is under way."""
        with self._alone():
            if self.calls:
                raise RuntimeError("the weights cannot change while an answer is under way")
            self.engine = None

    def _step(self) -> None:
        """Run a step of all open requests, and queue its events for their calls."""
        with self._alone():
            engine = self.engine
            assert engine is not None
            while self._left:
                engine.requests.drop(self._left.pop())
            if engine.idle:
                raise RuntimeError("the engine has nothing more to say, and an answer has not ended")
            try:
                events = engine.step()
            except BaseException as error:
                self.engine = None  # its state is unknown
                for call in self.calls.values():
                    call.broken = True
                self.calls.clear()
                if isinstance(error, WorkerLost):
                    raise RuntimeError(f"the model is no longer there: {error}") from error
                raise
            for event in events:
                if isinstance(event, Said) and (asked := self.calls.get(event.id)) is not None:
                    asked.said.append(event)
                    if isinstance(event, Finished | Failed):
                        self.calls.pop(event.id, None)

    def _let_go(self, ids: Iterable[str]) -> None:
        """End requests of a call that was given up. Python's collector may call this in the middle of a step: then they
        end with the next one."""
        for id in ids:
            self.calls.pop(id, None)
            self._left.append(id)
        if self.engine is not None and not self._busy.locked():
            while self._left:
                self.engine.requests.drop(self._left.pop())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Guard changes of the engine. Raises RuntimeError where another call is changing it."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("an LLM answers in one thread at a time: have a lock around its calls, or a server")
        try:
            yield
        finally:
            self._busy.release()

    def _engine_for(self, answers: Sequence[Answer]) -> Engine:
        """Return the engine of the last call, with its prefix cache, if it has room. A larger one replaces it when all
        requests in the old one have ended, even if their events are not read yet."""
        lengths = [min(len(answer.prompt) + answer.params.max_tokens, self._context) for answer in answers]
        most = max((each.budget for each in self._evictions), default=0)
        longest = max(*lengths, most)
        # The first eviction of a sequence may copy all that it keeps.
        each = -(-longest // BLOCK) + -(-most // BLOCK)
        blocks = max(min(len(lengths), TOGETHER) * each, ROOM // BLOCK)
        old, together = self.engine, min(len(lengths), TOGETHER)
        few = old is not None and old.sliding is not None and old.sliding.sequences < together
        if old is None or old.context < longest or old.pool.total < blocks or few:
            while self.calls:
                self._step()
            self.engine = None  # free the old one's memory first
            spare = 2 * (self._draft_tree or 0)  # blocks for branches of drafts
            context = min(self._context, max(ROOM, 1 << (longest - 1).bit_length()))
            if old is not None:
                context, blocks = max(context, old.context), max(blocks, old.pool.total - spare)
                together = TOGETHER if few else together
                del old
            limits = SchedulerConfig(
                max_running=TOGETHER, max_step_tokens=PREFILL_ROWS, max_waiting=sys.maxsize, headroom=0.0,
                max_drafts=FORCED_STEP_DRAFTS if self._drafter is None else MAX_STEP_DRAFTS,
            )  # fmt: skip
            tokenizer = self._model.tokenizer if self._model.has_tokenizer else None
            config = EngineConfig(
                blocks + spare, context, limits, self._model.eos_ids, drafter=self._drafter,
                draft_tokens=self._draft_tokens, draft_tree=self._draft_tree, sparse=self._sparse,
                prefill=self._prefill, evictions=self._evictions, tower=self._model.tower,
                sliding_blocks=self._sliding_blocks(blocks, context, together, spare),
            )  # fmt: skip
            self.engine = Engine(self._model.decoder, tokenizer, config, runner=self._model.runner)
        assert self.engine is not None
        return self.engine

    def _sliding_blocks(self, blocks: int, context: int, together: int, spare: int) -> int:
        """Return the blocks of layers with a sliding window for so many sequences together, and `spare` more; 0 where
        all layers have `blocks`. Several processes keep every token."""
        config, rows = self._model.decoder.config, PREFILL_ROWS
        if self._model.executor is not None:
            return 0
        rows *= 1 if self._model.decoder.device.type == "cpu" else 2  # steps that are under way together
        shape = cache_shape(config, config.layers, context, together, rows)
        found = 0 if shape is None else shape.sliding_blocks(blocks)
        return found + spare if found else 0
