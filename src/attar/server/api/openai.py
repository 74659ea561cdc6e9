"""Answers in OpenAI's shapes: /v1/chat/completions and /v1/completions, whole and as streams, and /v1/embeddings.

A stream makes one chunk a token, so the constant part of its chunks is encoded once. A stream ends with `data: [DONE]`,
or with an event whose object is an `error`; never with both, and never with neither.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from attar.faults import point
from attar.protocol.messages import Delta, Embedding, Failed, Finished
from attar.protocol.request import TokenLogprob
from attar.server.api.answering import AnswerReader
from attar.server.api.dialects.extras import Extras
from attar.server.api.dialects.vllm import times
from attar.server.api.logprobs import Columns, Content, Offsets, Turns, rows, values
from attar.server.api.schemas import EmbeddingBody, StreamOptions
from attar.server.api.tools.answers import deltas
from attar.server.engine_client.connection import PromptScores
from attar.server.errors import INTERNAL, APIError
from attar.server.http import sse
from attar.server.prompts import Echo
from attar.server.request_handler import RequestHandler
from attar.text.answers.events import AnswerEvent
from attar.text.answers.made_calls import MadeCall, calls
from attar.text.answers.reasoning import reasoning_and_text
from attar.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
FAILED = sse.event(APIError("internal", INTERNAL).body())
"""The last event of a stream that an exception ends."""

NO_TEXT = b'""'
"""Content of the first delta of a chat's choice, as JSON; llama.cpp's own route has null there."""

NO_OPTIONS = StreamOptions()

Pieces = list[bytes | bytearray]

encode = msgspec.json.encode


def usage(
    request: RequestHandler, generated: int, ended: bool = True, reader: AnswerReader | None = None
) -> dict[str, Any]:
    """Return the usage object. The number of cached tokens is known once the request has `ended`; that of reasoning is
    the `reader`'s."""
    point("openai.usage", request.caller.id)
    tokens = request.prompt_tokens
    counts: dict[str, Any] = {
        "prompt_tokens": tokens,
        "completion_tokens": generated,
        "total_tokens": tokens + generated,
    }
    if reader is not None and reader.reasons:
        counts["completion_tokens_details"] = {"reasoning_tokens": reader.reasoning_tokens}
    return counts | {"prompt_tokens_details": {"cached_tokens": request.reused}} if ended else counts


@dataclass(slots=True)
class Choice:
    """One whole choice. `logprob` is the sum over its `scored` tokens."""

    number: int
    text: str = ""
    reasoning: str = ""
    calls: Sequence[MadeCall] = ()
    reason: str = ""
    stop: str | None = None
    tokens: int = 0
    logprob: float = 0.0
    scored: int = 0


class ChatFormat:
    """Format of chat completions. Log probabilities are written as they come, by choice."""

    kind = "chat.completion"
    prefix = "chatcmpl-"

    def __init__(
        self, tokenizer: Tokenizer, logprobs: bool, extras: Extras, reader: AnswerReader | None = None,
        no_text: bytes = NO_TEXT, echo: str = "",
    ) -> None:  # fmt: skip
        self.n = 1  # `Format.n`: one, so `best` leaves no choice out
        self._echo = echo
        self.extras, self.reader = extras, reader or AnswerReader()
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._no_text = encode(echo) if echo else no_text
        self._contents: dict[int, Content] = {}

    def add(self, at: int, number: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Write more log probabilities of a choice."""
        content = self._contents.setdefault(number, self._content())
        for each in logprobs:
            content.add(each)

    def _content(self) -> Content:
        return Content(self._tokenizer, self.extras.as_ids, self.extras.named)

    async def add_prompt(self, at: int, event: PromptScores, turns: Turns) -> None:
        """Write the log probabilities of the prompt."""
        await self.extras.add_prompt(at, event, turns)

    def whole(self, number: int, choice: Choice) -> Pieces:
        """Return one choice of a whole answer."""
        more = b',"reasoning_content":' + encode(choice.reasoning) if choice.reasoning else b""
        text: str | None = self._echo + choice.text
        if choice.calls:
            more += b',"tool_calls":' + encode([call.told(self.reader.calling.new_id) for call in choice.calls])
            text = text or None
        before = b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null%b},"logprobs":' % (
            number,
            encode(text),
            more,
        )
        logprobs = self._contents.pop(choice.number, self._content()).json() if self._logprobs else [b"null"]
        return [
            before,
            *logprobs,
            b',"finish_reason":%b%b}' % (encode(choice.reason), self.extras.of_choice(choice.number)),
        ]

    def opening(self, number: int) -> Pieces:
        """Return a chunk's choice that names the role."""
        delta = b'{"role":"assistant","content":%b}' % self._no_text
        return [b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (number, delta)]

    def deltas(self, number: int, event: Delta) -> list[Pieces]:
        """Return the choices of chunks with more text or calls; none where there is nothing to tell yet."""
        found = deltas(self.reader.read(number, event), _said, self.reader.calling.new_id)
        if not found and not (event.logprobs or self.extras.token_ids):
            return []
        logprobs: Pieces = [b"null"]
        if event.logprobs is not None:
            content = self._content()
            for each in event.logprobs:
                content.add(each)
            logprobs = content.json()
        first, *others = found or [_said([])]
        before = b'{"index":%d,"delta":%b,"logprobs":' % (number, first)
        more = self.extras.of_delta(event.token_ids)
        return [
            [before, *logprobs, b',"finish_reason":null%b}' % more],
            *(_chunk_choice(number, delta) for delta in others),
        ]

    def rest(self, number: int) -> list[Pieces]:
        """Return the choices of chunks with what was held back until the end."""
        found = deltas(self.reader.close(number), _said, self.reader.calling.new_id)
        return [_chunk_choice(number, delta) for delta in found]

    def closing(self, number: int, reason: str) -> Pieces:
        """Return a chunk's choice with the finish reason."""
        why = self.reader.reason(number, reason)
        return [b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (number, encode(why))]


def _chunk_choice(number: int, delta: bytes) -> Pieces:
    return [b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (number, delta)]


def _said(events: list[AnswerEvent]) -> bytes:
    """Return a chunk's `delta` with more reasoning, text or both."""
    reasoning, text = reasoning_and_text(events)
    if not reasoning:
        return b'{"content":%b}' % encode(text)
    return b'{"reasoning_content":%b%b}' % (encode(reasoning), b',"content":' + encode(text) if text else b"")


class CompletionFormat:
    """Format of text completions, `n` of each of `prompts`. `echoes` has the prompts' texts where answers echo them.

    Log probabilities are written as they come, a prompt's once for all of its choices.
    """

    kind = "text_completion"
    prefix = "cmpl-"
    reader = None

    def __init__(
        self, tokenizer: Tokenizer, logprobs: bool, n: int, prompts: Sequence[Sequence[int]],
        echoes: Sequence[Echo] | None, extras: Extras,
    ) -> None:  # fmt: skip
        self.n, self.extras = n, extras
        self._tokenizer, self._logprobs, self._prompts, self._echoes = tokenizer, logprobs, prompts, echoes
        self._of_prompts: dict[int, Columns] = {}
        self._of_choices: dict[int, Columns] = {}

    def add(self, at: int, number: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Write more log probabilities of a choice of prompt `at`."""
        if self._logprobs:  # else they only rank the choices
            columns = self._columns(at, number)
            for each in logprobs:
                columns.add(each)

    async def add_prompt(self, at: int, event: PromptScores, turns: Turns) -> None:
        """Write the log probabilities of prompt `at`, before its choices begin."""
        await self.extras.add_prompt(at, event, turns)
        if self._echoes is None or not self._logprobs:
            return
        starts = iter(self._echoes[at].starts)
        columns = self._of_prompts[at] = Columns(self._tokenizer, lambda token: next(starts), self.extras.as_ids)
        columns.add_first(self._prompts[at][0])
        for each in rows(event.logprobs):
            columns.add(each)
            await turns.after(1 + len(each.top))

    def whole(self, number: int, choice: Choice) -> Pieces:
        """Return one choice of a whole answer, behind its prompt where that is echoed."""
        at = number // self.n
        text = choice.text if self._echoes is None else self._echoes[at].text + choice.text
        logprobs: Pieces = [b"null"]
        if self._logprobs:
            logprobs = self._columns(at, choice.number).json(self._of_prompts.get(at))
        before = b'{"index":%d,"text":%b,"logprobs":' % (number, encode(text))
        more = self.extras.of_choice(choice.number) + self.extras.of_whole(at)
        return [before, *logprobs, b',"finish_reason":%b%b}' % (encode(choice.reason), more)]

    def opening(self, number: int) -> Pieces:
        """Return a chunk's choice with the prompt, where it is echoed."""
        at = number // self.n
        if self._echoes is None:
            return self._choice(number, "", [b"null"], self.extras.of_prompt(at)) if self.extras.opens else []
        logprobs: Pieces = [b"null"]
        if self._logprobs:
            logprobs = self._of_prompts[at].json()
        return self._choice(number, self._echoes[at].text, logprobs, self.extras.of_prompt(at))

    def deltas(self, number: int, event: Delta, reason: str | None = None) -> list[Pieces]:
        """Return the choices of chunks with more text; none where there is nothing to tell yet. The last text of a
        choice comes with the `reason` of its end."""
        if not (event.text or event.logprobs or self.extras.token_ids):
            return []
        logprobs: Pieces = [b"null"]
        if event.logprobs is not None:
            columns = self._columns(number // self.n, number)
            for each in event.logprobs:
                columns.add(each)
            logprobs = columns.json()
            columns.clear()
        return [self._choice(number, event.text, logprobs, self.extras.of_delta(event.token_ids), reason)]

    def closing(self, number: int, reason: str) -> Pieces:
        """Return a chunk's choice with the finish reason."""
        return [b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}' % (number, encode(reason))]

    def rest(self, number: int) -> list[Pieces]:
        """Return nothing: no text is held back."""
        return []

    def _columns(self, at: int, number: int) -> Columns:
        if number not in self._of_choices:
            echoed = 0 if self._echoes is None else len(self._echoes[at].text)
            offsets = Offsets(self._tokenizer, self._prompts[at], echoed)
            self._of_choices[number] = Columns(self._tokenizer, offsets, self.extras.as_ids)
        return self._of_choices[number]

    def _choice(self, number: int, text: str, logprobs: Pieces, more: bytes, reason: str | None = None) -> Pieces:
        before = b'{"index":%d,"text":%b,"logprobs":' % (number, encode(text))
        return [before, *logprobs, b',"finish_reason":%b%b}' % (encode(reason), more)]


Format = ChatFormat | CompletionFormat


async def collect(
    request: RequestHandler, writer: Format | None = None, reader: AnswerReader | None = None
) -> list[Choice]:
    """Wait for all choices of a request. `writer` takes log probabilities; `reader` splits texts. Raises APIError."""
    choices = [Choice(number) for number in range(len(request.prompts) * request.n)]
    pieces: list[list[AnswerEvent]] = [[] for _ in choices]
    reader = reader or AnswerReader()
    turns = Turns(request.wanted)
    async for events in request.events(whole=True):
        for event in events:
            if isinstance(event, Delta):
                number = request.number(event)
                pieces[number] += reader.read(number, event)
                if writer is not None:
                    writer.extras.take(number, event.token_ids)
                if event.logprobs and writer is not None:
                    choices[number].logprob += sum(each.logprob for each in event.logprobs)
                    choices[number].scored += len(event.logprobs)
                    writer.add(request.stream.prompts[event.id], number, event.logprobs)
                    await turns.after(values(event.logprobs))
            elif isinstance(event, Finished):
                choice = choices[request.number(event)]
                choice.reason, choice.stop, choice.tokens = event.reason, event.stop, event.completion_tokens
                pieces[choice.number] += reader.close(choice.number)
            elif isinstance(event, PromptScores) and writer is not None:
                await writer.add_prompt(request.stream.prompts[event.id], event, turns)
            elif isinstance(event, Failed):
                raise request.context.refusal(event)
    for choice, events_of in zip(choices, pieces, strict=True):
        choice.reasoning, choice.text = reasoning_and_text(events_of)
        choice.calls, choice.reason = calls(events_of), reader.reason(choice.number, choice.reason)
    return choices


def best(choices: Sequence[Choice], made: int, kept: int) -> list[Choice]:
    """Return the `kept` choices with the highest log probability per token of every `made`, best first; all, in their
    order, where none is left out."""
    if made == kept:
        return list(choices)

    def per_token(choice: Choice) -> float:
        return choice.logprob / max(1, choice.scored)

    found: list[Choice] = []
    for start in range(0, len(choices), made):
        found += sorted(choices[start : start + made], key=per_token, reverse=True)[:kept]
    return found


def _lasts(request: RequestHandler, events: Sequence[object]) -> dict[int, Delta]:
    """Return the last texts of choices that end among these events, by their numbers."""
    ended = {request.number(event) for event in events if isinstance(event, Finished)}
    return {request.number(each): each for each in events if isinstance(each, Delta) and request.number(each) in ended}


def _times(request: RequestHandler, generated: int) -> bytes:
    """Return vLLM's times of a request, a field behind a comma; nothing where the server does not tell them."""
    return b',"metrics":%b' % encode(times(request.reports, generated)) if request.context.times else b""


async def whole(request: RequestHandler, model: str, form: Format) -> Pieces:
    """Return the answer as one object, in pieces. Raises APIError."""
    choices = await collect(request, form, form.reader)
    point("openai.whole", request.caller.id)
    generated = sum(choice.tokens for choice in choices)
    if isinstance(form, CompletionFormat):
        choices = best(choices, request.n, form.n)
    head = {"id": form.prefix + request.caller.id, "object": form.kind, "created": request.created, "model": model}
    pieces: Pieces = [encode(head)[:-1], b',"choices":[']
    for number, choice in enumerate(choices):
        pieces += [b"," if number else b"", *form.whole(number, choice)]
    end = form.extras.of_end(request.reports, generated)
    end += form.extras.of_whole(0) if isinstance(form, ChatFormat) else b""
    end += _times(request, generated)
    return [*pieces, b'],"usage":%b%b}' % (encode(usage(request, generated, reader=form.reader)), end)]


async def stream(
    request: RequestHandler, model: str, form: Format, options: StreamOptions = NO_OPTIONS
) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events."""
    kind = form.kind + ".chunk" if isinstance(form, ChatFormat) else form.kind
    head = {"id": form.prefix + request.caller.id, "object": kind, "created": request.created, "model": model}
    start = b"data: " + encode(head)[:-1]
    before = start + (b',"usage":null' if options.include_usage else b"") + b',"choices":['
    generated = so_far = 0
    end = b""  # llama.cpp's timings: in the stream's last chunk

    def beginning() -> bytes:
        if options.include_usage and options.continuous_usage_stats:
            return start + b',"usage":%b,"choices":[' % encode(usage(request, so_far, ended=False, reader=form.reader))
        return before

    opened: set[int] = set()
    turns = Turns(request.wanted)
    async for events in request.events():
        pieces: Pieces = []
        lasts = _lasts(request, events) if isinstance(form, CompletionFormat) else {}

        def say(choice: Pieces, more: bytes = b"", pieces: Pieces = pieces) -> None:
            if choice:
                pieces += [beginning(), *choice, b"]%b}\n\n" % more]

        try:
            for event in events:
                if isinstance(event, Delta | Finished):
                    point("openai.delta", event.id)
                    number = request.number(event)
                    if number not in opened:
                        opened.add(number)
                        say(form.opening(number), form.extras.of_prompt(0) if isinstance(form, ChatFormat) else b"")
                    if isinstance(event, Finished):
                        generated += event.completion_tokens
                        for piece in form.rest(number):
                            say(piece)
                        ended = event.report is not None and None not in request.reports
                        if ended:
                            end = form.extras.of_end(request.reports, generated)
                        closing = form.closing(number, event.reason)
                        if isinstance(form, CompletionFormat) and (last := lasts.pop(number, None)) is not None:
                            so_far += len(last.token_ids)
                            closing = next(iter(form.deltas(number, last, event.reason)), closing)
                        say(closing, end if ended and not options.include_usage else b"")
                        continue
                    if lasts.get(number) is event:
                        continue
                    so_far += len(event.token_ids)
                    for piece in form.deltas(number, event):
                        say(piece)
                    if event.logprobs:
                        await turns.after(values(event.logprobs))
                elif isinstance(event, PromptScores):
                    await form.add_prompt(request.stream.prompts[event.id], event, turns)
                elif isinstance(event, Failed):
                    raise APIError.of(event)
        except APIError as refusal:
            for part in sse.parts(pieces):
                yield part
            yield sse.event(refusal.body())
            return
        for part in sse.parts(pieces):
            yield part
    if options.include_usage:
        told = encode(head | {"choices": [], "usage": usage(request, generated, reader=form.reader)})
        yield sse.event(told[:-1] + end + _times(request, generated) + b"}")
    yield DONE


async def embeddings(request: RequestHandler, model: str, body: EmbeddingBody) -> Iterator[bytes]:
    """Return the answer as one object, in pieces: one vector for each prompt, in order. Raises APIError."""
    found: dict[str, bytes] = {}
    async for events in request.events(whole=True):
        for event in events:
            if isinstance(event, Failed):
                raise request.context.refusal(event)
            if isinstance(event, Embedding):
                found[event.id] = event.vector
    point("embeddings.whole")
    vectors = [found[each][: body.dimensions and 4 * body.dimensions] for each in request.stream.prompts]
    return _vectors(vectors, model, request.prompt_tokens, body.encoding_format == "base64")


def _unit(vector: bytes) -> array[float]:
    """Scale a float32 vector to length 1, as OpenAI's are: clients compare by dot products. Zeros stay as they are."""
    numbers = array("f", vector)
    length = math.hypot(*numbers)  # a double: no square of a float32 overflows it
    return array("f", [number / length for number in numbers]) if length else numbers


def _vectors(vectors: Sequence[bytes], model: str, tokens: int, as_base64: bool) -> Iterator[bytes]:
    """Yield the answer a vector at a time: text is several times as long, and thousands would block the event loop."""
    yield b'{"object":"list","model":%b,"data":[' % encode(model)
    for at, vector in enumerate(vectors):
        numbers = _unit(vector)
        shown = base64.b64encode(numbers).decode() if as_base64 else numbers.tolist()
        yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (b"," if at else b"", at, encode(shown))
    yield b'],"usage":%b}' % encode({"prompt_tokens": tokens, "total_tokens": tokens})
