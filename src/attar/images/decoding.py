"""Images as bytes or base64 to tiles: by a limited process of their own, one for each request.

Decoders of images run on bytes of strangers. `_decode_child.py` does it under limits of the operating system
(`text/limited_child.py`), and is replaced after each request: nothing of one request's images is near another's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from attar.errors import CODES, Code, UserError
from attar.images.geometry import layout, unpadded_rows
from attar.images.settings import ImageSettings
from attar.protocol.image_limits import CHANNELS, MAX_IMAGES, MAX_PIXELS, MAX_REQUEST_PIXELS, MAX_TILE_BYTES
from attar.protocol.images import ImageInput, digest_of
from attar.text.limited_child import LimitedChild

DECODE_SECONDS = 1.0  # of one image
MAX_FILE = 16 << 20  # bytes of one image
MAX_BASE64 = (MAX_FILE + 2) // 3 * 4
EXTRA = "reading images needs Pillow: pip install 'attar[vision]'"
KINDS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WEBP"}
"""Decoders by MIME type."""
_URL = re.compile(r"data:([a-z]{1,16}/[a-z0-9.+-]{1,64});base64,", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,16}:", re.IGNORECASE)


class ImageSource(NamedTuple):
    """An image as it came: its bytes, or base64 of them, and the decoder that its sender names; empty where it names
    none."""

    data: bytes
    base64: bool = False
    kind: str = ""

    @classmethod
    def of_url(cls, url: str) -> ImageSource:
        """Return the image of a data URL. Raises UserError (`image_invalid`, `image_too_large`) for any other."""
        head = _URL.match(url[:128])
        if head is None:
            scheme = _SCHEME.match(url[:32])
            if scheme and scheme[0].lower() != "data:":
                message = f"a URL with {scheme[0].lower()} is not fetched: send the image as data:image/png;base64,..."
            else:
                message = "an image is given as data:image/png;base64,..., or image/jpeg or image/webp"
            raise UserError("image_invalid", message)
        return cls.of_base64(url[head.end() :], head[1])

    @classmethod
    def of_base64(cls, text: str, mime: str = "") -> ImageSource:
        """Return the image of a text in base64. Raises UserError."""
        if mime and mime.lower() not in KINDS:
            raise UserError("image_invalid", "the image's type is none of image/png, image/jpeg and image/webp")
        if len(text) > MAX_BASE64:
            raise UserError("image_too_large", f"an image has at most {MAX_FILE >> 20} MiB")
        if not text.isascii():
            raise UserError("image_invalid", "the image is not valid base64")
        return cls(text.encode(), True, KINDS.get(mime.lower(), ""))

    @classmethod
    def of_bytes(cls, data: bytes) -> ImageSource:
        """Return the image of a file's content. Raises UserError where it is too large."""
        if len(data) > MAX_FILE:
            raise UserError("image_too_large", f"an image has at most {MAX_FILE >> 20} MiB")
        return cls(data)


def check_count(count: int) -> None:
    """Raise UserError for more images than a request may have."""
    if count > MAX_IMAGES:
        raise UserError("image_too_large", f"{count} images are more than {MAX_IMAGES} in one request")


def decode(settings: ImageSettings, sources: Sequence[ImageSource]) -> tuple[ImageInput, ...]:
    """Decode, resize and cut the images of one request, in a process that ends with it.

    Raises UserError: `image_invalid` for what is no whole PNG, JPEG or WebP file, `image_too_large` past a limit, and
    `package_missing` without Pillow. Error texts name the limit, and hold nothing that a decoder says. Thread-safe.
    """
    check_count(len(sources))
    child = LimitedChild(
        "attar.images._decode_child", ("PIL",), "decoding of an image", _error, most=MAX_TILE_BYTES + 4096
    )
    made: list[ImageInput] = []
    pixels, room = MAX_REQUEST_PIXELS, MAX_TILE_BYTES
    try:
        for source in sources:
            image = _decoded(child, settings, source, pixels)
            pixels -= image.size[0] * image.size[1]
            room -= len(image.tiles)
            if room < 0:
                message = f"the images have more than {MAX_TILE_BYTES >> 20} MiB once they are resized for this model"
                raise UserError("image_too_large", message)
            made.append(image)
    finally:
        child.close()
    return tuple(made)


def _decoded(child: LimitedChild, settings: ImageSettings, source: ImageSource, pixels: int) -> ImageInput:
    own = settings.pixels.json()
    limits = {"each": MAX_PIXELS, "all": MAX_REQUEST_PIXELS, "left": pixels}
    request = {"base64": source.base64, "kind": source.kind, "limits": limits, "settings": json.loads(own)}
    head = json.dumps(request).encode()
    reply = child.ask_bytes(b"".join((len(head).to_bytes(4, "little"), head, source.data)), DECODE_SECONDS)
    length = int.from_bytes(reply[:4], "little")
    told, tiles = json.loads(reply[4 : 4 + length]), reply[4 + length :]
    high, wide = told["size"]
    plan = layout(settings.pixels, high, wide)
    if len(tiles) != CHANNELS * plan.shape[0] * plan.shape[1] * plan.shape[2]:
        raise UserError("image_invalid", "decoding of an image gave other pixels than it said")
    rows = count_rows(settings, plan.shape[0], plan.grid, (high, wide))
    return ImageInput(digest_of(own, plan.shape, (high, wide), tiles), tiles, plan.shape, plan.grid, (high, wide), rows)


def count_rows(settings: ImageSettings, tiles: int, grid: tuple[int, int], size: tuple[int, int]) -> int:
    """Return the feature rows of an image of `size` (height, width) with `tiles` tiles."""
    pixels = settings.pixels
    if pixels.family == "qwen2_vl":
        return grid[0] * grid[1] // pixels.merge**2
    if pixels.family == "llava_next":
        return settings.tile_rows + unpadded_rows(pixels.tile // pixels.patch, grid, size)
    return settings.tile_rows * tiles


def _error(message: str, code: Code | None) -> UserError:
    if code == "package_missing":
        return UserError(code, EXTRA)
    named, _, words = message.partition(" ")
    known = next((each for each in CODES if each == named), None)
    return UserError(known or code or "image_invalid", words if known else message)
