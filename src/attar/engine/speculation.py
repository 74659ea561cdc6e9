"""Speculative decoding in the engine: drafts before a plan, and what a step teaches about them.

Before a plan each decoding sequence gets the drafts that pay (`sampling/pace.py`). What its constraint forces comes
first (`sampling/drafters/forced.py`), with a drafter or without: the drafter's guess counts where it begins with that.
After the step the guesses are compared with the tokens, verified or not. Nothing here can change a text, and no
exception here ends a request: it costs the drafts of that step and is counted.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from attar.checkpoints.drafts.files import kind_of
from attar.engine.drafts.draft_head import load_head
from attar.engine.drafts.draft_model import load_drafter
from attar.engine.loader import LoadedModel
from attar.engine.requests.outputs import Choice, Request
from attar.errors import UserError
from attar.faults import point
from attar.model.cache import KeptStates
from attar.protocol.speculation import DRAFTERS, MATCH_FIRST, MAX_DRAFT_TOKENS, TREES
from attar.sampling.draft_gains import DraftGains
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, Drafter, DraftRequest, StateReader, TrialReader
from attar.sampling.drafters.first_of import MATCHED, FirstOf, reader_of, stops
from attar.sampling.drafters.forced import ForcedDrafter
from attar.sampling.drafters.lookahead import LookaheadDrafter
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.sampling.pace import GLOBAL_MEMORY, LEAST, MEMORY, SAMPLES, Chances, Pace
from attar.sampling.sampler import SampledToken
from attar.sampling.verify import Drawn
from attar.scheduling.draft_tree import child, depth_of, in_preorder, is_tree
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import Outcome, StepPlan

SPELLED = 0.9  # share of right ones among forced tokens, before any is known
FRUITLESS = 32  # steps in a row without a draft that pays, after which drafts are looked for in every SELDOM-th alone
SELDOM = 4  # a look takes the host some tenths of a millisecond, which shows beside a small model's step
INSIDE, LAST = 1, 2  # evidence of forced tokens

logger = logging.getLogger(__name__)


def drafter(
    name: str | None,
    target: LoadedModel,
    context: int,
    sequences: int,
    *,
    activations: str,
    verify: bool,
    trees: bool = False,
) -> Drafter | None:
    """Return the drafter of a name that `check_draft` accepts, or the draft head or model at that path, with `trees` a
    head that makes trees. Raises ValueError where it cannot draft for `target`."""
    if name is None:
        return None
    if name in DRAFTERS:
        return SuffixDrafter() if name == "suffix" else LookaheadDrafter()
    path = Path(name.removeprefix(MATCH_FIRST))
    made: Drafter
    kind = kind_of(path)
    if trees and kind in (None, "exit"):
        raise UserError("option_conflict", f"a draft {'model' if kind is None else kind} makes chains: {TREES}")
    if kind is not None:
        made = load_head(path, kind, target, context, sequences, activations, trees)
    else:
        made = load_drafter(path, target, context, sequences, activations=activations, verify=verify)
    return FirstOf(made) if name.startswith(MATCH_FIRST) else made


@dataclass(eq=False, slots=True)
class _Account:
    """A sequence's drafts of the present step, and how its drafts did so far."""

    chances: Chances
    forced: Chances  # of tokens that a constraint forces
    draft: Draft = NO_DRAFT
    refused: Draft = NO_DRAFT  # a match, where the model's drafts were taken
    read: int = 0  # tokens of the sequence when a costly draft was last made
    unread: int = 0  # tokens that the drafter has to read besides those of the last step
    fruitless: int = 0  # steps since drafts paid

    def judged(self, draft: Draft, depth: int) -> tuple[Chances, int]:
        """Return the shares that count for a draft, and its evidence there."""
        if depth < draft.forced:
            return self.forced, LAST if depth == draft.forced - 1 else INSIDE
        return self.chances, draft.sure[depth] if draft.sure else draft.evidence + depth

    def compare(self, draft: Draft, tokens: Iterable[int]) -> None:
        """Count which drafts are right, up to the first that is not, or that has no token."""
        row = 0
        for depth, token in enumerate(itertools.islice(tokens, depth_of(draft.tokens, draft.parents))):
            if draft.parents and row not in draft.parents:
                break  # no guess of this token
            chances, evidence = self.judged(draft, depth)
            found = child(draft.tokens, draft.parents, row, token)
            chances.record(evidence, found is not None)
            if draft.sure and depth >= draft.forced:
                chances.record(draft.evidence + depth, found is not None)
            if found is None:
                break
            row = found

    def survivals(self, draft: Draft, fixed: bool) -> list[float]:
        """Return the survival of each draft, up to the first that is not worth a look unless their number is fixed."""
        judged = (self.judged(draft, depth) for depth in range(len(draft.tokens)))
        found = itertools.accumulate((chances.of(evidence) for chances, evidence in judged), operator.mul)
        return list(found if fixed else itertools.takewhile(lambda survival: survival > LEAST, found))


@dataclass(eq=False)
class Speculation:
    """Drafts of an engine's sequences for a vocabulary of `vocab_size`: those that constraints force, and those of one
    drafter where there is one."""

    drafter: Drafter | None
    pace: Pace
    vocab_size: int
    forcing: ForcedDrafter | None = None
    trees: bool = False  # whether the drafter may make trees
    drafted: int = 0  # drafts that were verified
    accepted: int = 0  # of these, the right ones
    forced: int = 0  # of these, the ones that a constraint forced
    overruled: int = 0  # forced tokens that were trusted in place of another that the model drew
    errors: int = 0  # exceptions of the drafter, and drafts outside the vocabulary
    gains: DraftGains = field(init=False)
    _accounts: dict[Sequence, _Account] = field(default_factory=dict)
    _spelled: Chances = field(default_factory=lambda: Chances(GLOBAL_MEMORY, start=SPELLED))
    _drafting: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # seconds of the drafter for a draft
    _reading: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # the same for a token of a prompt
    _stops: bool = field(init=False)
    _reader: StateReader | None = field(init=False)
    _trials: TrialReader | None = field(init=False)

    def __post_init__(self) -> None:
        self.gains = DraftGains(self.pace.costs)
        # Looked up once: an isinstance() check of a runtime protocol takes some 20 us, and steps are many.
        self._stops, self._reader = stops(self.drafter), reader_of(self.drafter)
        own: object = self.drafter
        self._trials = own if isinstance(own, TrialReader) else None

    @property
    def draft_cost(self) -> float:
        """The median seconds of a draft lately, of drafters whose drafts cost something; 0 where none was made."""
        return median(self._drafting) if self._drafting else 0.0

    def propose(self, choices: Iterable[Choice]) -> None:
        """Set the drafts of each decoding choice's sequence; none where they do not pay."""
        choices = list(choices)
        if self.pace.rests:
            self.pace.planned(drafts=False)
            return
        self._propose(choices)
        self.pace.planned(any(choice.sequence.drafts for choice in choices))

    def _propose(self, choices: Iterable[Choice]) -> None:
        asked, decoding = list[DraftRequest](), 0
        for choice in choices:
            sequence, sampler = choice.sequence, choice.sampler
            decoding += sequence.pending == 1
            wanted = sampler.mask is not None or (self.drafter is not None and not self._rests(sequence))
            if wanted and sequence.status is Status.DECODE and sequence.pending == 1:
                own = sampler.params.draft_tokens
                limit = self.pace.most if own is None else min(own, self.pace.most)
                left = sequence.longest - sequence.expected
                if (count := min(limit, left * limit if self.trees else left)) > 0:  # of a tree the plan cuts the depth
                    asked.append(DraftRequest(sequence, sampler, count))
        constrained = [request for request in asked if request.sampler.mask is not None]
        forced = zip(constrained, self._drafts(self.forcing, constrained), strict=True)
        known = {request.sequence: draft for request, draft in forced if draft.tokens}
        costly = self.drafter is not None and self.drafter.costly
        guessing = self._affordable([each for each in asked if each.sequence not in known]) if costly else asked
        for request, draft in zip(guessing, self._drafts(self.drafter, guessing), strict=True):
            certain = known.get(request.sequence, NO_DRAFT)
            agrees = draft.tokens[: certain.forced] == certain.tokens
            if agrees and draft.parents[: certain.forced] in ((), tuple(range(certain.forced))):
                known[request.sequence] = draft._replace(forced=certain.forced)
        for sequence, draft in known.items():
            self._account(sequence).draft = draft
        if costly and not self._stops:  # their number is decided
            for request in guessing:
                _give(request.sequence, known.pop(request.sequence))
        fixed = self.pace.fixed
        survivals = [self._account(sequence).survivals(draft, fixed) for sequence, draft in known.items()]
        survivals += [[]] * (decoding - len(survivals))  # the other rows of the step
        for (sequence, draft), count in zip(known.items(), self.pace.counts(survivals), strict=False):
            _give(sequence, draft.first(count))

    def _rests(self, sequence: Sequence) -> bool:
        """Return whether no draft is looked for in this step, because the last looks found none that pays."""
        account = self._accounts.get(sequence)
        steps = 0 if account is None or self.pace.fixed else account.fruitless
        return steps >= FRUITLESS and steps % SELDOM != 0

    def see(self, plan: StepPlan, outcomes: Mapping[str, Outcome], states: KeptStates | None) -> None:
        """Give the drafter the hidden states of a step's rows whose tokens stay, before they are committed. A step that
        ran in pieces has kept none."""
        reader = self._reader
        if self.drafter is None or reader is None or states is None or len(states) != plan.tokens:
            return
        first = 0
        for chunk in plan.chunks:
            kept = chunk.kept(outcomes.get(chunk.sequence.id, Outcome()).tokens)
            rows = slice(first, first + len(kept)) if chunk.tree is None else [first + row for row in kept]
            self._account(chunk.sequence)  # it is told of the sequence's end
            try:
                reader.see(chunk.sequence, chunk.start, states.rows(rows))
            except Exception:
                self._failed(self.drafter, "reading hidden states of sequence %s", chunk.sequence.id)
            first += chunk.rows

    def tried(self, sequence: Sequence, drafts: tuple[int, ...], draws: Iterable[Drawn]) -> None:
        """Give the drafter the tokens that were sampled behind its drafts, before they are committed."""
        if self.drafter is None or self._trials is None:
            return
        self._account(sequence)  # it is told of the sequence's end
        sampled = itertools.takewhile(lambda draw: isinstance(draw, SampledToken), draws)
        try:
            self._trials.tried(sequence, drafts, [draw.token_id for draw in sampled if isinstance(draw, SampledToken)])
        except Exception:
            self._failed(self.drafter, "reading tokens of sequence %s", sequence.id)

    def trusted(self, sequence: Sequence, drafts: tuple[int, ...], draws: list[Drawn], request: Request) -> int:
        """Return how many of a step's drafts are forced by the constraint, and count those that were not drawn."""
        count = min(self._account(sequence).draft.forced, len(drafts))
        drawn = itertools.takewhile(lambda draw: isinstance(draw, SampledToken), draws[:count])
        tokens = [draw.token_id for draw in drawn if isinstance(draw, SampledToken)]
        other = sum(token != draft for token, draft in zip(tokens, drafts, strict=False))
        self.overruled += other
        request.overruled += other
        return count

    def learn(
        self, plan: StepPlan, choices: Mapping[Sequence, Choice], outcomes: Mapping[str, Outcome], seconds: float
    ) -> None:
        """Compare the drafts of a step with its tokens, before they are committed. `choices` are those of its
        chunks."""
        if self.drafter is None and not self._accounts:
            return
        self.gains.count(plan, {each: choice.request.gain for each, choice in choices.items()}, outcomes)
        for chunk in plan.chunks:
            if (account := self._accounts.get(chunk.sequence)) is None or not chunk.samples:
                continue
            draft, account.draft = account.draft, NO_DRAFT
            refused, account.refused = account.refused, NO_DRAFT
            account.fruitless = 0 if chunk.drafts else account.fruitless + 1
            tokens = outcomes.get(chunk.sequence.id, Outcome()).tokens
            right = max(0, len(tokens) - 1) if chunk.drafts else 0
            for counted in (self, choices[chunk.sequence].request):
                counted.drafted += len(chunk.drafts)
                counted.accepted += right
                counted.forced += min(right, draft.forced)
            account.compare(draft, tokens)
            account.compare(refused, tokens)
        self.pace.trials.passed(seconds)
        if all(chunk.rows == 1 + len(chunk.drafts) and chunk.samples for chunk in plan.chunks):
            self.pace.costs.record(plan.tokens, seconds)

    def _affordable(self, asked: list[DraftRequest]) -> list[DraftRequest]:
        """Return the requests for which drafts pay, each with the number that does, and those for which some are made
        to learn."""
        drafting = self.draft_cost
        matched = self._matched(asked, drafting)
        found = [request for request in matched.values() if request.limit]
        asked = [request for request in asked if request.sequence not in matched]
        accounts = [self._account(request.sequence) for request in asked]
        likely = [
            list(account.chances.survivals(1, request.limit)) for account, request in zip(accounts, asked, strict=True)
        ]
        counts = self.pace.counts(likely, drafting)
        room = self.pace.together // max(1, len(asked))
        for request, account, count in zip(asked, accounts, counts, strict=True):
            tokens = len(request.sequence.tokens)
            account.unread = max(0, tokens - account.read - MAX_DRAFT_TOKENS - 1)
            reading = account.unread * median(self._reading) if self._reading else 0.0
            most = count
            if not self.pace.fixed:
                if count and reading > (request.sequence.longest - tokens) * self.pace.gained:
                    count = 0  # the rest of the text is too short for that
                if not count and self.pace.trials.may(drafting + reading):
                    count = most = 1
                elif self._stops:
                    most = max(count, min(request.limit, room))
            if count:
                account.read = tokens
                continues = partial(self._continues, account, len(asked), drafting)
                found.append(request._replace(limit=most, continues=continues))
        return found

    def _continues(self, account: _Account, sequences: int, drafting: float, sure: List[int]) -> bool:
        """Return whether one more draft of a sequence pays, behind those of these evidences."""
        survival = account.chances.of(1 + len(sure))
        for evidence in sure:
            survival *= account.chances.of(evidence)
        return self.pace.continues(survival, len(sure), sequences, drafting)

    def _matched(self, asked: list[DraftRequest], drafting: float) -> dict[Sequence, DraftRequest]:
        """Return the requests for which drafts without a model pay more than the model's, each with the number that
        pays."""
        if not isinstance(self.drafter, FirstOf):
            return {}
        found: dict[Sequence, DraftRequest] = {}
        likely = []
        for request in asked:
            try:
                draft = self.drafter.matched(request)
            except Exception:
                self._failed(self.drafter, "looking for a match of sequence %s", request.sequence.id)
                continue
            if not draft.tokens:
                continue
            account = self._account(request.sequence)
            survivals = list(account.chances.survivals(draft.evidence, len(draft.tokens)))
            others = list(account.chances.survivals(1, request.limit))
            if self.pace.best(survivals, 1)[0] < self.pace.best(others, 1, drafting)[0]:
                self.drafter.refuse(request.sequence)
                account.refused = draft  # compared with the next token all the same
                continue
            account.draft, account.unread = draft, 0  # compared with the next token, where it is not verified
            likely.append(survivals)
            found[request.sequence] = request
        counts = self.pace.counts(likely)
        return {each: found[each]._replace(limit=count) for each, count in zip(found, counts, strict=True)}

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        if self._accounts.pop(sequence, None) is not None and self.drafter is not None:
            try:
                self.drafter.forget(sequence)
            except Exception:
                self._failed(self.drafter, "forgetting sequence %s", sequence.id)

    def _account(self, sequence: Sequence) -> _Account:
        if (account := self._accounts.get(sequence)) is None:
            own, forced = Chances(MEMORY, self.pace.chances), Chances(MEMORY, self._spelled)
            account = self._accounts[sequence] = _Account(own, forced)
        return account

    def _drafts(self, drafter: Drafter | None, asked: list[DraftRequest]) -> list[Draft]:
        """Ask a drafter; one request at a time where all together raise. Without one there are none."""
        if drafter is None:
            return [NO_DRAFT] * len(asked)
        if not asked:
            return []
        try:
            for request in asked:
                point("draft.propose", request.sequence.id)
            since = time.perf_counter()
            drafts = drafter.draft(asked)
            made = sum(len(draft.tokens) for draft in drafts if draft.evidence < MATCHED)
            unread = sum(self._account(request.sequence).unread for request in asked)
            if drafter.costly and made:
                self._took(time.perf_counter() - since, made, unread)
            return [self._checked(draft, request) for draft, request in zip(drafts, asked, strict=True)]
        except Exception:
            if len(asked) > 1:
                return [draft for request in asked for draft in self._drafts(drafter, [request])]
            self._failed(drafter, "drafting for sequence %s", asked[0].sequence.id)
            return [NO_DRAFT]

    def _took(self, seconds: float, made: int, unread: int) -> None:
        """Learn from the time of costly drafts what one takes, and what a token takes that is read before."""
        if not unread:
            self._drafting.append(seconds / made)
        elif self._drafting and unread > MAX_DRAFT_TOKENS:
            self._reading.append(max(0.0, seconds - made * self.draft_cost) / unread)

    def _checked(self, draft: Draft, request: DraftRequest) -> Draft:
        """Return a draft up to its first token that is no token, and nothing of what is no tree."""
        if draft.parents and not (self.trees and is_tree(len(draft.tokens), draft.parents)):
            self.errors += 1
            return NO_DRAFT
        for place, token in enumerate(draft.tokens):
            if not 0 <= token < self.vocab_size:
                self.errors += 1
                return draft.first(min(place, request.limit))
        return draft.first(request.limit) if len(draft.tokens) > request.limit else draft

    def _failed(self, drafter: Drafter, doing: str, id: str) -> None:
        self.errors += 1
        if self.errors & (self.errors - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a broken drafter fills no log
            logger.exception(f"the drafter {drafter.name}, {doing}, raised; {self.errors} errors so far", id)


def _give(sequence: Sequence, draft: Draft) -> None:
    """Set a sequence's drafts, those of a tree in the order that plans want."""
    if draft.parents:
        sequence.drafts, sequence.parents = in_preorder(draft.tokens, draft.parents)
    else:
        sequence.drafts, sequence.parents = draft.tokens, ()
