"""The process: it drains at the first signal, ends at the second, with status 0, and loads no torch."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SERVE = """
import asyncio
import sys
from pathlib import Path
from attar.server.options import ServerOptions
from attar.server.serve import Server
from attar.text.tokenizer import Tokenizer
options = ServerOptions(port=0, drain_seconds=float(sys.argv[3]))
server = Server(Path(sys.argv[1]), Tokenizer.load(Path(sys.argv[2])), options)
asyncio.run(server.run(lambda url: print(url, flush=True)))
assert "torch" not in sys.modules
assert "numpy" not in sys.modules
print("ended", flush=True)
"""


@dataclass
class Processes:
    server: subprocess.Popen[str]
    engine: subprocess.Popen[str]
    port: int

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    def drains(self) -> None:
        """Wait until the server has taken the signal to end."""
        self.until(503)

    def until(self, status: int) -> None:
        """Wait until it says that it is ready, or is not."""
        while self.get("/readyz") != status:
            assert self.server.poll() is None, "the server has ended"
            assert self.engine.poll() is None, "the engine has ended"
            time.sleep(0.02)

    def stream(self, tokens: int) -> socket.socket:
        """A streaming request whose first event has arrived."""
        body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        start = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(start + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b"data:" in sock.recv(1 << 16) + sock.recv(1 << 16)
        return sock


@pytest.fixture
def processes(request: pytest.FixtureRequest, demo: Path, tmp_path: Path) -> Iterator[Processes]:
    """A server and a fake engine of 10 ms a step; the parameter is how long the server drains."""
    path = tmp_path / "engine.sock"
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
    arguments = [sys.executable, str(HERE / "fake_engine.py"), str(path), str(demo), "0.01"]
    engine = subprocess.Popen(arguments, text=True, env=environment)
    arguments = [sys.executable, "-c", SERVE, str(path), str(demo), str(request.param)]
    server = subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        found = Processes(server, engine, int(server.stdout.readline().rpartition(":")[2]))
        found.until(200)
        yield found
    finally:
        for process in (server, engine):
            process.kill()
            process.wait()


def rest(sock: socket.socket) -> bytes:
    data = b""
    while more := sock.recv(1 << 16):
        data += more
    return data


@pytest.mark.parametrize("processes", [20], indirect=True)
def test_what_is_open_at_the_first_signal_is_finished(processes: Processes) -> None:
    sock = processes.stream(300)
    processes.server.send_signal(signal.SIGTERM)
    processes.drains()
    assert processes.get("/livez") == 200
    data = rest(sock)
    assert b"[DONE]" in data
    assert b"error" not in data
    assert processes.server.wait(60) == 0
    assert processes.engine.wait(60) == 0


@pytest.mark.parametrize("processes", [0.3], indirect=True)
def test_what_takes_too_long_is_told_so(processes: Processes) -> None:
    sock = processes.stream(500)
    started = time.monotonic()
    processes.server.send_signal(signal.SIGTERM)
    data = rest(sock)
    assert data.count(b'"error"') == 1
    assert b"[DONE]" not in data
    assert processes.server.wait(60) == 0
    assert time.monotonic() - started > 0.3


@pytest.mark.parametrize("processes", [30], indirect=True)
def test_the_second_signal_ends_it_now(processes: Processes) -> None:
    sock = processes.stream(500)
    processes.server.send_signal(signal.SIGTERM)
    processes.drains()  # or the second would be one with the first
    started = time.monotonic()
    processes.server.send_signal(signal.SIGTERM)
    assert rest(sock).count(b'"error"') == 1
    assert processes.server.wait(60) == 0
    assert time.monotonic() - started < 10  # it takes milliseconds, and would drain for 30 s
    assert processes.server.stdout is not None
    assert processes.server.stdout.read() == "ended\n"


@pytest.mark.parametrize("processes", [30], indirect=True)
def test_an_engine_that_is_killed_is_noticed(processes: Processes) -> None:
    sock = processes.stream(500)
    started = time.monotonic()
    processes.engine.kill()
    data = b""
    while b"engine_down" not in data:
        data += (more := sock.recv(1 << 16))
        assert more, data
    assert processes.get("/readyz") == 503
    assert time.monotonic() - started < 10  # it takes milliseconds, and would drain for 30 s
