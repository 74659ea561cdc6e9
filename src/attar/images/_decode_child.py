"""The process that decodes images: reads requests on stdin, writes answers on stdout, until stdin ends.

Started by `decoding.py` in a bare Python. Images come from clients and are untrusted, and decoders of images have been
broken often. So three decoders of Pillow are registered and no others, the size is known before any pixel, and this
process has no environment, files, sockets or further memory. An image that passes a limit costs this process, and
nothing else. Words of decoders never leave it.

Frames go both ways (`protocol/framing.py`). Request: a length of 4 bytes, JSON of that length, and the image's bytes,
in base64 where the JSON says so. Answer: `+`, a length, JSON with size, shape and grid, and the tiles; or `-` and a
code with one sentence; or `!` and the same and the end of this process.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import resource
import sys
from typing import Any

from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from attar.errors import UserError
from attar.images._containers import Container, Refused, parse
from attar.images.geometry import Layout, layout
from attar.images.settings import PixelSettings
from attar.protocol.child_process import NO_FILES, allow_more_cpu, limit, send
from attar.protocol.framing import read

MEMORY = 512 << 20  # bytes of address space
CPU_SECONDS = 1
MAX_FRAME = 25 << 20
BAND = 256  # rows that are composed with white at a time
OPENERS: dict[str, Any] = {
    "PNG": PngImagePlugin.PngImageFile, "JPEG": JpegImagePlugin.JpegImageFile, "WEBP": WebPImagePlugin.WebPImageFile,
}  # fmt: skip
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""What sets an image upright, by EXIF's orientation."""


def answer(body: bytes) -> bytes:
    """Return the answer to a request. Raises MemoryError."""
    length = int.from_bytes(body[:4], "little")
    request = json.loads(body[4 : 4 + length])
    data = body[4 + length :]
    try:
        if request["base64"]:
            try:
                data = base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError):
                raise Refused("is not valid base64") from None
        found = parse(data)
        if request["kind"] and request["kind"] != found.kind:
            raise Refused(f"is said to be {request['kind']}, and is {found.kind}")
        pixels = found.width * found.height
        limits = request["limits"]
        if pixels > min(limits["each"], limits["left"]):
            most = f"{limits['each']} pixels, and all images of a request {limits['all']}"
            raise UserError(
                "image_too_large", f"the image has {found.width} x {found.height} pixels; it may have {most}"
            )
        settings = PixelSettings.of(request["settings"])
        flat = found.orientation > 4
        size = (found.width, found.height) if flat else (found.height, found.width)
        plan = layout(settings, *size)
        tiles = cut(settings, plan, upright(found))
    except Refused as error:
        return f"-image_invalid the image {error}".encode()
    except UserError as error:
        return f"-{error.code} {error}".encode()
    head = json.dumps({"size": size, "shape": plan.shape, "grid": plan.grid}).encode()
    return b"".join((b"+", len(head).to_bytes(4, "little"), head, *tiles))


def upright(found: Container) -> Image.Image:
    """Return the pixels of a container as RGB, upright. Raises Refused."""
    try:
        with OPENERS[found.kind](io.BytesIO(found.data)) as image:
            if image.size != (found.width, found.height):
                raise Refused("contradicts itself about its size")
            image.load()
            pixels = rgb(image)
    except (MemoryError, Refused):
        raise
    except Exception:  # whatever a decoder says: its words are not for clients
        raise Refused(f"is a damaged {found.kind} file") from None
    return pixels.transpose(TURNS[found.orientation]) if found.orientation in TURNS else pixels


def rgb(image: Image.Image) -> Image.Image:
    """Return an image as RGB, on white where it is transparent, as transformers' processors do."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    width, height = image.size
    made = Image.new("RGB", image.size)
    for top in range(0, height, BAND):
        band = image.crop((0, top, width, min(top + BAND, height)))
        band.info = image.info
        band = band.convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        made.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return made


def cut(settings: PixelSettings, plan: Layout, image: Image.Image) -> list[bytes]:
    """Return the tiles of an upright image."""

    def resize(image: Image.Image, size: tuple[int, int]) -> Image.Image:
        return image.resize(size[::-1], settings.resample)

    tile = plan.shape[1:]
    match settings.family:
        case "idefics3":
            for size in plan.sizes[:2]:
                image = resize(image, size)
            if plan.shape[0] == 1:
                return [image.tobytes()]
            return [*_grid(image, tile), resize(image, tile).tobytes()]
        case "llava_next":
            within, best, _ = plan.sizes
            canvas = Image.new("RGB", best[::-1])
            canvas.paste(resize(image, within), ((best[1] - within[1]) // 2, (best[0] - within[0]) // 2))
            return [resize(image, tile).tobytes(), *_grid(canvas, tile)]
        case _:
            if settings.square and image.width != image.height:
                side = max(image.size)
                canvas = Image.new("RGB", (side, side), settings.square)
                canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
                image = canvas
            image = resize(image, plan.sizes[0])
            if settings.crop:
                top, left = (image.height - tile[0]) // 2, (image.width - tile[1]) // 2
                image = image.crop((left, top, left + tile[1], top + tile[0]))
            return [image.tobytes()]


def _grid(image: Image.Image, tile: tuple[int, int]) -> list[bytes]:
    """Return the tiles of an image whose sides are multiples of theirs, row by row."""
    high, wide = tile
    return [
        image.crop((left, top, left + wide, top + high)).tobytes()
        for top in range(0, image.height, high)
        for left in range(0, image.width, wide)
    ]


def limits() -> dict[int, int]:
    """Return the limits of this process once everything is imported: no files or sockets, and bounded memory."""
    memory = {resource.RLIMIT_AS: MEMORY} if sys.platform == "linux" else {}  # macOS does not enforce it
    return {**NO_FILES, resource.RLIMIT_NOFILE: 0, **memory}


def main() -> None:
    """Answer requests until stdin ends."""
    Image._initialized = 2  # Pillow's own word for "all decoders are loaded": it loads no others
    limit(limits())
    send(b"+")
    while (body := read(sys.stdin.buffer, MAX_FRAME)) is not None:
        allow_more_cpu(CPU_SECONDS)
        try:
            reply = answer(body)
        except MemoryError:
            send(b"!image_too_large the image needs more than %d MiB of memory to be decoded" % (MEMORY >> 20))
            return
        send(reply)
