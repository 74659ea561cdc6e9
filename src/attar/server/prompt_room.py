"""Checks of prompts against the context length and the vocabulary of the served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attar.server.errors import APIError


class Room(NamedTuple):
    """Limits of the prompts in a `field`: the vocabulary, and the context, which must hold `new` tokens more."""

    field: str
    vocab: int
    context: int
    new: int = 1


def check_room(found: Sequence[Sequence[int]], room: Room) -> None:
    """Raise APIError for prompts without tokens, and for those that have no room in the context."""
    if not all(found):
        raise APIError("empty_prompt", f"{room.field}: no tokens", room.field)
    if (longest := max(map(len, found))) + room.new > room.context:
        raise beyond(longest, room.context, room.field)


def beyond(tokens: int, context: int, name: str, least: bool = False) -> APIError:
    """Make the refusal of a prompt of `tokens`, or at `least` so many, that is beyond the context or just fills it.
    Clients know OpenAI's first words, or Anthropic's `prompt is too long`; then they shorten it or take another
    model."""
    message = (
        f"This model's maximum context length is {context} tokens, and the prompt is too long: "
        f"{'at least ' if least else ''}{tokens} tokens in {name}"
        f"{' leave no room for an answer' if tokens == context and not least else ''}"
    )
    return APIError("context_length_exceeded", message, name, beyond=(tokens, context))


def in_vocabulary(tokens: Sequence[int], vocab: int, name: str) -> None:
    """Raise APIError unless all tokens are in the vocabulary."""
    if tokens and max(tokens) >= vocab:
        raise APIError("out_of_range", f"{name}: token ids are 0 to {vocab - 1}, not {max(tokens)}", name)
