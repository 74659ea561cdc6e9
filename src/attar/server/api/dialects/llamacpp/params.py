"""Sampling parameters of llama.cpp's routes, and how answers tell of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attar.protocol.messages import Ready
from attar.protocol.request import SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.api.dialects.llamacpp.fields import DEFAULTS, NativeSampling
from attar.server.api.sampling_params import check_choices, check_logprobs, filters, present, seed_of
from attar.server.api.schemas import ALL_THAT_FIT, MAX_BIASES
from attar.server.errors import APIError

BANNED = -100.0
"""The bias of a token that is never to come, as in OpenAI's API."""
RANDOM = -1  # as a seed


async def biases(
    body: NativeSampling, vocab: int, encode: Callable[[str], Awaitable[Sequence[int]]]
) -> dict[int, float]:
    """Return the biases of tokens; a text's is that of each of its tokens, which `encode` finds. Of two for one token
    the last counts. Raises APIError for a token beyond the vocabulary, and for too many."""
    found: dict[int, float] = {}
    for key, bias in body.biases():
        tokens = [key] if isinstance(key, int) else await encode(key)
        for token in tokens:
            if token >= vocab:
                message = f"logit_bias: token ids are 0 to {vocab - 1}, not {token}"
                raise APIError("out_of_range", message, "logit_bias")
            found[token] = BANNED if bias is False else float(bias)
        if len(found) > MAX_BIASES:
            message = f"logit_bias: its texts have more than {MAX_BIASES} tokens"
            raise APIError("out_of_range", message, "logit_bias")
    return found


def native_params(
    body: NativeSampling, prompts: Sequence[Sequence[int]], ready: Ready, most: int, caller: Caller,
    biased: Mapping[int, float], defaults: Mapping[str, Any],
) -> SamplingParams:  # fmt: skip
    """Make the parameters of answers to `prompts`, of which `most` choices each could ever wait together: those of the
    body, the server's `defaults`, then llama.cpp's; without a limit as many tokens as fit. Raises APIError."""
    names = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "stop")
    given: dict[str, Any] = {name: getattr(body, name) for name in names} | filters(body.top_k, body.top_p)
    given |= {"seed": None if body.seed == RANDOM else seed_of(body.seed), "repetition_penalty": body.repetition()}
    given |= {"ignore_eos": getattr(body, "ignore_eos", None), "logprobs": getattr(body, "n_probs", None) or None}
    n, room = getattr(body, "n_cmpl", None) or 1, ready.context - max(map(len, prompts))
    wanted = body.limit
    if wanted is None or wanted == ALL_THAT_FIT:
        wanted = caller.allowance(sum(map(len, prompts)), n * len(prompts)) or room
    given = {**DEFAULTS, **defaults, **present(given)}
    params = SamplingParams(max_tokens=min(wanted, room), logit_bias=biased, **given)
    check_choices(n, most, "n_cmpl")
    check_logprobs(prompts, params, n, bool(body.stream))
    return params


def settings(params: SamplingParams, n_predict: int | None = None, stream: bool = False) -> dict[str, Any]:
    """Return llama.cpp's `generation_settings` of these parameters; `n_predict` is the limit that was asked for."""
    return {
        "seed": RANDOM if params.seed is None else params.seed, "temperature": params.temperature,
        "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
        "repeat_last_n": -1, "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty,
        "typical_p": 1.0, "mirostat": 0, "dynatemp_range": 0.0, "xtc_probability": 0.0, "dry_multiplier": 0.0,
        "top_n_sigma": -1.0, "stop": list(params.stop), "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
        "n_probs": params.logprobs or 0, "stream": stream,
        **dict.fromkeys(("n_predict", "max_tokens"), ALL_THAT_FIT if n_predict is None else n_predict),
    }  # fmt: skip
