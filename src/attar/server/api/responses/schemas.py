"""The body of /v1/responses. Fields of hosted tools and of hosted conversations are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from attar.protocol.grammar import Grammar
from attar.server.api import constraints, schemas
from attar.server.api.body import Body, Ignored
from attar.server.api.constraints import Asked, SchemaObject
from attar.server.api.reasoning import Effort, ReasoningRequest
from attar.server.api.responses import items
from attar.server.api.responses.items import MAX_ITEMS, InputItem, MessageItem
from attar.server.api.responses.tools import ResponseChoice, ResponseTools, Toolset, read_tools
from attar.server.api.schemas import (
    ChatBody,
    Fraction,
    Length,
    Logprobs,
    Repetition,
    Seed,
    StopString,
    StopStrings,
    Temperature,
    TopK,
    TopP,
)
from attar.server.api.tools import fields
from attar.server.errors import APIError

_NOTE = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], _NOTE], Meta(max_length=16)]
_CHAIN = "The conversation goes on behind this answer, which the server has stored."
ResponseId = Annotated[str, Meta(max_length=128, description=_CHAIN)]
_RAW = "vLLM's: the answer has the tokens of prompt and answer, in input_messages and output_messages."
SCORES = "message.output_text.logprobs"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Included = Annotated[list[Include], Meta(max_length=16)]


Summary = Literal["auto", "concise", "detailed"]


class PlainText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObject(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON by a schema. With `strict`, each of its objects forbids additional properties and requires all."""

    name: Annotated[str, Meta(max_length=256)]
    schema: SchemaObject
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the text of an answer is like."""

    format: PlainText | JsonObject | JsonSchema | None = None
    verbosity: Literal["medium"] | None = None

    def told(self) -> dict[str, Any]:
        """Return the options as answers repeat them."""
        return {"format": msgspec.to_builtins(self.format or PlainText()), "verbosity": "medium"}


class ResponseReasoning(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the model reasons. No summaries are made of what it says there: an answer has all of it."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # its older name
    context: Literal["auto"] | None = None

    def told(self) -> dict[str, Any]:
        """Return the options as answers repeat them."""
        return {"effort": self.effort, "summary": self.summary or self.generate_summary}


class ResponseStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # padding against observers of lengths: a client may ask for none


class ResponsesBody(Body, frozen=True, kw_only=True):
    """Body of /v1/responses. `top_k`, `min_p`, `repetition_penalty`, `seed`, `stop` and `ignore_eos` are extensions.
    `store` has an effect where the server has a store, and is true by default there."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,), "conversation": (), "prompt": (), "max_tool_calls": (), "truncation": ("disabled",),
        "context_management": ([],), "moderation": (), 
        "frequency_penalty": (0,), "presence_penalty": (0,), "stop": ("", [""]),
    }  # fmt: skip

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: Length | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    ignore_eos: bool | None = None
    text: TextOptions | None = None
    reasoning: ResponseReasoning | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    include: Included | None = None
    top_logprobs: Logprobs | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    client_metadata: Ignored = None
    enable_response_messages: Annotated[bool, Meta(description=_RAW)] | None = None

    @classmethod
    def completed(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return a body's JSON in full: with the types that clients may leave out."""
        return {**value, "input": items.completed(value["input"])} if "input" in value else value

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise APIError("invalid_value", "stream_options: only with stream = true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            where = "stream_options.include_obfuscation"
            raise APIError("unsupported_field", f"{where}: not supported by this server", where)
        if self.top_logprobs and not self.scored:
            raise APIError("invalid_value", f"top_logprobs: only with include = [{SCORES}]", "top_logprobs")
        if self.ignore_eos and self.toolset().use.may_call:
            fields.check_alone(None, ["ignore_eos"])
        schemas.check_stops(self.stop, "stop")
        schemas.check_end(self)

    @property
    def scored(self) -> bool:
        """Whether the answer has log probabilities of its text."""
        return SCORES in (self.include or ())

    @property
    def items(self) -> Sequence[InputItem]:
        """The items of the input: a text is a user's message."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def toolset(self) -> Toolset:
        """Return the tools, and the choice among them. Raises APIError for what is refused."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def constraint(self) -> Asked | None:
        """Return the constraint of the answer; None where there is none. Raises APIError for a malformed one."""
        match None if self.text is None else self.text.format:
            case JsonObject():
                return Asked(Grammar.json_object(), "text.format")
            case JsonSchema() as named:
                return constraints.of_schema("text.format.schema", named.schema, named.strict)
        return None

    def reasoning_request(self) -> ReasoningRequest:
        """Return what the request asks of the model's reasoning."""
        return ReasoningRequest.of(None, effort=None if self.reasoning is None else self.reasoning.effort)

    def as_chat(self) -> ChatBody:
        """Return the parameters as those of a chat without messages."""
        return ChatBody(
            messages=[], max_completion_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p,
            top_k=self.top_k, min_p=self.min_p, repetition_penalty=self.repetition_penalty, seed=self.seed,
            stop=self.stop, ignore_eos=self.ignore_eos,
            logprobs=self.scored, top_logprobs=self.top_logprobs if self.scored else None,
        )  # fmt: skip
