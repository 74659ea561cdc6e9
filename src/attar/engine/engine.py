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

A request becomes one sequence a choice. Each has a sampler of its own, seeded by the request's seed and the choice's
number. It samples by (seed, index of the token), so that batching, preemption and the contents of the prefix cache
cannot change a text.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from attar.engine.blocks.moves import BlockMoves, PeerBlocks, SavedBlocks
from attar.engine.bottleneck import Bottlenecks
from attar.engine.images.images import Images, Prompt
from attar.engine.images.limits import check_drafter
from attar.engine.images.tower import VisionTower
from attar.engine.inflight import InflightStep, Launcher, Taker
from attar.engine.outputs import Choice, Request, resumed
from attar.engine.requests import RequestTable
from attar.engine.sparse_reads import PrefillReads, SparseReads
from attar.engine.speculation import Speculation
from attar.execution import cuda_graphs, kv_cache
from attar.execution.model_runner import BlockCounts, InflightTokens, Runner
from attar.faults import point
from attar.kernels.noise import seed_of_choice
from attar.kv.eviction import NONE, Eviction
from attar.kv.schemes import KvScheme
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.decoder import Decoder
from attar.model.sparse_layers import SparseLayers
from attar.plan.sliding import window_of
from attar.protocol.block_digests import horizon_of, packed, salt_of
from attar.protocol.messages import CachedBlocks, Embed, Event, Failed, Stats, StepTimes, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import IMAGE_CACHE
from attar.protocol.speculation import MAX_DRAFT_TOKENS
from attar.sampling.drafters.drafter import Drafter, TrialReader
from attar.sampling.drafters.first_of import reader_of
from attar.sampling.drafters.forced import ForcedDrafter
from attar.sampling.masks import AllowedMask, GrammarMasks
from attar.sampling.pace import Pace
from attar.sampling.reasoning import ReasoningMask
from attar.sampling.sampler import BadLogits, Mask, Sampler, distinct
from attar.sampling.stop_strings import StopChecker
from attar.sampling.verify import Drawn, confirmed
from attar.scheduling.admission import Refused
from attar.scheduling.block_journal import BlockJournal
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.image_ids import ImageIds
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sliding import SlidingBlocks
from attar.scheduling.step_plan import Outcome, StepPlan
from attar.text.grammars import Vocabulary
from attar.text.tokenizer import Detokenizer, Tokenizer
from attar.transfer.listener import PrefillAsked

OWN = "\0peer "  # what ids of the engine's own requests begin with, and no others
RECENT = 256  # steps whose times are kept until they are told

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine: `blocks` blocks of cache, and sequences of at most `context` tokens.

    kv: scheme of the KV cache, by default the lossless one. adapters: names of those that `lora.install` gave the
    decoder, in the order of their numbers. overlaps: whether steps are launched before the tokens of the one before are
    known, and tokens chosen without a look at the logits; by default on a GPU. drafter: the source of drafts of
    speculative decoding, none by default. draft_tokens: drafts of a sequence in each step; None decides by what pays.
    draft_tree: nodes of a sequence's tree of drafts in each step; None where drafts are chains. sparse: which layers
    read few keys in rows of outputs, and how many; None where all read all. prefill: how rows of prompts read few
    keys; None where they read all. sliding_blocks: blocks of layers with a sliding window, which are released behind
    it; by default those have `blocks` too. evictions: policies of KV eviction that requests may name; the first is
    that of requests which name none. tower: what computes the features of images, of which `image_cache` bytes are
    kept; without one, requests have no images. saved: where finished blocks are saved, and fetched from; None: nowhere.
    peer: the engine that computes prompts for this one, or the place where this one does so for others; None: neither.
    """

    blocks: int
    context: int
    limits: SchedulerConfig = field(default_factory=SchedulerConfig)
    eos_ids: frozenset[int] = frozenset()
    kv: KvScheme | None = None
    adapters: tuple[str, ...] = ()
    overlaps: bool | None = None
    drafter: Drafter | None = None
    draft_tokens: int | None = None
    draft_tree: int | None = None
    sparse: SparseLayers | None = None
    prefill: SparsePrefill | None = None
    sliding_blocks: int = 0
    tells_cache: bool = False
    evictions: tuple[Eviction, ...] = ()
    saved: SavedBlocks | None = None
    peer: PeerBlocks | None = None
    tower: VisionTower | None = None
    image_cache: int = IMAGE_CACHE


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
        self.decoder, self.tokenizer, self.eos_ids, self.clock = decoder, tokenizer, config.eos_ids, clock
        limits, scheme = config.limits, config.kv or decoder.lossless
        kv_cache.check(decoder, scheme)
        if config.draft_tree is not None:
            kv_cache.check_trees(decoder, scheme)
        if config.sparse is not None:
            config.sparse.settings.check(scheme, decoder.device.type, trees=config.draft_tree is not None)
        if config.prefill is not None:
            config.prefill.check(decoder.device.type, trees=config.draft_tree is not None)
        for eviction in config.evictions:
            kv_cache.check_eviction(decoder, scheme, eviction, config.context)
            few = config.sparse is not None or config.prefill is not None
            eviction.check(scheme, trees=config.draft_tree is not None, sparse=few)
            eviction.check_room(config.blocks)
        bases = kv_cache.bases(decoder, scheme)
        counts = BlockCounts(config.blocks, config.sliding_blocks)
        self.runner = runner(decoder, counts, config.context, scheme, limits.together, bases, record, limits.max_drafts)
        self.sparse = None if config.sparse is None else SparseReads(config.sparse)
        if config.sparse is not None:
            self.runner.read_few(config.sparse)
        self.prefill = None if config.prefill is None else PrefillReads(config.prefill, decoder.config)
        if config.prefill is not None:
            self.runner.prefill_few(config.prefill)
        self.evictions = {str(eviction): eviction for eviction in config.evictions}
        if self.evictions:
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
                self.runner.keep = reader.layers
        forces = limits.max_drafts > 0 and tokenizer is not None and not self.overlaps
        if config.drafter is not None or forces:
            nodes = config.draft_tree
            number = config.draft_tokens if nodes is None else nodes
            pace = Pace(MAX_DRAFT_TOKENS if number is None else number, number is not None, limits.max_drafts)
            forcing = None if tokenizer is None else ForcedDrafter(tokenizer)
            vocab_size = decoder.config.vocab_size
            self.speculation = Speculation(config.drafter, pace, vocab_size, forcing, nodes is not None)
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
            rows = limits.max_step_tokens - limits.together + 1 - limits.max_drafts
            self.images = Images(config.tower, config.image_cache, decoder.dtype, images, self.cache.flush, rows)
            self.runner.take_images(self.images.rows, config.tower.rotary)
        whole = None if config.sparse is None else config.sparse.settings.whole
        self.scheduler = Scheduler(self.pool, self.cache, limits, whole, self.sliding, config.prefill)
        self.moves: BlockMoves | None = None
        if config.saved is not None or config.peer is not None:
            self.moves = BlockMoves(
                self.scheduler, self.runner.pages, config.saved, config.peer, clock, self._compute, self.cancel
            )
        self.context = config.context
        self.adapters = {"": 0, **{name: number for number, name in enumerate(config.adapters, 1)}}
        self._own = itertools.count()  # numbers of the engine's own requests
        self.steps = self.generated = 0
        self.step_seconds = 0.0
        self._recent: deque[tuple[int, int, int, float]] = deque(maxlen=RECENT)
        self.requests = RequestTable(self.scheduler, clock)
        self.masks = GrammarMasks(self._vocabulary, decoder.config.vocab_size)

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
        prompt = None
        try:
            eviction = self._eviction(ask.params.kv_eviction)
            request = self._new(ask.id, ask.prompt, ask.params.seeded(), eviction)
            prompt = self._with_images(ask, eviction)
            if ask.grammar is not None:
                ask.grammar.check(ask.params)
                if self.tokenizer is None:
                    raise Refused("invalid", "the model has no tokenizer: a constraint needs one")
            if ask.params.stop and self.tokenizer is None:
                raise Refused("invalid", "the model has no tokenizer: stop strings need one, stop_token_ids do not")
            longest = min(ask.params.max_tokens, self._context(eviction) - len(ask.prompt))
            self.scheduler.require_room(ask.n)  # before what a long prompt makes costly
            request.of_prompt = None if ask.params.prompt_logprobs is None or ask.generated else {}
            if ask.params.repetition_penalty != 1.0:
                request.seen = distinct([id for id in prompt.ids if id >= 0], self.decoder.config.vocab_size)
            for number, known in enumerate(resumed(ask, self.decoder.config.vocab_size)):
                if known is None:
                    continue
                bypass = request.of_prompt is not None and number == 0
                choice = self._choice(request, number, longest, ask, bypass, prompt)
                choice.resume(known)
                request.choices.append(choice)
            self.requests.add(request)
            if self.images is not None:
                self.images.begin(choice.sequence for choice in request.choices)
        except Exception as error:
            self.requests.refuse(ask.id, error)
        else:
            self._fetch(request, ask)
        finally:
            if self.images is not None and prompt is not None:
                self.images.settle(prompt)

    def embed(self, ask: Embed) -> None:
        """Take a request for an embedding."""
        try:
            request = self._new(ask.id, ask.prompt, SamplingParams(max_tokens=0, temperature=0, seed=0))
            request.pooling = ask.pooling
            request.choices.append(self._choice(request, 0, 0, ask, bypass=ask.pooling == "mean"))
            self.requests.add(request)
        except Exception as error:
            self.requests.refuse(ask.id, error)
        else:
            self._fetch(request, ask)

    def cancel(self, id: str) -> None:
        """Cancel a request; its `Failed` comes with the next events."""
        self.requests.fail(id, "cancelled")

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

    # ---- taking requests

    def _fetch(self, request: Request, ask: Submit | Embed) -> None:
        """Let a request that was queued wait for blocks of its prompt, where there are some; a failure is logged."""
        if self.moves is not None:
            try:
                sequences = [choice.sequence for choice in request.choices]
                self.moves.consider(sequences, ask.cache_salt, ask.adapter)
            except AssertionError:
                raise
            except Exception:
                logger.exception("request %s fetches nothing", request.id)

    def _eviction(self, name: str | None) -> Eviction | None:
        """Return the policy of a request that names one, or none. Raises Refused for one that is not offered."""
        if name is None:
            return next(iter(self.evictions.values()), None)
        if name != NONE and name not in self.evictions:
            raise Refused("invalid", f"KV eviction {name[:80]!r}: offered are {', '.join((NONE, *self.evictions))}")
        return self.evictions.get(name)

    def _context(self, eviction: Eviction | None) -> int:
        """Return the tokens that prompt and output may have together."""
        return self.context if eviction is None else eviction.longest(self.context)

    def _new(
        self, id: str, prompt: tuple[int, ...], params: SamplingParams, eviction: Eviction | None = None
    ) -> Request:
        point("engine.submit", id)
        vocab = self.decoder.config.vocab_size
        running = {choice.request.id for choice in self.requests.choices.values()}  # also one that ends with this step
        if id in running:
            raise Refused("invalid", "a request of this id is running")
        if not prompt:
            raise Refused("invalid", "the prompt is empty")
        image_token = None if self.images is None else self.images.tower.image_token  # some lie behind the vocabulary
        if not all(0 <= token < vocab or token == image_token for token in prompt):
            raise Refused("invalid", f"a token id lies outside the model's vocabulary 0..{vocab - 1}")
        if len(prompt) + (params.max_tokens > 0) > (most := self._context(eviction)):
            words = f"this model's maximum context length is {most} tokens; the prompt has {len(prompt)}"
            raise Refused("too_long", words)
        named = self._specials(params)
        ending = frozenset(params.stop_token_ids) | named.keys() | (frozenset() if params.ignore_eos else self.eos_ids)
        return Request(
            id, prompt, params, ending, named, sparse=None if self.sparse is None else self.sparse.layers,
            eviction=eviction, prefill=None if self.prefill is None else self.prefill.settings,
        )  # fmt: skip

    def _with_images(self, ask: Submit, eviction: Eviction | None) -> Prompt:
        """Return a request's prompt with ids for its images. Raises Refused for what does not go with images."""
        if ask.images:
            if self.images is None:
                raise Refused("invalid", "this model is served without images")
            if ask.params.prompt_logprobs is not None:
                raise Refused("invalid", "prompt_logprobs: the tokens of an image have no log probabilities")
            if eviction is not None:
                raise Refused("invalid", f"KV eviction {eviction}: not in a request with images")
        return Prompt(ask.prompt) if self.images is None else self.images.take(ask)

    def _vocabulary(self) -> Vocabulary:
        assert self.tokenizer is not None
        return Vocabulary.of(self.tokenizer, self.decoder.config.vocab_size, self.eos_ids)

    def _specials(self, params: SamplingParams) -> dict[int, str]:
        """Return the stop strings that are special tokens, by token: no text ever shows those."""
        if self.tokenizer is None:
            return {}
        found = {self.tokenizer.token_to_id(stop): stop for stop in params.stop}
        return {token: stop for token, stop in found.items() if token in self.tokenizer.special_ids}

    def _choice(
        self, request: Request, number: int, longest: int, ask: Submit | Embed, bypass: bool,
        given: Prompt | None = None,
    ) -> Choice:  # fmt: skip
        prompt = Prompt(ask.prompt) if given is None else given
        if ask.adapter not in self.adapters:
            raise Refused("invalid", f"the engine has no adapter {ask.adapter[:80]!r}")
        adapter = self.adapters[ask.adapter]
        sequence = Tokens(
            id=f"{request.id}#{number}", prompt_ids=prompt.ids, max_tokens=longest, bypass=bypass, adapter=adapter,
            priority=ask.priority if isinstance(ask, Submit) else 0,
            deadline=None if ask.deadline is None else self.clock() + ask.deadline,
            cache_salt=salt_of(adapter, ask.cache_salt),
            horizons=self.runner.horizons, eviction=request.eviction,
            images=prompt.own_spans(), positions=prompt.positions, shift=prompt.shift,
        )  # fmt: skip
        point("engine.choice", sequence.id)
        params = request.params
        assert params.seed is not None
        own = replace(params, seed=seed_of_choice(params.seed, number))
        vocab = self.decoder.config.vocab_size
        seen = request.prompt if request.seen is None else request.seen
        mask = self._mask(ask, sequence.id, request.ending) if isinstance(ask, Submit) else None
        if params.allowed_token_ids:
            if params.min_tokens and request.ending.issuperset(params.allowed_token_ids):
                raise Refused("invalid", "min_tokens: every one of allowed_token_ids ends the output")
            mask = AllowedMask(params.allowed_token_ids, vocab, mask)
        sampler = Sampler(own, seen, vocab, name=sequence.id, mask=mask, ending=request.ending)
        visible = params.visible_token_ids
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, request.prompt, visible=visible)
        return Choice(request, number, sequence, sampler, detokenizer, StopChecker(own.stop))

    def _mask(self, ask: Submit, name: str, ending: frozenset[int]) -> Mask | None:
        """Return the mask of a choice called `name`; None where every token may come at any time."""
        grammar = None if ask.grammar is None else self.masks.mask(ask.grammar, ask.cache_salt, name)
        if (section := ask.reasoning) is None or (grammar is None and section.budget is None):
            return grammar
        vocab = self.decoder.config.vocab_size
        if max(section.start, section.end) >= vocab:
            raise Refused("invalid", f"a reasoning marker lies outside the model's vocabulary 0..{vocab - 1}")
        return ReasoningMask(section, vocab, grammar, ending)

    def _compute(self, asked: PrefillAsked) -> None:
        """Compute a peer's prompt as a request of the engine's own, and lend the peer its blocks."""
        ask, id = asked.ask, f"{OWN}{next(self._own)}"

        def done(event: Event) -> None:
            moves = self.moves
            if moves is None or isinstance(event, Failed):
                asked.reply.put(None)
                return
            horizon = horizon_of(self.runner.horizons, len(asked.tokens))
            moves.lend(asked, salt_of(self.adapters[ask.adapter], ask.salt, horizon))

        self.requests.own[id], asked.request = done, id
        self.embed(Embed(id, tuple(asked.tokens), "last", ask.seconds, ask.adapter, ask.salt))

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
            except Exception:
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
