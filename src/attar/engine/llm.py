"""`LLM`: a checkpoint that answers. Prompts in, completions out, in this process.

One sequence runs at a time. That is slower than a batch; the kernels would give a prompt the same tokens in one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints import hf, hub, receipt
from attar.checkpoints.safetensors import VerificationError
from attar.engine.decoding import Decoding
from attar.engine.request import Completion, FinishReason, SamplingParams, TokenLogprob
from attar.engine.sampler import BadLogits, Sampler, sample
from attar.engine.stops import StopChecker
from attar.kernels import ops
from attar.model.cache import KVCache, Step
from attar.model.decoder import Decoder
from attar.text.template import render_chat
from attar.text.tokenizer import Detokenizer, Tokenizer

PREFILL_ROWS = 2048  # prompt rows of one forward call: bounds the memory of activations

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Progress = Callable[[str, int, int], None]


class LLM:
    """A model ready to generate. `model` is a folder, a Hub id or `demo`.

    On loading, one probe of the checkpoint's receipt is replayed, unless `verify` is false: a checkpoint that does not
    compute what it did when it was made is refused.

    `dtype` is what is computed in: float32 by the native kernels, others by the reference. `activations` says how rows
    meet weights of a scheme that leaves them alone: rounded to int8 on the fly, with one scale a row (`int8`) or for
    every 128 or 32 columns (`int8g128`, `int8g32`), or `exact`.

    Raises ValueError where the model cannot be loaded, VerificationError (a ValueError) where it fails its probe.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        activations: str = "int8g128",
        verify: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.path = hub.resolve(model)
        report = progress or (lambda stage, done, total: None)
        computed = hf.compute_dtype(dtype)
        store = ops.store(activations) if computed == torch.float32 else None
        self.decoder: Decoder = hf.load(self.path, computed, partial(report, "loading"), store)
        self.receipt = receipt.read_receipt(self.path)
        if verify and self.receipt is not None:
            verdict = receipt.verify(self.path, self.decoder, hashes=False, probes="one")
            if not verdict.ok:
                raise VerificationError(
                    f"{self.path} does not compute what its receipt says: it diverges at {verdict.first_divergence}. "
                    "`attar verify` checks the files; --no-verify loads it all the same"
                )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text: those of the generation config, else the tokenizer's."""
        declared = self.decoder.config.eos_ids
        if declared or not self._has_tokenizer:
            return frozenset(declared)
        return frozenset() if self.tokenizer.eos_id is None else frozenset({self.tokenizer.eos_id})

    @property
    def context(self) -> int:
        """Positions of prompt and output together."""
        return self.decoder.config.context

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits float32 [N, vocab] of a sequence of N token ids, one row a position."""
        ids = self._checked(token_ids)
        return self.decoder.forward(torch.tensor(ids), Step((len(ids),), len(ids), self.decoder.cache(len(ids))))

    def generate(self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Continue each prompt (text or token ids); one completion a prompt, in order."""
        several = [prompts] if _is_prompt(prompts) else list(prompts)
        return [_drain(self.stream(prompt, params)) for prompt in several]  # type: ignore[arg-type]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Completion:
        """Answer a conversation of {"role", "content"} messages through the model's chat template.

        `template` are further variables of the template, such as `tools` or `enable_thinking`.
        """
        return _drain(self.stream_chat(messages, params, **template))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Generator[str, None, Completion]:
        """As `chat`, piece by piece."""
        tokenizer = self.tokenizer
        text = render_chat(
            tokenizer.chat_template(bool(template.get("tools"))), messages,
            bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, **template,
        )  # fmt: skip
        return self.stream(tokenizer.encode_chat(text), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[str, None, Completion]:
        """Yield the text piece by piece, never half a character; the generator's return value is the Completion."""
        params = params or SamplingParams()
        ids = self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        return self._run(ids, params)

    def _run(self, ids: list[int], params: SamplingParams) -> Generator[str, None, Completion]:
        room = self.context - len(ids)
        if room < 1:
            raise ValueError(f"the prompt has {len(ids)} tokens and the model a context of {self.context}: shorten it")
        longest = len(ids) + min(params.max_tokens, room)
        cache = self.decoder.cache(longest)
        sampler = Sampler(params, ids, self.decoder.config.vocab_size)
        detokenizer = Detokenizer(self.tokenizer, ids) if self._has_tokenizer else None
        stops = StopChecker(params.stop)
        if params.stop and detokenizer is None:
            raise ValueError(f"{self.path} has no tokenizer: stop strings need one, stop_token_ids do not")
        ending = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        text = ""
        reason: FinishReason = "length"
        decoding = Decoding(self.decoder, cache, longest)
        row = self._prefill(ids, cache, longest)
        while True:
            drawn = sample(row, [sampler])[0]
            if isinstance(drawn, BadLogits):
                raise drawn
            tokens.append(drawn.token_id)
            sampler.commit(drawn.token_id)
            if drawn.logprobs is not None:
                logprobs.append(drawn.logprobs)
            if drawn.token_id in ending:
                reason = "stop"
                break
            if detokenizer is not None and (piece := stops.push(detokenizer.push(drawn.token_id))):
                text += piece
                yield piece
            if stops.done:
                reason = "stop"
                break
            if len(ids) + len(tokens) == longest:
                break
            row = decoding.step([drawn.token_id])
        cut = stops.done
        if detokenizer is not None and not cut:
            piece = stops.push(detokenizer.flush()) + stops.flush()
            reason = "stop" if stops.done else reason
            if piece:
                text += piece
                yield piece
        return Completion(
            text,
            tuple(tokens),
            reason,
            tuple(ids),
            tuple(logprobs) if params.logprobs is not None else None,
            sampler.seed,
        )

    def _prefill(self, ids: list[int], cache: KVCache, horizon: int) -> Tensor:
        """Run the prompt; returns the logits [1, vocab] after its last token."""
        last = torch.empty(0)
        for start in range(0, len(ids), PREFILL_ROWS):
            piece = torch.tensor(ids[start : start + PREFILL_ROWS])
            last = self.decoder.forward(piece, Step((len(piece),), horizon, cache), torch.tensor([len(piece) - 1]))
        return last

    @cached_property
    def _has_tokenizer(self) -> bool:
        return any((self.path / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model"))

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        """Token ids as a list, each in the vocabulary; of an empty prompt, the model's BOS."""
        ids = [int(i) for i in token_ids] or list(self.decoder.config.bos_ids[:1])
        if not ids:
            raise ValueError("the prompt is empty and the model has no BOS token to begin from")
        vocab = self.decoder.config.vocab_size
        if not all(0 <= i < vocab for i in ids):
            raise ValueError(f"a token id lies outside the model's vocabulary 0..{vocab - 1}")
        return ids


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Sequence) and len(value) > 0 and all(isinstance(i, int) for i in value)
    )


def _drain(stream: Generator[str, None, Completion]) -> Completion:
    while True:
        try:
            next(stream)
        except StopIteration as end:
            completion: Completion = end.value
            return completion
