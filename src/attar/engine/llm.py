"""`LLM`: a checkpoint that generates text. Prompts in, completions out, by an engine in this process.

Prompts of one call run together, up to `TOGETHER` at a time, and so do those of calls that are under way at the same
time, such as streams that are read in turn. On CPUs with native kernels each prompt gets the tokens that it would get
alone.

A call that wants more runs the next step of all calls (`LLM._step`). Events for other calls wait in these calls' own
queues, until they are read.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attar.checkpoints.adapters import lora
from attar.checkpoints.generation_config import sampling as recommended
from attar.checkpoints.sources import hub
from attar.engine.engine import Engine, EngineConfig
from attar.engine.loader import Parallel, load_model
from attar.engine.speculation import drafter
from attar.errors import UserError
from attar.execution.parallel.executor import WorkerLost
from attar.kernels import dispatch
from attar.model.cache import BLOCK, ForwardBatch
from attar.progress import Progress
from attar.protocol.grammar import Constraint, Grammar
from attar.protocol.messages import Delta, Failed, Finished, PromptLogprobs, Submit
from attar.protocol.reasoning import ReasoningSection
from attar.protocol.request import Completion, FinishReason, SamplingParams, TokenLogprob
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.speculation import FORCED_STEP_DRAFTS, MAX_STEP_DRAFTS, check_draft
from attar.sampling.sampler import counted
from attar.text.answers.events import AnswerParser, Plain
from attar.text.answers.reasoning import Place, ReasoningMarkers, ReasoningParser, reasoning_and_text
from attar.text.grammar_proof import Prover
from attar.text.grammars import Vocabulary
from attar.text.literal import LiteralChat
from attar.text.template import render_chat
from attar.text.tokenizer import Tokenizer

PREFILL_ROWS = 2048  # rows of one step: bounds the memory of activations
TOGETHER = 16  # prompts
TAIL = 64  # tokens at the end of a prompt that show whether a reasoning section is open
ROOM = 2048  # least tokens of an engine's cache, for one prompt or several: a second stream is to find some

Said = Delta | PromptLogprobs | Finished | Failed
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(eq=False)
class Answer:
    """A prompt and its output so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None
    section: ReasoningSection | None = None
    parser: AnswerParser = field(default_factory=Plain)
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    of_prompt: tuple[TokenLogprob, ...] | None = None
    reason: FinishReason | None = None

    def take(self, event: Said) -> None:
        """Add an event. Raises ValueError where the request has failed."""
        match event:
            case Failed():
                raise UserError("request_refused", event.message)
            case Finished():
                self.reason = event.reason
            case PromptLogprobs():
                self.of_prompt = event.logprobs
            case Delta():
                self.tokens += event.token_ids
                self.text.append(event.text)
                self.logprobs += event.logprobs or ()

    def completion(self) -> Completion:
        assert self.reason is not None, "an answer that has not ended"
        logprobs = None if counted(self.params) is None else tuple(self.logprobs)
        reasoning, text = reasoning_and_text([*self.parser.feed("".join(self.text)), *self.parser.close()])
        return Completion(
            text, tuple(self.tokens), self.reason, self.prompt, logprobs, self.params.seed, self.of_prompt, reasoning
        )


@dataclass(eq=False)
class Call:
    """Requests of one call, and their events that it has not read."""

    answers: dict[str, Answer]
    said: deque[Said] = field(default_factory=deque)
    broken: bool = False  # True where the engine was lost with the call's requests


class LLM:
    """A model ready to generate. `model` is a folder, a GGUF file, a Hub id or `demo`.

    On loading, one probe of the checkpoint's receipt is replayed, unless `verify` is false: a checkpoint that does not
    reproduce its recorded results is refused.

    `generation_config` is where sampling parameters come from for calls without any: `attar`, the defaults of
    `SamplingParams`, or `model`, whose recommended ones are in `sampling`. `SamplingParams(**llm.sampling, ...)` adds
    others to these.

    `device` is `cpu`, or `cuda`, an NVIDIA GPU, or `cuda:1`, the second. `dtype` is the number format of computation:
    on CPUs float32 by the native kernels (by default), others by the reference; on `cuda` bfloat16 (by default),
    float16 or float32. `activations` is the precision of activations for weight-only schemes: rounded to int8 on the
    fly, with one scale a row (`int8`) or for every 128 or 32 columns (`int8g128`, `int8g32`), or `exact`. On `cuda`
    they stay exact.

    `draft` is the source of drafts of speculative decoding: `suffix` copies from prompt and text; otherwise it is a
    smaller model with the same tokenizer, named like `model`; `suffix,MODEL` copies where it finds a long match, and
    asks the model elsewhere. Drafts change no text on CPUs, only its speed.
    `draft_tokens` is the number of drafts in each step, up to 16; None decides by what pays.

    `parallel` says how many processes share the model (`loader.py`). No probe is replayed then: it would report
    rounding that one process does not have. `close` ends the processes, as does this one's end.

    Calls may be under way side by side: several streams, read in turn, or a `generate` between two pieces of a stream.
    They share every step, so the texts of unread streams grow as well, and wait to be read; a stream that is closed, or
    garbage-collected, ends. A call for which the cache is too small gets a larger one when all calls under way have
    ended. All calls must come from one thread at a time; an LLM raises where two meet in it.

    Raises ValueError where the model cannot be loaded or the device cannot compute, VerificationError (a ValueError)
    where it fails its probe.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        activations: str = "int8g128",
        parallel: Parallel | None = None,
        draft: str | None = None,
        draft_tokens: int | None = None,
        verify: bool = True,
        generation_config: Literal["attar", "model"] = "attar",
        progress: Progress | None = None,
    ) -> None:
        dispatch.require(device)  # before anything is downloaded
        check_draft(draft, draft_tokens)
        draft = hub.resolve_draft(draft)
        path = hub.resolve(model)
        self.sampling = recommended(path) if generation_config == "model" else {}
        self.model = load_model(
            path, device=device, dtype=dtype, activations=activations, parallel=parallel, verify=verify,
            progress=progress,
        )  # fmt: skip
        self.decoder = self.model.decoder
        self._draft_tokens = draft_tokens
        self._drafter = drafter(draft, self.model, self.context, TOGETHER, activations=activations, verify=verify)
        self._literal: LiteralChat | None = None
        self._prover: Prover | None = None
        self._engine: Engine | None = None
        self._ids = itertools.count()
        self._calls: dict[str, Call] = {}  # calls of open requests, by request id
        self._left: list[str] = []  # requests to be ended, whose calls were given up
        self._busy = threading.Lock()

    def attach(self, adapter: str | Path) -> None:
        """Attach a low-rank adapter, a folder in PEFT's format, beside the weights, unmerged. Raises ValueError where
        it does not fit, and ends the processes that share the model then."""
        try:
            lora.attach(self.decoder, Path(adapter), self.model.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes that share the model, where there are several."""
        self.model.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError where it has none."""
        return self.model.tokenizer

    @property
    def context(self) -> int:
        """Tokens that prompt and output may have together."""
        return self.decoder.config.context

    @property
    def drafts(self) -> tuple[int, int]:
        """Drafts that were verified since the cache was made, and of these the right ones."""
        speculation = None if self._engine is None else self._engine.speculation
        return (0, 0) if speculation is None else (speculation.drafted, speculation.accepted)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits float32 [N, vocab] of a sequence of N token ids, one row a position."""
        ids = self._checked(token_ids)
        step = ForwardBatch((len(ids),), len(ids), self.decoder.cache(len(ids)))
        return self.decoder.forward(torch.tensor(ids, device=self.decoder.device), step).cpu()

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None, *,
        constraint: Constraint | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Continue each prompt (text or token ids); one completion a prompt, in order. They run together.

        With a `constraint` (`protocol/grammar.py`), each text that ends with `stop` satisfies it, and one cut by
        `max_tokens` begins like one that does. Raises UserError for a constraint that cannot be enforced.
        """
        several: list[Prompt] = [prompts] if _is_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        answers = [self._answer(prompt, params, constraint) for prompt in several]
        for _ in self._run(answers):
            pass
        return [answer.completion() for answer in answers]

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *,
        constraint: Constraint | None = None, **template: Any,
    ) -> Completion:  # fmt: skip
        """Answer a conversation of {"role", "content"} messages through the model's chat template. `template` are
        further variables of the template, such as `tools` or `enable_thinking`. What the model says in its reasoning
        section is the completion's `reasoning`; a constraint holds behind it."""
        answer = self._chat_answer(messages, params, constraint, template)
        for _ in self._run([answer]):
            pass
        return answer.completion()

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *,
        constraint: Constraint | None = None, **template: Any,
    ) -> Generator[str, None, Completion]:  # fmt: skip
        """Answer like `chat`, and yield the text piece by piece, a reasoning section and its markers included; the
        generator's return value is the Completion."""
        return self._pieces(self._chat_answer(messages, params, constraint, template))

    def reasoning_parser(
        self, prompt: Sequence[int], exact: bool = False, inner: AnswerParser | None = None
    ) -> AnswerParser:
        """Return a parser for the pieces of an answer to a chat's prompt, which splits reasoning from text; `exact`
        as a constraint needs it (`text/answers/reasoning.py`). `inner` splits the text further."""
        inner = inner or Plain()
        if (markers := self._markers) is None:
            return inner
        return ReasoningParser(markers, self._place(markers, prompt), inner, exact)

    @property
    def _markers(self) -> ReasoningMarkers | None:
        return ReasoningMarkers.of(self.tokenizer, self.tokenizer.chat_templates.get("default"))

    def _place(self, markers: ReasoningMarkers, prompt: Sequence[int]) -> Place:
        return markers.place(self.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False))

    def _chat_answer(
        self, messages: Sequence[Message], params: SamplingParams | None, constraint: Constraint | None,
        template: Mapping[str, Any],
    ) -> Answer:  # fmt: skip
        answer = self._answer(self.encode_chat(messages, **template), params, constraint)
        answer.parser = self.reasoning_parser(answer.prompt, exact=constraint is not None)
        if (markers := self._markers) is not None:
            place = self._place(markers, answer.prompt)
            answer.section = markers.section(place)
            visible = (*answer.params.visible_token_ids, *markers.visible)
            answer.params = replace(answer.params, visible_token_ids=visible)
            if constraint is not None and place is Place.INSIDE and answer.section is None:
                message = f"no constraint while the model reasons: its vocabulary has no token {markers.end!r}"
                raise UserError("option_conflict", message)
        return answer

    def encode_chat(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Return the token ids of a conversation, with the assistant's turn opened, as `chat` gives them to the model.
        Special tokens that a message or a tool spells stay text (`literal.py`). Raises ValueError where there is no
        template, or it fails."""
        tokenizer = self.tokenizer
        source = tokenizer.chat_template(bool(template.get("tools")))

        def render(said: Sequence[Message], more: Mapping[str, Any]) -> str:
            return render_chat(source, said, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, **more)

        if self._literal is None:
            self._literal = LiteralChat(tokenizer)
        return self._literal.encode(messages, render, template)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, constraint: Constraint | None = None
    ) -> Generator[str, None, Completion]:
        """Yield the text piece by piece, never half a character; the generator's return value is the Completion."""
        return (yield from self._pieces(self._answer(prompt, params, constraint)))

    def _pieces(self, answer: Answer) -> Generator[str, None, Completion]:
        for delta in self._run([answer]):
            if delta.text:
                yield delta.text
        return answer.completion()

    def _proven(self, constraint: Constraint, params: SamplingParams) -> Grammar:
        """Return a constraint's grammar, once it is proven."""
        grammar = Grammar.of(constraint)
        grammar.check(params)
        self.prove(grammar)
        return grammar

    def prove(self, grammar: Grammar) -> None:
        """Raise GrammarError for a grammar that no mask can keep."""
        if self._prover is None:
            ends = self.model.eos_ids
            self._prover = Prover(Vocabulary.of(self.tokenizer, self.decoder.config.vocab_size, ends))
        self._prover.prove(grammar)

    def _answer(self, prompt: Prompt, params: SamplingParams | None, constraint: Constraint | None) -> Answer:
        ids = self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if len(ids) >= self.context:
            raise UserError(
                "context_exceeded",
                f"the prompt has {len(ids)} tokens and the model a context of {self.context}: shorten it",
            )
        own = (params or SamplingParams(**self.sampling)).seeded()
        return Answer(tuple(ids), own, None if constraint is None else self._proven(constraint, own))

    def _run(self, answers: Sequence[Answer]) -> Iterator[Delta]:
        """Run requests to their ends, and yield their new tokens. Raises ValueError for one that fails, RuntimeError
        where the engine was lost."""
        if not answers:
            return
        engine = self._engine_for(answers)
        call = Call({f"{next(self._ids)}": answer for answer in answers})
        left = set(call.answers)
        try:
            with self._alone():
                self._calls |= dict.fromkeys(call.answers, call)
                for id, answer in call.answers.items():
                    engine.submit(
                        Submit(id, answer.prompt, answer.params, grammar=answer.grammar, reasoning=answer.section)
                    )
            del engine  # a larger one may replace it before all is read
            while left:
                while not call.said:
                    if call.broken:
                        raise RuntimeError("this answer shared a step with another call, and that was broken off")
                    self._step()
                event = call.said.popleft()
                call.answers[event.id].take(event)
                if isinstance(event, Finished):
                    left.remove(event.id)
                elif isinstance(event, Delta):
                    yield event
        finally:  # the reader may stop early
            self._let_go(left)

    def _step(self) -> None:
        """Run a step of all open requests, and queue its events for their calls."""
        with self._alone():
            engine = self._engine
            assert engine is not None
            while self._left:
                engine.requests.drop(self._left.pop())
            if engine.idle:
                raise RuntimeError("the engine has nothing more to say, and an answer has not ended")
            try:
                events = engine.step()
            except BaseException as error:
                self._engine = None  # its state is unknown
                for call in self._calls.values():
                    call.broken = True
                self._calls.clear()
                if isinstance(error, WorkerLost):
                    raise RuntimeError(f"the model is no longer there: {error}") from error
                raise
            for event in events:
                if isinstance(event, Said) and (asked := self._calls.get(event.id)) is not None:
                    asked.said.append(event)
                    if isinstance(event, Finished | Failed):
                        self._calls.pop(event.id, None)

    def _let_go(self, ids: Iterable[str]) -> None:
        """End requests of a call that was given up. Python's collector may call this in the middle of a step: then they
        end with the next one."""
        for id in ids:
            self._calls.pop(id, None)
            self._left.append(id)
        if self._engine is not None and not self._busy.locked():
            while self._left:
                self._engine.requests.drop(self._left.pop())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Guard changes of the engine. Raises RuntimeError where another call is changing it."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("an LLM answers in one thread at a time: have a lock around its calls, or a server")
        try:
            yield
        finally:
            self._busy.release()

    def _engine_for(self, answers: Sequence[Answer]) -> Engine:
        """Return the engine of the last call, with its prefix cache, if it has room. A larger one replaces it when all
        requests in the old one have ended, even if their events are not read yet."""
        lengths = [min(len(answer.prompt) + answer.params.max_tokens, self.context) for answer in answers]
        longest = max(lengths)
        blocks = max(min(len(lengths), TOGETHER) * -(-longest // BLOCK), ROOM // BLOCK)
        old = self._engine
        if old is None or old.context < longest or old.pool.total < blocks:
            while self._calls:
                self._step()
            self._engine = None  # free the old one's memory first
            context = min(self.context, max(ROOM, 1 << (longest - 1).bit_length()))
            if old is not None:
                context, blocks = max(context, old.context), max(blocks, old.pool.total)
                del old
            limits = SchedulerConfig(
                max_running=TOGETHER, max_step_tokens=PREFILL_ROWS, max_waiting=sys.maxsize, headroom=0.0,
                max_drafts=FORCED_STEP_DRAFTS if self._drafter is None else MAX_STEP_DRAFTS,
            )  # fmt: skip
            tokenizer = self.tokenizer if self.model.has_tokenizer else None
            config = EngineConfig(
                blocks, context, limits, self.model.eos_ids, drafter=self._drafter, draft_tokens=self._draft_tokens
            )
            self._engine = Engine(self.decoder, tokenizer, config, runner=self.model.runner)
        assert self._engine is not None
        return self._engine

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        """Return token ids as a list, each in the vocabulary; for an empty prompt, the model's BOS."""
        ids = [int(i) for i in token_ids] or list(self.decoder.config.bos_ids[:1])
        if not ids:
            raise UserError("prompt_empty", "the prompt is empty and the model has no BOS token to begin from")
        vocab = self.decoder.config.vocab_size
        if not all(0 <= i < vocab for i in ids):
            raise UserError("token_out_of_vocabulary", f"a token id lies outside the model's vocabulary 0..{vocab - 1}")
        return ids


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Sequence) and len(value) > 0 and all(isinstance(i, int) for i in value)
    )
