"""Frames, in which processes of attar put what they tell each other: a length of four bytes, then as many of body.

The length is little-endian. What a body holds, and how long it may be, is the affair of each pair of processes. Only
the standard library is imported, for the process that renders chat templates has no more.
"""

from __future__ import annotations

from typing import BinaryIO

HEAD = 4  # bytes of the length
MOST = (1 << 8 * HEAD) - 1  # bytes of a body that a length can tell


class FrameTooLong(ValueError):
    """A frame is longer than its reader accepts, or its writer may send."""


def frame(body: bytes, limit: int = MOST) -> bytes:
    """Return the frame of a body. Raises FrameTooLong where it has more than `limit` bytes."""
    if len(body) > limit:
        raise FrameTooLong(f"a frame of {len(body)} bytes is longer than {limit}")
    return len(body).to_bytes(HEAD, "little") + body


def missing(data: bytes | bytearray, limit: int = MOST) -> int:
    """Return how many bytes are needed next of the frame that `data` begins with: of its length, then of its body; 0
    where it is whole. Raises FrameTooLong where its body has more than `limit` bytes."""
    if len(data) < HEAD:
        return HEAD - len(data)
    if (size := int.from_bytes(data[:HEAD], "little")) > limit:
        raise FrameTooLong(f"a frame of {size} bytes is longer than {limit}")
    return max(0, HEAD + size - len(data))


def take(buffer: bytearray, limit: int = MOST) -> bytearray | None:
    """Remove the first frame from what has arrived, and return its body; None where it is not whole. Raises
    FrameTooLong where its body has more than `limit` bytes."""
    if missing(buffer, limit):
        return None
    end = HEAD + int.from_bytes(buffer[:HEAD], "little")
    body = buffer[HEAD:end]
    del buffer[:end]
    return body


def read(file: BinaryIO, limit: int = MOST) -> bytes | None:
    """Read one frame from a file that blocks, and return its body; None where the file ends before it does. Raises
    FrameTooLong where its body has more than `limit` bytes."""
    data = file.read(HEAD)
    while wanted := missing(data, limit):
        if not (more := file.read(wanted)):
            return None
        data += more
    return data[HEAD:]
