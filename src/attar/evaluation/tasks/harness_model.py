"""A decoder of attar's as a model of the harness: log-likelihoods of continuations, and greedy texts.

Log-likelihoods are of the same calls of the decoder as in `attar eval` on a text: float32 unless `--dtype` says
otherwise, without a cache. Several requests run in one call, one behind the other without padding, and the LM head is
applied to the rows that are scored. Requests with equal inputs, as of choices of one token, run once.

The tokenizer decides about BOS, as everywhere in attar. The harness does so for a server only with `add_bos_token`.

Legend: R rows in a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor

from attar.errors import UserError
from attar.kernels import ops
from attar.metrics.perplexity import nll
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.progress import Progress
from attar.text.tokenizer import Tokenizer

ROWS_AT_ONCE = 2048  # tokens of one call: bounds the memory of activations, as an engine's step does
TEXTS_AT_ONCE = 16  # texts that are generated as one batch
MAX_NEW_TOKENS = 256  # of a text, where its task names no number: the harness's own default

Pair = tuple[list[int], list[int]]
"""Tokens of a context, and those of the continuation that is scored."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the library has no types
    """The harness's view of a decoder and its tokenizer. `context` is the most tokens that a call may see of a
    request; longer contexts lose their beginning. `progress` is told of requests that are done."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, context: int, progress: Progress) -> None:
        super().__init__()
        self.decoder, self.tokens, self.context, self.told = decoder, tokenizer, context, progress

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text. Raises UserError where the tokenizer has none."""
        if (found := self.tokens.eos_id) is None:
            raise UserError("tokenizer_missing", "the tokenizer has no token that ends a text, which the task needs")
        return found

    @property
    def prefix_token_id(self) -> int:
        """Return the token in front of a continuation without a context: BOS, or what ends a text."""
        return self.eot_token_id if self.tokens.bos_id is None else self.tokens.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text, with BOS where the tokenizer puts it, unless `add_special_tokens` is
        False."""
        return self.tokens.encode(string, add_special_tokens is not False)

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Encode as the harness does, which gives the continuation what the whole has past as many tokens as the
        context has alone. Where that is nothing, it begins at the first token that differs."""
        front, back = super()._encode_pair(context, continuation)
        return (front, back) if back else self.cut(front, self.tok_encode(context + continuation))

    @staticmethod
    def cut(front: list[int], whole: list[int]) -> Pair:
        """Return the tokens of a context, and those of the whole that are its continuation, as `_encode_pair`."""
        if len(whole) > len(front):
            return front, whole[len(front) :]
        same = next((i for i, (a, b) in enumerate(zip(front, whole, strict=False)) if a != b), len(front))
        cut = max(1, min(same, len(whole) - 1))  # leaves a token to predict, and one to predict it from
        return whole[:cut], whole[cut:]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats given its context, and whether greedy decoding would write
        it; without the harness's bar."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the context that do not overlap."""
        found = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.context, 1)
            pairs = [(seen[: len(seen) - len(wanted) + 1], wanted) for seen, wanted in windows]
            found.append(sum(value for value, _ in self.score(pairs)))
        return found

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats, and whether every token of it was the most probable.

        Raises UserError for a continuation longer than the context, and where logits are not finite.
        """
        inputs: dict[tuple[int, ...], list[int]] = {}  # indices of pairs with these inputs
        for i, (context, continuation) in enumerate(pairs):
            if len(continuation) > self.context:
                message = f"a continuation of {len(continuation)} tokens is longer than the context of {self.context}"
                raise UserError("context_exceeded", message)
            ids = tuple((context + continuation)[-(self.context + 1) :][:-1])
            inputs.setdefault(ids, []).append(i)
        found: dict[int, tuple[float, bool]] = {}
        for batch in _batches(inputs):
            found |= self._of_batch(batch, pairs)
            self.told("evaluating", len(found), len(pairs))
        return [found[i] for i in range(len(pairs))]

    def _of_batch(
        self, batch: Mapping[tuple[int, ...], Sequence[int]], pairs: Sequence[Pair]
    ) -> dict[int, tuple[float, bool]]:
        lengths = tuple(map(len, batch))
        rows: list[int] = []
        starts: dict[int, tuple[int, int]] = {}  # of each pair: its first row of logits, and their number
        end = 0
        for ids, members in batch.items():
            end += len(ids)
            most = max(len(pairs[i][1]) for i in members)
            for i in members:
                starts[i] = len(rows) + most - len(pairs[i][1]), len(pairs[i][1])
            rows += range(end - most, end)
        device = self.decoder.device
        fed = torch.tensor([token for ids in batch for token in ids], device=device)
        logits = self.decoder.forward(
            fed, ForwardBatch(lengths, lengths, device=device), torch.tensor(rows, device=device)
        ).cpu()  # [R, V]
        return {i: scored(logits[first : first + count], pairs[i][1]) for i, (first, count) in starts.items()}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return greedy continuations, each up to the first of its stop strings, an end of text, or its most tokens.

        Raises UserError for settings that sample.
        """
        texts: list[str] = []
        for at in range(0, len(requests), TEXTS_AT_ONCE):
            some = requests[at : at + TEXTS_AT_ONCE]
            texts += self._continued(
                [request.args[0] for request in some], [ends_of(request.args[1]) for request in some]
            )
            self.told("generating", len(texts), len(requests))
        return texts

    def _continued(self, prompts: Sequence[str], ends: Sequence[tuple[tuple[str, ...], int]]) -> list[str]:
        most = max(count for _, count in ends)
        kept = max(self.context - most, self.context // 2)  # a prompt gives way to its text, down to half
        fed = [self.tok_encode(prompt)[-kept:] for prompt in prompts]
        lengths = tuple(map(len, fed))
        most = min(most, self.context - max(lengths) + 1)  # the last token is not fed again
        cache = self.decoder.cache(max(lengths) + most - 1, len(prompts))
        device = self.decoder.device
        ids = torch.tensor([token for each in fed for token in each], device=device)
        rows = torch.tensor(lengths, device=device).cumsum(0) - 1
        horizons = tuple(length + most - 1 for length in lengths)
        made: list[list[int]] = [[] for _ in prompts]
        texts: list[str | None] = [None] * len(prompts)
        for _ in range(most):
            logits = self.decoder.forward(ids, ForwardBatch(lengths, horizons, cache, device=device), rows)
            ids = ops.argmax(logits)
            for i, token in enumerate(ids.tolist()):
                if texts[i] is None:
                    made[i].append(token)
                    texts[i] = self.ended(made[i], *ends[i])
            if all(text is not None for text in texts):
                break
            lengths, rows = (1,) * len(prompts), torch.arange(len(prompts), device=device)
        return [text if text is not None else self.tokens.decode(ids) for text, ids in zip(texts, made, strict=True)]

    def ended(self, made: list[int], stops: tuple[str, ...], most: int) -> str | None:
        """Return the text of `made` where it has ended, else None."""
        over = made[-1] in self.tokens.eos_ids
        text = self.tokens.decode(made[:-1] if over else made)
        cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
        if cut is not None:
            return text[:cut]
        return text if over or len(made) >= most else None


def scored(logits: Tensor, wanted: Sequence[int]) -> tuple[float, bool]:
    """Return the log-likelihood of tokens by logits [N, V], and whether each was the most probable. Raises UserError
    where logits are not finite."""
    if not logits.isfinite().all():
        raise UserError("not_finite", "the logits of the model hold a NaN or an infinity: its weights are damaged")
    tokens = torch.tensor(wanted)
    return -nll(logits, tokens).sum().item(), bool((ops.argmax(logits) == tokens).all())


def ends_of(settings: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the stop strings and the most tokens of a text. Raises UserError for settings that sample."""
    if settings.get("do_sample") or settings.get("temperature", 0.0):
        raise UserError("task_malformed", "the task samples its texts: greedy texts are supported")
    until = settings.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    most = settings.get("max_gen_toks", settings.get("max_new_tokens", MAX_NEW_TOKENS))
    return tuple(stop for stop in stops if stop), int(most)


def _batches(inputs: Mapping[tuple[int, ...], list[int]]) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """Yield the inputs in order, as many at a time as `ROWS_AT_ONCE` holds, at least one."""
    batch: dict[tuple[int, ...], list[int]] = {}
    rows = 0
    for ids, members in inputs.items():
        if batch and rows + len(ids) > ROWS_AT_ONCE:
            yield batch
            batch, rows = {}, 0
        batch[ids] = members
        rows += len(ids)
    if batch:
        yield batch
