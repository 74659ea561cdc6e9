"""Drafts of a smaller model with the same tokenizer: it runs ahead of the target, token by token.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. Here the draft model draws as the target will: with
the same temperature, filters and penalties, and with the same noise. Two draws that share noise agree in at least
(1 - d) / (1 + d) of all cases, where d is the total variation distance of the two distributions (Daliri et al., arXiv
2408.07978). A greedy target compares with a greedy draft.

The draft model has a cache of its own, of a fixed number of blocks. When a sequence is drafted for, wrong drafts are
forgotten, and the tokens that the model has not seen are run through it. Where blocks are short, the sequence that was
drafted for the longest ago gives up its own, and is read again if it comes back.

The evidence of a draft is its depth, since the first drafts are right more often than later ones, and besides the
model's own probability of it. Behind a draft that is likely wrong no more are made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from attar.execution.model_runner import Runner
from attar.model.cache import BLOCK
from attar.model.decoder import Decoder
from attar.sampling import device_sampler
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, DraftRequest
from attar.sampling.pace import SOURCE
from attar.sampling.sampler import SampledToken, Sampler, sample
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sequence import Status
from attar.scheduling.step_plan import ScheduledTokens, StepPlan

SHORT = 512  # tokens of a short sequence
ROWS = 512  # tokens that are read in one step
SURE = 2 * SOURCE  # where evidences begin that are probabilities
REPLAYED = 2  # the last draft, where it was right, and the target's own token


@dataclass(eq=False, slots=True)
class _Reading:
    """What the draft model has of a sequence: the tokens that it was given, drafts behind them, and blocks."""

    sequence: Tokens
    given: int = 0  # tokens that are the target's; drafts come behind


@dataclass(eq=False, slots=True)
class _Round:
    """A request whose drafts are being made."""

    request: DraftRequest
    reading: _Reading
    state: Sampler
    drafts: list[int] = field(default_factory=list)
    sure: list[int] = field(default_factory=list)

    @property
    def continues(self) -> bool:
        """Whether it wants one more draft."""
        return len(self.drafts) < self.request.limit and self.request.continues(self.sure)


class ModelDrafter:
    """A draft model for sequences of up to `context` tokens, at most `sequences` of which are drafted for at a time.

    `vocab_size` is the target's. The cache has `blocks` blocks, by default enough for one sequence of `context` tokens
    or a short one of each. Raises ValueError where the model has fewer tokens than the target.
    """

    name, costly, stops = "model", True, True

    def __init__(
        self, decoder: Decoder, context: int, sequences: int, vocab_size: int, blocks: int | None = None
    ) -> None:
        if decoder.config.vocab_size < vocab_size:
            raise ValueError(f"the draft model has {decoder.config.vocab_size} tokens, fewer than {vocab_size}")
        self.context, self.vocab_size = min(context, decoder.config.context), vocab_size
        blocks = blocks or blocks_for(self.context, sequences, BLOCK)
        self.runner = Runner(decoder, blocks, self.context, sequences=sequences, drafts=sequences)
        self.pool = BlockPool(blocks, self.runner.block)
        self._readings: OrderedDict[Tokens, _Reading] = OrderedDict()  # the last one drafted for comes last

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rounds: dict[int, _Round] = {}
        taken: set[Tokens] = set()
        for place, request in enumerate(requests):
            if (reading := self._reading(request, taken)) is not None:
                taken.add(request.sequence)
                rounds[place] = _Round(request, reading, request.sampler)
        going = list(rounds.values())
        try:
            while going:
                self._advance(going)
                going = [each for each in going if each.continues]
        except Exception:
            self.runner.release()  # a recording may be half made
            raise
        made = {i: Draft(tuple(each.drafts), 1, sure=tuple(each.sure)) for i, each in rounds.items()}
        return [made.get(i, NO_DRAFT) for i in range(len(requests))]

    def forget(self, sequence: Tokens) -> None:
        if (reading := self._readings.pop(sequence, None)) is not None:
            self._drop(reading)

    def reset(self) -> None:
        for sequence in list(self._readings):
            self.forget(sequence)

    def _reading(self, request: DraftRequest, taken: Collection[Tokens]) -> _Reading | None:
        """Return a sequence's reading with blocks for all its tokens and drafts; None where there is no room beside the
        sequences `taken`."""
        target = request.sequence
        tokens = target.tokens
        needed = self.pool.needed(len(tokens) + request.limit)
        if len(tokens) + request.limit > self.context or needed > self.pool.total:
            return None
        reading = self._readings.get(target)
        if reading is None:
            own = Tokens(id=target.id, prompt_ids=tokens, max_tokens=2**30)
            own.status = Status.DECODE
            reading = self._readings[target] = _Reading(own)
        self._readings.move_to_end(target)
        own, right = reading.sequence, reading.given
        longest = len(tokens) + request.limit
        horizon = next((at for at in self.runner.horizons if at >= longest), 0)
        if horizon != own.horizon:  # all keys are others
            own.horizon, own.computed, right = horizon, 0, 0
        while right < min(own.computed, len(tokens)) and own.tokens[right] == tokens[right]:  # drafts that were right
            right += 1
        own.computed = min(own.computed, right, len(tokens) - 1)  # the last token's logits are wanted
        del own.tokens[own.computed :]
        own.tokens.extend(tokens[own.computed :])
        reading.given = len(tokens)
        missing = needed - len(own.blocks)
        while missing > self.pool.free:
            oldest = next(iter(self._readings))
            if oldest is target or oldest in taken:
                return None
            self._drop(self._readings.pop(oldest))
        if missing > 0:
            own.blocks += self.pool.allocate(missing)
        return reading

    def _advance(self, going: Sequence[_Round]) -> None:
        """Run what is unread of each sequence, and draw its next draft."""
        sequences = [each.reading.sequence for each in going]
        for own in sequences:
            while (unread := _unread(own)) > REPLAYED:
                self._run([ScheduledTokens(own, own.computed, min(ROWS, unread - 1), 0)])
        rows = [_unread(own) for own in sequences]
        alike = rows[0] if max(rows) == min(rows) <= REPLAYED else 1  # such steps are replayed, with logits of all rows
        chunks = [ScheduledTokens(own, own.computed, n, alike) for own, n in zip(sequences, rows, strict=True)]
        logits = self._of_all_tokens(self._run(chunks)[alike - 1 :: alike])
        choose = sample if logits.device.type == "cpu" else device_sampler.sample
        totals = logits.logsumexp(-1)
        for row, (each, drawn) in enumerate(zip(going, choose(logits, [each.state for each in going]), strict=True)):
            if not isinstance(drawn, SampledToken):
                raise ValueError("the draft model's logits hold no finite maximum")
            each.drafts.append(drawn.token_id)
            each.sure.append(evidence_of(float((logits[row, drawn.token_id] - totals[row]).exp())))
            each.reading.sequence.tokens.append(drawn.token_id)
            each.state = each.state.along((drawn.token_id,))[1]

    def _of_all_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, vocab] of the target's tokens, of the model's own."""
        return logits[:, : self.vocab_size]

    def _run(self, chunks: list[ScheduledTokens]) -> torch.Tensor:
        logits = self.runner.run(StepPlan(chunks))
        for chunk in chunks:
            chunk.sequence.computed += chunk.rows
        return logits

    def _drop(self, reading: _Reading) -> None:
        self.pool.drop(reading.sequence.blocks)
        reading.sequence.status = Status.ENDED


def evidence_of(probability: float) -> int:
    """Return the evidence of a draft of that probability: a source of its own, in which kinds are octaves of odds."""
    odds = probability / max(1 - probability, 1e-6)
    return SURE + max(1, min(round(2 * odds), SOURCE - 1))


def blocks_for(context: int, sequences: int, block: int) -> int:
    """Return the default number of blocks: enough for one sequence of the whole context, or a short one of each."""
    return max(-(-context // block), SHORT // block * sequences)


def _unread(sequence: Tokens) -> int:
    return len(sequence.tokens) - sequence.computed
