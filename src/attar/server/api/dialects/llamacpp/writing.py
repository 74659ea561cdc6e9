"""Answers of /completion and /infill: whole, one object for each choice, and as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from attar.faults import point
from attar.protocol.messages import Delta, Failed, Finished
from attar.protocol.request import SamplingParams, TokenLogprob
from attar.server.api.dialects.extras import timings
from attar.server.api.dialects.llamacpp.params import settings
from attar.server.api.logprobs import LEAST, Turns, token_text, values
from attar.server.errors import APIError
from attar.server.http import sse
from attar.server.request_handler import RequestHandler
from attar.text.tokenizer import Tokenizer

encode = msgspec.json.encode


@dataclass(frozen=True)
class Asked:
    """What answers depend on beside the request itself. `prompts` are the prompts' texts, `n_predict` the limit that
    was asked for, `fields` the paths of the fields that a whole answer has (all where there are none)."""

    model: str
    tokenizer: Tokenizer
    params: SamplingParams
    prompts: Sequence[str]
    n_predict: int | None = None
    tokens: bool = True
    fields: Sequence[str] = ()


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    newline: bool = False
    tokens: list[int] = field(default_factory=list)
    probabilities: bytearray = field(default_factory=bytearray)
    end: Finished | None = None


async def whole(request: RequestHandler, asked: Asked) -> list[bytes]:
    """Return the answer as one object, or a list of one for each choice where there are several. Raises APIError."""
    choices = [_Choice() for _ in range(len(request.prompts) * request.n)]
    turns = Turns(request.wanted)
    async for events in request.events(whole=True):
        for event in events:
            if isinstance(event, Failed):
                raise request.context.refusal(event)
            if isinstance(event, Delta):
                choice = choices[request.number(event)]
                choice.text.append(event.text)
                choice.tokens += event.token_ids if asked.tokens else ()
                if event.logprobs:
                    _append(choice.probabilities, _probabilities(asked.tokenizer, event.logprobs))
                    await turns.after(values(event.logprobs))
            elif isinstance(event, Finished):
                choices[request.number(event)].end = event
    point("llamacpp.whole", request.caller.id)
    told = [encode(_chosen(_whole(request, asked, number, each), asked.fields)) for number, each in enumerate(choices)]
    return told if len(told) == 1 else [b"[", *(b"," * bool(at) + each for at, each in enumerate(told)), b"]"]


async def stream(request: RequestHandler, asked: Asked) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events; the last one of each choice has `stop`."""
    choices = [_Choice() for _ in range(len(request.prompts) * request.n)]
    made = [0] * len(choices)
    turns = Turns(request.wanted)
    async for events in request.events():
        for event in events:
            if isinstance(event, Failed):
                yield sse.event(APIError.of(event).body())
                return
            if isinstance(event, Delta):
                point("llamacpp.delta", event.id)
                number = request.number(event)
                choice = choices[number]
                choice.newline |= "\n" in event.text
                made[number] += len(event.token_ids)
                told = _told(request, number, event.text, list(event.token_ids)) | {"tokens_predicted": made[number]}
                if event.logprobs:
                    items = b"[%b]" % _probabilities(asked.tokenizer, event.logprobs)
                    told["completion_probabilities"] = msgspec.Raw(items)
                    await turns.after(values(event.logprobs))
                yield sse.event(encode(told))
            elif isinstance(event, Finished):
                number = request.number(event)
                yield sse.event(encode(_ended(request, asked, number, event, choices[number])))


def _told(request: RequestHandler, number: int, text: str, tokens: list[int]) -> dict[str, Any]:
    evaluated = len(request.prompts[number // request.n])
    return {
        "index": number, "content": text, "tokens": tokens, "stop": False, "id_slot": -1, "tokens_evaluated": evaluated
    }  # fmt: skip


def _whole(request: RequestHandler, asked: Asked, number: int, choice: _Choice) -> dict[str, Any]:
    assert choice.end is not None
    text = "".join(choice.text)
    choice.newline = "\n" in text
    told = _ended(request, asked, number, choice.end, choice) | {"content": text, "tokens": choice.tokens}
    if asked.params.logprobs:
        told["completion_probabilities"] = msgspec.Raw(b"[%b]" % bytes(choice.probabilities))
    return told


def _ended(request: RequestHandler, asked: Asked, number: int, end: Finished, choice: _Choice) -> dict[str, Any]:
    """Return the last event of a choice, which has all but its text and its tokens."""
    at = number // request.n
    kind = "limit" if end.reason == "length" else "eos" if end.stop is None else "word"
    report = request.reports[at] if at < len(request.reports) else None
    spent = timings([report or end.report], end.completion_tokens)
    full = len(request.prompts[at]) + end.completion_tokens
    wanted = asked.n_predict if asked.n_predict is not None and asked.n_predict >= 0 else full
    return _told(request, number, "", []) | {
        "stop": True, "model": asked.model, "tokens_predicted": end.completion_tokens,
        "generation_settings": settings(asked.params, asked.n_predict), "prompt": asked.prompts[at],
        "has_new_line": choice.newline, "truncated": kind == "limit" and end.completion_tokens < wanted,
        "stop_type": kind, "stopping_word": end.stop or "", "tokens_cached": spent["cache_n"], "timings": spent,
    }  # fmt: skip


def _probabilities(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> bytes:
    """Return log probabilities as items of a JSON array."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        raw = list(tokenizer.id_to_bytes(token))
        return {"id": token, "token": token_text(tokenizer, token), "bytes": raw, "logprob": max(logprob, LEAST)}

    return b",".join(
        encode(told(each.token_id, each.logprob) | {"top_logprobs": [told(*top) for top in each.top]})
        for each in found
    )  # fmt: skip


def _append(items: bytearray, more: bytes) -> None:
    items += (b"," if items and more else b"") + more


def _chosen(told: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
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
