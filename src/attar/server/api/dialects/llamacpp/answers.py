"""The shapes of answers of llama.cpp's routes, for the OpenAPI document, and for tests to parse answers by."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from attar.server.api.response_types.answer import Answer
from attar.server.api.response_types.openai import Timings


class NativeProbability(Answer, frozen=True):
    """A token, and the likeliest ones in its place."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[NativeProbability] | UnsetType = UNSET


class NativeCompletion(Answer, frozen=True):
    """An answer of /completion or /infill: whole, or a piece of a stream, whose last has the fields from `model` on. Of
    a whole answer `response_fields` chooses some, by their paths. Several prompts or answers are a list of these."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_evaluated: int
    tokens_predicted: int | UnsetType = UNSET
    completion_probabilities: list[NativeProbability] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class AppliedTemplate(Answer, frozen=True):
    prompt: str


class NativeVector(Answer, frozen=True):
    index: int
    embedding: list[list[float]]


class NativeDefaults(Answer, frozen=True):
    id: int
    n_ctx: int
    is_processing: bool
    params: dict[str, Any]


class Properties(Answer, frozen=True):
    """Properties of the server."""

    default_generation_settings: NativeDefaults
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class Slot(Answer, frozen=True):
    """One of the choices that can run at a time."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class NativeProblem(Answer, frozen=True):
    code: int
    message: str
    type: str
    param: str | None
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class NativeError(Answer, frozen=True):
    """An error in llama.cpp's shape."""

    error: NativeProblem
