"""A server and a fake engine, in a loop of their own in another thread, on a port of the kernel's choice."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from soaks.served import Served

from attar.server.options import ServerOptions
from attar.server.serve import Server
from attar.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

LEAKS = re.compile(rb"0x[0-9a-fA-F]{6,}|Traceback|site-packages|\.py\b|object at|/(src|usr|etc|tmp|home|proc)/")
"""What no error may show of the machine that it happened on."""


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error in OpenAI's shape."""
        return str(self.json["error"]["code"])

    @property
    def events(self) -> list[Any]:
        """Of a stream: the objects, and "[DONE]"."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Running:
    """A server that runs, and its engine. Attributes of both may be looked at and set from the test's thread."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: ServerOptions, **engine: Any) -> None:
        self.socket = folder / "engine.sock"
        self.server: Server
        self.engine: FakeEngine
        self.port = 0
        self._begun = threading.Event()
        self._make = (tokenizer, options, engine)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._begun.wait(60)
        self.wait(lambda: self.server.engine.ready is not None)

    async def _main(self) -> None:
        tokenizer, options, engine = self._make
        self.loop = asyncio.get_running_loop()
        self.engine = FakeEngine(self.socket, tokenizer, **engine)
        await self.engine.start()
        self.server = Server(self.socket, tokenizer, options)

        def started(url: str) -> None:
            self.port = int(url.rpartition(":")[2])
            self._begun.set()

        await self.server.run(started, signals=False)
        await self.engine.stop()

    def call(self, work: Callable[[], Any]) -> None:
        """Do something in the server's loop."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (work(), done.set()))
        assert done.wait(60)

    def wait(self, true: Callable[[], bool], seconds: float = 60.0) -> None:
        """Until something holds. The last look is after the end: this thread may have stood still meanwhile."""
        end = time.monotonic() + seconds
        while not true():
            late = time.monotonic() > end
            time.sleep(0.1 if late else 0.002)
            assert not late or true(), "it never came true"

    def stop(self) -> bool:
        """Whether it ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.server.stop)
            self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(60)
        return not self._thread.is_alive()

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One request over a connection of its own; a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = {"Content-Type": "application/json"} if body is not None else {}
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, sent | (headers or {}))
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            answer = Reply(reply.status, found, reply.read())
            assert reply.status < 400 or not LEAKS.search(answer.body), answer
            return answer
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return self.request("POST", path, body, headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self.request("GET", path, None, headers)


@pytest.fixture(scope="session")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.load(demo)


@pytest.fixture(scope="module")
def start(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    """Starts servers: `start(options=None, **arguments of FakeEngine)`; all are stopped with the module."""
    with starting(tokenizer, tmp_path_factory) as make:
        yield make


@contextlib.contextmanager
def starting(tokenizer: Tokenizer, folders: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    logging.getLogger("attar").setLevel(logging.INFO)
    running: list[Running] = []

    def make(options: ServerOptions | None = None, **engine: Any) -> Running:
        folder = folders.mktemp("engine")
        running.append(Running(folder, tokenizer, options or ServerOptions(port=0), **engine))
        return running[-1]

    yield make
    ended = [each.stop() for each in running]
    assert all(ended)


@pytest.fixture(scope="session")
def real() -> Iterator[Served]:
    """`attar serve` with the embedded model, two processes of their own; tests leave it idle."""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("looks at processes by /proc")
    made = Served("--threads", "1")
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def server(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that tests share: they leave it as it was."""
    with starting(tokenizer, tmp_path_factory) as make:
        yield make()
