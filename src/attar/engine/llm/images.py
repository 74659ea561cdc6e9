"""Images that are handed to an `LLM`: files, bytes, data URLs and PIL images, decoded as the server decodes them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attar.errors import UserError
from attar.images.decoding import MAX_FILE, ImageSource, decode
from attar.images.messages import MARK, in_parts
from attar.images.placeholders import Placeholders
from attar.images.settings import ImageSettings
from attar.protocol.images import ImageInput
from attar.text.template import lists_only
from attar.text.tokenizer import Tokenizer

FORMS = "a path, a data: URL, the bytes of a file, or a PIL image"
_KEPT = ("RGB", "RGBA", "L", "LA", "P", "1")  # modes that PNG has


class ImagePrompts:
    """Images of conversations and prompts for one model."""

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._places: Placeholders | None = None

    def decode(self, given: Sequence[Any]) -> tuple[ImageInput, ...]:
        """Return images as the engine takes them. Raises UserError: `image_invalid`, `image_too_large`,
        `package_missing`."""
        return decode(self._settings, [source_of(each) for each in given]) if given else ()

    def parted(self, template: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages as the template takes them: content in parts where it has images, or takes no texts."""
        always = lists_only(template)
        contents = ((each, each.get("content")) for each in messages)
        return [
            {**each, "content": in_parts(content, always)} if isinstance(content, str) else each
            for each, content in contents
        ]

    def expand(self, text: str, images: Sequence[ImageInput]) -> str:
        """Return a rendered text with the tokens of its images. Raises UserError without one place for each."""
        if self._places is None:
            self._places = Placeholders(self._settings, self._tokenizer)
        return self._places.expand(text, images)


def taken(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return messages with marks in place of their images, and the images. Raises UserError for parts of no known
    form beside an image."""
    said: list[Mapping[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list) or not any(_is_image(part) for part in content):
            said.append(message)
            continue
        texts = []
        for part in content:
            if _is_image(part):
                images.append(_given(part))
                texts.append(MARK)
            elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                raise UserError("image_invalid", "content beside an image is parts of type text")
        said.append({**message, "content": "".join(texts)})
    return said, images


def source_of(given: Any) -> ImageSource:
    """Return an image as the decoding process takes it. Raises UserError (`image_invalid`, `image_too_large`, and
    `file_not_found` for a path that is no file)."""
    if isinstance(given, ImageSource):
        return given
    if isinstance(given, str) and given.startswith("data:"):
        return ImageSource.of_url(given)
    if isinstance(given, str | Path):
        path = Path(given)
        if not path.is_file():  # nor a pipe, which might never end
            raise UserError("file_not_found", f"{path}: no such image file")
        with path.open("rb") as file:
            return ImageSource.of_bytes(file.read(MAX_FILE + 1))
    if isinstance(given, bytes | bytearray):
        return ImageSource.of_bytes(bytes(given))
    if type(given).__module__.partition(".")[0] == "PIL":
        return ImageSource.of_bytes(_png(given))
    raise UserError("image_invalid", f"an image is {FORMS}, not {type(given).__name__}")


def _png(image: Any) -> bytes:
    """Return a PIL image, turned as its EXIF says, as a PNG file."""
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    file = io.BytesIO()
    (turned if turned.mode in _KEPT else turned.convert("RGB")).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _given(part: Mapping[str, Any]) -> Any:
    """Return what a part of a message says its image is."""
    if part["type"] == "image_url":
        url = part.get("image_url")
        return ImageSource.of_url(str(url.get("url") if isinstance(url, Mapping) else url))
    for name in ("image", "path", "url"):
        if name in part:
            return part[name]
    raise UserError("image_invalid", f"a part of type image has its image under image: {FORMS}")
