"""Framing: every way of reading gives the bodies that were framed, however the bytes arrive."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

import attar
from attar.protocol.framing import HEAD, FrameTooLong, frame, missing, read, take

BODIES = [b"", b"a", bytes(range(256)) * 3]


def test_what_arrives_in_pieces_is_taken_whole() -> None:
    buffer, taken = bytearray(), []
    for byte in b"".join(map(frame, BODIES)):
        wanted = missing(buffer)
        buffer.append(byte)
        assert wanted == missing(buffer) + 1 or len(buffer) == HEAD
        while (body := take(buffer)) is not None:
            taken.append(bytes(body))
    assert taken == BODIES
    assert buffer == b""


def test_a_file_is_read_frame_by_frame() -> None:
    whole = b"".join(map(frame, BODIES))
    file = io.BytesIO(whole)
    assert [read(file) for _ in BODIES] == BODIES
    assert read(file) is None
    for end in (len(frame(b"abc")) - 1, HEAD - 1):
        assert read(io.BytesIO(frame(b"abc")[:end])) is None


def test_a_frame_has_a_limit_on_both_sides() -> None:
    assert read(io.BytesIO(frame(b"abc", 3)), 3) == b"abc"
    with pytest.raises(FrameTooLong, match="a frame of 4 bytes is longer than 3"):
        frame(b"abcd", 3)
    head = bytearray(frame(b"abcd")[:HEAD])
    for refuse in (missing, take):
        with pytest.raises(FrameTooLong, match="a frame of 4 bytes is longer than 3"):
            refuse(head, 3)


def test_only_the_standard_library_is_imported() -> None:
    code = "import sys; sys.path.append(sys.argv[1]); import attar.protocol.framing"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(Path(attar.__file__).parents[1])], check=True)
