"""Answers in OpenAI's shapes: /v1/chat/completions and /v1/completions, whole and as streams.

A chunk of a stream is made once for every token, so its constant part is encoded once for every stream. A stream ends
with `data: [DONE]`, or with an event whose object is an `error`; never with both, and never with neither.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from attar.engine.messages import Delta, Failed, Finished, PromptLogprobs
from attar.engine.request import TokenLogprob
from attar.faults import point
from attar.server import sse
from attar.server.errors import Refusal
from attar.server.work import Choice, Work
from attar.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LEAST = -9999.0  # JSON has no infinity; OpenAI's number for it

encode = msgspec.json.encode


def usage(work: Work, generated: int) -> dict[str, Any]:
    """The usage object."""
    point("openai.usage", work.caller.id)
    return {
        "prompt_tokens": work.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": work.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": work.reused},
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is part of a character only as `bytes:` and their escapes, as OpenAI writes it."""
    point("openai.logprobs")
    raw = tokenizer.id_to_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def failed(refusal: Refusal) -> bytes:
    """The last event of a stream that fails."""
    return sse.event(refusal.body())


class ChatFormat:
    """Chat completions."""

    kind = "chat.completion"
    prefix = "chatcmpl-"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def whole(self, number: int, choice: Choice) -> dict[str, Any]:
        """A choice."""
        return {
            "index": number,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._content(choice.logprobs),
            "finish_reason": choice.reason,
        }

    def opening(self, number: int) -> bytes:
        """A choice of a chunk: who speaks."""
        return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % number

    def delta(self, number: int, event: Delta) -> bytes:
        """A choice of a chunk: more text."""
        logprobs = b"null" if event.logprobs is None else encode(self._content(event.logprobs))
        return b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (
            number,
            encode(event.text),
            logprobs,
        )

    def closing(self, number: int, reason: str) -> bytes:
        """A choice of a chunk: the end."""
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (number, encode(reason))

    def _content(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            self._token(each.token_id, each.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.id_to_bytes(token)
        return {"token": token_text(self._tokenizer, token), "logprob": max(logprob, LEAST), "bytes": list(raw)}


class _Offsets:
    """Where each token's text begins: characters completed by those before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token: int) -> int:
        at = self._at
        if token not in self._tokenizer.special_ids:
            self._at += len(self._utf8.decode(self._tokenizer.id_to_bytes(token)))
        return at


class CompletionFormat:
    """Text completions, `n` of a prompt. `echoed` holds each prompt's text where it is part of the answer."""

    kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool, n: int, echoed: Sequence[str] | None) -> None:
        self.n = n
        self._tokenizer, self._logprobs, self._echoed = tokenizer, logprobs, echoed
        self._offsets: dict[int, _Offsets] = {}  # by choice

    def whole(self, number: int, choice: Choice, work: Work, of_prompts: Mapping[int, Sequence[TokenLogprob]]) -> Any:
        """A choice, its prompt in front where that is echoed."""
        at = number // self.n
        table = self._table()
        text = choice.text
        if self._echoed is not None:
            text = self._echoed[at] + text
            self._add_prompt(table, number, work.prompts[at], of_prompts.get(at))
        self._add(table, number, choice.logprobs)
        return {
            "index": number,
            "text": text,
            "logprobs": table if self._logprobs else None,
            "finish_reason": choice.reason,
        }

    def opening(self, number: int, work: Work, logprobs: Sequence[TokenLogprob] | None) -> bytes | None:
        """A choice of a chunk: the prompt, if it is echoed."""
        if self._echoed is None:
            return None
        at = number // self.n
        table = self._table()
        self._add_prompt(table, number, work.prompts[at], logprobs)
        return self._choice(number, self._echoed[at], table if self._logprobs else None)

    def delta(self, number: int, event: Delta) -> bytes:
        """A choice of a chunk: more text."""
        table = None
        if event.logprobs is not None:
            table = self._table()
            self._add(table, number, event.logprobs)
        return self._choice(number, event.text, table)

    def closing(self, number: int, reason: str) -> bytes:
        """A choice of a chunk: the end."""
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}' % (number, encode(reason))

    def _choice(self, number: int, text: str, table: dict[str, list[Any]] | None) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (number, encode(text), encode(table))

    def _table(self) -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add_prompt(
        self,
        table: dict[str, list[Any]],
        number: int,
        prompt: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
    ) -> None:
        if logprobs is not None:
            self._row(table, number, prompt[0], None, None)  # nothing comes before it that could predict it
            self._add(table, number, logprobs)

    def _add(self, table: dict[str, list[Any]], number: int, logprobs: Sequence[TokenLogprob]) -> None:
        for each in logprobs:
            top: dict[str, float] = {}
            for token, logprob in each.top:  # best first; of two tokens of one text the better stays
                top.setdefault(token_text(self._tokenizer, token), max(logprob, LEAST))
            top.setdefault(token_text(self._tokenizer, each.token_id), max(each.logprob, LEAST))  # always among them
            self._row(table, number, each.token_id, max(each.logprob, LEAST), top)

    def _row(
        self, table: dict[str, list[Any]], number: int, token: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        offsets = self._offsets.setdefault(number, _Offsets(self._tokenizer))
        row = (token_text(self._tokenizer, token), logprob, top, offsets.next(token))
        for column, value in zip(table.values(), row, strict=True):
            column.append(value)


Format = ChatFormat | CompletionFormat


def best(choices: Sequence[Choice], made: int, kept: int) -> list[Choice]:
    """Of every `made` choices the `kept` with the highest log probability per token, best first; all of them as they
    are where none is left out."""
    if made == kept:
        return list(choices)
    found: list[Choice] = []
    for start in range(0, len(choices), made):
        found += sorted(choices[start : start + made], key=_per_token, reverse=True)[:kept]
    return found


def _per_token(choice: Choice) -> float:
    return sum(each.logprob for each in choice.logprobs) / max(1, len(choice.logprobs))


async def whole(work: Work, model: str, form: Format) -> bytes:
    """The answer as one object. Raises Refusal."""
    choices, of_prompts = await work.choices()
    point("openai.whole", work.caller.id)
    generated = sum(choice.tokens for choice in choices)
    if isinstance(form, ChatFormat):
        found = [form.whole(number, choice) for number, choice in enumerate(choices)]
    else:
        choices = best(choices, work.n, form.n)
        found = [form.whole(number, choice, work, of_prompts) for number, choice in enumerate(choices)]
    head = {"id": form.prefix + work.caller.id, "object": form.kind, "created": work.created, "model": model}
    return encode(head | {"choices": found, "usage": usage(work, generated)})


async def stream(work: Work, model: str, form: Format, with_usage: bool) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    kind = form.kind + ".chunk" if isinstance(form, ChatFormat) else form.kind
    head = {"id": form.prefix + work.caller.id, "object": kind, "created": work.created, "model": model}
    before = encode(head)[:-1] + (b',"usage":null' if with_usage else b"") + b',"choices":['
    generated = 0
    opened: set[int] = set()
    of_prompts: dict[int, Sequence[TokenLogprob]] = {}
    async for events in work.events():
        pieces: list[bytes | None] = []
        for event in events:
            if isinstance(event, Delta | Finished):
                point("openai.delta", event.id)
                number = work.number(event)
                if number not in opened:
                    opened.add(number)
                    if isinstance(form, ChatFormat):
                        pieces.append(form.opening(number))
                    else:
                        pieces.append(form.opening(number, work, of_prompts.get(number // work.n)))
                if isinstance(event, Finished):
                    generated += event.completion_tokens
                    pieces.append(form.closing(number, event.reason))
                elif event.text or event.logprobs:
                    pieces.append(form.delta(number, event))
            elif isinstance(event, PromptLogprobs):
                of_prompts[work.answer.prompts[event.id]] = event.logprobs
            elif isinstance(event, Failed):
                yield b"".join(sse.event(before + piece + b"]}") for piece in pieces if piece)
                yield failed(Refusal.of(event))
                return
        if pieces:
            yield b"".join([b"data: %b%b]}\n\n" % (before, piece) for piece in pieces if piece])
    if with_usage:
        yield sse.event(encode(head | {"choices": [], "usage": usage(work, generated)}))
    yield DONE
