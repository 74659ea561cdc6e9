"""Ollama's API: bodies of requests, read as those of OpenAI's API, and answers, whole and as lines of JSON.

Streams are the default, as there. Where a request names no sampling parameter, this server's defaults hold, not those
of Ollama's models.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from attar.protocol.image_limits import MAX_IMAGES
from attar.protocol.messages import Delta, Failed, Finished
from attar.server.api.answering import AnswerReader
from attar.server.api.body import Body, Ignored
from attar.server.api.constraints import NamedSchema, ObjectFormat, ResponseFormat, SchemaFormat, SchemaObject
from attar.server.api.dialects.llamacpp.inputs import Inputs
from attar.server.api.dialects.vllm import FITTING
from attar.server.api.images.parts import BareImage
from attar.server.api.messages import MAX_MESSAGES, Message, Reasoned, SeenContent, TextPart
from attar.server.api.schemas import (
    ALL_THAT_FIT,
    MAX_INPUTS,
    MAX_TOKENS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    Fraction,
    Length,
    Penalty,
    Repetition,
    Seed,
    StopString,
    StopStrings,
    Temperature,
    TopK,
    check_stops,
)
from attar.server.api.tools.ollama import CompleteCalls, OllamaCalls, OpenCalls
from attar.server.errors import APIError
from attar.server.request_handler import RequestHandler
from attar.text.answers.events import AnswerEvent
from attar.text.answers.reasoning import reasoning_and_text
from attar.text.tools.openai import CallId, Tools
from attar.text.tools.openai import FunctionName as ToolName

VERSION = "0.12.6"
"""The version of Ollama's API that this one follows; clients compare it."""

NEVER = "1970-01-01T00:00:00Z"
"""A time that this server does not know."""

_PREDICT = "0 and less: as many as fit."

encode = msgspec.json.encode

Images = Annotated[list[str], Meta(max_length=MAX_IMAGES, description="Base64 of PNG, JPEG or WebP files.")]
One = Annotated[float, Meta(ge=1, le=1)]
Think = bool | Annotated[Literal["low", "medium", "high"], Meta(description="Whether to reason, and how much.")]
JsonFormat = Literal["", "json"] | SchemaObject


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters, and settings of Ollama's own engine, which are ignored."""

    num_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKENS, description=_PREDICT)] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    typical_p: One | None = None
    tfs_z: One | None = None
    mirostat: Annotated[int, Meta(ge=0, le=0)] | None = None
    num_ctx: Ignored = None
    num_keep: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    main_gpu: Ignored = None
    num_thread: Ignored = None
    numa: Ignored = None
    use_mmap: Ignored = None
    use_mlock: Ignored = None
    low_vram: Ignored = None
    f16_kv: Ignored = None
    repeat_last_n: Ignored = None
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    penalize_newline: Ignored = None

    def __post_init__(self) -> None:
        check_stops(self.stop, "options.stop")

    def fields(self) -> dict[str, Any]:
        """Return the parameters by their names in OpenAI's API."""
        names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
        found = {name: getattr(self, name) for name in names} | {"repetition_penalty": self.repeat_penalty}
        if self.num_predict is not None:
            found["max_tokens"] = self.num_predict if self.num_predict > 0 else ALL_THAT_FIT
        return found


_NO_OPTIONS = Options()


class _Generating(Body, frozen=True, kw_only=True):
    """What both bodies of texts have."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "logprobs": (False,), "top_logprobs": (0,),
        "template": ("",), "context": ([],), "width": (0,), "height": (0,), "steps": (0,), "truncate": (True,),
        "shift": (True, False),
    }  # fmt: skip

    options: Options | None = None
    format: JsonFormat | None = None
    stream: bool | None = None
    think: Think | None = None

    @property
    def streams(self) -> bool:
        """Return whether the answer is a stream, which is the default."""
        return self.stream is not False

    def thinking(self) -> dict[str, Any]:
        """Return `think` as fields of OpenAI's API."""
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return {"enable_thinking": self.think}

    def sampling(self) -> dict[str, Any]:
        """Return sampling parameters and the constraint as fields of OpenAI's API."""
        shape: ResponseFormat | None = None
        if self.format == "json":
            shape = ObjectFormat()
        elif isinstance(self.format, dict):
            shape = SchemaFormat(json_schema=NamedSchema(schema=self.format))
        return (self.options or _NO_OPTIONS).fields() | {"response_format": shape, "model": self.model}


def _seen(text: str, images: Images | None) -> SeenContent:
    """Return the content of a message with images before its text."""
    return [*(BareImage(image_url=each) for each in images), TextPart(text=text)] if images else text


class OllamaMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Images | None = None
    tool_calls: OllamaCalls | None = None
    tool_name: ToolName | None = None  # of a result, as the older `name`, or `tool_call_id`
    name: ToolName | None = None
    tool_call_id: CallId | None = None
    thinking: Reasoned | None = None

    def as_chat(self, calls: OpenCalls) -> Message:
        """Return the message as one of OpenAI's API. Raises APIError."""
        result = calls.answered(self.tool_call_id, self.tool_name or self.name) if self.role == "tool" else None
        return Message(
            role=self.role, content=_seen(self.content or "", self.images), tool_call_id=result,
            reasoning_content=self.thinking or None,
            tool_calls=calls.add(self.tool_calls) if self.tool_calls else None,
        )  # fmt: skip


class OllamaChatBody(_Generating, frozen=True, kw_only=True):
    """Body of /api/chat. Without messages it asks for nothing but the model."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None

    def as_chat(self) -> ChatBody:
        """Return the body as one of OpenAI's API. Raises APIError."""
        calls = OpenCalls()
        said = [each.as_chat(calls) for each in self.messages or ()]
        return ChatBody(messages=said, tools=self.tools, **self.thinking(), **self.sampling())


class OllamaGenerateBody(_Generating, frozen=True, kw_only=True):
    """Body of /api/generate: one turn of a conversation, or with `raw` a text to be continued. With `suffix` the answer
    is what comes between both texts. Without a prompt it asks for nothing but the model."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_Generating.neutral, "tools": ([],)}

    prompt: str | None = None
    images: Images | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None

    def as_chat(self) -> ChatBody:
        """Return the body as a conversation. Raises APIError."""
        said = [Message(role="system", content=self.system)] if self.system else []
        said.append(Message(role="user", content=_seen(self.prompt or "", self.images)))
        return ChatBody(messages=said, **self.thinking(), **self.sampling())

    def as_completion(self) -> CompletionBody | None:
        """Return the body as a text to be continued; None where it is a conversation. Raises APIError."""
        if not self.raw and not self.suffix:
            return None
        if self.images:
            raise APIError("unsupported_field", "images: not with raw or suffix", "images")
        fields = {"max_tokens": ALL_THAT_FIT} | self.sampling()
        return CompletionBody(prompt=self.prompt or "", suffix=self.suffix or None, **fields)


class OllamaEmbedBody(Body, frozen=True, kw_only=True):
    """Body of /api/embed. The end of a text that is too long is dropped where `truncate` asks for it, not by
    default."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    dimensions: Length | None = None
    options: Options | None = None
    truncate: bool | None = None

    def as_embedding(self) -> EmbeddingBody:
        """Return the body as one of OpenAI's API. Raises APIError."""
        texts: Inputs = self.input if isinstance(self.input, str) else [*self.input]
        kept = FITTING if self.truncate else None
        return EmbeddingBody(
            input=texts, dimensions=self.dimensions, model=self.model, truncate_prompt_tokens=kept,
            truncation_side="right",
        )  # fmt: skip


class OllamaEmbeddingsBody(Body, frozen=True, kw_only=True):
    """Body of /api/embeddings, the older form."""

    prompt: str
    options: Options | None = None


class OllamaShowBody(Body, frozen=True, kw_only=True):
    """Body of /api/show."""

    name: Annotated[str, Meta(max_length=256)] | None = None
    verbose: Ignored = None
    system: Ignored = None
    template: Ignored = None
    options: Ignored = None


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def loaded(model: str, chat: bool) -> dict[str, Any]:
    """Return the answer to a request for nothing but the model."""
    return {"model": model, "created_at": now(), **_text("", chat), "done": True, "done_reason": "load"}


def _text(text: str, chat: bool, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    more: dict[str, Any] = {"thinking": thinking} if thinking else {}
    more |= {"tool_calls": calls} if calls else {}
    return {"message": {"role": "assistant", "content": text, **more}} if chat else {"response": text, **more}


def _end(request: RequestHandler, generated: int, reason: str) -> dict[str, Any]:
    reports = [report for report in request.reports if report is not None]
    spent = time.monotonic() - request.caller.arrived
    return {
        "done": True, "done_reason": reason, "total_duration": _nanoseconds(spent), "load_duration": 0,
        "prompt_eval_count": request.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(sum(report.prefill for report in reports)),
        "eval_count": generated, "eval_duration": _nanoseconds(sum(report.decode for report in reports)),
    }  # fmt: skip


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


async def whole(request: RequestHandler, model: str, chat: bool, reader: AnswerReader) -> list[bytes]:
    """Return the answer as one object. Raises APIError."""
    events_of: list[AnswerEvent] = []
    async for events in request.events(whole=True):
        for event in events:
            if isinstance(event, Failed):
                raise request.context.refusal(event)
            if isinstance(event, Delta):
                events_of += reader.read(0, event)
            elif isinstance(event, Finished):
                events_of += reader.close(0)
                thinking, text = reasoning_and_text(events_of)
                made = CompleteCalls(reader.calling)
                calls = made.add(events_of)
                head = {"model": model, "created_at": now(), **_text(text + made.rest(), chat, thinking, calls)}
                return [encode(head | _end(request, event.completion_tokens, event.reason))]
    raise AssertionError("an answer without an end")


def piece(model: str, text: str, chat: bool, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> bytes:
    """Return a line of a stream with more text, more thinking, or calls."""
    return encode({"model": model, "created_at": now(), **_text(text, chat, thinking, calls), "done": False}) + b"\n"


async def stream(request: RequestHandler, model: str, chat: bool, reader: AnswerReader) -> AsyncIterator[bytes]:
    """Yield the answer as lines of JSON; the last is `done`, or has an error."""
    made = CompleteCalls(reader.calling)
    async for events in request.events():
        lines = []
        for event in events:
            if isinstance(event, Failed):
                lines.append(failed(APIError.of(event)))
            elif isinstance(event, Delta):
                found = reader.read(0, event)
                thinking, text = reasoning_and_text(found)
                calls = made.add(found)
                if thinking or text or calls:
                    lines.append(piece(model, text, chat, thinking, calls))
            elif isinstance(event, Finished):
                found = reader.close(0)
                (thinking, text), calls = reasoning_and_text(found), made.add(found)
                head = {"model": model, "created_at": now(), **_text(text + made.rest(), chat, thinking, calls)}
                lines.append(encode(head | _end(request, event.completion_tokens, event.reason)) + b"\n")
        if lines:
            yield b"".join(lines)


def failed(error: APIError) -> bytes:
    """Return the last line of a stream that an error ends."""
    return encode({"error": error.message}) + b"\n"
