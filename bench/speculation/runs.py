"""Answers of engines with drafts and without, of one model in one process, with their times and what was drafted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.model.cache import BLOCK
from attar.protocol.messages import Delta, Failed, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.speculation import MAX_DRAFT_TOKENS, MAX_STEP_DRAFTS
from attar.sampling.drafters.drafter import Drafter

CONTEXT = 2048  # tokens of a prompt and its answer, at most

Prompt = tuple[int, ...]
Ask = tuple[Prompt, SamplingParams]


@dataclass
class Run:
    """What requests took together, behind the first token of each, and what was drafted for them."""

    seconds: float = 0.0
    processor: float = 0.0
    tokens: int = 0
    steps: int = 0  # of the engine
    passes: int = 0  # of requests: each brings a token, and one for each right draft
    drafting: float = 0.0  # seconds
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)  # by position
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    brought: list[int] = field(default_factory=list)  # tokens of each pass, in order

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __add__(self, other: Run) -> Run:
        return Run(
            self.seconds + other.seconds, self.processor + other.processor, self.tokens + other.tokens,
            self.steps + other.steps, self.passes + other.passes, self.drafting + other.drafting,
            [a + b for a, b in zip(self.drafted, other.drafted, strict=True)],
            [a + b for a, b in zip(self.accepted, other.accepted, strict=True)],
            [*self.brought, *other.brought],
        )  # fmt: skip


def engine(
    llm: LLM, batch: int, drafter: Drafter | None, draft_tokens: int | None = None, *, draft_tree: int | None = None,
    context: int = CONTEXT,
) -> Engine:  # fmt: skip
    """An engine of the model for so many requests at a time. Without a drafter it makes no drafts."""
    drafts = 0 if drafter is None else MAX_STEP_DRAFTS
    limits = SchedulerConfig(max_running=batch, max_step_tokens=context, max_drafts=drafts, headroom=0.0)
    config = EngineConfig(
        (2 * batch + 2) * -(-context // BLOCK), context, limits, llm.model.eos_ids, drafter=drafter,
        draft_tokens=None if drafter is None else draft_tokens, draft_tree=draft_tree,
    )  # fmt: skip
    return Engine(llm.decoder, None, config)


def asks(prompts: Sequence[Prompt], tokens: int, temperature: float, top_p: float, first: int = 0) -> list[Ask]:
    """Requests, each with a seed of its own; `top_p` is for temperatures above 0."""
    top_p = top_p if temperature else 1.0
    return [
        (prompt, SamplingParams(max_tokens=tokens, temperature=temperature, top_p=top_p, seed=first + number))
        for number, prompt in enumerate(prompts)
    ]


def answer(engine: Engine, asks: Sequence[Ask]) -> tuple[Run, list[list[int]]]:
    """Answer prompts together; return what that took, and the answers' tokens. Raises RuntimeError where one fails."""
    for number, (prompt, params) in enumerate(asks):
        engine.submit(Submit(f"{number}", prompt, params))
    said: dict[str, list[int]] = {}
    since, begun = (time.perf_counter(), time.process_time()), engine.steps
    gains = None if engine.speculation is None else engine.speculation.gains
    before = (0, 0.0, [0] * MAX_DRAFT_TOKENS, [0] * MAX_DRAFT_TOKENS) if gains is None else _counters(engine)
    first, brought = 0, list[int]()
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Failed):
                raise RuntimeError(f"a request failed: {event.code}")
            if isinstance(event, Delta):
                started = len(said) < len(asks)
                said.setdefault(event.id, []).extend(event.token_ids)
                brought.append(len(event.token_ids))
                if started:  # prompts are still being read
                    since, begun = (time.perf_counter(), time.process_time()), engine.steps
                    first = sum(map(len, said.values()))
                    brought.clear()
    run = Run(
        time.perf_counter() - since[0], time.process_time() - since[1],
        sum(map(len, said.values())) - first, engine.steps - begun, brought=brought,
    )  # fmt: skip
    if gains is not None:
        after = _counters(engine)
        run.passes, run.drafting = after[0] - before[0], after[1] - before[1]
        run.drafted = [a - b for a, b in zip(after[2], before[2], strict=True)]
        run.accepted = [a - b for a, b in zip(after[3], before[3], strict=True)]
    else:
        run.passes = run.tokens
    return run, [said[f"{number}"] for number in range(len(asks))]


def _counters(engine: Engine) -> tuple[int, float, list[int], list[int]]:
    assert engine.speculation is not None
    gains = engine.speculation.gains
    places = range(MAX_DRAFT_TOKENS)
    return gains.steps, gains.seconds, [gains.drafted[at] for at in places], [gains.accepted[at] for at in places]
