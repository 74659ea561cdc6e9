"""The engine: requests in, events out, one step at a time, in one thread.

A step is plan, run, commit. The scheduler plans on integers, the runner runs the model, and here each sequence that got
logits chooses its next token and turns it into text.

What raises while it works for one request fails that request and no other. What is done for all at once, the model's
step and the choice of tokens, is done again one by one where it raises: to the same bits, since no number depends on
company, and whoever raises again has failed.

On a GPU the host works while the device does (`overlaps`). A step is on its way when `Runner.run` comes back. Then,
while the device computes, the tokens of the step before become text and events; `meanwhile` sends those and reads what
was asked for, so that new requests are checked and queued and cancelled ones end with this step; and the choice of
tokens is launched. Only a token whose text could end its sequence, by a stop string, is looked at before the next step
is planned. What the device waits for: its tokens are fetched, taken by samplers and sequences and committed, the next
step is planned, waiting requests get their blocks, inputs are filled in and sent. A plan made before the tokens of its
step are known would hide that too; it is not done. Of a step that is not replayed from a graph the device has done a
part when its last kernel is launched, and what is left overlaps.

Where the device has too little memory for a step, it is run in halves, and later steps in pieces of that size, also
those that only decode (`_run_whole`); nobody's request ends by it.

A request becomes one sequence a choice. Each has a sampler of its own, seeded with the request's seed plus the choice's
number, and draws by (seed, index of the token), so that neither batching nor preemption nor what the prefix cache had
can change a text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attar.engine import device_sampler, graphs
from attar.engine import kv as kv_schemes
from attar.engine.blocks import BlockPool
from attar.engine.bounds import Bounds
from attar.engine.choices import Choice, Request
from attar.engine.limits import Limits
from attar.engine.messages import Embed, Event, Failed, Stats, Submit
from attar.engine.radix import RadixCache
from attar.engine.request import SamplingParams
from attar.engine.runner import Runner, Wanted, horizon
from attar.engine.sampler import BadLogits, Draw, Sampler, distinct, sample
from attar.engine.scheduler import Refused, Scheduler
from attar.engine.sequence import Sequence as Tokens
from attar.engine.step import Chunk, Outcome, StepPlan
from attar.engine.stops import StopChecker
from attar.faults import point
from attar.model.cache import sent
from attar.model.decoder import Decoder
from attar.text.tokenizer import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)

SENTENCES = {
    "cancelled": "the request was cancelled",
    "deadline": "the request did not end before its deadline",
    "bad_logits": "the model's logits hold NaN or no finite maximum",
    "internal": "the engine failed on this request",
    "shutdown": "the engine is shutting down",
}


class Engine:
    """A model that many requests share. `blocks` blocks of cache; sequences of at most `context` tokens.

    Without a tokenizer there is no text, and stop strings are refused. `clock` gives seconds that never go back.
    `record` is the runner's. `overlaps` says whether text is left for when the next step runs, and tokens are chosen
    without a look at the logits: by default on a GPU. `meanwhile`, where it is set, is called in every step while the
    device is busy, with what there is to say, and may hand in requests and cancel others. `adapters` are the names of
    those that `lora.install` gave the decoder, in the order of their numbers. `bounds` says what limits steps, where
    somebody wants to know.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        *,
        blocks: int,
        context: int,
        limits: Limits | None = None,
        eos_ids: frozenset[int] = frozenset(),
        kv: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: tuple[str, ...] = (),
        record: graphs.Record | None = None,
        overlaps: bool | None = None,
        bounds: Bounds | None = None,
        runner: Callable[..., Runner] = Runner,
    ) -> None:
        self.decoder, self.tokenizer, self.eos_ids, self.clock = decoder, tokenizer, eos_ids, clock
        limits, scheme = limits or Limits(), kv_schemes.of(decoder, kv)
        bases = kv_schemes.bases(decoder, scheme)
        self.runner = runner(decoder, blocks, context, scheme, limits.together, bases, record)
        self.overlaps = self.runner.device.type != "cpu" if overlaps is None else overlaps
        self.bounds = bounds
        self.meanwhile: Callable[[list[Event]], None] | None = None
        self._sample = device_sampler.sample if self.overlaps else sample
        self._late: list[tuple[Choice, Draw]] = []  # of the last step, to be told of while the next one runs
        self._rows: int | None = None  # of a step that the device has had memory for, where one was too large
        self.pool = BlockPool(blocks, self.runner.block)
        self.cache = RadixCache(self.pool, scheme.round_to(self.runner.block))
        self.scheduler = Scheduler(self.pool, self.cache, limits)
        self.context = context
        self.adapters = {"": 0, **{name: number for number, name in enumerate(adapters, 1)}}
        self.steps = self.generated = 0
        self.step_seconds = 0.0
        self._requests: dict[str, Request] = {}
        self._choices: dict[str, Choice] = {}
        self._events: list[Event] = []

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and every event was taken."""
        return not self._requests and not self._events

    @property
    def runnable(self) -> bool:
        """Whether a step would do something now, rather than when `scheduler.wake` says."""
        continuous = self.scheduler.limits.policy == "continuous"
        return bool(self._events or self.scheduler.running or (continuous and self.scheduler.waiting))

    def submit(self, ask: Submit) -> None:
        """Take a request. It ends with events, also where it is refused at once."""
        try:
            request = self._new(ask.id, ask.prompt, ask.params.seeded())
            if ask.params.stop and self.tokenizer is None:
                raise Refused("invalid", "the model has no tokenizer: stop strings need one, stop_token_ids do not")
            longest = min(ask.params.max_tokens, self.context - len(ask.prompt))
            self.scheduler.require_room(ask.n)  # before what a long prompt makes costly
            request.of_prompt = None if ask.params.prompt_logprobs is None else {}
            if ask.params.repetition_penalty != 1.0:
                request.seen = distinct(ask.prompt, self.decoder.config.vocab_size)
            for number in range(ask.n):
                bypass = request.of_prompt is not None and number == 0
                sequence = self._sequence(request, number, longest, ask, bypass)
                request.choices.append(self._choice(request, number, sequence))
            self._add(request)
        except Exception as error:
            self._refuse(ask.id, error)

    def embed(self, ask: Embed) -> None:
        """Take a request for a vector."""
        try:
            request = self._new(ask.id, ask.prompt, SamplingParams(max_tokens=0, temperature=0, seed=0))
            request.pooling = ask.pooling
            whole = Submit(
                ask.id, ask.prompt, request.params, salt=ask.salt, deadline=ask.deadline, adapter=ask.adapter
            )
            sequence = self._sequence(request, 0, 0, whole, bypass=True)
            request.choices.append(self._choice(request, 0, sequence))
            self._add(request)
        except Exception as error:
            self._refuse(ask.id, error)

    def cancel(self, id: str) -> None:
        """End a request that nobody waits for; its `Failed` comes with the next events."""
        self._fail(id, "cancelled")

    def drop(self, id: str) -> None:
        """End a request of which nothing more is to be said."""
        if (request := self._requests.pop(id, None)) is not None:
            for choice in request.choices:
                self.scheduler.cancel(choice.sequence.id, self.clock())

    def close(self) -> list[Event]:
        """End everything."""
        self._tell()
        for id in list(self._requests):
            self._fail(id, "shutdown")
        return self._take()

    def step(self) -> list[Event]:
        """Do one step, if there is one to do; returns everything there is to say."""
        began = self.clock()
        plan = self.scheduler.plan(began)
        self._settle()
        if plan.chunks:
            outcomes = self._run(plan)
            self.scheduler.commit(plan, outcomes, self.clock())
            self._count(plan, self.clock() - began)
            self._settle()
        else:
            self.scheduler.commit(plan, {}, self.clock())
            self._settle()
        return self._take()

    def stats(self, blocks: bool = False) -> Stats:
        """The state of this moment; with `blocks` also each block's."""
        running = len(self.scheduler.running)
        return Stats(
            running=running,
            waiting=len(self.scheduler.sequences) - running,
            blocks_free=self.pool.free,
            blocks_active=self.pool.active,
            blocks_cached=self.pool.cached,
            steps=self.steps,
            prompt_tokens=self.cache.asked,
            reused_tokens=self.cache.reused,
            generated_tokens=self.generated,
            preemptions=self.scheduler.preemptions,
            step_seconds=self.step_seconds,
            blocks=self.pool.states() if blocks else b"",
        )

    # ---- taking requests

    def _new(self, id: str, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        point("engine.submit", id)
        vocab = self.decoder.config.vocab_size
        if any(choice.request.id == id for choice in self._choices.values()):  # also one that ends with this step
            raise Refused("invalid", "a request of this id is running")
        if not prompt:
            raise Refused("invalid", "the prompt is empty")
        if not all(0 <= token < vocab for token in prompt):
            raise Refused("invalid", f"a token id lies outside the model's vocabulary 0..{vocab - 1}")
        if len(prompt) + (params.max_tokens > 0) > self.context:
            raise Refused("too_long", f"the prompt has {len(prompt)} tokens; the context holds {self.context}")
        ending = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        return Request(id, prompt, params, ending)

    def _sequence(self, request: Request, number: int, longest: int, ask: Submit, bypass: bool) -> Tokens:
        if ask.adapter not in self.adapters:
            raise Refused("invalid", f"the engine has no adapter {ask.adapter[:80]!r}")
        adapter = self.adapters[ask.adapter]
        made = Tokens(
            id=f"{request.id}#{number}",
            prompt_ids=request.prompt,
            max_tokens=longest,
            priority=ask.priority,
            deadline=None if ask.deadline is None else self.clock() + ask.deadline,
            salt=adapter.to_bytes(4, "little") + ask.salt,  # of fixed length: no salt reads as another adapter's
            bypass=bypass,
            adapter=adapter,
        )
        if self.runner.grows:  # its keys are turned by angles of its own length
            made.salt += horizon(made).to_bytes(8, "little")
        return made

    def _choice(self, request: Request, number: int, sequence: Tokens) -> Choice:
        point("engine.choice", sequence.id)
        params = request.params
        assert params.seed is not None
        own = replace(params, seed=(params.seed + number) % 2**64)
        vocab = self.decoder.config.vocab_size
        prompt = request.prompt if request.seen is None else request.seen
        sampler = Sampler(own, prompt, vocab, name=sequence.id)
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, request.prompt)
        return Choice(request, number, sequence, sampler, detokenizer, StopChecker(own.stop))

    def _add(self, request: Request) -> None:
        self.scheduler.add([choice.sequence for choice in request.choices], self.clock())
        self._requests[request.id] = request
        request.open = len(request.choices)
        self._choices |= {choice.sequence.id: choice for choice in request.choices}

    def _refuse(self, id: str, error: Exception) -> None:
        if isinstance(error, ValueError):
            code = error.code if isinstance(error, Refused) else "invalid"
            self._events.append(Failed(id, code, str(error)))
        else:
            logger.error("request %s failed before it began", id, exc_info=error)
            self._events.append(Failed(id, "internal", SENTENCES["internal"]))

    # ---- a step

    def _run(self, plan: StepPlan) -> dict[str, Outcome]:
        wanted = self._wanted(plan)
        failed: set[str] = set()
        if self.bounds is not None:
            self.bounds.begin()
        try:
            logits = self._run_whole(plan)
        except torch.AcceleratorError:  # nothing can be computed there any more: the process ends, and a new one starts
            raise
        except Exception:
            logger.exception("a step of %d sequences raised: once more, one by one", len(plan.chunks))
            logits, failed = self._run_apart(plan, wanted)
        if self.bounds is not None:
            self.bounds.end()
        self._tell()
        if self.meanwhile is not None:
            self.meanwhile(self._take())
        outcomes = {id: Outcome(failure="internal") for id in failed}
        ran = [self._choices[chunk.sequence.id] for chunk in plan.chunks if chunk.samples]
        sampling = [choice for choice in ran if choice.sequence.id not in failed]
        drawing = [i for i, choice in enumerate(sampling) if choice.sequence.max_tokens > 0]
        whole = len(drawing) == len(sampling)
        samplers = [sampling[i].sampler for i in drawing]
        if drawing and not whole:
            (places,) = sent(logits.device, torch.tensor(drawing))
            logits = logits[places]
        draws = self._draw(logits, samplers) if drawing else []
        outcomes |= {choice.sequence.id: Outcome((), True) for choice in sampling}
        for i, draw in zip(drawing, draws, strict=True):
            outcomes[sampling[i].sequence.id] = self._advance(sampling[i], draw)
        return outcomes

    def _run_whole(self, plan: StepPlan) -> Tensor:
        """As `Runner.run`, in pieces where the device has too little memory for more. Raises torch.OutOfMemoryError
        where it has too little for a single token."""
        left = [plan] if self._rows is None else plan.pieces(self._rows)
        logits: list[Tensor] = []
        while left:
            piece = left.pop(0)
            pooled = [(request, request.pooled) for request in map(self._request, piece.chunks)]
            try:
                found = self.runner.run(piece, self._wanted(piece))
            except torch.OutOfMemoryError:
                self.runner.release()
                if piece.tokens < 2:
                    raise
                for request, before in pooled:
                    request.pooled = before
                half = -(-piece.tokens // 2)
                self._rows = half
                logger.warning("too little memory for %d tokens at once: from now on %d", piece.tokens, self._rows)
                left = [smaller for each in (piece, *left) for smaller in each.pieces(half)]
            else:
                logits.append(found.clone() if left or logits else found)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _request(self, chunk: Chunk) -> Request:
        return self._choices[chunk.sequence.id].request

    def _run_apart(self, plan: StepPlan, wanted: dict[str, Wanted]) -> tuple[Tensor, set[str]]:
        """A step sequence by sequence: logits [S, V] as of `Runner.run` without those that raise, and their ids."""
        empty = torch.empty((0, self.decoder.config.vocab_size), device=self.runner.device)
        logits, failed = [empty], set()
        self.runner.release()  # recordings may be half made
        for sequence in dict.fromkeys([*(chunk.sequence for chunk in plan.chunks), *plan.admitted]):
            chunks = [chunk for chunk in plan.chunks if chunk.sequence is sequence]
            copies = [copy for copy in plan.copies if copy.sequence is sequence]
            try:
                logits.append(self.runner.run(StepPlan(chunks, copies), wanted).clone())
            except torch.AcceleratorError:
                raise
            except Exception:
                logger.exception("sequence %s failed", sequence.id)
                failed.add(sequence.id)
                self.runner.release()
        return torch.cat(logits), failed

    def _draw(self, logits: Tensor, samplers: list[Sampler]) -> list[Draw | BadLogits | None]:
        """A draw for every row; None where it raises."""
        try:
            return list(self._sample(logits, samplers))
        except torch.AcceleratorError:
            raise
        except Exception:
            logger.exception("choosing %d tokens raised: once more, one by one", len(samplers))
        draws: list[Draw | BadLogits | None] = []
        for row, sampler in zip(logits, samplers, strict=True):
            try:
                draws += self._sample(row[None], [sampler])
            except torch.AcceleratorError:
                raise
            except Exception:
                logger.exception("sequence %s failed", sampler.name)
                draws.append(None)
        return draws

    def _advance(self, choice: Choice, draw: Draw | BadLogits | None) -> Outcome:
        if draw is None:
            return Outcome(failure="internal")
        if isinstance(draw, BadLogits):
            return Outcome(failure="bad_logits")
        if choice.sequence.ending is not None:  # cancelled while the step ran
            return Outcome()
        try:
            if choice.take(draw) and self.overlaps:
                self._late.append((choice, draw))
            else:
                self._events.append(choice.tell(draw))
        except Exception:
            logger.exception("sequence %s failed", choice.sequence.id)
            return Outcome(failure="internal")
        self.generated += 1
        return Outcome((draw.token_id,), choice.reason is not None)

    def _tell(self) -> None:
        """Say what the last step gave, as far as it was left for later."""
        late, self._late = self._late, []
        for choice, draw in late:
            if choice.request.id in self._requests:
                try:
                    self._events.append(choice.tell(draw))
                except Exception:
                    logger.exception("sequence %s failed", choice.sequence.id)
                    self._fail(choice.request.id, "internal")

    def _wanted(self, plan: StepPlan) -> dict[str, Wanted]:
        """What requests of this step want besides the next token."""
        wanted = {}
        for chunk in plan.chunks:
            request = self._choices[chunk.sequence.id].request
            if request.pooling:
                before = request.pooled if chunk.start else None
                wanted[chunk.sequence.id] = Wanted(hidden=partial(_pool, request, before))
            elif request.of_prompt is not None and chunk.sequence.bypass and chunk.start < chunk.sequence.prompt:
                wanted[chunk.sequence.id] = Wanted(logits=self._score)
        return wanted

    def _score(self, chunk: Chunk, first: int, logits: Tensor) -> None:
        found = self._choices[chunk.sequence.id].request.score(chunk.start + first, logits)
        if found is not None:
            self._events.append(found)

    def _count(self, plan: StepPlan, seconds: float) -> None:
        """Before those that end with it are settled: their reports tell of their last step too."""
        self.steps += 1
        self.step_seconds += seconds
        if self.bounds is not None:
            self.bounds.count(plan, seconds, set(map(self._request, plan.chunks)))

    # ---- ends

    def _settle(self) -> None:
        """Say what the scheduler has ended."""
        ended = self.scheduler.collect()
        if ended:
            self._tell()
        for sequence in ended:
            choice = self._choices.pop(sequence.id)
            request = choice.request
            if request.id not in self._requests:
                continue
            if sequence.ending != "finished":
                self._fail(request.id, str(sequence.ending))
                continue
            try:
                self._events.append(choice.end(self.clock()))
            except Exception:
                logger.exception("request %s failed at its end", request.id)
                self._fail(request.id, "internal")
                continue
            request.open -= 1
            if not request.open:
                del self._requests[request.id]

    def _fail(self, id: str, code: str) -> None:
        """End a request without an answer, all choices of it."""
        if (request := self._requests.get(id)) is not None:
            self._events.append(Failed(id, code, SENTENCES[code], request.report(self.clock())))
            self.drop(id)

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _pool(request: Request, before: Tensor | None, chunk: Chunk, first: int, hidden: Tensor) -> None:
    request.pool(before, hidden)
