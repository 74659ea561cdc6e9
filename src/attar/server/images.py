"""Images of requests: decoded apart from the event loop, within bounds of the server, and put into prompts.

A few images are decoded at a time, each in a limited process of its own (`images/decoding.py`). Those that wait, and
the bytes that requests hold once decoded, have limits: beyond them a request is refused with 429.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from attar.errors import UserError
from attar.images.decoding import ImageSource, check_count, decode
from attar.images.placeholders import Placeholders
from attar.images.settings import ImageSettings
from attar.protocol.images import ImageInput
from attar.protocol.messages import Ready
from attar.server.errors import FULL, APIError
from attar.server.fair_thread_pool import FairThreadPool
from attar.text.tokenizer import Tokenizer

DECODERS = 2  # processes at a time
MAX_WAITING = 16  # requests whose images are decoded or wait for it
MAX_HELD = 256 << 20  # bytes of images of open requests, decoded, and encoded where they wait
_CODES = {"image_invalid": "invalid_value", "image_too_large": "invalid_length", "package_missing": "not_implemented",
          "template_failed": "template_error"}  # fmt: skip


class ImageReader:
    """Reader of images for one model. `keys` API keys share it; with several each decodes one request at a time."""

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer, keys: int = 0) -> None:
        self.settings, self.places = settings, Placeholders(settings, tokenizer)
        self._threads = FairThreadPool("images", DECODERS, DECODERS if keys < 2 else 1)
        self.waiting = self._held = 0
        self._freed: deque[int] = deque()  # by finalizers, in any thread

    @property
    def held(self) -> int:
        """Return the bytes of images that are in use."""
        while self._freed:
            self._held -= self._freed.popleft()
        return self._held

    async def decode(self, key: bytes, sources: Sequence[ImageSource]) -> tuple[ImageInput, ...]:
        """Return the images of one request, as the engine takes them. Raises APIError for what is refused, and where
        the server has no room for more images."""
        size = sum(len(each.data) for each in sources)
        if self.waiting >= MAX_WAITING or self.held + size > MAX_HELD:
            raise APIError("overloaded", FULL)
        self.waiting += 1
        self._held += size
        try:
            made = await self._threads.run(key, lambda: decode(self.settings, sources))
        except UserError as error:
            raise refused(error) from error
        finally:
            self.waiting -= 1
            self._held -= size
        if self.held + sum(len(each.tiles) for each in made) > MAX_HELD:
            raise APIError("overloaded", FULL)
        for each in made:
            self._held += len(each.tiles)
            weakref.finalize(each, self._freed.append, len(each.tiles)).atexit = False
        return made

    def close(self) -> None:
        """Release the threads."""
        self._threads.close()


def taken(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Return messages without their images, whose places stay marked, and the images. Raises APIError for too many."""
    said, images = [], []
    for message in messages:
        images += message.get("images", ())
        said.append({name: value for name, value in message.items() if name != "images"})
    try:
        check_count(len(images))
    except UserError as error:
        raise refused(error) from error
    return said, images


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any message has an image."""
    return any("images" in message for message in messages)


def require_images(messages: Sequence[Mapping[str, Any]], ready: Ready, reader: ImageReader | None) -> None:
    """Raise APIError for messages with images where the model, its engine or this server takes none."""
    if has_images(messages) and (reader is None or not ready.images):
        why = f": {ready.no_images}" if ready.no_images else ""
        raise APIError("unsupported_field", f"messages: this model takes no images{why}", "messages")


def refused(error: UserError) -> APIError:
    """Return the refusal of a request for an error of its images."""
    if error.code == "package_missing":
        return APIError("not_implemented", f"messages: {error}", "messages")
    return APIError(_CODES.get(error.code, "invalid_value"), f"messages: {error}", "messages")
