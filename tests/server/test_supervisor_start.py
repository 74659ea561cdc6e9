"""What comes before a server serves: its address, then a model that loads, and an end that does not wait for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from attar.protocol.settings import Settings
from attar.server import supervisor
from attar.server.supervisor import EngineProcess
from tests.server.test_supervisor import SECONDS, Served

HERE = Path(__file__).parent

LOADS = "import time; time.sleep(600)"  # and hears nothing meanwhile
ENDS = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); sys.stdin.buffer.read(); sys.exit(0)"


def test_a_port_that_is_taken_is_said_before_anything_of_the_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "attar", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"attar: cannot listen at 127.0.0.1, port {port}: address already in use; --port takes")


SERVE = """
import sys
from pathlib import Path
from attar.protocol.settings import Settings
from attar.server import supervisor
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer

def started(url):
    print(url, flush=True)

tokenizer = Tokenizer.load(Path(sys.argv[1]))
sys.exit(supervisor.run(Settings("fake", ""), tokenizer, ServerOptions(port=0), sys.argv[2:], started))
"""


def test_any_engine_is_served_whose_command_line_is_given(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}")
    engine = [sys.executable, str(HERE / "fake_engine.py"), "-", str(demo), "0.001"]
    served = Served.__new__(Served)
    served.process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(demo), *engine], stdout=subprocess.PIPE, text=True
    )
    try:
        assert served.process.stdout is not None
        served.url = served.process.stdout.readline().strip()
        served.wait_for(200, SECONDS)
        status, answer = served.get("/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert (status, answer["model"]) == (200, "fake")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(SECONDS) == 0
    finally:
        served.process.kill()
        served.process.wait()


def test_readiness_is_503_while_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And SIGTERM then ends both processes, with status 0 and nothing left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    served = Served()
    try:
        engine = served.engine()
        os.kill(engine, signal.SIGSTOP)  # so that it does for as long as this test looks at it
        assert served.get("/readyz")[0] == 503
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(SECONDS) == 0
    finally:
        served.process.kill()
        served.process.wait()
    assert not Path(f"/proc/{engine}").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., EngineProcess]:
    """Starts a program in the engine's place."""

    def make(program: str, **settings: Any) -> EngineProcess:
        made = replace(Settings("", str(tmp_path / "attar" / "engine")), **settings)
        command = [sys.executable, "-c", program, made.socket]
        engine = EngineProcess(command, made, lambda: False, lambda _: pytest.fail("it was told to end"))
        engine.start()
        return engine

    return make


def status_of(engine: EngineProcess) -> int:
    assert engine.child is not None
    engine.end()
    return engine.child.wait()


def test_an_engine_that_loads_is_not_waited_for(
    started: Callable[..., EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", SECONDS)
    began = time.monotonic()
    assert status_of(started(LOADS)) == -signal.SIGKILL
    assert time.monotonic() - began < SECONDS / 2


def test_one_that_is_ready_has_time_to_end(
    started: Callable[..., EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", SECONDS)
    engine = started(ENDS)
    end = time.monotonic() + SECONDS
    while not Path(engine.settings.socket).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert status_of(engine) == 0
