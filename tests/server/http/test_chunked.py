"""Bodies in chunks: the same for any cut, what is refused, and what small chunks cost."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.server.http.chunked import MAX_EXTRA, MAX_RUNS
from attar.server.http.limits import MAX_HEAD, _Connection

if TYPE_CHECKING:
    from types import FrameType

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(body: bytes, sizes: list[int], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    parts, at = [], 0
    while at < len(body):
        piece = body[at : at + sizes[len(parts) % len(sizes)]]
        parts.append(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece))
        at += len(piece)
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


def received(connection: h11.Connection, data: bytes) -> tuple[bytes, bool]:
    """The body's part in these bytes, and whether it has ended."""
    body = b""
    connection.receive_data(data)
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return body, True
        elif event in (h11.NEED_DATA, h11.PAUSED):
            return body, False


def received_in(connection: h11.Connection, data: bytes, segment: int) -> bytes:
    """The body of a request that arrives in segments; the next may begin with the last."""
    pieces = [received(connection, data[at : at + segment]) for at in range(0, len(data), segment)]
    assert [ended for _, ended in pieces[:-1]] == [False] * (len(pieces) - 1)
    return b"".join(piece for piece, _ in pieces)


@given(
    st.binary(max_size=800),
    st.lists(st.sampled_from([1, 2, 3, 15, 16, 17, 100, 255, 256]), min_size=1, max_size=4),
    st.sampled_from([b"", b";a=b", b" ; name"]),
    st.sampled_from([b"", b"X-Sum: 1\r\n"]),
    st.integers(1, 60),
)
def test_a_body_is_the_same_however_it_is_cut(
    body: bytes, sizes: list[int], extension: bytes, trailers: bytes, segment: int
) -> None:
    data = HEAD + chunked(body, sizes, extension, trailers)
    connection = _Connection(h11.SERVER, MAX_HEAD)
    assert received_in(connection, data, segment) == body
    assert connection.their_state is h11.DONE


@pytest.mark.parametrize(
    "data",
    [
        b"-1\r\n", b"+1\r\na\r\n", b"0x1\r\na\r\n", b"1_0\r\n", b"\r\n", b"g\r\n", b" 1\r\na\r\n", b"1" * 17 + b"\r\n",
        b"1\r\nab\r\n", b"1\r\na\n\n", b"1\na\r\n", b"2\r\na\r\n\r\n", b"1\r\na\r0\r\n\r\n",
        b"1;" + b"x" * (MAX_EXTRA + 1) + b"\r\na\r\n", b"1;" + b"x" * (MAX_EXTRA + 100),
        b"1;abcdefg\r\na\r\n" * (MAX_EXTRA // 8 + 1), b"1;a\x00b\r\na\r\n",
        b"0\r\nX: " + b"x" * MAX_EXTRA + b"\r\n\r\n", b"0\r\n" + b"x" * (MAX_EXTRA + 3), b"0\r\nno colon\r\n\r\n",
        b"0\r\n a: b\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_body_of_chunks_is_refused(data: bytes) -> None:
    for segment in (1, len(data)):
        connection = _Connection(h11.SERVER, MAX_HEAD)
        received(connection, HEAD)
        with pytest.raises(h11.RemoteProtocolError) as error:
            received_in(connection, data, segment)
        assert error.value.error_status_hint == 400


def test_what_follows_a_body_is_the_next_request() -> None:
    connection = _Connection(h11.SERVER, MAX_HEAD)
    assert received(connection, HEAD + chunked(b"ab", [1]) + b"GET / HTTP/1.1\r\n") == (b"ab", True)
    assert connection.trailing_data[0] == b"GET / HTTP/1.1\r\n"


def test_changes_of_size_are_counted() -> None:
    data = b"1\r\na\r\n2\r\nbc\r\n" * (MAX_RUNS // 2)
    connection = _Connection(h11.SERVER, MAX_HEAD)
    assert len(received(connection, HEAD + data)[0]) == MAX_RUNS // 2 * 3
    with pytest.raises(h11.RemoteProtocolError) as error:
        received(connection, b"1\r\na\r\n")
    assert error.value.error_status_hint == 413


@pytest.mark.parametrize("size", [1, 2, 7, 15, 16, 100, 255])
def test_small_chunks_take_few_calls(size: int) -> None:
    """h11's own reader makes some 14 calls for each chunk. Calls are counted, because times depend on the machine:
    `bench/chunked_bodies.py` prints those."""
    body = b'{"prompt": [%b]}' % b",".join(b"%d" % random.Random(1).randrange(4096) for _ in range(40_000))
    data, connection = HEAD + chunked(body, [size]), _Connection(h11.SERVER, MAX_HEAD)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = received_in(connection, data, 1 << 16)
    finally:
        sys.setprofile(before)
    assert found == body
    assert 0 < calls <= 2500 + len(body) / size / 8
