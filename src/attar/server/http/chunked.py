"""Bodies in chunks: a reader for h11 that takes everything that has arrived at once.

h11's own takes a chunk at a time, in 15 microseconds of the event loop. A body of single bytes would cost thousands of
times what the same body costs whole, and any client can send one. Here a run of chunks of one small size is found and
joined by slices, and other chunks cost two microseconds each. So what is left to count are changes of size and large
chunks: at most MAX_RUNS.

Extensions and trailers are read and dropped, up to MAX_EXTRA bytes of each.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import h11

if TYPE_CHECKING:
    from h11._receivebuffer import ReceiveBuffer

MAX_RUNS = 32768
MAX_EXTRA = 1 << 10  # bytes
SMALL = 256  # chunks of fewer bytes are read in runs
LONGEST_LINE = 16 + MAX_EXTRA + 3

_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})([ \t]*(?:;[^\x00\r\n]*)?)\r\n")
_TRAILERS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[^\x00\r\n]*+\r\n)*+\r\n")
_END = re.compile(rb"\r\n\r\n|\A\r\n")


class ChunkedBody:
    """Reads the chunks of one body, as h11 calls its readers. Raises RemoteProtocolError with the status to answer."""

    def __init__(self) -> None:
        self._left = 0  # bytes of the present chunk, with the line break behind it
        self._runs = self._extra = 0
        self._last = False  # True behind the last chunk

    def __call__(self, buffer: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        """Return all of the body that the buffer holds, or its end; None where more must arrive."""
        pieces: list[bytes] = []
        data, at = bytes(buffer), 0
        while not self._last and at < len(data):
            start = at
            at = self._within(data, at, pieces) if self._left else self._begin(data, at, pieces)
            if at == start:
                break
        if pieces or at:
            buffer.maybe_extract_at_most(at)
        if pieces:
            return h11.Data(data=b"".join(pieces))
        return self._trailers(buffer) if self._last else None

    def read_eof(self) -> None:
        """Raise: the body has not ended."""
        raise _refused("the connection ended within a body")

    def _within(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Take the rest of a chunk, as far as it is there; return where it ends."""
        end = min(len(data), at + self._left)
        behind = self._left - 2  # bytes before the line break
        if behind > 0:
            pieces.append(data[at : min(end, at + behind)])
        broken = data[max(at, at + behind) : end]
        if broken != b"\r\n"[2 - min(self._left, 2) :][: len(broken)]:
            raise _refused("a chunk is longer than its size")
        self._left -= end - at
        return end

    def _begin(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Take a chunk's line, or a whole run of small chunks; return where it ends, `at` where more must arrive."""
        if (line := _LINE.match(data, at)) is None:
            if b"\n" in data[at : at + LONGEST_LINE] or len(data) - at >= LONGEST_LINE:
                raise _refused("a chunk's size")
            return at
        self._runs += 1
        self._extra += len(line[2])
        if self._extra > MAX_EXTRA:
            raise _refused("extensions of chunks")
        if self._runs > MAX_RUNS:
            raise h11.RemoteProtocolError("chunks", error_status_hint=413)
        size = int(line[1], 16)
        if 0 < size < SMALL and not line[2] and (count := _run(data, at, line[0], size)):
            step = len(line[0]) + size + 2
            end = at + count * step
            pieces.append(_joined(data[at:end], len(line[0]), size, step))
            return end
        self._last, self._left = size == 0, size + 2 if size else 0
        return line.end()

    def _trailers(self, buffer: ReceiveBuffer) -> h11.EndOfMessage | None:
        data = bytes(buffer)
        end = _END.search(data, 0, MAX_EXTRA + 2)
        if end is None:
            if len(data) > MAX_EXTRA:
                raise _refused("trailers of a body")
            return None
        if (trailers := _TRAILERS.match(data)) is None:
            raise _refused("trailers of a body")
        buffer.maybe_extract_at_most(trailers.end())
        return h11.EndOfMessage()


def _run(data: bytes, at: int, line: bytes, size: int) -> int:
    """Return how many whole chunks of `size` that begin with `line` there are in a row. They are looked at in columns,
    twice as many each time, so that the time is that of the run."""
    count, step, window = 0, len(line) + size + 2, 8
    columns = [(place, line[place : place + 1]) for place in range(len(line))]
    columns += [(step - 2, b"\r"), (step - 1, b"\n")]
    while True:
        start = at + count * step
        if (window := min(window, (len(data) - start) // step)) == 0:
            return count
        end = start + window * step
        found = min(_leading(data[start + place : end : step], byte) for place, byte in columns)
        count += found
        if found < window:
            return count
        window *= 2


def _joined(chunks: bytes, line: int, size: int, step: int) -> bytes:
    """Return the contents of equal chunks, each `line` bytes into its `step`; by whichever takes fewer slices."""
    count = len(chunks) // step
    if count < size:
        return b"".join(chunks[at : at + size] for at in range(line, len(chunks), step))
    joined = bytearray(count * size)
    for place in range(size):
        joined[place::size] = chunks[line + place :: step]
    return bytes(joined)


def _leading(column: bytes, byte: bytes) -> int:
    return len(column) if column == byte * len(column) else len(column) - len(column.lstrip(byte))


def _refused(what: str) -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError(what, error_status_hint=400)
