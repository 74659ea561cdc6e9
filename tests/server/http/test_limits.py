"""HTTP itself, by raw sockets: what is malformed, too large or too slow is refused, and nothing gets out of step."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from attar.server.engine_client import response_stream
from attar.server.http import limits, sockets
from attar.server.http.chunked import MAX_RUNS
from attar.server.http.limits import MAX_BODY
from tests.server.conftest import Running

BODY = json.dumps({"prompt": "hello", "max_tokens": 1, "temperature": 0}).encode()
JSON = b"Content-Type: application/json\r\n"


def head(*lines: bytes, first: bytes = b"POST /v1/completions HTTP/1.1", host: bytes = b"Host: localhost\r\n") -> bytes:
    return first + b"\r\n" + host + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def post(body: bytes = BODY, *lines: bytes) -> bytes:
    return head(JSON.strip(), b"Content-Length: %d" % len(body), *lines) + body


CHUNKED = b"Transfer-Encoding: chunked"


def chunked(body: bytes, size: int = 1 << 20, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return head(JSON.strip(), CHUNKED) + chunks + b"0\r\n" + trailers + b"\r\n"


MANY = head(JSON.strip(), CHUNKED) + b"1\r\na\r\n2\r\nbc\r\n" * (MAX_RUNS // 2 + 1)
GET = head(first=b"GET /livez HTTP/1.1")
GROWTH = 8 << 20  # bytes of memory that a connection may cost, whatever comes over it
TLS = bytes.fromhex("16030100c8010000c40303") + bytes(190)

# What is sent, and the status of the first answer; 0: the connection ends without one.
CASES: dict[str, tuple[bytes, int]] = {
    "a get": (GET, 200),
    "a post": (post(), 200),
    "lower case names": (post().replace(b"Content-", b"content-"), 200),
    "http 1.0": (GET.replace(b"1.1", b"1.0"), 200),
    "an empty line before": (b"\r\n" + GET, 400),
    "bare line feeds": (GET.replace(b"\r\n", b"\n"), 200),
    "64 headers": (head(*[b"a%d: b" % i for i in range(63)], first=b"GET /livez HTTP/1.1"), 200),
    "65 headers": (head(*[b"a%d: b" % i for i in range(64)], first=b"GET /livez HTTP/1.1"), 431),
    "many headers": (head(*[b"a%d: b" % i for i in range(2000)]), 431),
    "a header of 15 KiB": (head(b"a: " + b"b" * (15 << 10), first=b"GET /livez HTTP/1.1"), 200),
    "a header of 17 KiB": (head(b"a: " + b"b" * (17 << 10)), 431),
    "a header of 200 KiB": (head(b"a: " + b"b" * (200 << 10)), 431),
    "a header without end": (b"GET / HTTP/1.1\r\na: " + b"b" * (80 << 10), 431),
    "a target of 2 KiB": (head(first=b"GET /" + b"a" * 2047 + b" HTTP/1.1"), 404),
    "a target over 2 KiB": (head(first=b"GET /" + b"a" * 2048 + b" HTTP/1.1"), 414),
    "a query over 2 KiB": (head(first=b"GET /livez?" + b"a" * 3000 + b" HTTP/1.1"), 414),
    "two lengths": (head(JSON.strip(), b"Content-Length: 5", b"Content-Length: 6") + b"hello!", 400),
    "two lengths in one": (head(b"Content-Length: 5, 6") + b"hello!", 400),
    "a negative length": (head(b"Content-Length: -1"), 400),
    "a length with a sign": (head(b"Content-Length: +5") + b"hello", 400),
    "a length in hex": (head(b"Content-Length: 0x5") + b"hello", 400),
    "an endless length": (head(b"Content-Length: " + b"9" * 100), 400),
    "a length beyond the limit": (head(JSON.strip(), b"Content-Length: 4194305"), 413),
    "a length of exabytes": (head(JSON.strip(), b"Content-Length: 9223372036854775807"), 413),
    "no length": (head(JSON.strip()), 400),  # an empty body
    "chunks": (chunked(BODY), 200),
    "chunks of single bytes": (chunked(BODY, 1), 200),
    "chunks with extensions and trailers": (chunked(BODY, 9, b";a=b", b"X-Sum: 1\r\n"), 200),
    "a chunk of nothing": (chunked(b""), 400),
    "a chunk of nothing in a get": (chunked(b"").replace(b"POST /v1/completions", b"GET /livez"), 200),
    "a chunk of exabytes": (chunked(b"")[:-5] + b"7fffffffffffffff\r\n" + b" " * (5 << 20), 413),
    "a chunk of negative size": (chunked(b"")[:-5] + b"-1\r\n\r\n", 400),
    "a chunk's line of 80 KiB": (chunked(b"")[:-5] + b"1;" + b"a" * (80 << 10), 400),
    "extensions of 1 KiB": (chunked(BODY, 9, b";" + b"a" * 200), 400),
    "trailers of 1 KiB": (chunked(BODY, 9, b"", b"X-Sum: 1\r\n" * 200), 400),
    "chunks of http 1.0": (chunked(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    "a chunk of another size": (chunked(BODY).replace(b"\r\n0\r\n", b"xx\r\n0\r\n"), 400),
    "a chunk of no size": (head(JSON.strip(), CHUNKED) + b"zz\r\n", 400),
    "a chunk beyond the limit": (chunked(b" " * (MAX_BODY + 1), MAX_BODY + 1), 413),
    "chunks of single bytes without end": (chunked(BODY.ljust(1 << 19), 1), 200),
    "too many sizes": (MANY, 413),
    "length and chunks": (head(b"Content-Length: 5", CHUNKED) + b"0\r\n\r\n", 400),
    "chunks and length": (head(CHUNKED, b"Content-Length: 5") + b"0\r\n\r\n", 400),
    "a strange coding": (head(b"Transfer-Encoding: xchunked"), 400),
    "chunked twice": (head(b"Transfer-Encoding: chunked, chunked"), 400),
    "gzip": (post(BODY, b"Content-Encoding: gzip"), 415),
    "deflate": (post(BODY, b"Content-Encoding: deflate"), 415),
    "identity": (post(BODY, b"Content-Encoding: identity"), 200),
    "a form": (post().replace(b"application/json", b"application/x-www-form-urlencoded"), 415),
    "plain text": (post().replace(b"application/json", b"text/plain"), 415),
    "no type": (head(b"Content-Length: %d" % len(BODY)) + BODY, 415),
    "a charset": (post().replace(b"application/json", b"application/json; charset=utf-8"), 200),
    "no host": (head(first=b"GET /livez HTTP/1.1", host=b""), 400),
    "two hosts": (head(b"Host: localhost", first=b"GET /livez HTTP/1.1"), 400),
    "another host": (head(first=b"GET /readyz HTTP/1.1", host=b"Host: evil.example\r\n"), 403),
    "another host with a port": (head(first=b"GET /readyz HTTP/1.1", host=b"Host: evil.example:80\r\n"), 403),
    "a host like ours": (head(first=b"GET /readyz HTTP/1.1", host=b"Host: localhost.evil.example\r\n"), 403),
    "IPv6's loopback": (head(first=b"GET /readyz HTTP/1.1", host=b"Host: [::1]:8000\r\n"), 200),
    "an absolute target": (head(first=b"GET http://localhost/readyz HTTP/1.1"), 200),
    "an absolute target of a server": (head(first=b"GET HTTP://127.0.0.1:80?a=/b HTTP/1.1"), 200),
    "an absolute target elsewhere": (head(first=b"GET http://evil.example/readyz HTTP/1.1"), 403),
    "an absolute target for another host": (
        head(first=b"GET http://localhost/readyz HTTP/1.1", host=b"Host: evil.example\r\n"),
        200,
    ),
    "an absolute target without a host": (head(first=b"GET http:///livez HTTP/1.1"), 400),
    "another scheme": (head(first=b"GET ftp://localhost/livez HTTP/1.1"), 400),
    "an absolute target of somebody": (head(first=b"GET http://me@localhost/livez HTTP/1.1"), 400),
    "a star": (head(first=b"OPTIONS * HTTP/1.1"), 400),
    "connect": (head(first=b"CONNECT localhost:80 HTTP/1.1"), 400),
    "a wrong method": (head(first=b"DELETE /v1/completions HTTP/1.1"), 405),
    "an unknown method": (head(first=b"BREW /livez HTTP/1.1"), 405),
    "trace": (head(first=b"TRACE /livez HTTP/1.1"), 405),
    "a method with a space": (b"GE T /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "http 0.9": (b"GET /livez\r\n\r\n", 400),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "http 3.7": (GET.replace(b"1.1", b"3.7"), 400),
    "a TLS hello": (TLS, 400),
    "noise": (bytes(range(256)) * 4, 400),
    "a NUL in a header": (head(b"a: b\x00c"), 400),
    "a line break in a header's name": (head(b"a b: c"), 400),
    "a folded header": (head(b"a: b\r\n c", first=b"GET /livez HTTP/1.1"), 200),
    "no colon": (head(b"abc"), 400),
    "an empty name": (head(b": c"), 400),
    "a path outside": (head(first=b"GET /../../etc/passwd HTTP/1.1"), 404),
    "an escaped path outside": (head(first=b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1"), 404),
    "an escaped NUL": (head(first=b"GET /livez%00 HTTP/1.1"), 404),
    "escapes that are no UTF-8": (head(first=b"GET /%ff%fe HTTP/1.1"), 404),
    "an upgrade": (head(b"Connection: Upgrade", b"Upgrade: websocket", first=b"GET /livez HTTP/1.1"), 200),
    "expect": (post(BODY, b"Expect: 100-continue"), 200),
}


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def answer(sock: socket.socket, data: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one answer; 0 where the connection ends first."""
    while b"\r\n\r\n" not in data:
        try:
            more = sock.recv(65536)
        except ConnectionError:
            more = b""
        if not more:
            return 0, data
        data += more
    start, _, body = data.partition(b"\r\n\r\n")
    if start.startswith(b"HTTP/1.1 100"):
        return answer(sock, body)
    length = next(int(line[15:]) for line in start.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    while len(body) < length:
        body += sock.recv(65536)
    return int(start[9:12]), body


def read_all(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


@pytest.mark.parametrize("name", CASES)
def test_the_answer_to(name: str, server: Running) -> None:
    data, status = CASES[name]
    with connect(server) as sock:
        sock.sendall(data)
        got, body = answer(sock)
    assert got == status, body
    if status >= 400:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert server.get("/livez").status == 200


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 60


def test_two_requests_in_one_segment_have_two_answers_in_order(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(post() + GET + head(first=b"GET /nope HTTP/1.1") + GET)
        stream = sock.makefile("rb")
        statuses = []
        for _ in range(4):
            statuses.append(int(stream.readline().split()[1]))
            length = 0
            while line := stream.readline().strip():
                length = int(line[15:]) if line.lower().startswith(b"content-length:") else length
            stream.read(length)
    assert statuses == [200, 200, 404, 200]


@pytest.mark.parametrize("name", ["no host", "too many sizes", "a TLS hello", "another host", "plain text"])
def test_every_refusal_has_a_date_and_an_id(name: str, server: Running) -> None:
    """Whoever answers: the parser, the door or the endpoint."""
    ids = set()
    for _ in range(2):
        with connect(server) as sock:
            sock.sendall(CASES[name][0])
            lines = sock.recv(65536).partition(b"\r\n\r\n")[0].lower().split(b"\r\n")[1:]
        headers = dict(line.split(b": ", 1) for line in lines)
        assert headers[b"date"].endswith(b" gmt")
        ids.add(headers[b"x-request-id"])
    assert len(ids) == 2


def test_a_request_is_not_smuggled_behind_a_refused_one(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(head(b"Content-Length: 5", CHUNKED) + b"0\r\n\r\n" + GET)
        assert answer(sock)[0] == 400
        assert sock.recv(1 << 16) == b""


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """By their protocol asyncio knows the sockets for which it has to turn Nagle's algorithm off."""
    with sockets.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        pass
    assert listener.proto == socket.IPPROTO_TCP


def test_a_body_of_single_bytes_arrives(server: Running) -> None:
    with connect(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post('{"prompt": "😀", "max_tokens": 1}'.encode()):
            sock.sendall(bytes([byte]))
        assert answer(sock)[0] == 200


def test_a_client_that_closes_its_half_is_gone(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(post())
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    server.wait(lambda: server.engine.open == 0)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """What goes on within takes no more than GROWTH at any moment, sender and receiver being this process."""
    status, peak = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not peak.exists():
        pytest.skip("looks at memory by /proc")

    def kilobytes(name: str) -> int:
        return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith(name)))

    gc.collect()
    peak.write_text("5")  # the most that was ever in use becomes what is
    before = kilobytes("VmRSS")
    yield
    assert kilobytes("VmHWM") - before <= GROWTH >> 10


def test_a_body_in_chunks_is_the_same_body(server: Running) -> None:
    for size in (1, 7, 1 << 20):
        with connect(server) as sock:
            sock.sendall(chunked(BODY, size))
            first = answer(sock)
            sock.sendall(post())  # the connection goes on behind it
            second = answer(sock)
        assert first[0] == second[0] == 200
        assert json.loads(first[1])["choices"] == json.loads(second[1])["choices"]
    server.wait(lambda: server.server.middleware.bodies.total() == 0)


def test_a_body_in_chunks_counts_as_the_largest_until_it_has_arrived(start: Callable[..., Running]) -> None:
    server = start()
    server.engine.held = True
    bodies = server.server.middleware.bodies
    with connect(server) as sock:
        whole = chunked(BODY, 4)
        sock.sendall(whole[:-20])
        server.wait(lambda: bodies.total() == MAX_BODY)
        sock.sendall(whole[-20:])
        server.wait(lambda: bodies.total() == len(BODY))
        server.engine.held = False
        assert answer(sock)[0] == 200
    server.wait(lambda: bodies.total() == 0)


def test_a_body_that_is_too_large_is_dropped_not_kept(server: Running) -> None:
    with little_memory(), connect(server) as sock:
        sock.sendall(head(JSON.strip(), b"Content-Length: 1073741824"))
        assert answer(sock)[0] == 413
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                sent += sock.send(bytes(1 << 20))
    assert sent < 64 << 20


@pytest.mark.parametrize("name", ["a header of 200 KiB", "many headers", "a header without end", "too many sizes"])
def test_floods_of_headers_take_no_memory(server: Running, name: str) -> None:
    request, status = CASES[name]
    flood = request + b"1\r\na\r\n2\r\nbc\r\n" * (1 << 17)
    flood = flood if name == "too many sizes" else request + b"b" * (8 << 20)
    with little_memory(), connect(server) as sock:
        sent = 0
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(flood), 1 << 16):
                sent += sock.send(memoryview(flood)[start : start + (1 << 16)])
        with contextlib.suppress(ConnectionError):
            assert answer(sock)[0] in (status, 0)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a test's length."""
    monkeypatch.setattr(limits.LimitedProtocol, "receipt_seconds", 0.5)
    monkeypatch.setattr(limits.LimitedProtocol, "stall_seconds", 0.5)
    monkeypatch.setattr(response_stream, "PATIENCE", 0.0)


@pytest.mark.parametrize(
    "begin, drip, status",
    [
        (b"", b"", 0),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n", 408),
        (b"G", b"", 408),
        (head(JSON.strip(), b"Content-Length: 1000"), b"x", 408),
    ],
    ids=["nothing", "headers", "a letter", "a body"],
)
def test_a_request_that_does_not_arrive_ends(
    server: Running, hurried: None, begin: bytes, drip: bytes, status: int
) -> None:
    start = time.monotonic()
    with connect(server) as sock:
        sock.sendall(begin)
        with contextlib.suppress(ConnectionError):  # it may be over before the last of these
            for _ in range(4):
                time.sleep(0.05)
                sock.sendall(drip)
        assert answer(sock)[0] == status
    assert time.monotonic() - start > 0.4


def test_a_slow_request_behind_a_good_one_ends_too(server: Running, hurried: None) -> None:
    with connect(server) as sock:
        sock.sendall(GET + b"GET /livez HT")
        assert answer(sock)[0] == 200
        assert answer(sock)[0] == 408


def test_time_between_requests_is_not_counted(server: Running, hurried: None) -> None:
    with connect(server) as sock:
        sock.sendall(GET)
        assert answer(sock)[0] == 200
        time.sleep(0.8)
        sock.sendall(GET)
        assert answer(sock)[0] == 200


def test_an_answer_that_nobody_reads_is_given_up(start: Callable[..., Running], hurried: None) -> None:
    server = start()
    server.engine.step = 0
    body = json.dumps({"prompt": "a", "max_tokens": 500, "n": 16, "stream": True, "logprobs": 20, "ignore_eos": True})
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post(body.encode()))
        server.wait(lambda: server.engine.cancelled == 1)
        server.wait(lambda: server.server.middleware.open == 0)
        with pytest.raises(ConnectionResetError):  # not an end behind which the kernel goes on
            read_all(sock)
    assert server.engine.cancelled == 1


def test_a_reader_that_gets_on_is_not_hung_up_on() -> None:
    one = object.__new__(limits.LimitedProtocol)
    one.transport, one.loop = Mock(), Mock()
    one.transport.get_write_buffer_size.return_value = 90
    one._see_stall(100)
    one.loop.call_later.assert_called_once_with(limits.STALL_SECONDS, one._see_stall, 90)
    one.transport.abort.assert_not_called()
    one._see_stall(90)
    one.transport.abort.assert_called_once_with()


def test_what_is_no_http_fills_no_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    upgrade, status = CASES["an upgrade"]  # two warnings each
    for data, expected in [(b"nonsense\r\n\r\n", 400), (upgrade, status)] * 20:
        with connect(server) as sock:
            sock.sendall(data)
            assert answer(sock)[0] == expected
    assert sum(record.name == "uvicorn.error" for record in caplog.records) <= limits.WARNINGS


def test_warnings_that_were_left_out_are_counted() -> None:
    now = [0.0]
    sparing = limits.Sparing(2, lambda: now[0])

    def say(level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("a", level, "", 0, "bad %s", ("thing",), None)
        return record.getMessage() if sparing.filter(record) else None

    assert [say() for _ in range(5)] == ["bad thing"] * 2 + [None] * 3
    assert say(logging.ERROR) == "bad thing"
    now[0] = 60.0
    assert [say() for _ in range(3)] == ["bad thing (3 warnings before it were left out)", "bad thing", None]
