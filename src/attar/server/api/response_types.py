"""The shapes of answers, for the OpenAPI document, and for tests to parse answers by.

The server writes dictionaries and bytes: streams encode what is constant in them once (`openai.py`). These types
describe the output; an answer has no field that they do not name.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from attar.protocol.messages import Ready, Report, Stats
from attar.protocol.model_shape import MachineRates, ModelShape
from attar.protocol.request import FinishReason


class Answer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parts of an answer."""


class Alive(Answer, frozen=True):
    status: Literal["alive", "ready"]


class Version(Answer, frozen=True):
    version: str


class Load(Answer, frozen=True):
    server_load: int  # requests that run or wait


class Replica(Answer, frozen=True):
    replica: int
    state: Literal["loading", "ready", "draining", "down", "stuck", "strange", "failed"]
    processors: list[int]
    open: int  # requests that it has
    deaths: int
    restarts: int
    requests: int  # that were sent to it, and the tokens of their prompts
    prompt_tokens: int
    cached_prompt_tokens: int  # of these, those that the router expected to be cached there
    stats: Stats | None


class Engine(Answer, frozen=True):
    ready: Ready
    stats: Stats | None
    replicas: list[Replica] | UnsetType = UNSET  # of a server with several engines


class RunningRequest(Answer, frozen=True):
    """A running request of the caller's key: its id, the tokens that it has, and those that it may come to have."""

    id: str
    tokens: int
    max_tokens: int


class Lab(Answer, frozen=True):
    """Data of the lab's page. `steps` are the last ones: rows, sequences, cached tokens, seconds; null where several
    keys share the server, whose requests they would tell of."""

    live: bool
    written: str
    model: ModelShape | None
    machine: MachineRates | None
    gpus: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    channels: list[dict[str, Any]]
    replay: list[dict[str, Any]]
    engine: Engine
    sequences: list[RunningRequest]
    steps: list[tuple[int, int, int, float]] | None


class Model(Answer, frozen=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str  # what is served under this name
    parent: str | UnsetType = UNSET  # an adapter's base model
    loaded: bool | UnsetType = UNSET  # this and the others: of a server with several models
    state: Literal["unloaded", "loading", "ready", "draining", "failed"] | UnsetType = UNSET
    memory: int | UnsetType = UNSET  # bytes that its engine takes


class Models(Answer, frozen=True):
    object: Literal["list"]
    data: list[Model]


class Why(Answer, frozen=True):
    """Account of where a request's time went, or goes while `outcome` is `running`.

    `outcome` is otherwise how it ended: `stop`, `length`, or the code of its failure. `prompts` has a report for each
    prompt, and for an embedding's first 128 inputs. A running prompt's report is partial; it is null where the prompt
    waits to be sent to the engine, or a step has kept the engine from answering for a second.
    """

    id: str
    outcome: str
    seconds: float
    seconds_to_first_token: float | None
    generated_tokens: int
    replays: int  # times that another engine of several went on with a prompt; told at the end
    prompts: list[Report | None]


class TokenPiece(Answer, frozen=True):
    """A token with its text, or with its bytes where those are no text."""

    id: int
    piece: str | list[int]


class Tokenized(Answer, frozen=True):
    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET  # where they were asked for


class Detokenized(Answer, frozen=True):
    """The text, by vLLM's and by llama.cpp's name."""

    prompt: str
    content: str


class TokenizerInfo(Answer, frozen=True):
    """What a client needs to render conversations by itself."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: None
    chat_template: str | None
    vocab_size: int
    model_max_length: int


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


class AnthropicUsage(Answer, frozen=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Answer, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Answer, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning. Its signature is a checksum, which clients send back; nothing reads it."""

    thinking: str
    signature: str


class CallBlock(Answer, frozen=True, tag_field="type", tag="tool_use"):
    """A call; in the first event of a stream's block its input is empty."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | CallBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicReply(Answer, frozen=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(Answer, frozen=True):
    input_tokens: int


class MessageStart(Answer, frozen=True, tag_field="type", tag="message_start"):
    message: AnthropicReply


class ContentBlockStart(Answer, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(Answer, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Answer, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Answer, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Answer, frozen=True, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON text of a call's input."""

    partial_json: str


class ContentBlockDelta(Answer, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class ContentBlockStop(Answer, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Answer, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: AnthropicUsage


class Ping(Answer, frozen=True, tag_field="type", tag="ping"):
    """A keep-alive event in a stream that has been silent for a while."""


class MessageStop(Answer, frozen=True, tag_field="type", tag="message_stop"):
    pass


class ErrorDetail(Answer, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class Error(Answer, frozen=True):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class AnthropicErrorDetail(Answer, frozen=True):
    type: str
    message: str


class AnthropicError(Answer, frozen=True, tag_field="type", tag="error"):
    """An error in Anthropic's shape."""

    error: AnthropicErrorDetail


ANTHROPIC_EVENTS: tuple[type[Answer], ...] = (
    MessageStart, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop, Ping,
    AnthropicError,
)  # fmt: skip
