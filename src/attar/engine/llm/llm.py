"""`LLM`: a checkpoint that generates text. Prompts in, completions out, by an engine in this process.

Prompts of one call run together, up to `TOGETHER` at a time, and so do those of calls that are under way at the same
time, such as streams that are read in turn (`running.py`). On CPUs with native kernels each prompt gets the tokens that
it would get alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attar.checkpoints import image_settings
from attar.checkpoints.adapters import lora
from attar.checkpoints.generation_config import sampling as recommended
from attar.checkpoints.sources import hub
from attar.engine.images.limits import NO_TENSORS, against_images, tower_of
from attar.engine.llm.answer import Answer
from attar.engine.llm.chats import Chats, Message
from attar.engine.llm.images import ImagePrompts, taken
from attar.engine.llm.running import TOGETHER, Running
from attar.engine.loader import Parallel, load_model
from attar.engine.speculation import drafter
from attar.errors import UserError
from attar.execution import kv_cache
from attar.kernels import dispatch
from attar.kv.eviction import parse_all
from attar.kv.schemes import scheme
from attar.kv.sparse import SparseAttention
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.cache import ForwardBatch
from attar.model.vision.against import Beside
from attar.progress import Progress
from attar.protocol.grammar import Constraint, Grammar
from attar.protocol.images import ImageInput
from attar.protocol.request import Completion, SamplingParams
from attar.protocol.speculation import check_draft
from attar.text.answers.events import AnswerEvent
from attar.text.answers.reasoning import Place
from attar.text.forms.infill import File
from attar.text.forms.rerank import INSTRUCTION, score
from attar.text.grammar_proof import Prover
from attar.text.grammars import Vocabulary
from attar.text.tokenizer import Tokenizer
from attar.text.tools.calling import Calling
from attar.text.tools.given import ChoiceLike, ToolLike, tool_use
from attar.text.tools.openai import ToolUse

Prompt = str | Sequence[int]


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
    `draft_tokens` is the number of drafts in each step, up to 16; None decides by what pays. `draft_tree` is the number
    of nodes of a tree of drafts, 2 to 16, which heads of Medusa and EAGLE make; None makes chains.

    `sparse_attention` lets tokens of answers read few keys of a long context: `topk:512` the most important 512, and
    `topk:1/16` a sixteenth. None reads all. Prompts always do. It is for CPUs, and finds key statistics on loading.
    `sparse_prefill` lets tokens of prompts read few keys, but for the last of each: `tri-shape` the first and the
    newest, and `skip` what matters. None reads all. It is for CPUs.

    `kv_eviction` drops keys of long texts: `sink:4+2044` keeps the first 4 tokens and the newest 2,044, and texts run
    past the model's context; `snapkv:2048`, `h2o:2048` and `expected:2048` keep so many of a prompt. A list are
    policies that `SamplingParams.kv_eviction` may name, the default first.

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
        draft_tree: int | None = None,
        sparse_attention: str | None = None,
        sparse_prefill: str | None = None,
        kv_eviction: str | Sequence[str] = (),
        verify: bool = True,
        generation_config: Literal["attar", "model"] = "attar",
        progress: Progress | None = None,
    ) -> None:
        dispatch.require(device)  # before anything is downloaded
        check_draft(draft, draft_tokens, draft_tree)
        few = None if sparse_attention is None else SparseAttention.parse(sparse_attention)
        if few is not None:
            shared = parallel or Parallel()
            few.check(scheme("float32"), device, shared.tp * shared.pp, draft_tree is not None)
        of_prompts = None if sparse_prefill is None else SparsePrefill.parse(sparse_prefill)
        if of_prompts is not None:
            shared = parallel or Parallel()
            of_prompts.check(device, shared.tp * shared.pp, draft_tree is not None)
        self.evictions = parse_all((kv_eviction,) if isinstance(kv_eviction, str) else tuple(kv_eviction))
        """Policies of KV eviction that a call may name, the default first."""
        for eviction in self.evictions:
            shared = parallel or Parallel()
            reads_few, processes = few is not None or of_prompts is not None, shared.tp * shared.pp
            eviction.check(scheme("float32"), device, processes, trees=draft_tree is not None, sparse=reads_few)
        draft = hub.resolve_draft(draft)
        path = hub.resolve(model)
        config, why = tower_of(path)
        self.no_images = why or "this model has no vision tower"
        """Why calls have no images; empty where they may have some."""
        if config is not None:
            shared = parallel or Parallel()
            other = Beside(bool(self.evictions), few is not None or of_prompts is not None)
            self.no_images = against_images(config, device, shared.tp * shared.pp, draft, other) or ""
        self.sampling = recommended(path) if generation_config == "model" else {}
        self.model = load_model(
            path, device=device, dtype=dtype, activations=activations, parallel=parallel, verify=verify,
            images=not self.no_images, progress=progress,
        )  # fmt: skip
        if not self.no_images and self.model.tower is None:
            self.no_images = NO_TENSORS
        self.decoder = self.model.decoder
        for eviction in self.evictions:
            kv_cache.check_eviction(self.decoder, self.decoder.lossless, eviction, self.context)
        drafts = drafter(
            draft, self.model, self.context, TOGETHER, activations=activations, verify=verify,
            trees=draft_tree is not None,
        )  # fmt: skip
        sparse = None if few is None else kv_cache.sparse_layers_of(self.decoder, few, progress)
        self.running = Running(
            self.model, self.context, drafts, draft_tokens, draft_tree, sparse, of_prompts, self.evictions
        )
        self._known_chats: Chats | None = None
        self._prover: Prover | None = None

    def attach(self, adapter: str | Path) -> None:
        """Attach a low-rank adapter, a folder in PEFT's format, beside the weights, unmerged. Raises ValueError where
        it does not fit, and ends the processes that share the model then; RuntimeError while an answer is under way.
        """
        self.running.renew()
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
        speculation = None if self.running.engine is None else self.running.engine.speculation
        return (0, 0) if speculation is None else (speculation.drafted, speculation.accepted)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits float32 [N, vocab] of a sequence of N token ids, one row a position."""
        ids = self._checked(token_ids)
        step = ForwardBatch((len(ids),), len(ids), self.decoder.cache(len(ids)))
        return self.decoder.forward(torch.tensor(ids, device=self.decoder.device), step).cpu()

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None, *,
        constraint: Constraint | None = None, images: Sequence[Any] | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Continue each prompt (text or token ids); one completion a prompt, in order. They run together.

        `images` are those of a text prompt, in order, or a sequence of them for each of several prompts: paths, bytes
        of files, data: URLs or PIL images. The text has the model's image token, such as `<image>`, once for each.

        With a `constraint` (`protocol/grammar.py`), each text that ends with `stop` satisfies it, and one cut by
        `max_tokens` begins like one that does. Raises UserError for a constraint that cannot be enforced.
        """
        several: list[Prompt] = [prompts] if _is_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        seen: Sequence[Sequence[Any]] = [()] * len(several)
        if images is not None:
            seen = [images] if _is_prompt(prompts) else images
        if len(seen) != len(several):
            raise UserError("image_invalid", f"images of {len(seen)} prompts, of which there are {len(several)}")
        answers = [
            self._answer(*self._seeing(prompt, own), params, constraint)
            for prompt, own in zip(several, seen, strict=True)
        ]
        for _ in self.running.run(answers):
            pass
        return [answer.completion() for answer in answers]

    def rerank(self, query: str, documents: Sequence[str], instruction: str = INSTRUCTION) -> list[float]:
        """Return the relevance of each document to the query, from 0 to 1, in order: the probability of `yes` that a
        causal reranker, such as Qwen3-Reranker, gives. They are those of `/v1/rerank`. Raises UserError
        (`feature_unsupported`) for other models."""
        reranker = self._chats.reranker
        if reranker is None:
            message = "it is no causal reranker, which needs the tokens `yes` and `no` and Qwen3's chat markup"
            raise UserError("feature_unsupported", message)
        words = (reranker.no, reranker.yes)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=words)
        found = []
        for answer in self.generate([reranker.ids(query, each, instruction) for each in documents], params):
            assert answer.logprobs is not None
            told = dict(answer.logprobs[0].top)
            found.append(score(*(told[word] for word in words)))
        return found

    def infill(
        self, prefix: str, suffix: str, params: SamplingParams | None = None, files: Sequence[File] = ()
    ) -> Completion:
        """Fill in what comes between two texts, by the tokens that the model has for it. `files` are names and texts of
        others of the same repository. The prompt is that of `/infill`. Raises UserError (`feature_unsupported`) where
        the model has no such tokens."""
        infill = self._chats.infill
        if infill is None:
            raise UserError("feature_unsupported", "this model has no tokens to fill in the middle of a text")
        answer = self._answer(infill.ids(prefix, suffix, files), (), params, None)
        answer.params = replace(answer.params, stop_token_ids=(*answer.params.stop_token_ids, *infill.ends))
        for _ in self.running.run([answer]):
            pass
        return answer.completion()

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *,
        constraint: Constraint | None = None, tools: Sequence[ToolLike] | None = None, tool_choice: ChoiceLike = "auto",
        parallel_tool_calls: bool = True, **template: Any,
    ) -> Completion:  # fmt: skip
        """Answer a conversation of messages in OpenAI's shape through the model's chat template. `template` are further
        variables of the template, such as `enable_thinking`. What the model says in its reasoning section is the
        completion's `reasoning`; a constraint holds behind it. Content may be a list of parts, images among them:
        `{"type": "image", "image": ...}`, which is a path, the bytes of a file, a data: URL or a PIL image.

        `tools` are functions that the model may call: OpenAI's objects, or Python functions, described by docstring and
        type hints. Calls are the completion's `tool_calls`, and its text is without them; no function is run. They
        are the server's for the same request (`docs/tools.md`). `tool_choice` is `auto`, `none`, `required`, or
        OpenAI's object of one function or of allowed ones. With a `constraint` to JSON, an answer that does not call
        satisfies it.

        Raises UserError for what is refused, such as a result without its call (`tools_invalid`).
        """
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        answer = self._chat_answer(messages, params, constraint, use, template)
        for _ in self.running.run([answer]):
            pass
        return answer.completion()

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *,
        constraint: Constraint | None = None, tools: Sequence[ToolLike] | None = None, tool_choice: ChoiceLike = "auto",
        parallel_tool_calls: bool = True, **template: Any,
    ) -> Generator[str, None, Completion]:  # fmt: skip
        """Answer like `chat`, and yield the text piece by piece, a reasoning section, calls and their markers included;
        the generator's return value is the Completion."""
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        return self._pieces(self._chat_answer(messages, params, constraint, use, template))

    def chat_events(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *,
        constraint: Constraint | None = None, tools: Sequence[ToolLike] | None = None, tool_choice: ChoiceLike = "auto",
        parallel_tool_calls: bool = True, **template: Any,
    ) -> Generator[AnswerEvent, None, Completion]:  # fmt: skip
        """Answer like `chat`, and yield the events of text, reasoning and calls (`text/answers/events.py`); the
        generator's return value is the Completion."""
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        return self._events(self._chat_answer(messages, params, constraint, use, template))

    def _chat_answer(
        self, messages: Sequence[Message], params: SamplingParams | None, constraint: Constraint | None, use: ToolUse,
        template: Mapping[str, Any],
    ) -> Answer:  # fmt: skip
        chats = self._chats
        said, given = taken(messages)
        images = self._decoded(given)
        answer = self._answer(chats.with_tools(said, use.tools, template, images), images, params, constraint)
        if use.may_call:
            final = answer.grammar
            if final is not None and final.kind not in ("json_object", "json_schema"):
                raise UserError("option_conflict", "beside tools that may be called a constraint must be one to JSON")
            answer.calling = Calling.of(chats.tool_format(), use.tools, use.choice, self.prove, final)
            answer.grammar = answer.calling.grammar
        if answer.grammar is not None:
            answer.grammar.check(answer.params)
        answer.parser = chats.parser(answer.prompt, constraint is not None, answer.calling.parser())
        visible, markers = tuple(answer.params.visible_token_ids), chats.markers
        if markers is not None:
            place = chats.place(markers, answer.prompt)
            answer.section = markers.section(place)
            visible = (*visible, *markers.visible)
            if answer.grammar is not None and place is Place.INSIDE and answer.section is None:
                message = f"no constraint while the model reasons: its vocabulary has no token {markers.end!r}"
                raise UserError("option_conflict", message)
        answer.params = answer.calling.shown(answer.params, visible)
        return answer

    @property
    def _chats(self) -> Chats:
        if self._known_chats is None:
            self._known_chats = Chats(self.tokenizer, self._image_prompts)
        return self._known_chats

    @cached_property
    def _image_prompts(self) -> ImagePrompts | None:
        settings = image_settings.read(self.model.path)
        return None if settings is None else ImagePrompts(settings, self.tokenizer)

    def _decoded(self, given: Sequence[Any]) -> tuple[ImageInput, ...]:
        """Return images as the engine takes them. Raises UserError also where the model takes none."""
        if not given:
            return ()
        if self.no_images:
            raise UserError("feature_unsupported", f"no images: {self.no_images}")
        if self._image_prompts is None:
            raise UserError("feature_unsupported", "no images: the model's folder has no preprocessor_config.json")
        return self._image_prompts.decode(given)

    def _seeing(self, prompt: Prompt, given: Sequence[Any]) -> tuple[Prompt, tuple[ImageInput, ...]]:
        """Return a text prompt with the tokens of its images, and the images."""
        if not given:
            return prompt, ()
        if not isinstance(prompt, str):
            raise UserError("image_invalid", "a prompt with images is text, with the image token once for each")
        images = self._decoded(given)
        assert self._image_prompts is not None
        return self._image_prompts.expand(prompt, images), images

    def encode_chat(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Return the token ids of a conversation, with the assistant's turn opened, as `chat` gives them to the model.
        Special tokens that a message or a tool spells stay text (`literal.py`). Raises ValueError where there is no
        template, or it fails."""
        return self._chats.ids(messages, template)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, constraint: Constraint | None = None
    ) -> Generator[str, None, Completion]:
        """Yield the text piece by piece, never half a character; the generator's return value is the Completion."""
        return (yield from self._pieces(self._answer(prompt, (), params, constraint)))

    def _pieces(self, answer: Answer) -> Generator[str, None, Completion]:
        for delta in self.running.run([answer]):
            if delta.text:
                yield delta.text
        return answer.completion()

    def _events(self, answer: Answer) -> Generator[AnswerEvent, None, Completion]:
        told = 0
        for _ in self.running.run([answer]):
            new, told = answer.events[told:], len(answer.events)
            yield from new
        yield from answer.events[told:]
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

    def _answer(
        self, prompt: Prompt, images: tuple[ImageInput, ...], params: SamplingParams | None,
        constraint: Constraint | None,
    ) -> Answer:  # fmt: skip
        ids = self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, bool(images))
        own = (params or SamplingParams(**self.sampling)).seeded()
        if len(ids) >= (most := self._room(own)):
            raise UserError(
                "context_exceeded", f"the prompt has {len(ids)} tokens and the model a context of {most}: shorten it"
            )
        grammar = None if constraint is None else self._proven(constraint, own)
        return Answer(tuple(ids), own, grammar, images=images)

    def _room(self, params: SamplingParams) -> int:
        """Return the tokens that prompt and output may have together."""
        name = params.kv_eviction
        named = (each for each in self.evictions if name is None or str(each) == name)
        eviction = next(named, None)
        return self.context if eviction is None else eviction.longest(self.context)

    def _checked(self, token_ids: Sequence[int], images: bool = False) -> list[int]:
        """Return token ids as a list, each in the vocabulary; for an empty prompt, the model's BOS. With `images` the
        image token may lie behind the vocabulary."""
        ids = [int(i) for i in token_ids] or list(self.decoder.config.bos_ids[:1])
        if not ids:
            raise UserError("prompt_empty", "the prompt is empty and the model has no BOS token to begin from")
        vocab = self.decoder.config.vocab_size
        also = self.model.tower.image_token if images and self.model.tower is not None else None
        if not all(0 <= i < vocab or i == also for i in ids):
            raise UserError("token_out_of_vocabulary", f"a token id lies outside the model's vocabulary 0..{vocab - 1}")
        return ids


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Sequence) and len(value) > 0 and all(isinstance(i, int) for i in value)
    )
