"""What speculative decoding brought: counters of the engine, and what each request gained by it.

A request's gain is measured in seconds. Each right draft saved it a step, which takes as long as steps of so many rows
were measured to take without drafts. What its steps with drafts took longer, and making the drafts, is subtracted. All
requests of a step wait for the drafts of any, so all are charged for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from attar.protocol.speculation import MAX_DRAFT_TOKENS
from attar.sampling.pace import Costs
from attar.scheduling.draft_tree import depths
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import Outcome, StepPlan


@dataclass(eq=False, slots=True)
class Gain:
    """What a request has gained."""

    steps: int = 0  # behind its prompt
    drafting: float = 0.0  # seconds of making drafts in these steps, for all of their requests
    saved: float = 0.0  # seconds


@dataclass(eq=False)
class DraftGains:
    """Counters of an engine's speculation, where steps cost `costs`."""

    costs: Costs
    drafted: Counter[int] = field(default_factory=Counter)  # drafts that were verified, by position from 0
    accepted: Counter[int] = field(default_factory=Counter)  # of these, the right ones
    steps: int = 0  # of decoding sequences: each made a token, and one for each right draft
    seconds: float = 0.0  # making drafts
    _latest: float = 0.0  # seconds of the drafts of the present step

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Count the time of making a step's drafts."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._latest = time.perf_counter() - since
            self.seconds += self._latest

    def count(self, plan: StepPlan, gains: Mapping[Sequence, Gain], outcomes: Mapping[str, Outcome]) -> None:
        """Count a step before it is committed. `gains` are those of its chunks' requests."""
        step = longer = 0.0
        if plan.drafts and self.costs.known:
            step = self.costs.of(plan.tokens - plan.drafts)
            longer = self.costs.of(plan.tokens) - step
        for chunk in plan.chunks:
            if chunk.sequence.status is not Status.DECODE or not chunk.samples:
                continue
            self.steps += 1
            gain = gains[chunk.sequence]
            gain.steps += 1
            gain.drafting += self._latest
            right = 0
            if chunk.drafts:
                right = max(0, len(outcomes.get(chunk.sequence.id, Outcome()).tokens) - 1)
                self.drafted.update(at - 1 for at in depths(chunk.parents or range(len(chunk.drafts)))[1:])
                self.accepted.update(range(right))
            gain.saved += right * step - longer - self._latest

    def stats(self) -> dict[str, Any]:
        """Return the counters by the names that they have in `messages.Stats`."""
        return {
            "drafted_by_position": tuple(self.drafted[at] for at in range(MAX_DRAFT_TOKENS)),
            "accepted_by_position": tuple(self.accepted[at] for at in range(MAX_DRAFT_TOKENS)),
            "draft_steps": self.steps,
            "draft_seconds": self.seconds,
        }
