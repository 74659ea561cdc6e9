"""What every request's body has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from attar.text.tools.openai import Ignored as Ignored

MAX_TOKENS = 2**31 - 1  # also the largest id that a vocabulary could have

Token = Annotated[int, Meta(ge=0, le=MAX_TOKENS, title="Token")]
Name = Annotated[str, Meta(max_length=256)]


class Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request's body. `model` is the served model (the default) or one of its adapters."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: Name | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    cache_control: Ignored = None
    cache_prompt: Ignored = None  # llama-server's, as `id_slot`
    id_slot: Ignored = None
    keep_alive: Ignored = None  # Ollama's
    session_id: Ignored = None
    request_id: Ignored = None
    rid: Ignored = None  # SGLang's request id
    provider: Ignored = None  # OpenRouter's, as `usage`
    usage: Ignored = None
    guided_decoding_backend: Ignored = None

    @classmethod
    def completed(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return a body's JSON in full: here as it is."""
        return value
