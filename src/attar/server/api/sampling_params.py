"""Parameters of one request: its fields as `SamplingParams`, with the checks that need the model or the queue.

A refusal gives both numbers: what was asked for, and what there may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attar.faults import point
from attar.protocol.messages import Ready
from attar.protocol.request import MAX_SEED, SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.api.anthropic import AnthropicBody
from attar.server.api.schemas import ALL_THAT_FIT, ChatBody, CompletionBody, Sampling
from attar.server.errors import APIError
from attar.server.prompt_room import in_vocabulary
from attar.strict_json import shown
from attar.text.forms.infill import Infill

DEFAULT_COMPLETION = 16  # tokens: /v1/completions, as OpenAI has it
LISTED = 4  # wrong keys in an error
MAX_LOGPROBS = 3_000_000  # per answer, alternatives included: 20 for each token of a context of 128K, and more


def context(body: Sampling, ready: Ready) -> int:
    """Return the tokens that prompt and output may have together. Raises APIError for a policy of KV eviction that the
    server does not offer."""
    if (found := ready.room(body.kv_eviction)) is None:
        offered = ", ".join(("none", *(name for name, _ in ready.kv_evictions)))
        message = f"kv_eviction: {shown(body.kv_eviction or '')} is not offered here, but {offered}"
        raise APIError("invalid_value", message, "kv_eviction")
    return found


def completion_params(
    body: CompletionBody, prompts: Sequence[Sequence[int]], ready: Ready, most: int, caller: Caller,
    defaults: Mapping[str, Any],
) -> SamplingParams:  # fmt: skip
    """Make the parameters of completions of `prompts`, of which `most` choices each could ever wait together. Without a
    limit, -1, they may fill the context, within the key's allowance. `defaults` are parameters that bodies need not
    name. Raises APIError."""
    given = {**defaults, **_common(body, ready.vocab_size)}
    n, room = body.n or 1, context(body, ready) - max(map(len, prompts))
    made = body.best_of or n
    if body.logprobs is not None:
        given["logprobs"] = 0 if body.logprob_token_ids else body.logprobs
        if body.echo:
            given["prompt_logprobs"] = body.logprobs
    elif made > n:
        given["logprobs"] = 0  # needed to rank the choices
    wanted = DEFAULT_COMPLETION if body.limit is None else body.limit
    if wanted == ALL_THAT_FIT:
        wanted = caller.allowance(sum(map(len, prompts)), made * len(prompts)) or min(room, ready.context)
    params = SamplingParams(max_tokens=min(wanted, room), **given)
    check_choices(made, most, "best_of" if made > n else "n")
    check_logprobs(prompts, params, made, bool(body.stream) or body.logprobs is None)
    return params


def chat_params(
    body: ChatBody, prompt: Sequence[int], ready: Ready, most: int, caller: Caller, defaults: Mapping[str, Any]
) -> SamplingParams:
    """Make the parameters of a chat; without a limit it may fill the context, within the key's allowance. `most` and
    `defaults` are as in `completion_params`. Raises APIError."""
    given = {**defaults, **_common(body, ready.vocab_size)}
    n, room = body.n or 1, context(body, ready) - len(prompt)
    wanted = body.most or caller.allowance(len(prompt), n) or min(room, ready.context)
    if body.logprobs:
        given["logprobs"] = 0 if body.logprob_token_ids else body.top_logprobs or 0
    params = SamplingParams(max_tokens=min(wanted, room), **given)
    check_choices(n, most, "n")
    check_logprobs([prompt], params, n, bool(body.stream))
    return params


def ended(params: SamplingParams, infill: Infill | None) -> SamplingParams:
    """Return parameters of a middle, which a token that begins another file ends too."""
    assert infill is not None
    return replace(params, stop_token_ids=(*params.stop_token_ids, *infill.ends))


def anthropic_params(body: AnthropicBody, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
    """Make the parameters of Anthropic's messages, whose prompt leaves `room` tokens of the context."""
    given: dict[str, Any] = {"temperature": body.temperature, "stop": body.stop_sequences}
    given |= filters(body.top_k, body.top_p)
    return SamplingParams(max_tokens=min(body.max_tokens, room), **{**defaults, **present(given)})


def check_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, stream: bool) -> None:
    """Raise APIError where an answer would have too many log probabilities. A stream keeps none of its choices'."""
    read = 0 if params.prompt_logprobs is None else sum(map(len, prompts)) * (params.prompt_logprobs + 1)
    each = 0 if params.logprobs is None else params.logprobs + len(params.logprob_token_ids) + 1
    made = 0 if stream else len(prompts) * params.max_tokens * each
    if (count := n * (read + made)) > MAX_LOGPROBS:
        message = (
            f"logprobs: up to {count} of them are more than the {MAX_LOGPROBS} that an answer may have: ask for fewer "
            "prompts, choices, tokens (max_tokens) or likely ones for each"
        )
        raise APIError("out_of_range", message, "logprobs")


def check_choices(n: int, most: int, name: str) -> None:
    """Raise APIError where a prompt's choices could never wait together."""
    if n > most:
        message = (
            f"{name}: {n} choices of a prompt are more than the {most} that one key may have waiting: ask for fewer"
        )
        raise APIError("out_of_range", message, name)


_PLAIN = (
    "min_tokens", "temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
    "stop", "prompt_logprobs", "kv_eviction",
)  # fmt: skip


def _common(body: Sampling, vocab: int) -> dict[str, Any]:
    given: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN}
    given |= filters(body.top_k, body.top_p)
    if body.speculation is not None:
        given |= {"draft_tokens": body.speculation.max_tokens, "trust_forced": body.speculation.trust_forced}
    given["seed"] = seed_of(body.seed)
    if body.stop_token_ids:
        in_vocabulary(body.stop_token_ids, vocab, "stop_token_ids")
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logprob_token_ids:
        in_vocabulary(body.logprob_token_ids, vocab, "logprob_token_ids")
        given["logprob_token_ids"] = tuple(body.logprob_token_ids)
    if body.allowed_token_ids:
        in_vocabulary(body.allowed_token_ids, vocab, "allowed_token_ids")
        given["allowed_token_ids"] = tuple(body.allowed_token_ids)
    given["logit_bias"] = _biases(body.logit_bias, vocab)
    return present(given)


def seed_of(seed: int | None) -> int | None:
    """Return a request's seed as `SamplingParams` has it."""
    return None if seed is None else seed % (MAX_SEED + 1)  # each of OpenAI's seeds is one of ours


def _biases(biases: Mapping[str, float] | None, vocab: int) -> dict[int, float] | None:
    def is_token(key: str) -> bool:
        # Canonical numbers only: with two spellings of one token, one bias would be lost.
        return key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key and int(key) < vocab

    wrong = [shown(key) for key in biases or () if not is_token(key)]
    if wrong:
        told = ", ".join(wrong[:LISTED]) + (", ..." if len(wrong) > LISTED else "")
        message = f"logit_bias: {told}: none of its keys, which are token ids, 0 to {vocab - 1}"
        raise APIError("invalid_value", message, "logit_bias")
    return {int(key): bias for key, bias in biases.items()} if biases else None


def filters(top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Return `top_k` and `top_p` as `SamplingParams` has them."""
    if top_p == 0:  # the smallest nucleus
        return {"top_k": 1}
    return {"top_k": None if top_k is None else max(0, top_k), "top_p": top_p}  # -1 is another server's word for all


def present(given: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that are given."""
    point("params.build")
    return {name: value for name, value in given.items() if value is not None}
