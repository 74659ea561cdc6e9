"""Speculative decoding in the engine: drafts before a plan, and what a step teaches about them.

Before a plan each decoding sequence gets the drafts that pay (`sampling/pace.py`). After the step the drafter's guesses
are compared with the tokens, verified or not. Nothing here can change a text, and no exception here ends a request: it
costs the drafts of that step and is counted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from attar.engine.draft_model import load_drafter
from attar.engine.loader import LoadedModel
from attar.engine.outputs import Choice
from attar.faults import point
from attar.protocol.speculation import DRAFTERS
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, Drafter, DraftRequest
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.sampling.pace import MEMORY, SAMPLES, Chances, Pace
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import Outcome, StepPlan

LONGEST_PAUSE = 64

logger = logging.getLogger(__name__)


def drafter(
    name: str | None, target: LoadedModel, context: int, sequences: int, *, activations: str, verify: bool
) -> Drafter | None:
    """Return the drafter of a name that `check_draft` accepts, or the draft model at that path. Raises ValueError where
    the model cannot draft for `target`."""
    if name is None:
        return None
    if name in DRAFTERS:
        return SuffixDrafter()
    return load_drafter(Path(name), target, context, sequences, activations=activations, verify=verify)


@dataclass(eq=False, slots=True)
class _Account:
    """A sequence's drafts of the present step, and how its drafts did so far."""

    chances: Chances
    draft: Draft = NO_DRAFT
    skipped: int = 1  # steps since a draft was last made, where drafts are costly
    unread: bool = True  # whether the drafter had to read more than the last step's tokens
    pause: int = 1  # steps to skip before one is made although it does not seem to pay


@dataclass(eq=False)
class Speculation:
    """Drafts of an engine's sequences, by one drafter, for a vocabulary of `vocab_size`."""

    drafter: Drafter
    pace: Pace
    vocab_size: int
    drafted: int = 0  # drafts that were verified
    accepted: int = 0  # of these, the right ones
    errors: int = 0  # exceptions of the drafter, and drafts outside the vocabulary
    _accounts: dict[Sequence, _Account] = field(default_factory=dict)
    _drafting: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # seconds of the drafter for a draft

    def propose(self, choices: Iterable[Choice]) -> None:
        """Set the drafts of each decoding choice's sequence; none where they do not pay."""
        asked = []
        for choice in choices:
            sequence, sampler = choice.sequence, choice.sampler
            if sequence.status is Status.DECODE and sequence.pending == 1:
                own = sampler.params.draft_tokens
                limit = self.pace.most if own is None else min(own, self.pace.most)
                if (count := min(limit, sequence.longest - sequence.expected)) > 0:
                    asked.append(DraftRequest(sequence, sampler, count))
        if self.drafter.costly:
            asked = self._affordable(asked)
        accounts = [self._account(request.sequence) for request in asked]
        for account, draft in zip(accounts, self._drafts(asked), strict=True):
            account.draft = draft
        if self.drafter.costly:
            for request, account in zip(asked, accounts, strict=True):
                request.sequence.drafts = account.draft.tokens
            return
        survivals = [list(each.chances.survivals(each.draft.evidence, len(each.draft.tokens))) for each in accounts]
        for request, account, count in zip(asked, accounts, self.pace.counts(survivals), strict=True):
            request.sequence.drafts = account.draft.tokens[:count]

    def learn(
        self, plan: StepPlan, choices: Mapping[Sequence, Choice], outcomes: Mapping[str, Outcome], seconds: float
    ) -> None:
        """Compare the drafts of a step with its tokens, before they are committed. `choices` are those of its
        chunks."""
        for chunk in plan.chunks:
            if (account := self._accounts.get(chunk.sequence)) is None or not chunk.samples:
                continue
            draft, account.draft = account.draft, NO_DRAFT
            tokens = outcomes.get(chunk.sequence.id, Outcome()).tokens
            right = max(0, len(tokens) - 1) if chunk.drafts else 0
            for counted in (self, choices[chunk.sequence].request):
                counted.drafted += len(chunk.drafts)
                counted.accepted += right
            for depth, (guess, token) in enumerate(zip(draft.tokens, tokens, strict=False)):
                account.chances.record(draft.evidence + depth, guess == token)
                if guess != token:
                    break
        if all(chunk.rows == 1 + len(chunk.drafts) and chunk.samples for chunk in plan.chunks):
            self.pace.costs.record(plan.tokens, seconds)

    def _affordable(self, asked: list[DraftRequest]) -> list[DraftRequest]:
        """Return the requests for which drafts pay, each with the number that does."""
        accounts = [self._account(request.sequence) for request in asked]
        likely = [
            list(account.chances.survivals(1, request.limit)) for account, request in zip(accounts, asked, strict=True)
        ]
        found = []
        counts = self.pace.counts(likely, median(self._drafting) if self._drafting else 0.0)
        for request, account, count in zip(asked, accounts, counts, strict=True):
            if count:
                account.pause = 1
            elif account.skipped >= account.pause and not self.pace.fixed:
                count, account.pause = 1, min(2 * account.pause, LONGEST_PAUSE)
            account.unread, account.skipped = account.skipped > 0, 0 if count else account.skipped + 1
            if count:
                found.append(request._replace(limit=count))
        return found

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        if self._accounts.pop(sequence, None) is not None:
            try:
                self.drafter.forget(sequence)
            except Exception:
                self._failed("forgetting sequence %s", sequence.id)

    def _account(self, sequence: Sequence) -> _Account:
        if (account := self._accounts.get(sequence)) is None:
            account = self._accounts[sequence] = _Account(Chances(MEMORY, self.pace.chances))
        return account

    def _drafts(self, asked: list[DraftRequest]) -> list[Draft]:
        """Ask the drafter; one request at a time where all together raise."""
        if not asked:
            return []
        try:
            for request in asked:
                point("draft.propose", request.sequence.id)
            since = time.perf_counter()
            drafts = self.drafter.draft(asked)
            made = sum(len(draft.tokens) for draft in drafts)
            if made and not any(self._account(request.sequence).unread for request in asked):
                self._drafting.append((time.perf_counter() - since) / made)
            return [self._checked(draft, request) for draft, request in zip(drafts, asked, strict=True)]
        except Exception:
            if len(asked) > 1:
                return [draft for request in asked for draft in self._drafts([request])]
            self._failed("drafting for sequence %s", asked[0].sequence.id)
            return [NO_DRAFT]

    def _checked(self, draft: Draft, request: DraftRequest) -> Draft:
        """Return a draft up to its first token that is no token."""
        for place, token in enumerate(draft.tokens):
            if not 0 <= token < self.vocab_size:
                self.errors += 1
                return draft._replace(tokens=draft.tokens[: min(place, request.limit)])
        return draft._replace(tokens=draft.tokens[: request.limit]) if len(draft.tokens) > request.limit else draft

    def _failed(self, doing: str, id: str) -> None:
        self.errors += 1
        if self.errors & (self.errors - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a broken drafter fills no log
            logger.exception(f"the drafter {self.drafter.name}, {doing}, raised; {self.errors} errors so far", id)
