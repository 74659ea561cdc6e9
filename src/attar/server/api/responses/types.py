"""The shapes of answers of /v1/responses and of their streams' events, for the OpenAPI document and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from attar.server.api.response_types.answer import Answer
from attar.server.api.responses.items import Status

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class SaidText(Answer, frozen=True, tag_field="type", tag="output_text"):
    annotations: list[Any]
    logprobs: list[Any]
    text: str


class ReasoningText(Answer, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class SaidMessage(Answer, frozen=True, tag_field="type", tag="message"):
    """A message of the model. It has no content until its part begins."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[SaidText]


class MadeCall(Answer, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function, whose output names its `call_id`."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET  # of a function in one


class MadeCustomCall(Answer, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool, whose output names its `call_id`."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str


class SaidReasoning(Answer, frozen=True, tag_field="type", tag="reasoning"):
    """What the model says before it answers."""

    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


OutputItem = SaidMessage | MadeCall | MadeCustomCall | SaidReasoning


class ResponseError(Answer, frozen=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class Incomplete(Answer, frozen=True):
    reason: Literal["max_output_tokens"]


class InputDetails(Answer, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Answer, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Effort(Answer, frozen=True):
    effort: str | None
    summary: str | None


class RawMessage(Answer, frozen=True, tag_field="type", tag="raw_message_tokens"):
    """A prompt or an answer as the model has it."""

    message: str
    tokens: list[int]


class ResponseObject(Answer, frozen=True):
    """An answer. `store` says whether the server has kept it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Effort
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    input_messages: list[RawMessage] | UnsetType = UNSET  # at the end, where enable_response_messages asks for them
    output_messages: list[RawMessage] | UnsetType = UNSET


class DeletedResponse(Answer, frozen=True):
    """A stored answer that has been forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class ListedText(Answer, frozen=True, tag_field="type", tag="input_text"):
    text: str


class ListedImage(Answer, frozen=True, tag_field="type", tag="input_image"):
    image_url: str
    detail: str


class SaidRefusal(Answer, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class ListedMessage(Answer, frozen=True, tag_field="type", tag="message"):
    """A message of an answer's input."""

    id: str
    status: Status
    role: Literal["system", "developer", "user", "assistant"]
    content: Sequence[ListedText | ListedImage | SaidText | SaidRefusal]


class ListedOutput(Answer, frozen=True, tag_field="type", tag="function_call_output"):
    """What a called function has returned."""

    id: str
    status: Status
    call_id: str
    output: str | list[ListedText | ListedImage]


class ListedCustomOutput(Answer, frozen=True, tag_field="type", tag="custom_tool_call_output"):
    """What a called custom tool has returned."""

    id: str
    status: Status
    call_id: str
    output: str | list[ListedText | ListedImage]


ListedItem = ListedMessage | MadeCall | ListedOutput | MadeCustomCall | ListedCustomOutput | SaidReasoning


class InputItemList(Answer, frozen=True):
    """A page of the input items of a stored answer."""

    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(Answer, frozen=True):
    sequence_number: int


class Created(ResponseEvent, frozen=True, tag_field="type", tag="response.created"):
    response: ResponseObject


class InProgress(ResponseEvent, frozen=True, tag_field="type", tag="response.in_progress"):
    response: ResponseObject


class Completed(ResponseEvent, frozen=True, tag_field="type", tag="response.completed"):
    response: ResponseObject


class Ended(ResponseEvent, frozen=True, tag_field="type", tag="response.incomplete"):
    response: ResponseObject


class FailedResponse(ResponseEvent, frozen=True, tag_field="type", tag="response.failed"):
    response: ResponseObject


class ItemAdded(ResponseEvent, frozen=True, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, frozen=True, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class OfItem(ResponseEvent, frozen=True):
    item_id: str
    output_index: int


class OfPart(OfItem, frozen=True):
    content_index: int


class PartAdded(OfPart, frozen=True, tag_field="type", tag="response.content_part.added"):
    part: SaidText | ReasoningText


class PartDone(OfPart, frozen=True, tag_field="type", tag="response.content_part.done"):
    part: SaidText | ReasoningText


class SaidDelta(OfPart, frozen=True, tag_field="type", tag="response.output_text.delta"):
    delta: str
    logprobs: list[Any]


class SaidDone(OfPart, frozen=True, tag_field="type", tag="response.output_text.done"):
    text: str
    logprobs: list[Any]


class ReasoningTextDelta(OfPart, frozen=True, tag_field="type", tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(OfPart, frozen=True, tag_field="type", tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(OfItem, frozen=True, tag_field="type", tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(OfItem, frozen=True, tag_field="type", tag="response.function_call_arguments.done"):
    arguments: str


class CustomInputDelta(OfItem, frozen=True, tag_field="type", tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(OfItem, frozen=True, tag_field="type", tag="response.custom_tool_call_input.done"):
    input: str


RESPONSE_EVENTS: tuple[type[ResponseEvent], ...] = (
    Created, InProgress, ItemAdded, PartAdded, SaidDelta, SaidDone, ReasoningTextDelta, ReasoningTextDone,
    ArgumentsDelta, ArgumentsDone, CustomInputDelta, CustomInputDone, PartDone, ItemDone, Completed, Ended,
    FailedResponse,
)  # fmt: skip
