"""Conversion of a request's fields to `SamplingParams`; the remaining checks need the vocabulary and the context."""

from __future__ import annotations

from typing import Any

from attar.faults import point
from attar.protocol.request import MAX_SEED, SamplingParams
from attar.server.admission.request_limits import in_vocabulary
from attar.server.api.anthropic_schemas import AnthropicBody
from attar.server.api.schemas import ChatBody, CompletionBody, Sampling
from attar.server.errors import APIError

DEFAULT_COMPLETION = 16  # tokens: /v1/completions, as OpenAI has it


def completion_params(body: CompletionBody, room: int, vocab: int) -> SamplingParams:
    """Make the parameters of a completion whose prompt leaves `room` tokens of the context."""
    given = _common(body, vocab)
    wanted = DEFAULT_COMPLETION if body.max_tokens is None else body.max_tokens
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = body.logprobs
    elif (body.best_of or 1) > (body.n or 1):
        given["logprobs"] = 0  # needed to rank the choices
    return SamplingParams(max_tokens=min(wanted, room), **given)


def chat_params(body: ChatBody, room: int, vocab: int, allowance: int | None = None) -> SamplingParams:
    """Make the parameters of a chat; without a limit it may fill the context, within the key's `allowance`."""
    given = _common(body, vocab)
    wanted = body.max_completion_tokens or body.max_tokens or (room if allowance is None else allowance)
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return SamplingParams(max_tokens=min(wanted, room), **given)


def anthropic_params(body: AnthropicBody, room: int) -> SamplingParams:
    """Make the parameters of Anthropic's messages."""
    given: dict[str, Any] = {"temperature": body.temperature, "stop": body.stop_sequences}
    given |= _filters(body.top_k, body.top_p)
    return SamplingParams(max_tokens=min(body.max_tokens, room), **_present(given))


_PLAIN = (
    "temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos", "stop"
)  # fmt: skip


def _common(body: Sampling, vocab: int) -> dict[str, Any]:
    given: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN}
    given |= _filters(body.top_k, body.top_p)
    given["seed"] = None if body.seed is None else body.seed % (MAX_SEED + 1)  # each of OpenAI's seeds is one of ours
    if body.stop_token_ids:
        in_vocabulary(body.stop_token_ids, vocab, "stop_token_ids")
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias:
        for key in body.logit_bias:
            # Canonical numbers only: with two spellings of one token, one bias would be lost.
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key and int(key) < vocab):
                message = f"logit_bias: keys are token ids, 0 to {vocab - 1}"
                raise APIError("invalid_value", message, "logit_bias")
        given["logit_bias"] = {int(key): bias for key, bias in body.logit_bias.items()}
    return _present(given)


def _filters(top_k: int | None, top_p: float | None) -> dict[str, Any]:
    if top_p == 0:  # the smallest nucleus
        return {"top_k": 1}
    return {"top_k": None if top_k is None else max(0, top_k), "top_p": top_p}  # -1 is another server's word for all


def _present(given: dict[str, Any]) -> dict[str, Any]:
    point("params.build")
    return {name: value for name, value in given.items() if value is not None}
