"""Images as clients send them. A message's text has marks in their places (`images/messages.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from attar.errors import UserError
from attar.images.decoding import ImageSource
from attar.images.messages import MARK
from attar.server.api.body import Ignored
from attar.server.images import refused

_ONLY_DATA = "A data URL with base64: data:image/png;base64,..., or image/jpeg or image/webp. No other is fetched."
Url = Annotated[str, Meta(description=_ONLY_DATA)]
Detail = Literal["auto", "low", "high"]


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An image as a data URL. `detail` changes nothing: the model's own settings decide about its size."""

    url: Url
    detail: Detail | None = None


class ImagePart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="image_url"):
    """An image of OpenAI's chats."""

    image_url: ImageUrl | Url
    cache_control: Ignored = None

    def source(self) -> ImageSource:
        """Return the image. Raises APIError."""
        url = self.image_url if isinstance(self.image_url, str) else self.image_url.url
        return source(lambda: ImageSource.of_url(url))


class BareImage(ImagePart, frozen=True, kw_only=True, tag="bare_image"):
    """An image of Ollama's messages: base64 without a type."""

    def source(self) -> ImageSource:
        """Return the image. Raises APIError."""
        assert isinstance(self.image_url, str)
        text = self.image_url
        return source(lambda: ImageSource.of_base64(text))


class InputImage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="input_image"):
    """An image of OpenAI's responses."""

    image_url: Url
    detail: Detail | None = None

    def source(self) -> ImageSource:
        """Return the image. Raises APIError."""
        return source(lambda: ImageSource.of_url(self.image_url))


class Base64Source(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="base64"):
    """Base64 of a file."""

    media_type: Literal["image/png", "image/jpeg", "image/webp"]
    data: str


class ImageBlock(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="image"):
    """An image of Anthropic's messages."""

    source: Base64Source
    cache_control: Ignored = None

    def image(self) -> ImageSource:
        """Return the image. Raises APIError."""
        return source(lambda: ImageSource.of_base64(self.source.data, self.source.media_type))


def source(make: Callable[[], ImageSource]) -> ImageSource:
    """Return the image that `make` makes. Raises APIError for what is refused."""
    try:
        return make()
    except UserError as error:
        raise refused(error) from error


def placed(entry: dict[str, Any], images: Iterable[ImageSource]) -> dict[str, Any]:
    """Return a message whose text has marks, with its images."""
    found = tuple(images)
    return entry | {"images": found} if found else entry


__all__ = ["MARK", "BareImage", "ImageBlock", "ImagePart", "ImageUrl", "InputImage", "placed", "source"]
