"""Images of a prompt as the server hands them to the engine: decoded and resized, neither rescaled nor normalised.

A prompt has the model's image token once for each feature row of an image. The images follow the prompt's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from attar.errors import UserError
from attar.protocol.image_limits import CHANNELS, MAX_IMAGES, MAX_PIXELS, MAX_REQUEST_PIXELS, MAX_TILE_BYTES

DIGEST = 16  # bytes


class ImageInput(msgspec.Struct, frozen=True, weakref=True):
    """One image of a prompt as tiles of equal size.

    `grid` counts rows and columns of tiles without the global tile, which comes last for Idefics3 and first for
    LLaVA-NeXT; for Qwen2-VL it counts patches of the height and the width. `size` is height and width of the image
    before it was resized.
    """

    digest: bytes  # `digest_of`: equal digests give equal features
    tiles: bytes  # uint8 RGB, [T, H, W, 3], row-major
    shape: tuple[int, int, int]  # T, H, W
    grid: tuple[int, int]
    size: tuple[int, int]
    rows: int  # of features: how often the image token stands in the prompt for this image


def digest_of(settings: bytes, shape: tuple[int, int, int], size: tuple[int, int], tiles: bytes) -> bytes:
    """Return the digest of an image: 16 bytes of BLAKE2b over preprocessing settings, shape, size and tiles."""
    head = b"".join(number.to_bytes(4, "little") for number in (len(settings), *shape, *size))
    return hashlib.blake2b(head + settings + tiles, digest_size=DIGEST, person=b"attar images").digest()


def check_images(images: Sequence[ImageInput], tokens: int) -> None:
    """Check images of a prompt that has the image token `tokens` times.

    Raises UserError: `image_too_large` past a limit, and `image_invalid` where sizes contradict each other.
    """
    if len(images) > MAX_IMAGES:
        raise UserError("image_too_large", f"{len(images)} images are more than {MAX_IMAGES} in one request")
    for image in images:
        _check(image)
    check_sizes([image.size for image in images], [image.shape for image in images])
    if (rows := sum(image.rows for image in images)) != tokens:
        raise UserError("image_invalid", f"the images have {rows} rows, and the prompt has {tokens} image tokens")


def check_sizes(sizes: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, int, int]]) -> None:
    """Check the images of one request: height and width of each before it is resized, and the shape of its tiles.

    Raises UserError (`image_too_large`) where they have more pixels or bytes than a request may have.
    """
    before = sum(height * width for height, width in sizes)
    after = sum(count * height * width for count, height, width in shapes)
    if before > MAX_REQUEST_PIXELS or after > MAX_REQUEST_PIXELS or CHANNELS * after > MAX_TILE_BYTES:
        said = f"the images have {before:,} pixels, and {CHANNELS * after / (1 << 20):,.1f} MiB after resizing"
        limits = f"{MAX_REQUEST_PIXELS:,} pixels, and {MAX_TILE_BYTES >> 20} MiB after resizing"
        raise UserError("image_too_large", f"{said}; a request has at most {limits}")


def _check(image: ImageInput) -> None:
    numbers = (*image.shape, *image.grid, *image.size, image.rows)
    if min(*image.shape, *image.size, image.rows) < 1 or min(image.grid) < 0 or max(numbers) > MAX_REQUEST_PIXELS:
        raise UserError("image_invalid", "shape, size and rows of an image are at least 1, and its grid at least 0")
    if image.size[0] * image.size[1] > MAX_PIXELS:
        raise UserError("image_too_large", f"an image has at most {MAX_PIXELS} pixels")
    count, height, width = image.shape
    if len(image.tiles) != count * height * width * CHANNELS or len(image.digest) != DIGEST:
        raise UserError("image_invalid", f"an image has 3 bytes a pixel of its tiles, and a digest of {DIGEST} bytes")
