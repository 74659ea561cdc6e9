"""The intake of requests: what is checked of a message, and the request that is made of it.

A request becomes one sequence a choice. Each has a sampler of its own, seeded by the request's seed and the choice's
number. It samples by (seed, index of the token), so that batching, preemption and the contents of the prefix cache
cannot change a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attar.engine.config import EngineConfig
from attar.engine.images.images import Images, Prompt
from attar.engine.requests.outputs import Choice, Request, resumed
from attar.engine.requests.table import RequestTable
from attar.faults import point
from attar.kernels.noise import seed_of_choice
from attar.kv.eviction import NONE, Eviction
from attar.model.decoder import Decoder
from attar.protocol.block_digests import horizon_of, salt_of
from attar.protocol.messages import Embed, Submit
from attar.protocol.request import SamplingParams
from attar.sampling.masks import AllowedMask, GrammarMasks
from attar.sampling.reasoning import ReasoningMask
from attar.sampling.sampler import Mask, Sampler, distinct
from attar.sampling.stop_strings import StopChecker
from attar.scheduling.admission import Refused
from attar.scheduling.sequence import Sequence as Tokens
from attar.text.grammars import Vocabulary
from attar.text.tokenizer import Detokenizer, Tokenizer


class Intake:
    """The way of messages into a request table. What is refused ends with an event there.

    Without a tokenizer, stop strings and constraints are refused; without `images`, those are. `horizons` are those of
    `Sequence`. `clock` is the scheduler's.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer | None, config: EngineConfig, requests: RequestTable,
        images: Images | None, horizons: tuple[int, ...], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._vocab_size = decoder.config.vocab_size
        self._tokenizer, self._eos_ids, self._context = tokenizer, config.eos_ids, config.context
        self.adapters = {"": 0, **{name: number for number, name in enumerate(config.adapters, 1)}}
        self.evictions = {str(eviction): eviction for eviction in config.evictions}
        self._sparse, self._prefill = config.sparse, config.prefill
        self._requests, self._images, self._horizons, self._clock = requests, images, horizons, clock
        self.masks = GrammarMasks(self._vocabulary, self._vocab_size)

    def submit(self, ask: Submit) -> Request | None:
        """Queue a request, and return it; None where it was refused."""
        prompt = None
        try:
            eviction = self._eviction(ask.params.kv_eviction)
            request = self._new(ask.id, ask.prompt, ask.params.seeded(), eviction)
            prompt = self._with_images(ask, eviction)
            if ask.grammar is not None:
                ask.grammar.check(ask.params)
                if self._tokenizer is None:
                    raise Refused("invalid", "the model has no tokenizer: a constraint needs one")
            if ask.params.stop and self._tokenizer is None:
                raise Refused("invalid", "the model has no tokenizer: stop strings need one, stop_token_ids do not")
            longest = min(ask.params.max_tokens, self._longest(eviction) - len(ask.prompt))
            self._requests.require_room(ask.n)  # before what a long prompt makes costly
            request.of_prompt = None if ask.params.prompt_logprobs is None or ask.generated else {}
            if ask.params.repetition_penalty != 1.0:
                request.seen = distinct([id for id in prompt.ids if id >= 0], self._vocab_size)
            for number, known in enumerate(resumed(ask, self._vocab_size)):
                if known is None:
                    continue
                bypass = request.of_prompt is not None and number == 0
                choice = self._choice(request, number, longest, ask, bypass, prompt)
                choice.resume(known)
                request.choices.append(choice)
            self._requests.add(request)
            if self._images is not None:
                self._images.begin(choice.sequence for choice in request.choices)
        except Exception as error:  # whatever it is, it concerns this request alone
            self._requests.refuse(ask.id, error)
            return None
        finally:
            if self._images is not None and prompt is not None:
                self._images.settle(prompt)
        return request

    def embed(self, ask: Embed) -> Request | None:
        """Queue a request for an embedding, and return it; None where it was refused."""
        try:
            request = self._new(ask.id, ask.prompt, SamplingParams(max_tokens=0, temperature=0, seed=0))
            request.pooling = ask.pooling
            request.choices.append(self._choice(request, 0, 0, ask, ask.pooling == "mean", Prompt(ask.prompt)))
            self._requests.add(request)
        except Exception as error:  # whatever it is, it concerns this request alone
            self._requests.refuse(ask.id, error)
            return None
        return request

    def block_salt(self, adapter: str, salt: bytes, tokens: int) -> bytes:
        """Return the salt of the blocks of a prompt of so many tokens, whose API key has `salt`."""
        return salt_of(self.adapters[adapter], salt, horizon_of(self._horizons, tokens))

    def _eviction(self, name: str | None) -> Eviction | None:
        """Return the policy of a request that names one, or none. Raises Refused for one that is not offered."""
        if name is None:
            return next(iter(self.evictions.values()), None)
        if name != NONE and name not in self.evictions:
            raise Refused("invalid", f"KV eviction {name[:80]!r}: offered are {', '.join((NONE, *self.evictions))}")
        return self.evictions.get(name)

    def _longest(self, eviction: Eviction | None) -> int:
        """Return the tokens that prompt and output may have together."""
        return self._context if eviction is None else eviction.longest(self._context)

    def _new(
        self, id: str, prompt: tuple[int, ...], params: SamplingParams, eviction: Eviction | None = None
    ) -> Request:
        point("engine.submit", id)
        if self._requests.runs(id):
            raise Refused("invalid", "a request of this id is running")
        if not prompt:
            raise Refused("invalid", "the prompt is empty")
        image_token = None if self._images is None else self._images.tower.image_token  # some lie behind the vocabulary
        if not all(0 <= token < self._vocab_size or token == image_token for token in prompt):
            raise Refused("invalid", f"a token id lies outside the model's vocabulary 0..{self._vocab_size - 1}")
        if len(prompt) + (params.max_tokens > 0) > (most := self._longest(eviction)):
            words = f"this model's maximum context length is {most} tokens; the prompt has {len(prompt)}"
            raise Refused("too_long", words)
        named = self._specials(params)
        ends = frozenset() if params.ignore_eos else self._eos_ids
        ending = frozenset(params.stop_token_ids) | named.keys() | ends
        return Request(id, prompt, params, ending, named, sparse=self._sparse, eviction=eviction, prefill=self._prefill)

    def _with_images(self, ask: Submit, eviction: Eviction | None) -> Prompt:
        """Return a request's prompt with ids for its images. Raises Refused for what does not go with images."""
        if ask.images:
            if self._images is None:
                raise Refused("invalid", "this model is served without images")
            if ask.params.prompt_logprobs is not None:
                raise Refused("invalid", "prompt_logprobs: the tokens of an image have no log probabilities")
            if eviction is not None:
                message = f"KV eviction {eviction}: not in a request with images, which needs kv_eviction {NONE}"
                raise Refused("invalid", message)
        return Prompt(ask.prompt) if self._images is None else self._images.take(ask)

    def _vocabulary(self) -> Vocabulary:
        assert self._tokenizer is not None
        return Vocabulary.of(self._tokenizer, self._vocab_size, self._eos_ids)

    def _specials(self, params: SamplingParams) -> dict[int, str]:
        """Return the stop strings that are special tokens, by token: no text ever shows those."""
        if self._tokenizer is None:
            return {}
        found = {self._tokenizer.token_to_id(stop): stop for stop in params.stop}
        return {token: stop for token, stop in found.items() if token in self._tokenizer.special_ids}

    def _choice(
        self, request: Request, number: int, longest: int, ask: Submit | Embed, bypass: bool, prompt: Prompt
    ) -> Choice:
        if ask.adapter not in self.adapters:
            raise Refused("invalid", f"the engine has no adapter {ask.adapter[:80]!r}")
        adapter = self.adapters[ask.adapter]
        sequence = Tokens(
            id=f"{request.id}#{number}", prompt_ids=prompt.ids, max_tokens=longest, bypass=bypass, adapter=adapter,
            priority=ask.priority if isinstance(ask, Submit) else 0,
            deadline=None if ask.deadline is None else self._clock() + ask.deadline,
            cache_salt=salt_of(adapter, ask.cache_salt),
            horizons=self._horizons, eviction=request.eviction,
            images=prompt.own_spans(), positions=prompt.positions, shift=prompt.shift,
        )  # fmt: skip
        point("engine.choice", sequence.id)
        params = request.params
        assert params.seed is not None
        own = replace(params, seed=seed_of_choice(params.seed, number))
        seen = request.prompt if request.seen is None else request.seen
        mask = self._mask(ask, sequence.id, request.ending) if isinstance(ask, Submit) else None
        if params.allowed_token_ids:
            if params.min_tokens and request.ending.issuperset(params.allowed_token_ids):
                raise Refused("invalid", "min_tokens: every one of allowed_token_ids ends the output")
            mask = AllowedMask(params.allowed_token_ids, self._vocab_size, mask)
        sampler = Sampler(own, seen, self._vocab_size, name=sequence.id, mask=mask, ending=request.ending)
        tokenizer, visible = self._tokenizer, params.visible_token_ids
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, request.prompt, visible=visible)
        return Choice(request, number, sequence, sampler, detokenizer, StopChecker(own.stop))

    def _mask(self, ask: Submit, name: str, ending: frozenset[int]) -> Mask | None:
        """Return the mask of a choice called `name`; None where every token may come at any time."""
        grammar = None if ask.grammar is None else self.masks.mask(ask.grammar, ask.cache_salt, name)
        if (section := ask.reasoning) is None or (grammar is None and section.budget is None):
            return grammar
        if max(section.start, section.end) > (last := self._vocab_size - 1):
            raise Refused("invalid", f"a reasoning marker lies outside the model's vocabulary 0..{last}")
        return ReasoningMask(section, self._vocab_size, grammar, ending)
