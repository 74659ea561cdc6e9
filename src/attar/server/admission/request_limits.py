"""Limits on what one request may ask for; a refusal gives both numbers."""

from __future__ import annotations

from collections.abc import Sequence

from attar.protocol.request import SamplingParams
from attar.server.errors import APIError

MAX_LOGPROBS = 3_000_000  # per answer, alternatives included: 20 for each token of a context of 128K, and more


def written(prompts: Sequence[tuple[int, ...]], params: SamplingParams, n: int, stream: bool) -> None:
    """Raise APIError, with both numbers, where an answer would have too many log probabilities. A stream keeps none of
    its choices'."""
    read = 0 if params.prompt_logprobs is None else sum(map(len, prompts)) * (params.prompt_logprobs + 1)
    made = 0 if params.logprobs is None or stream else len(prompts) * params.max_tokens * (params.logprobs + 1)
    if (count := n * (read + made)) > MAX_LOGPROBS:
        message = (
            f"logprobs: up to {count} of them are more than the {MAX_LOGPROBS} that an answer may have: ask for fewer "
            "prompts, choices, tokens (max_tokens) or likely ones for each"
        )
        raise APIError("out_of_range", message, "logprobs")


def fits(n: int, most: int, name: str) -> None:
    """Raise APIError, with both numbers, where a prompt's choices could never wait together."""
    if n > most:
        message = (
            f"{name}: {n} choices of a prompt are more than the {most} that one key may have waiting: ask for fewer"
        )
        raise APIError("out_of_range", message, name)


def room(prompts: Sequence[tuple[int, ...]], context: int, name: str, new: int = 1) -> int:
    """Return the tokens that the longest prompt leaves of the context, at least `new`. Raises APIError with both."""
    longest = max(map(len, prompts))
    if longest + new > context:
        raise beyond(str(longest), new, context, name)
    return context - longest


def beyond(tokens: str, new: int, context: int, name: str) -> APIError:
    """Make the refusal of a prompt of `tokens`, a phrase, that has no room in the context with `new` more."""
    message = f"{name}: {tokens} tokens, which with {new} to come are more than this model's context of {context}"
    return APIError("context_length_exceeded", message, name)


def in_vocabulary(tokens: Sequence[int], vocab: int, name: str) -> None:
    """Raise APIError unless all tokens are in the vocabulary."""
    if tokens and max(tokens) >= vocab:
        raise APIError("out_of_range", f"{name}: token ids are 0 to {vocab - 1}, not {max(tokens)}", name)
