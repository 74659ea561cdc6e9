"""`attar serve` as a user runs it: two processes, the embedded model, and what happens when one of them dies."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attar.checkpoints.sources import hub
from attar.protocol.settings import CHANGED, HOPELESS, Settings
from attar.server import serve, supervisor
from attar.server.options import ServerOptions
from attar.server.supervisor import WITHIN, EngineProcess
from attar.text.tokenizer import Tokenizer

SECONDS = 60.0  # that a start may take on a busy machine


class Served:
    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "attar", "serve", "--port", "0", "--json", *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]

    def get(self, path: str, body: dict[str, object] | None = None) -> tuple[int, dict[str, object]]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_for(self, status: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.get("/readyz")[0] != status:
            assert time.monotonic() < end, f"not {status} within {seconds} s"
            time.sleep(0.02)

    def wait_for_another(self, engine: int) -> None:
        """Until the engine is another one than that; between them there is none."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(StopIteration, OSError):
                if self.engine() != engine:
                    return
            time.sleep(0.02)
        raise AssertionError("the engine was not replaced")

    def engine(self) -> int:
        """The process id of the engine."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return next(
            int(pid)
            for file in children
            for pid in file.read_text().split()
            if b"attar.engine.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("finds the engine's process by /proc")
    made = Served("--max-running", "4")
    try:
        made.wait_for(200, SECONDS)
        yield made
    finally:
        made.process.kill()
        made.process.wait()


ASK: dict[str, object] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


def text_of(answer: dict[str, object]) -> str:
    (choice,) = answer["choices"]  # type: ignore[misc]
    return str(choice["text"])


def test_it_answers_as_the_library_does(served: Served) -> None:
    from attar import LLM, SamplingParams

    status, answer = served.get("/v1/completions", ASK)
    assert status == 200
    (alone,) = LLM("demo").generate("Once upon a time", SamplingParams(max_tokens=12, temperature=0))
    assert text_of(answer) == alone.text


def test_each_process_loads_what_it_needs(served: Served) -> None:
    """The one that speaks HTTP is small and soon there: it has neither torch nor numpy. The engine's has no web."""
    assert served.get("/v1/completions", ASK)[0] == 200
    http, engine = (Path(f"/proc/{pid}/maps").read_text() for pid in (served.process.pid, served.engine()))
    assert "libtorch" not in http
    assert "_multiarray_umath" not in http
    assert "libtorch" in engine
    assert "pydantic_core" not in engine


def test_a_dead_engine_is_seen_and_replaced(served: Served) -> None:
    before = served.engine()
    expected = text_of(served.get("/v1/completions", ASK)[1])
    os.kill(before, signal.SIGKILL)
    served.wait_for_another(before)
    served.wait_for(200, SECONDS)
    assert text_of(served.get("/v1/completions", ASK)[1]) == expected


def test_an_open_stream_of_a_dead_engine_ends_with_an_error(served: Served) -> None:
    ask = json.dumps(ASK | {"max_tokens": 400, "n": 16, "stream": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(served.url + "/v1/completions", ask, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as stream:
        stream.readline()
        os.kill(served.engine(), signal.SIGKILL)
        rest = stream.read().decode()
    events = [line.removeprefix("data: ") for line in rest.split("\n") if line.startswith("data: ")]
    assert "error" in json.loads(events[-1] if events[-1] != "[DONE]" else events[-2])
    assert sum("error" in json.loads(event) for event in events if event != "[DONE]") == 1
    served.wait_for(200, SECONDS)


def test_a_stopped_engine_is_seen_and_goes_on_where_it_was(served: Served) -> None:
    """`test_client` has the numbers that make it two seconds; here it may take what a busy machine takes."""
    ask = json.dumps(ASK | {"max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(served.url + "/v1/completions", ask, {"Content-Type": "application/json"})
    expected = served.get("/v1/completions", ASK | {"max_tokens": 400, "ignore_eos": True})[1]
    engine = served.engine()
    with urllib.request.urlopen(request, timeout=SECONDS) as stream:
        begun = stream.readline()
        os.kill(engine, signal.SIGSTOP)
        try:
            served.wait_for(503, SECONDS)
            status, refused = served.get("/v1/completions", ASK)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert (status, refused["error"]["code"]) == (503, "engine_down")  # type: ignore[index]
        served.wait_for(200, SECONDS)
        lines = (begun + stream.read()).decode().split("\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "".join(text_of(json.loads(event)) for event in events) == text_of(expected)
    assert served.engine() == engine


def test_sigterm_ends_both_with_status_0(served: Served) -> None:
    engine = served.engine()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(SECONDS) == 0
    assert not Path(f"/proc/{engine}").exists()


def test_a_killed_server_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it cannot clean up itself the engine does, which ends with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    served = Served()
    try:
        served.wait_for(200, SECONDS)
        assert [each.name for each in tmp_path.glob("attar-*/*")] == ["engine"]
    finally:
        served.process.kill()
        served.process.wait()
    end = time.monotonic() + SECONDS
    while list(tmp_path.glob("attar-*")):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (("--memory", "100MB"), "needs"),
        (("--context", "100000"), "past the 512 positions"),
        (("--host", "0.0.0.0"), "API key"),
        (("no-such-model/",), "no-such-model"),
        (("--scheduler", "max-step-tokens=1", "--max-running", "2"), "a step of 1 tokens"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(options: tuple[str, ...], sentence: str) -> None:
    command = [sys.executable, "-m", "attar", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


class Deaths:
    """Engines that end as they are told, in a time that passes only where somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: list[int | OSError], ready_after: int) -> None:
        self.now, self.starts = 0.0, [0.0]
        self.gave_up: list[int] = []
        rest = iter(ends)
        monkeypatch.setattr(supervisor.time, "monotonic", lambda: self.now)

        class Child:
            def __init__(self, status: int) -> None:
                self.wait = lambda: status

        def spawn() -> None:
            end = next(rest)
            self.starts.append(self.now)
            if isinstance(end, OSError):
                raise end
            self.engine.child = Child(end)  # type: ignore[assignment]

        def pause(seconds: float) -> bool:
            self.now += seconds
            return False

        self.engine = EngineProcess([], Settings("", ""), lambda: len(self.starts) > ready_after, self.gave_up.append)
        monkeypatch.setattr(self.engine, "_spawn", spawn)
        monkeypatch.setattr(self.engine._ending, "wait", pause)
        spawn()
        del self.starts[0]
        self.engine._watch()


NO_MEMORY = OSError(errno.ENOMEM, "Cannot allocate memory")


def test_an_engine_that_keeps_dying_is_started_ever_later_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Deaths(monkeypatch, [-9] * 6, ready_after=0)
    assert made.starts == [0.0, 0.0, 2.0, 6.0, 14.0, 30.0]
    assert made.gave_up == [1]


def test_a_process_that_cannot_be_started_counts_as_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Deaths(monkeypatch, [-9, NO_MEMORY, NO_MEMORY, 0], ready_after=0)
    assert made.starts == [0.0, 0.0, 2.0, 6.0]
    assert made.gave_up == []
    made = Deaths(monkeypatch, [-9, *[NO_MEMORY] * 5], ready_after=0)
    assert (len(made.starts), made.gave_up) == (6, [1])


def test_only_a_model_that_was_never_served_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Deaths(monkeypatch, [HOPELESS], ready_after=1)
    assert (made.starts, made.gave_up) == ([0.0], [HOPELESS])
    made = Deaths(monkeypatch, [-9, HOPELESS, HOPELESS, 0], ready_after=0)
    assert (len(made.starts), made.gave_up) == (4, [])
    made = Deaths(monkeypatch, [-9, *[HOPELESS] * 5], ready_after=0)
    assert (len(made.starts), made.gave_up) == (6, [1])


def test_a_model_that_was_replaced_on_disk_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying again would change nothing, and what is there now is not what people asked for."""
    made = Deaths(monkeypatch, [-9, CHANGED], ready_after=0)
    assert (made.starts, made.gave_up) == ([0.0, 0.0], [1])


def test_deaths_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Deaths(monkeypatch, [-9] * 3 + [0], ready_after=0)
    assert made.starts[-1] == 6.0
    made.now += WITHIN
    assert made.engine._goes_on(-9)
    assert made.now == 6.0 + WITHIN, "at once"


def test_a_folder_that_was_cleaned_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(*_: object, **__: object) -> Any:
        started.append((tmp_path / "attar").stat().st_mode & 0o777)
        return SimpleNamespace(stdin=io.BytesIO())

    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    engine = EngineProcess([], Settings("", str(tmp_path / "attar" / "engine")), lambda: True, lambda _: None)
    engine._spawn()
    assert started == [0o700]
    (tmp_path / "attar").chmod(0o777)
    with pytest.raises(PermissionError, match="attar is not a folder of this user alone"):
        engine._spawn()
    assert len(started) == 1


@pytest.mark.parametrize("replaced", ["not at all", "by nothing", "by a link", "by a file"])
def test_a_server_ends_where_its_folder_was_replaced(
    replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves what is there."""
    folder, other = tmp_path / "attar-0", tmp_path / "other"
    for each in (folder, other):
        each.mkdir(0o700)
    (other / "engine").touch()

    class Stub:
        def __init__(self, *arguments: Any) -> None:
            self.engine = SimpleNamespace()

        def start(self) -> None:
            (folder / "engine").touch()

        def kill(self) -> None:
            """Nothing hangs."""

        async def run(self, started: object) -> None:
            if replaced == "not at all":
                return
            (folder / "engine").unlink()
            folder.rmdir()
            if replaced == "by a link":
                folder.symlink_to(other)
            elif replaced == "by a file":
                folder.touch()

    class Engine(Stub):
        def end(self) -> None:
            """It has done so."""

    monkeypatch.setattr(supervisor.tempfile, "mkdtemp", lambda *_, **__: str(folder))
    monkeypatch.setattr(supervisor, "EngineProcess", Engine)
    monkeypatch.setattr(supervisor.gc, "freeze", lambda: None)
    monkeypatch.setattr(supervisor.sockets, "allow", lambda _: None)
    monkeypatch.setattr(serve, "Server", Stub)
    tokenizer = Tokenizer.load(hub.resolve("demo"))
    assert supervisor.run(Settings("", ""), tokenizer, ServerOptions(port=0), [], lambda _: None) == 0
    assert [each.name for each in other.iterdir()] == ["engine"]
    left = {"by a link", "by a file"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["attar-0"] * (replaced in left) + ["other"]


def test_a_server_that_ends_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it waits for the time to do so, nor when that has just come."""
    engine = EngineProcess([], Settings("", ""), lambda: True, lambda _: pytest.fail("it was told to end"))
    monkeypatch.setattr(engine, "_spawn", lambda: pytest.fail("nobody would end it"))
    engine._ending.set()
    assert not engine._goes_on(-9)
    engine.child = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(1)"], stdin=subprocess.PIPE)
    monkeypatch.setattr(engine, "_goes_on", lambda status: True)
    engine._watch()
    engine.child.communicate()
