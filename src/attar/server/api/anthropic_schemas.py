"""Request bodies of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from attar.server.api.schemas import (
    MAX_MESSAGES,
    Body,
    CacheControl,
    Content,
    Fraction,
    Label,
    Length,
    StopStrings,
    TopP,
    check_stops,
    text_of,
)
from attar.server.errors import APIError


class AnthropicMessage(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: Content


def _check_last(messages: Sequence[AnthropicMessage]) -> None:
    """Raise APIError for a last message that begins the answer. Anthropic's API continues it; here a template opens a
    turn, and many open one unlike a finished one: with thoughts or a space that the other has not."""
    if messages[-1].role == "assistant":
        message = "messages: continuing an assistant's message is not supported: end with one of role user"
        raise APIError("invalid_value", message, "messages")


class Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    user_id: Label | None = None


class AnthropicPrompt(Body, frozen=True, kw_only=True):
    """Body of /v1/messages/count_tokens, and the prompt's part of /v1/messages."""

    unbuilt: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ({"type": "none"}, {"type": "auto"}),
        "thinking": ({"type": "disabled"},),
        "mcp_servers": ([],),
        "context_management": (),
        "output_config": (),
        "output_format": (),
    }

    messages: Annotated[
        list[AnthropicMessage],
        Meta(
            min_length=1,
            max_length=MAX_MESSAGES,
            description="The last is of role user: an assistant's message is not continued.",
        ),
    ]
    system: Content | None = None
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        _check_last(self.messages)

    def conversation(self) -> list[dict[str, str]]:
        """Return the system prompt and the messages as chat templates expect them."""
        system = text_of(self.system)
        head = [{"role": "system", "content": system}] if system else []
        return head + [{"role": message.role, "content": text_of(message.content)} for message in self.messages]


class AnthropicBody(AnthropicPrompt, frozen=True, kw_only=True):
    """Body of /v1/messages."""

    unbuilt: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AnthropicPrompt.unbuilt,
        "service_tier": ("auto", "standard_only"),
        "container": (),
    }

    max_tokens: Length
    temperature: Fraction | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    metadata: Metadata | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stops(self.stop_sequences, "stop_sequences")
