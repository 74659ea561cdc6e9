"""An in-flight step: launch, sampling, and recovery from exceptions and out-of-memory.

The work on a whole batch, the model's step and the sampling, is repeated row by row where it raises: to the same bits,
since no number depends on the batch. A row that raises again has failed.

Where the device has too little memory for a step, it is run in halves, and later steps in pieces of that size, decode
steps included. A request fails by it only where there is too little memory for a single token.

Nothing here knows what a token means to its request. A flight keeps its own account of the sequences of its rows,
because an ended sequence is forgotten elsewhere while a row of it may still be in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attar.engine.bottleneck import Bottlenecks
from attar.engine.requests.outputs import Choice, Request
from attar.execution.model_runner import Runner, Wanted
from attar.execution.step_inputs import InflightTokens
from attar.model.cache import sent
from attar.protocol.messages import Event
from attar.sampling import device_sampler
from attar.sampling.device_sampler import Chosen
from attar.sampling.sampler import BadLogits, SampledToken, Sampler, sample
from attar.sampling.verify import Drawn, draw_reached
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import ScheduledTokens, StepPlan

logger = logging.getLogger(__name__)


class Taker(NamedTuple):
    """A choice for which a step samples a token, and one more behind each of its drafts; `parents` are those of a
    tree."""

    choice: Choice
    drafts: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(eq=False, slots=True)
class InflightStep:
    """A step launched at `began`. `choices` are those of its chunks, in their order."""

    plan: StepPlan
    choices: Mapping[Sequence, Choice]
    began: float
    logits: Tensor | None
    """Logits [S, V] of the rows behind which tokens are sampled, without those of `failed`; None once they are."""
    failed: set[str]  # ids of sequences for which the step raised
    busy: Callable[[], float]  # seconds of the device at the step, as a meter gives them
    takers: list[Taker] = field(default_factory=list)
    """Choices whose tokens are sampled: not those that had ended, or want none."""
    samplers: list[Sampler] = field(default_factory=list)  # of the rows of `takers`, 1 + len(drafts) each
    chosen: Chosen | None = None  # sampled tokens of these rows, which the device may not have computed yet
    known: list[Drawn] = field(default_factory=list)  # sampled tokens of these rows that the host knows already

    @property
    def whole(self) -> bool:
        """True where nothing has raised: then the device has a token for every sequence that continues."""
        return not self.failed and (self.chosen is not None or not self.takers)

    @property
    def inflight_tokens(self) -> InflightTokens | None:
        """Tokens of this step, for the step behind it."""
        if self.chosen is None:
            return None
        assert not any(taker.drafts for taker in self.takers), "which tokens stay, only the host finds out"
        return InflightTokens(self.chosen.tokens, {taker.choice.sequence: i for i, taker in enumerate(self.takers)})


class Launcher:
    """Launches steps of `runner`, and samples tokens behind them; on a device that `overlaps`, without a look at the
    logits. `say` takes events that a step itself gives rise to."""

    def __init__(
        self, runner: Runner, overlaps: bool, bounds: Bottlenecks | None, say: Callable[[Event], None]
    ) -> None:
        self.runner, self.overlaps, self.bounds, self.say = runner, overlaps, bounds, say
        self.rows: int | None = None
        """Most tokens of a step for which the device had memory; None while no step was too large."""
        self.draws_all = False
        """Whether rows behind wrong drafts are sampled too, since a drafter reads their tokens."""

    def launch(
        self, plan: StepPlan, choices: Mapping[Sequence, Choice], began: float, inflight_tokens: InflightTokens | None
    ) -> InflightStep:
        """Run the model, or on a GPU launch it. `inflight_tokens` are tokens of the step before that the host does not
        know yet. Raises torch.AcceleratorError where the device is beyond use."""
        failed: set[str] = set()
        pooled = _pooled(choices.values())
        if self.bounds is not None:
            self.bounds.meter.begin()
        try:
            logits = self._whole(plan, choices, inflight_tokens)
        except torch.AcceleratorError:  # the device is beyond use: the process ends, and a new one starts
            raise
        except Exception:  # whatever it is: one by one, the step shows whose work raises
            logger.exception("a step of %d sequences raised: once more, one by one", len(plan.chunks))
            _restore(pooled)
            logits, failed = self._apart(plan, choices, inflight_tokens)
        busy = float if self.bounds is None else self.bounds.meter.end()
        return InflightStep(plan, choices, began, logits, failed, busy)

    def choose(self, inflight: InflightStep) -> None:
        """Sample the tokens of a step, or begin to."""
        rows: list[int] = []
        first = 0
        for chunk in inflight.plan.chunks:
            sequence = chunk.sequence
            if not chunk.samples or sequence.id in inflight.failed:
                continue
            if sequence.max_tokens > 0 and sequence.ending is None:
                inflight.takers.append(Taker(inflight.choices[sequence], chunk.drafts, chunk.parents))
                rows += range(first, first + chunk.samples)
            first += chunk.samples
        if not rows:
            return
        logits, inflight.logits = inflight.logits, None  # frees the memory, or the next step writes there
        assert logits is not None
        if len(rows) < first:
            (places,) = sent(logits.device, torch.tensor(rows))
            logits = logits[places]
        samplers = inflight.samplers = [
            state for choice, drafts, parents in inflight.takers for state in choice.sampler.along(drafts, parents)
        ]
        try:
            if self.overlaps:
                inflight.chosen = device_sampler.choose(logits, samplers)
            else:
                chains = [chain for taker in inflight.takers for chain in self._chains(taker)]
                inflight.known = draw_reached(logits, samplers, chains)
        except torch.AcceleratorError:
            raise
        except Exception:  # whatever it is: row by row, only the row that raises is lost
            choose, own = (device_sampler.sample if self.overlaps else sample), logits
            inflight.known = _each(samplers, lambda row: choose(own[row : row + 1], samplers[row : row + 1]))

    def _chains(self, taker: Taker) -> list[tuple[int, ...] | None]:
        """Return the drafts of a choice's chain, or None for each row where all of them are sampled."""
        if self.draws_all or taker.parents or taker.choice.sampler.params.trust_forced:
            return [None] * (1 + len(taker.drafts))
        return [taker.drafts]

    def wait_for(self, inflight: InflightStep) -> list[Drawn]:
        """Return the outcome of each row of `inflight.takers`. The host waits for the device here."""
        if (chosen := inflight.chosen) is None:
            return inflight.known
        try:
            return list(chosen.draws())
        except torch.AcceleratorError:
            raise
        except Exception:  # as in `choose`
            return _each(inflight.samplers, lambda row: chosen.draws(row, row + 1))

    def _whole(
        self, plan: StepPlan, choices: Mapping[Sequence, Choice], inflight_tokens: InflightTokens | None
    ) -> Tensor:
        """Run `Runner.run`, in pieces where the device has too little memory. Raises torch.OutOfMemoryError where it
        has too little for a single token."""
        left = [plan] if self.rows is None else plan.pieces(self.rows)
        logits: list[Tensor] = []
        while left:
            piece = left.pop(0)
            pooled = _pooled(choices[chunk.sequence] for chunk in piece.chunks)
            try:
                found = self.runner.run(piece, self._wanted(piece, choices), inflight_tokens)
            except torch.OutOfMemoryError:
                self.runner.release()
                if piece.tokens < 2:
                    raise
                _restore(pooled)
                self.rows = half = -(-piece.tokens // 2)
                logger.warning("too little memory for %d tokens at once: from now on %d", piece.tokens, half)
                left = [smaller for each in (piece, *left) for smaller in each.pieces(half)]
            else:
                logits.append(found.clone() if left or logits else found)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _apart(
        self, plan: StepPlan, choices: Mapping[Sequence, Choice], inflight_tokens: InflightTokens | None
    ) -> tuple[Tensor, set[str]]:
        """Run a step sequence by sequence: logits [S, V] as `Runner.run` without those that raise, and their ids."""
        logits, failed = [torch.empty((0, self.runner.decoder.config.vocab_size), device=self.runner.device)], set()
        self.runner.release()  # recordings may be half made
        for sequence in plan.sequences:
            chunks = [chunk for chunk in plan.chunks if chunk.sequence is sequence]
            copies = [copy for copy in plan.copies if copy.sequence is sequence]
            sliding = [copy for copy in plan.sliding_copies if copy.sequence is sequence]
            evictions = [each for each in plan.evictions if each.sequence is sequence]
            try:
                own = StepPlan(chunks, copies, evictions, sliding_copies=sliding)
                logits.append(self._whole(own, choices, inflight_tokens).clone())
            except torch.AcceleratorError:
                raise
            except Exception:  # whatever it is, it concerns this sequence alone
                logger.exception("sequence %s failed", sequence.id)
                failed.add(sequence.id)
                self.runner.release()
        return torch.cat(logits), failed

    def _wanted(self, plan: StepPlan, choices: Mapping[Sequence, Choice]) -> dict[str, Wanted]:
        """Return what requests of this step want besides the next token, by sequence."""
        wanted = {}
        for chunk in plan.chunks:
            request = choices[chunk.sequence].request
            if request.pooling:
                before = request.pooled if chunk.start else None
                wanted[chunk.sequence.id] = Wanted(hidden=partial(_pool, request, before))
            elif request.of_prompt is not None and chunk.sequence.bypass and chunk.start < chunk.sequence.prompt:
                wanted[chunk.sequence.id] = Wanted(logits=partial(self._score, request))
        return wanted

    def _score(self, request: Request, chunk: ScheduledTokens, first: int, logits: Tensor) -> None:
        if (found := request.score(chunk.start + first, logits.cpu())) is not None:
            self.say(found)


def _pooled(choices: Iterable[Choice]) -> list[tuple[Request, Tensor | None]]:
    """Return the embeddings' sums so far: a step that is run again starts from these."""
    return [(choice.request, choice.request.pooled) for choice in choices]


def _restore(pooled: List[tuple[Request, Tensor | None]]) -> None:
    for request, before in pooled:
        request.pooled = before


def _pool(request: Request, before: Tensor | None, chunk: ScheduledTokens, first: int, hidden: Tensor) -> None:
    request.pool(before, hidden.cpu())


def _each(samplers: List[Sampler], choose: Callable[[int], list[SampledToken | BadLogits]]) -> list[Drawn]:
    """Sample each row by itself, after all at once has raised; None where a row raises alone."""
    logger.exception("choosing %d tokens raised: once more, one by one", len(samplers))
    draws: list[Drawn] = []
    for row, sampler in enumerate(samplers):
        try:
            draws += choose(row)
        except torch.AcceleratorError:
            raise
        except Exception:  # whatever it is, it concerns this row alone
            logger.exception("sequence %s failed", sampler.name)
            draws.append(None)
    return draws
