"""The shapes of answers of other servers' APIs, for the OpenAPI document, and for tests to parse answers by."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from attar.server.api.response_types.answer import Answer
from attar.server.api.response_types.openai import ReadUsage


class RankedText(Answer, frozen=True):
    text: str


class RankedDocument(Answer, frozen=True):
    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Answer, frozen=True):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: ReadUsage


class OllamaError(Answer, frozen=True):
    """An error in Ollama's shape."""

    error: str


class OllamaVersion(Answer, frozen=True):
    version: str


class OllamaDetails(Answer, frozen=True):
    """What Ollama tells of a model's file; empty where this server does not know it."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer, frozen=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET  # this and the others: of a model in memory
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(Answer, frozen=True):
    models: list[OllamaModel]


class OllamaShown(Answer, frozen=True):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaMadeFunction(Answer, frozen=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaMadeCall(Answer, frozen=True):
    id: str
    function: OllamaMadeFunction


class OllamaSaid(Answer, frozen=True):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaMadeCall] | UnsetType = UNSET


class OllamaText(Answer, frozen=True):
    """A whole answer, or a line of a stream: the last has `done`, a reason, counts, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    message: OllamaSaid | UnsetType = UNSET  # of /api/chat
    response: str | UnsetType = UNSET  # of /api/generate
    thinking: str | UnsetType = UNSET
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaVectors(Answer, frozen=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(Answer, frozen=True):
    embedding: list[float]
