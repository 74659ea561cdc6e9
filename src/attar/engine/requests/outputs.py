"""A request in the engine: its choices, and how each turns tokens into text and events.

Nothing here knows of other requests. An exception here concerns one request, and the engine ends that one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from attar.faults import point
from attar.kv.eviction import Eviction
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.sparse_layers import SparseLayers
from attar.protocol.messages import Delta, Embedding, Finished, PromptLogprobs, Report, Submit
from attar.protocol.request import FinishReason, SamplingParams, TokenLogprob
from attar.sampling.draft_gains import Gain
from attar.sampling.sampler import BAD, BadLogits, SampledToken, Sampler, logprobs_of
from attar.sampling.stop_strings import StopChecker
from attar.scheduling.admission import Refused
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sequence import Status
from attar.text.tokenizer import Detokenizer


@dataclass(eq=False, slots=True)
class Choice:
    """One continuation of a request's prompt."""

    request: Request
    number: int
    sequence: Tokens
    sampler: Sampler
    detokenizer: Detokenizer | None
    stops: StopChecker
    reason: FinishReason | None = None

    def take(self, draw: SampledToken) -> bool:
        """Add the token; return whether its event may wait, since nothing in its text could make it the last."""
        self.sampler.commit(draw.token_id)
        if draw.token_id in self.request.ending:
            self.reason = "stop"
        last = self.complete or self.sampler.index == self.sequence.max_tokens
        return self.reason is None and not last and not self.sampler.params.stop

    @property
    def complete(self) -> bool:
        """True where the constraint lets nothing follow."""
        return self.sampler.mask is not None and self.sampler.mask.finished

    def limited(self) -> bool:
        """Return whether the constraint has passed one of its limits. Behind drafts a copy of it was asked, so this one
        is asked again."""
        mask = self.sampler.mask
        if mask is not None and not mask.failed:
            mask.allowed()
        return mask is not None and mask.failed

    def tell(self, draw: SampledToken) -> Delta:
        """Return the last token as an event with text; `reason` is set where it is the last of all."""
        token, text = draw.token_id, ""
        if self.reason is None and self.detokenizer is not None:
            point("detokenizer.push", self.sequence.id)
            text = self._shown(self.detokenizer.push(token))
        last = self.complete or self.sampler.index == self.sequence.max_tokens
        if (self.reason or last) and self.detokenizer is not None and not self.stops.done:
            point("detokenizer.flush", self.sequence.id)
            text += self._shown(self.detokenizer.flush())
            if not self.stops.done:
                text += self.stops.flush()
        if not self.stops.done:
            self.stops.stopped = self.request.named.get(token)
        if self.stops.done:
            self.reason = "stop"
        elif last and self.reason is None:
            self.reason = "stop" if self.complete else "length"
        logprobs = None if draw.logprobs is None else (draw.logprobs,)
        point("engine.delta", self.sequence.id)
        return Delta(self.request.id, self.number, (token,), text, logprobs)

    def resume(self, tokens: Sequence[int]) -> None:
        """Take tokens that another engine has generated for this choice, before it is queued. Like after a preemption,
        they are computed again, and the next draw is the one behind them. Raises Refused where they would have ended
        it, or its constraint does not allow them."""
        for token in tokens:
            self.take(SampledToken(token, None))
            self.tell(SampledToken(token, None))
            if self.reason is not None:
                raise Refused("invalid", "the generated tokens end the answer: nothing is to be continued")
        self.sequence.tokens.extend(tokens)

    def end(self, now: float) -> Finished | Embedding:
        """Return the event of the end, with a report if the request's other choices have ended. Raises BadLogits where
        a vector holds a NaN or an infinity."""
        request, report = self.request, None
        if request.open == 1:
            point("engine.report", request.id)
            report = request.report(now)
        if request.pooling:
            point("engine.vector", request.id)
            assert request.pooled is not None
            vector = (request.pooled / (len(request.prompt) if request.pooling == "mean" else 1)).float()
            if not vector.isfinite().all():
                raise BadLogits(BAD)
            return Embedding(request.id, vector.numpy().tobytes(), report)
        point("engine.finish", self.sequence.id)
        reason = self.reason or "length"
        return Finished(request.id, self.number, reason, self.sampler.index, self.stops.stopped, report)

    def _shown(self, text: str) -> str:
        point("stops.push", self.sequence.id)
        return text if self.sampler.index <= self.sampler.params.min_tokens else self.stops.push(text)


@dataclass(eq=False, slots=True)
class Request:
    """A request and its progress."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    ending: frozenset[int]
    named: dict[int, str] = field(default_factory=dict)  # stop strings that are special tokens, by token
    choices: list[Choice] = field(default_factory=list)
    open: int = 0  # choices that have not ended
    seen: Tensor | None = None  # the prompt's tokens as `sampler.distinct` returns them, where a penalty needs them
    of_prompt: dict[int, TokenLogprob] | None = None
    """Log probabilities of the prompt's tokens by position, until they are sent; None where not requested."""
    unscorable: bool = False
    """True where a prompt token has no valid log probability: the request fails, as with invalid logits."""
    pooling: str = ""  # pooling of an embedding: mean or last; empty for other requests
    pooled: Tensor | None = None  # pooled state, float64 [D]: the last hidden state, or the sum of all so far
    limited_by: Counter[str] = field(default_factory=Counter)  # count of the request's steps, by bottleneck
    least: float = 0.0  # seconds of those steps by the roofline
    stepped: float = 0.0  # seconds of those steps as measured
    expected: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # of those steps, by use
    drafted: int = 0  # drafts that were verified
    accepted: int = 0  # of these, the right ones
    forced: int = 0  # of these, the ones that the constraint forced
    overruled: int = 0  # forced tokens that were trusted in place of another that the model drew
    gain: Gain = field(default_factory=Gain)  # by speculation
    eviction: Eviction | None = None
    sparse: SparseLayers | None = None  # the engine's, which the report tells
    keys_seen: int = 0  # by rows of its outputs, with sparse attention
    keys_read: int = 0  # of these, in each layer that is not dense
    prefill: SparsePrefill | None = None  # how rows of its prompt read few keys
    prompt_keys_seen: int = 0  # by rows of its prompt, with sparse prefill
    prompt_keys_read: int = 0  # of these, in each layer without a sliding window

    def pool(self, before: Tensor | None, hidden: Tensor) -> None:
        """Take the hidden states [N, D] of the next piece of the prompt, where `pooled` was `before`. A repeated call
        with the same arguments changes nothing: a step may have to be run again."""
        point("engine.pool", self.id)
        if self.pooling == "last":
            self.pooled = hidden[-1].double()
        else:
            rows = hidden.double()
            if before is not None:
                rows[0] += before
            self.pooled = rows.cumsum(0)[-1]  # row by row: chunking must not change the sum

    def score(self, start: int, logits: Tensor) -> PromptLogprobs | None:
        """Take the logits [N, V] behind the prompt's tokens from `start` on; return the event once all are known. Where
        the largest of a row is a NaN or an infinity the prompt is `unscorable`. Others may be -inf."""
        if self.of_prompt is None:
            return None
        point("engine.prompt_logprobs", self.id)
        count = self.params.prompt_logprobs
        assert count is not None
        scored = range(start, min(start + len(logits), len(self.prompt) - 1))
        if not logits[: len(scored)].amax(-1).isfinite().all():
            self.of_prompt, self.unscorable = None, True
            return None
        found = logprobs_of(logits, [(at - start, self.prompt[at + 1], count) for at in scored])
        self.of_prompt |= {at + 1: one for at, one in zip(scored, found, strict=True)}
        if len(self.of_prompt) < len(self.prompt) - 1:
            return None
        known, self.of_prompt = self.of_prompt, None
        return PromptLogprobs(self.id, tuple(known[at] for at in sorted(known)))

    def report(self, now: float) -> Report:
        """Report the request's time until `now`, and the reused part of its prompt."""
        leader = self.choices[0].sequence

        def longest(status: Status) -> float:
            return max(choice.sequence.spent(status, now) for choice in self.choices)

        return Report(
            queued=leader.spent(Status.QUEUED, now), fetching=leader.spent(Status.FETCHING, now),
            fetched_tokens=leader.fetched, prefill=leader.spent(Status.PREFILL, now),
            decode=longest(Status.DECODE), preempted=longest(Status.PREEMPTED),
            preemptions=sum(choice.sequence.preemptions for choice in self.choices), prompt_tokens=len(self.prompt),
            reused_tokens=min(leader.reused, len(self.prompt)), reuse_ended=leader.reuse_ended,
            differs_at=leader.differs_at, limited_by=dict(self.limited_by),
            roof_fraction=self.least / self.stepped if self.least and self.stepped else None,
            step_seconds=self.stepped, expected_seconds=dict(self.expected),
            drafted_tokens=self.drafted, accepted_tokens=self.accepted, forced_tokens=self.forced,
            overruled_tokens=self.overruled,
            draft_steps=self.gain.steps, draft_seconds=self.gain.drafting, saved_seconds=self.gain.saved,
            kv_eviction="" if self.eviction is None else str(self.eviction),
            evicted_tokens=sum(choice.sequence.evicted for choice in self.choices),
            sparse_attention="" if self.sparse is None else str(self.sparse.settings),
            dense_layers=() if self.sparse is None else self.sparse.dense,
            keys_seen=self.keys_seen, keys_read=self.keys_read,
            sparse_prefill="" if self.prefill is None else str(self.prefill),
            prompt_keys_seen=self.prompt_keys_seen, prompt_keys_read=self.prompt_keys_read,
        )  # fmt: skip


def resumed(ask: Submit, vocab_size: int) -> tuple[tuple[int, ...] | None, ...]:
    """Return the tokens that each choice of a request begins with, () for none; None for a choice that has ended.
    Raises Refused where they are not those of `n` choices, none is left, or a token lies outside the vocabulary."""
    if not ask.generated:
        return ((),) * ask.n
    if len(ask.generated) != ask.n or all(known is None for known in ask.generated):
        raise Refused("invalid", f"generated tokens of {len(ask.generated)} choices, of which {ask.n} are asked for")
    if any(not 0 <= token < vocab_size for known in ask.generated for token in known or ()):
        raise Refused("invalid", f"a generated token lies outside the model's vocabulary 0..{vocab_size - 1}")
    return ask.generated
