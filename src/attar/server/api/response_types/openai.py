"""Shapes of answers in OpenAI's API: chat and text completions, embeddings and errors."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from attar.protocol.request import FinishReason
from attar.server.api.response_types.answer import Answer


class CachedTokens(Answer, frozen=True):
    cached_tokens: int


class GeneratedTokens(Answer, frozen=True):
    """Tokens of the reasoning section, its markers included, where the model has one."""

    reasoning_tokens: int


class Usage(Answer, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET  # in a stream, with the last chunk
    completion_tokens_details: GeneratedTokens | UnsetType = UNSET


class ReadUsage(Answer, frozen=True):
    """Usage of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int


class Vector(Answer, frozen=True):
    """One embedding of unit length, as OpenAI's are, so that dot products are cosines; zeros stay as they are. Base64
    encodes little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer, frozen=True):
    object: Literal["list"]
    model: str
    data: list[Vector]
    usage: ReadUsage


class Timings(Answer, frozen=True):
    """Timings of a request as llama.cpp gives them; milliseconds, and tokens."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class RequestMetrics(Answer, frozen=True):
    """Times of a request as vLLM gives them, where the server tells them."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    tokens_per_second: float
    mean_itl_ms: float | UnsetType = UNSET  # of an answer of two tokens or more


class RankedToken(Answer, frozen=True):
    """A token of vLLM's `prompt_logprobs`; its rank is null beyond the most probable ones."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


class LikelyToken(Answer, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken, frozen=True):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Answer, frozen=True):
    content: list[ChosenToken]
    refusal: None


class MadeFunction(Answer, frozen=True):
    name: str
    arguments: str  # a JSON object as text


class ChatCall(Answer, frozen=True):
    id: str
    type: Literal["function"]
    function: MadeFunction


class ChatMessage(Answer, frozen=True):
    role: Literal["assistant"]
    content: str | None  # null where there are calls alone
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatChoice(Answer, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None  # this and the other extras: null where they were not asked for


class ChatCompletion(Answer, frozen=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    timings: Timings | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class FunctionDelta(Answer, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET  # with the first piece of a call, as its id


class CallDelta(Answer, frozen=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Answer, frozen=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionLogprobs(Answer, frozen=True):
    """Log probabilities of a completion: one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None


class Completion(Answer, frozen=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class CompletionChunkChoice(Answer, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChunk(Answer, frozen=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class ErrorDetail(Answer, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class Error(Answer, frozen=True):
    """An error in OpenAI's shape."""

    error: ErrorDetail
