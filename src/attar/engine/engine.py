"""The engine: requests in, events out, one step at a time, in one thread.

A step is plan, launch, commit. The scheduler plans on integers, and the launcher runs the model and samples tokens
(`inflight.py`). Then each sequence that got a token takes it and turns it into text.

An exception during work for one request fails that request and no other.

On a GPU the host works while the device does (`overlaps`). Steps and samplings are queued on the device and waited for
only later. So while the device computes a step, the next one is planned and launched behind it, with tokens that the
host does not know yet: they go from one step to the next on the device. Then `meanwhile` sends events and reads
commands, and only then the host waits for tokens, which it commits and turns into text while the next step runs.
Samplers learn of a token before the next one is sampled, so penalties, masks, seeds and all else that sampling depends
on are what they would be otherwise, and so are the tokens. The end of a text is seen a step late, unless its length
decides: its row of the next step is computed for nothing, and a request that arrives meanwhile waits one step longer.

There is no step ahead, and the next one is planned when the tokens of this one are known, in three cases: its plan
would preempt a sequence; something has raised, so that the device's tokens are not the requests' tokens; the host would
wait within the next step while tokens of this one are ready to be sent. The last holds for models that always wait
(`Runner.waits`), and for embeddings and log probabilities of prompts, whose numbers the launch reads. `ahead` counts
steps ahead, and `alone`, by reason, the times that there was none. Without a step ahead, text is left for when the next
step runs (`RequestTable.tell_late`), unless a stop string could end its sequence.

`requests/intake.py` makes requests of messages, and says how a request becomes sequences.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from attar.engine.blocks.moves import BlockMoves
from attar.engine.bottleneck import Bottlenecks
from attar.engine.config import EngineConfig
from attar.engine.images.images import Images
from attar.engine.images.limits import check_drafter
from attar.engine.inflight import InflightStep, Launcher, Taker
from attar.engine.requests.intake import Intake
from attar.engine.requests.outputs import Choice, Request
from attar.engine.requests.table import RequestTable
from attar.engine.sparse_reads import PrefillReads, SparseReads
from attar.engine.speculation import Speculation
from attar.execution import cuda_graphs, kv_cache
from attar.execution.model_runner import BlockCounts, Runner
from attar.execution.step_inputs import InflightTokens
from attar.model.decoder import Decoder
from attar.plan.sliding import window_of
from attar.protocol.block_digests import packed
from attar.protocol.messages import CachedBlocks, Embed, Event, Stats, StepTimes, Submit
from attar.sampling.drafters.drafter import TrialReader
from attar.sampling.drafters.first_of import reader_of
from attar.sampling.drafters.forced import ForcedDrafter
from attar.sampling.sampler import BadLogits
from attar.sampling.verify import Drawn, confirmed
from attar.scheduling.block_journal import BlockJournal
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.image_ids import ImageIds
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sliding import SlidingBlocks
from attar.scheduling.step_plan import Outcome, StepPlan
from attar.text.tokenizer import Tokenizer

RECENT = 256  # steps whose times are kept until they are told

logger = logging.getLogger(__name__)


class Engine:
    """A model that many requests share.

    Without a tokenizer there is no text, and stop strings are refused. `clock` gives seconds that never go back.
    `record` is the runner's. `meanwhile`, where it is set, is called in every step while the device is busy, with what
    there is to say, and may hand in requests and cancel others. `bounds`, where given, finds what limits steps.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        record: cuda_graphs.Record | None = None,
        bounds: Bottlenecks | None = None,
        runner: Callable[..., Runner] = Runner,
    ) -> None:
        self.decoder, self.clock = decoder, clock
        limits, scheme = config.limits, config.kv or decoder.lossless
        config.check(decoder, scheme)
        bases = kv_cache.bases(decoder, scheme)
        counts = BlockCounts(config.blocks, config.sliding_blocks)
        self.context = config.context
        self.runner = runner(decoder, counts, config.context, scheme, limits.together, bases, record, limits.max_drafts)
        self.sparse = None if config.sparse is None else SparseReads(config.sparse)
        if config.sparse is not None:
            self.runner.read_few(config.sparse)
        self.prefill = None if config.prefill is None else PrefillReads(config.prefill, decoder.config)
        if config.prefill is not None:
            self.runner.prefill_few(config.prefill)
        if config.evictions:
            self.runner.evict_keys()
        self.overlaps = self.runner.device.type != "cpu" if config.overlaps is None else config.overlaps
        self.bounds = bounds
        self.meanwhile: Callable[[list[Event]], None] | None = None
        self.launcher = Launcher(self.runner, self.overlaps, bounds, lambda event: self.requests.events.append(event))
        self.ahead = 0  # steps that were launched before the one before was waited for
        self.alone: Counter[str] = Counter()
        """Times that an engine that overlaps launched no step ahead, by reason, also where there was none to launch:
        `model`, `mishap`, `numbers` (which the host would wait for), `blocks` (too few), `drafts` (guesses of tokens
        that are to come)."""
        self.speculation: Speculation | None = None
        if config.drafter is not None:
            config.drafter.reset()
            self.launcher.draws_all = isinstance(config.drafter, TrialReader)
            if (reader := reader_of(config.drafter)) is not None:
                self.runner.kind.keep = reader.layers
        forcing = None if tokenizer is None else ForcedDrafter(tokenizer)
        if config.drafter is not None or (forcing is not None and limits.max_drafts > 0 and not self.overlaps):
            trees, vocab_size = config.draft_tree is not None, decoder.config.vocab_size
            self.speculation = Speculation(config.drafter, config.pace(), vocab_size, forcing, trees)
        if self.overlaps and self.runner.waits is not None:
            logger.warning("no step is launched before the tokens of the last are known: %s", self.runner.waits)
        self._inflight: InflightStep | None = None  # the next step, where it is on its way
        self.pool = BlockPool(config.blocks, self.runner.block)
        self.sliding: SlidingBlocks | None = None
        if (window := window_of(decoder.config)) is not None and self.runner.slides:
            rows = limits.max_step_tokens * (2 if self.overlaps else 1)
            self.sliding = SlidingBlocks(BlockPool(config.sliding_blocks, self.runner.block), window, rows)
        self.journal = BlockJournal() if config.tells_cache else None
        images = None if config.tower is None else ImageIds()
        self.cache = PrefixCache(self.pool, scheme.round_to(self.runner.block), self.sliding, self.journal, images)
        self.images: Images | None = None
        if config.tower is not None and images is not None:
            check_drafter(config.drafter)
            assert config.saved is None, "ids of images are this process's own: its blocks stay here"
            assert config.peer is None, "ids of images are this process's own: its blocks stay here"
            self.images = Images(
                config.tower, config.image_cache, decoder.dtype, images, self.cache.flush, limits.prompt_rows
            )
            self.runner.take_images(self.images.rows, config.tower.rotary)
        whole = None if config.sparse is None else config.sparse.settings.whole
        self.scheduler = Scheduler(self.pool, self.cache, limits, whole, self.sliding, config.prefill)
        self.requests = RequestTable(self.scheduler, clock)
        self.intake = Intake(decoder, tokenizer, config, self.requests, self.images, self.runner.horizons, clock)
        self.moves: BlockMoves | None = None
        if config.saved is not None or config.peer is not None:
            pages, salt = self.runner.pages, self.intake.block_salt
            self.moves = BlockMoves(
                self.scheduler, pages, config.saved, config.peer, clock, salt, self._compute, self.cancel
            )
        self.steps = self.generated = 0
        self.step_seconds = 0.0
        self._recent: deque[tuple[int, int, int, float]] = deque(maxlen=RECENT)

    @property
    def idle(self) -> bool:
        """True where nothing runs or waits, every event was taken, and every ended request is settled."""
        return not self.requests.choices and not self.requests.events and self._inflight is None

    @property
    def runnable(self) -> bool:
        """True where a step would do something now, rather than at the time of `scheduler.wake`."""
        continuous = self.scheduler.limits.policy == "continuous"
        more = self.requests.events or self._inflight or self.scheduler.running
        # More choices than sequences: one was cancelled between steps, and is not settled.
        ended = len(self.requests.choices) > len(self.scheduler.sequences)
        return bool(more or ended or (continuous and self.scheduler.waiting))

    def submit(self, ask: Submit) -> None:
        """Take a request. It ends with events, also where it is refused at once."""
        self._fetch(self.intake.submit(ask), ask)

    def embed(self, ask: Embed) -> None:
        """Take a request for an embedding."""
        self._fetch(self.intake.embed(ask), ask)

    def cancel(self, id: str) -> None:
        """Cancel a request; its `Failed` comes with the next events."""
        self.requests.fail(id, "cancelled")

    def take_over(self, path: Path) -> None:
        """Take over cached blocks of the replica that answers at `path`; unless others may take over this one's,
        nothing."""
        if self.moves is not None and self.moves.handover is not None:
            self.moves.handover.begin(path)

    def close(self) -> list[Event]:
        """End everything."""
        self.requests.fail_all("shutdown")
        return self.requests.take()

    def step(self) -> list[Event]:
        """Do one step, if there is one to do; returns all new events. Plan and launch, sample tokens, launch the next
        step behind them where it need not wait, commit."""
        if self.moves is not None:
            self.moves.settle()
        if self.images is not None and (failed := self.images.advance(self.scheduler.running)) is not None:
            self.requests.fail(self.requests.choices[failed].request.id, "internal")
        inflight, self._inflight = self._inflight or self._planned(), None
        if inflight is not None:
            self.launcher.choose(inflight)
            if self.overlaps:
                self._inflight = self._next(inflight)
            self.requests.tell_late()
            if self.meanwhile is not None:
                self.meanwhile(self.requests.take())
            outcomes = self._outcomes(inflight)
            now = self.clock()
            if self.speculation is not None:
                self.speculation.see(inflight.plan, outcomes, self.runner.kept)
                self.speculation.learn(inflight.plan, inflight.choices, outcomes, now - inflight.began)
            if self.sparse is not None:
                self.sparse.count(inflight.plan.chunks, self.requests.choices)
            if self.prefill is not None:
                self.prefill.count(inflight.plan.chunks, self.requests.choices, self.runner.skipped)
            self.scheduler.commit(inflight.plan, outcomes, now)
            self._count(inflight, self.clock())
            self._settle()
        return self.requests.take()

    def stats(self, blocks: bool = False) -> Stats:
        """Return the present state; with `blocks` also each block's."""
        running, pool, cache = len(self.scheduler.running), self.pool, self.cache
        drafts, slides = self.speculation, None if self.sliding is None else self.sliding.pool
        return Stats(
            running=running, waiting=len(self.scheduler.sequences) - running,
            blocks_free=pool.free, blocks_active=pool.active, blocks_cached=pool.cached,
            blocks=pool.states() if blocks else b"", steps=self.steps, steps_ahead=self.ahead,
            step_seconds=self.step_seconds, prompt_tokens=cache.asked, reused_tokens=cache.reused,
            generated_tokens=self.generated, preemptions=self.scheduler.preemptions,
            drafted_tokens=drafts.drafted if drafts else 0, accepted_tokens=drafts.accepted if drafts else 0,
            draft_errors=drafts.errors if drafts else 0, forced_tokens=drafts.forced if drafts else 0,
            overruled_tokens=drafts.overruled if drafts else 0,
            sliding_blocks=None if slides is None else (slides.free, slides.active, slides.cached),
            **(drafts.gains.stats() if drafts else {}),
            evicted_tokens=self.scheduler.evicted,
            keys_seen=self.sparse.seen if self.sparse else 0, keys_read=self.sparse.read if self.sparse else 0,
            prompt_keys_seen=self.prefill.seen if self.prefill else 0,
            prompt_keys_read=self.prefill.read if self.prefill else 0,
            disk_cache=None if self.moves is None else self.moves.disk_counts(),
            prefill_peer=None if self.moves is None else self.moves.peer_counts(),
        )  # fmt: skip

    def cached(self, whole: bool = False) -> list[Event]:
        """Return the change of the prefix cache's blocks since the last call, where there is one and it is to be told;
        all of its blocks with `whole`."""
        if self.journal is None or not (whole or self.journal):
            return []
        stored, evicted = self.journal.take()
        if whole:
            return [CachedBlocks(packed(self.cache.digests()), whole=True)]
        return [CachedBlocks(packed(stored), packed(evicted))]

    def take_steps(self) -> StepTimes:
        """Return the last steps, at most `RECENT`, each once."""
        taken = StepTimes(tuple(self._recent))
        self._recent.clear()
        return taken

    def _fetch(self, request: Request | None, ask: Submit | Embed) -> None:
        """Let a request that was queued wait for blocks of its prompt, where there are some."""
        if self.moves is not None and request is not None:
            self.moves.consider([choice.sequence for choice in request.choices], ask.cache_salt, ask.adapter)

    def _compute(self, ask: Embed, done: Callable[[Event], None]) -> None:
        """Take a request of the engine itself, and call `done` with the event of its end."""
        self.requests.own[ask.id] = done
        self.embed(ask)

    # ---- a step

    def _planned(self) -> InflightStep | None:
        """Launch the next step after the one before is over; None where there is nothing to run."""
        if self.speculation is not None:
            with self.speculation.gains.drafting():
                self.speculation.propose(map(self._choice_of, self.scheduler.running))
        plan = self.scheduler.plan(began := self.clock())
        # One that waits for its image may begin with a copy, and no row.
        work = plan.chunks or plan.copies or plan.sliding_copies
        inflight = self._launched(plan, began) if work else None
        if inflight is None:
            self.scheduler.commit(plan, {}, self.clock())
            if self.moves is not None:
                self.moves.wait()  # for blocks, or for room that fetches and loans have
        self._settle()  # no earlier: an ending sequence frees its blocks, which the launch reads
        return inflight

    def _next(self, inflight: InflightStep) -> InflightStep | None:
        """Launch the step behind one whose tokens are not known yet; None where it must wait, or there is none."""
        if (why := self._alone(inflight)) is None:
            now = self.clock()
            if (plan := self.scheduler.ahead(now)) is not None:
                self.ahead += bool(plan.chunks)
                return self._launched(plan, now, inflight.inflight_tokens) if plan.chunks else None
            why = "blocks"
        self.alone[why] += 1
        return None

    def _outcomes(self, inflight: InflightStep) -> dict[str, Outcome]:
        """Return a step's outcomes by sequence; those of sequences that have ended meanwhile are missing or ignored."""
        outcomes = {chunk.sequence.id: Outcome((), True) for chunk in inflight.plan.chunks if chunk.samples}
        draws = iter(self.launcher.wait_for(inflight))
        for taker in inflight.takers:
            own = list(itertools.islice(draws, 1 + len(taker.drafts)))
            if self.speculation is not None and not taker.parents:
                self.speculation.tried(taker.choice.sequence, taker.drafts, own)
            outcomes[taker.choice.sequence.id] = self._advance(taker, own)
        unscorable = [each.id for each, choice in inflight.choices.items() if choice.request.unscorable]
        outcomes |= {id: Outcome(failure="bad_logits") for id in unscorable}
        return outcomes | {id: Outcome(failure="internal") for id in inflight.failed}

    def _count(self, inflight: InflightStep, now: float) -> None:
        """Count a step before the requests that end with it are settled: their reports include their last step."""
        self.steps += 1
        self.step_seconds += now - inflight.began
        if self.images is not None:
            self.images.took(now - inflight.began)
        chunks = inflight.plan.chunks
        held = sum(chunk.start + chunk.rows for chunk in chunks)
        self._recent.append((inflight.plan.tokens, len(chunks), held, now - inflight.began))
        if self.bounds is not None:
            requests = {choice.request for choice in inflight.choices.values()}
            self.bounds.count(inflight.plan, now - inflight.began, inflight.busy, requests)
        if self._inflight is not None:
            self._inflight.began = now

    def _launched(self, plan: StepPlan, began: float, inflight_tokens: InflightTokens | None = None) -> InflightStep:
        choices = {chunk.sequence: self.requests.choices[chunk.sequence.id] for chunk in plan.chunks}
        return self.launcher.launch(plan, choices, began, inflight_tokens)

    def _alone(self, inflight: InflightStep) -> str | None:
        """Return why the step behind this one must wait for its tokens; None where it need not."""
        if self.runner.waits is not None:
            return "model"
        if not inflight.whole:
            return "mishap"
        if self.speculation is not None:  # the next step would have none
            return "drafts"
        return "numbers" if self._numbers_wanted() else None

    def _numbers_wanted(self) -> bool:
        """Return whether the next step may hold a piece of a prompt whose numbers the host waits for."""
        scheduler = self.scheduler
        room = scheduler.limits.together - len(scheduler.running)
        soon = [self.requests.choices[each.id] for each in (*scheduler.running, *scheduler.waiting[:room])]
        starting = (choice.request for choice in soon if choice.sequence.planned < choice.sequence.prompt)
        return any(request.pooling or request.of_prompt is not None for request in starting)

    def _advance(self, taker: Taker, draws: list[Drawn]) -> Outcome:
        """Give a choice its next tokens: the one behind its last token, and those behind drafts that were right."""
        choice, drafts, parents = taker
        if choice.sequence.ending is not None:  # cancelled while the step ran
            return Outcome()
        later = self.overlaps and self._inflight is None and not drafts
        tokens: list[int] = []
        trusted = 0
        if choice.sampler.params.trust_forced and self.speculation is not None and not parents:
            trusted = self.speculation.trusted(choice.sequence, drafts, draws, choice.request)
        for draw in confirmed(drafts, draws, parents, trusted):
            if draw is None:
                return Outcome(failure="internal")
            try:
                if isinstance(draw, BadLogits) or choice.request.unscorable:
                    return Outcome(failure="grammar_limit" if choice.limited() else "bad_logits")
                self.requests.accept(choice, draw, later)
            except Exception:  # whatever it is, it concerns this sequence alone
                logger.exception("sequence %s failed", choice.sequence.id)
                return Outcome(failure="internal")
            self.generated += 1
            tokens.append(draw.token_id)
            if choice.reason is not None:
                break
        return Outcome(tuple(tokens), choice.reason is not None)

    def _choice_of(self, sequence: Tokens) -> Choice:
        return self.requests.choices[sequence.id]

    def _settle(self) -> None:
        """Tell of the sequences that have ended."""
        for sequence in self.requests.settle():
            if self.images is not None:
                self.images.forget(sequence)
            if self.speculation is not None:
                self.speculation.forget(sequence)
