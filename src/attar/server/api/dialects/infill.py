"""The route /infill of llama.cpp: the text between a prefix and a suffix, as editors ask for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from attar.protocol.messages import Delta, Failed, Finished
from attar.server.api.body import Body, Ignored
from attar.server.api.dialects.extras import timings
from attar.server.api.schemas import (
    Biases,
    Fraction,
    Limit,
    Penalty,
    Repetition,
    Seed,
    StopStrings,
    Temperature,
    TopK,
    check_stops,
)  # fmt: skip
from attar.server.errors import APIError
from attar.server.http import sse
from attar.server.request_handler import RequestHandler

encode = msgspec.json.encode

MAX_FILES = 256
DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Sampling parameters of llama.cpp, where a request names none."""

_OWN_ORDER = "Accepted and ignored: filters act in this server's order, and `infill` is none of them."
_NO_CLOCK = "Accepted and ignored: n_predict bounds an answer."


class File(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Another file of the repository."""

    text: str
    filename: Annotated[str, Meta(max_length=1024)] = "tmp"
    time: Ignored = None


class InfillBody(Body, frozen=True, kw_only=True):
    """Body of /infill. `prompt` is the beginning of the text asked for."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "n_keep": (0,), "n_probs": (0,), "n_indent": (0,), "typical_p": (1,), "mirostat": (0,), "dynatemp_range": (0,),
        "xtc_probability": (0,), "dry_multiplier": (0,), "repeat_penalty": (1,), "lora": ([],), "grammar": ("",),
    }  # fmt: skip

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[File], Meta(max_length=MAX_FILES)] | None = None
    prompt: str | None = None
    n_predict: Limit | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    stream: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None
    samplers: Annotated[Any, Meta(description=_OWN_ORDER)] = None
    t_max_prompt_ms: Annotated[Any, Meta(description=_NO_CLOCK)] = None
    t_max_predict_ms: Annotated[Any, Meta(description=_NO_CLOCK)] = None

    def __post_init__(self) -> None:
        check_stops(self.stop, "stop")


def _told(request: RequestHandler, model: str, text: str, tokens: list[int], end: Finished | None) -> dict[str, Any]:
    told: dict[str, Any] = {"index": 0, "content": text, "tokens": tokens, "stop": end is not None, "id_slot": -1}
    if end is None:
        return told | {"tokens_evaluated": request.prompt_tokens}
    kind = "limit" if end.reason == "length" else "eos" if end.stop is None else "word"
    spent = timings(request.reports, end.completion_tokens)
    return told | {
        "model": model, "tokens_predicted": end.completion_tokens, "tokens_evaluated": request.prompt_tokens,
        "has_new_line": "\n" in text, "truncated": False, "stop_type": kind, "stopping_word": end.stop or "",
        "tokens_cached": spent["cache_n"], "timings": spent,
    }  # fmt: skip


def _chosen(told: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Return the fields asked for, each by its path, such as `timings/prompt_n`; all where none are named."""
    if not fields:
        return told
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = told
        for step in path.split("/"):
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


async def whole(request: RequestHandler, model: str, fields: list[str] | None) -> list[bytes]:
    """Return the answer as one object. Raises APIError."""
    texts: list[str] = []
    tokens: list[int] = []
    async for events in request.events(whole=True):
        for event in events:
            if isinstance(event, Failed):
                raise request.context.refusal(event)
            if isinstance(event, Delta):
                texts.append(event.text)
                tokens += event.token_ids
            elif isinstance(event, Finished):
                return [encode(_chosen(_told(request, model, "".join(texts), tokens, event), fields))]
    raise AssertionError("an answer without an end")


async def stream(request: RequestHandler, model: str) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events; the last has `stop`."""
    async for events in request.events():
        for event in events:
            if isinstance(event, Failed):
                yield sse.event(APIError.of(event).body())
            elif isinstance(event, Delta):
                yield sse.event(encode(_told(request, model, event.text, list(event.token_ids), None)))
            elif isinstance(event, Finished):
                yield sse.event(encode(_told(request, model, "", [], event)))
