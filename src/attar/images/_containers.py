"""PNG, JPEG and WebP files, read up to their sizes before any pixel is decoded.

A file is rewritten to what its first frame's pixels need. Colour profiles, texts, thumbnails and further frames never
reach a decoder. Only the standard library is imported, for the limited process has little more.
"""

from __future__ import annotations

import re
import struct
from typing import Any, NamedTuple

MAX_PARTS = 65_536  # chunks or segments of a file
MAX_SCANS = 100  # of a JPEG; progressive ones have about ten
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_ORIENTATION = 0x0112
_CUT = "is cut off"


class Refused(Exception):
    """A file cannot be read: the words behind `the image`."""


class Container(NamedTuple):
    """A file's kind and size, how it is turned (EXIF's 1 to 8), and what decoders are given of it."""

    kind: str
    width: int
    height: int
    orientation: int
    data: bytes


def parse(data: bytes) -> Container:
    """Return the container of a file. Raises Refused."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        found = _png(data)
    elif data.startswith(b"\xff\xd8\xff"):
        found = _jpeg(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = _webp(data)
    else:
        raise Refused("is neither PNG, JPEG nor WebP")
    if found.width < 1 or found.height < 1:
        raise Refused(f"has no pixels: {found.width} x {found.height}")
    return found


def _png(data: bytes) -> Container:
    width = height = 0
    kept, turned, at = [data[:8]], 1, 8
    for _ in range(MAX_PARTS):
        length, kind = _unpack(">I4s", data, at)
        end = at + 12 + length
        if end > len(data):
            raise Refused(_CUT)
        if (kind == b"IHDR") != (at == 8) or (kind == b"IHDR" and length != 13):
            raise Refused("has a damaged header")
        if kind == b"IHDR":
            width, height = _unpack(">II", data, at + 8)
        elif kind == b"eXIf" and turned == 1:  # the first that says something
            turned = _orientation(data[at + 8 : end - 4])
        if kind in _PIXELS:
            kept.append(data[at:end])
        if kind == b"IEND":
            return Container("PNG", width, height, turned, b"".join(kept))
        at = end
    raise Refused(f"has more than {MAX_PARTS} chunks")


def _jpeg(data: bytes) -> Container:
    size: tuple[int, int] | None = None
    kept, turned, at, scans = [data[:2]], 1, 2, 0
    for _ in range(MAX_PARTS):
        while data[at : at + 2] == b"\xff\xff":  # fill bytes
            at = _filled(data, at)
        mark, kind = _unpack(">BB", data, at)
        if mark != 0xFF:
            raise Refused("has a damaged header")
        if kind == 0xD9:
            if size is None or not scans:
                raise Refused("has no pixels")
            return Container("JPEG", size[1], size[0], turned, b"".join((*kept, b"\xff\xd9")))
        if kind == 0x01 or 0xD0 <= kind <= 0xD7:
            at += 2
            continue
        (length,) = _unpack(">H", data, at + 2)
        end = at + 2 + length
        if length < 2 or end > len(data):
            raise Refused(_CUT)
        if kind in (0xC0, 0xC1, 0xC2):
            if size is not None:
                raise Refused("has two headers")
            size = _unpack(">HH", data, at + 5)
        elif 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            raise Refused("is a JPEG neither baseline nor progressive")
        elif kind == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            turned = _orientation(data[at + 10 : end])
        elif kind == 0xDA:
            scans += 1
            if scans > MAX_SCANS:
                raise Refused(f"has more than {MAX_SCANS} scans")
            following = _MARKER.search(data, end)
            if following is None:
                raise Refused(_CUT)
            end = following.start()
        if not (0xE1 <= kind <= 0xED or kind in (0xEF, 0xFE)):  # JFIF's and Adobe's segments say what colours mean
            kept.append(data[at:end])
        at = end
    raise Refused(f"has more than {MAX_PARTS} segments")


_FILL = re.compile(rb"\xff+")


def _filled(data: bytes, at: int) -> int:
    """Return where the last of the fill bytes from `at` on is."""
    found = _FILL.match(data, at)
    assert found is not None
    return found.end() - 1


def _webp(data: bytes) -> Container:
    (total,) = _unpack("<I", data, 4)
    if total + 8 > len(data) or total < 4:
        raise Refused(_CUT)
    parts: dict[bytes, bytes] = {}
    turned, at, end = 1, 12, total + 8
    for _ in range(MAX_PARTS):
        if at >= end:
            break
        kind, length = _unpack("<4sI", data, at)
        if at + 8 + length > end:
            raise Refused(_CUT)
        if kind == b"EXIF":
            turned = _orientation(data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0"))
        elif kind in (b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"):
            parts.setdefault(kind, data[at + 8 : at + 8 + length])
        at += 8 + length + length % 2
    else:
        raise Refused(f"has more than {MAX_PARTS} chunks")
    if extended := parts.get(b"VP8X"):
        width, height = 1 + _three(extended, 4), 1 + _three(extended, 7)
        animated = b"ANMF" in parts
        names = (b"VP8X", b"ANIM", b"ANMF") if animated else (b"VP8X", b"ALPH", b"VP8 ", b"VP8L")
        flags = extended[0] & (0x12 if animated else 0x10)  # alpha and animation: no profile, EXIF or XMP follow
        parts[b"VP8X"] = bytes((flags,)) + extended[1:10]
        chunks = [(name, parts[name]) for name in names if name in parts]
    elif lossy := parts.get(b"VP8 "):
        wide, high = _unpack("<HH", lossy, 6)
        width, height, chunks = wide & 0x3FFF, high & 0x3FFF, [(b"VP8 ", lossy)]
    elif lossless := parts.get(b"VP8L"):
        (bits,) = _unpack("<I", lossless, 1)
        width, height, chunks = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), [(b"VP8L", lossless)]
    else:
        raise Refused("has no pixels")
    body = b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2) for name, content in chunks
    )
    made = b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
    return Container("WEBP", width, height, turned, made)


def _orientation(exif: bytes) -> int:
    """Return the orientation of EXIF's first directory, which alone is read; 1 where there is none that is valid."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, at)
        for number in range(min(count, 1024)):
            tag, _, _, value = struct.unpack_from(order + "HHIH", exif, at + 2 + 12 * number)
            if tag == _ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _unpack(form: str, data: bytes, at: int) -> tuple[Any, ...]:
    try:
        return struct.unpack_from(form, data, at)
    except struct.error:
        raise Refused(_CUT) from None


def _three(data: bytes, at: int) -> int:
    if len(data) < at + 3:
        raise Refused(_CUT)
    return int.from_bytes(data[at : at + 3], "little")
