"""Hostile images, made here: bytes by name, with the error code of each, or None where it is a picture after all."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a PNG's chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(width: int, height: int, *before: bytes, rows: bytes | None = None, depth: int = 8, colour: int = 0) -> bytes:
    """Return a grey PNG of this size, whose pixels may be fewer; chunks `before` them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    data = zlib.compress(b"\0" * (height * (width + 1)) if rows is None else rows, 9)
    return SIGNATURE + header + b"".join(before) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def saved(form: str, mode: str = "RGB", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """Return a picture of Pillow's in a format."""
    out = io.BytesIO()
    Image.new(mode, size, options.pop("colour", 0)).save(out, form, **options)
    return out.getvalue()


def exif(orientation: int, order: str = ">", recursive: bool = False) -> bytes:
    """Return EXIF with an orientation, and a directory that names itself as the next."""
    entries = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    entries += struct.pack(order + "HHII", 0x8769, 4, 1, 8) if recursive else b""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return head + struct.pack(order + "H", len(entries) // 12) + entries + struct.pack(order + "I", 8 * recursive)


def jpeg_of_scans(count: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated."""
    data = saved("JPEG", size=(512, 512), progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def apng(frames: int) -> bytes:
    """Return an APNG of many frames."""
    control = chunk(b"acTL", struct.pack(">II", frames, 0))
    frame = b"".join(
        chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, 8, 8, 0, 0, 1, 100, 0, 0)) for number in range(frames)
    )
    return png(8, 8, control, frame)


def webp_of_frames(frames: int) -> bytes:
    """Return an animated WebP whose second frame is repeated."""
    out = io.BytesIO()
    pictures = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    pictures[0].save(out, "WEBP", save_all=True, append_images=pictures[1:], lossless=True)
    data = out.getvalue()
    last = data.rindex(b"ANMF")
    body = data[8:last] + data[last:] * frames
    return b"RIFF" + struct.pack("<I", len(body)) + body


def profile(size: int) -> bytes:
    """Return a chunk with a colour profile of zeros, compressed."""
    return chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(size), 9))


def palette_index() -> bytes:
    """Return a PNG of a palette of two colours, whose pixels are of the 256th."""
    return png(8, 8, chunk(b"PLTE", bytes(6)), rows=b"\0" + b"\xff" * 8 + (b"\0" + b"\xff" * 8) * 7, colour=3)


BIG = 30 << 20  # bytes that compressed chunks grow to
CORPUS: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "bomb": (lambda: png(65_535, 65_535, rows=bytes(1 << 20)), "image_too_large"),
    "just_too_large": (lambda: png(4_001, 4_000), "image_too_large"),
    "cut_off": (lambda: png(100, 100)[:-30], "image_invalid"),
    "cut_off_pixels": (lambda: png(100, 100, rows=bytes(500)), "image_invalid"),
    "cut_off_jpeg": (lambda: saved("JPEG", size=(200, 200))[:-100], "image_invalid"),
    "cut_off_webp": (lambda: saved("WEBP", size=(200, 200))[:-20], "image_invalid"),
    "one_by_100000": (lambda: png(1, 100_000), "image_too_large"),
    "65535_by_one": (lambda: png(65_535, 1), "image_too_large"),
    "zero_by_n": (lambda: png(0, 10), "image_invalid"),
    "negative": (lambda: png(0xFFFFFFFF, 0xFFFFFFFF, rows=b""), "image_too_large"),
    "empty": (lambda: b"", "image_invalid"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/>', "image_invalid"),
    "gif": (lambda: saved("GIF", "P"), "image_invalid"),
    "bmp": (lambda: saved("BMP"), "image_invalid"),
    "tiff": (lambda: saved("TIFF"), "image_invalid"),
    "nested_data_url": (lambda: b"data:image/png;base64,iVBORw0KGgo=", "image_invalid"),
    "huge_profile": (lambda: png(8, 8, profile(BIG)), None),
    "huge_text": (lambda: png(8, 8, chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(BIG), 9))), None),
    "huge_international_text": (
        lambda: png(8, 8, chunk(b"iTXt", b"x\0\1\0\0\0" + zlib.compress(bytes(BIG), 9))), None,
    ),
    "many_chunks": (lambda: png(8, 8, chunk(b"tEXt", b"a\0b") * 100_000), "image_invalid"),
    "scans": (lambda: jpeg_of_scans(1000), "image_invalid"),
    "cmyk_broken_profile": (lambda: saved("JPEG", "CMYK", icc_profile=b"broken" * 100), None),
    "palette_index": (palette_index, None),
    "grey_16_bit": (lambda: png(8, 8, rows=(b"\0" + b"\xff\0" * 8) * 8, depth=16), None),
    "orientation_0": (lambda: saved("JPEG", exif=b"Exif\0\0" + exif(0)), None),
    "orientation_9": (lambda: saved("JPEG", exif=b"Exif\0\0" + exif(9)), None),
    "recursive_exif": (lambda: saved("JPEG", exif=b"Exif\0\0" + exif(3, recursive=True)), None),
    "webp_frames": (lambda: webp_of_frames(100_000), "image_invalid"),
    "webp_animated": (lambda: webp_of_frames(1_000), None),
    "apng_frames": (lambda: apng(100_000), "image_invalid"),
    "apng_animated": (lambda: apng(10_000), None),
    "two_formats": (lambda: saved("JPEG") + png(8, 8), None),
    "two_headers": (lambda: _two_headers(), "image_invalid"),
    "webp_other_canvas": (lambda: _other_canvas(), "image_invalid"),
    "wrong_checksum": (lambda: png(8, 8).replace(b"IDAT", b"IDAT\xff", 1), "image_invalid"),
    "fill_bytes": (lambda: b"\xff\xd8" + b"\xff" * (4 << 20) + saved("JPEG")[2:], None),
    "slow_lossless": (lambda: png(4_000, 4_000), None),
}  # fmt: skip


def _two_headers() -> bytes:
    data = saved("JPEG")
    at = data.index(b"\xff\xc0")
    header = data[at : at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")]
    return data[:at] + header + data[at:]


def _other_canvas() -> bytes:
    data = bytearray(saved("WEBP", "RGBA", (40, 30), colour=(1, 2, 3, 4), lossless=False))
    assert data[12:16] == b"VP8X"
    data[24:27] = (400).to_bytes(3, "little")
    return bytes(data)
