"""Texts to be continued or embedded, in all forms that llama.cpp's server takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from attar.server.api.body import Token
from attar.server.errors import APIError


class InputPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of a text."""

    type: Literal["text"]
    text: str


class InputObject(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text as an object: `prompt_string`, or a `content` of parts. Its `multimodal_data` is empty: there are no
    images here."""

    prompt_string: str | UnsetType = UNSET
    content: Annotated[list[InputPart], Meta(max_length=256)] | UnsetType = UNSET
    multimodal_data: Annotated[list[str], Meta(max_length=0)] | None = None

    def __post_init__(self) -> None:
        if (self.prompt_string is UNSET) == (self.content is UNSET):
            raise APIError("missing_field", "prompt_string: either prompt_string or content, and one of them")

    def text(self) -> str:
        """Return the text."""
        if self.content is not UNSET:
            return "".join(part.text for part in self.content)
        assert self.prompt_string is not UNSET
        return self.prompt_string


Pieces = list[Token | str]
"""Token ids and texts, one behind the other, as one text."""
_MANY = "Several texts; or one, of token ids or of token ids and texts."
Several = Annotated[
    list[Token | str | InputObject | Pieces], Meta(min_length=1, max_length=1 << 20, description=_MANY)
]  # fmt: skip
Inputs = str | InputObject | Several


def check_inputs(given: Inputs, name: str, most: int) -> None:
    """Raise APIError for a list that mixes texts and token ids otherwise than as one text, and for more than `most`
    texts. Called while a body is read, which is outside the event loop: token ids may be millions."""
    if not isinstance(given, list):
        return
    kinds = set(map(type, given))
    if int in kinds and kinds - {int, str}:
        message = f"{name}: a list of texts, or one of token ids and strings, not both"
        raise APIError("invalid_type", message, name)
    if int not in kinds and len(given) > most:
        raise APIError("invalid_length", f"{name}: at most {most} texts, not {len(given)}", name)


def inputs_of(checked: Inputs) -> Sequence[str | Pieces]:
    """Return the texts of a checked input, each as it is, or a list of token ids and texts."""
    if not isinstance(checked, list):
        return [_plain(checked)]
    if any(isinstance(each, int) for each in checked):
        return [checked]  # type: ignore[list-item]
    return [_plain(each) for each in checked]  # type: ignore[arg-type]


def _plain(given: str | InputObject | Pieces) -> str | Pieces:
    return given.text() if isinstance(given, InputObject) else given
