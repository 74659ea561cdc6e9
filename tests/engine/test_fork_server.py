"""Engines that are forked from one process: the weights are held once, and ends are told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from attar import LLM
from attar.protocol.messages import Delta, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.settings import HOPELESS, Settings
from attar.server.replicas.forked import ForkedEngine, ForkServerProcess
from tests.engine.test_main import Client

if sys.platform != "linux":
    pytest.skip("replicas need Linux", allow_module_level=True)

COMMAND = [sys.executable, "-m", "attar.engine.fork_server"]
SECONDS = 120.0
CORES = sorted(os.sched_getaffinity(0))
GREEDY = SamplingParams(max_tokens=24, temperature=0, seed=0)
PROMPT = (11, 42, 7, 300)
SHARED = 0.75  # of what is loaded: engines write to the rest, as counts of references lie beside objects


class Forked:
    """Engines of the embedded model, forked from one process of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.settings = Settings(str(model), "", memory=4 << 30, sharers=2, threads=1, verify=False)
        self.folder = folder
        self.server = ForkServerProcess(COMMAND, self.settings, CORES)

    def start(self, name: str, cores: list[int] = CORES) -> ForkedEngine:
        """Start an engine, whose socket has this name."""
        engine = self.server.start(cores)
        assert engine.stdin is not None
        engine.stdin.write(msgspec.structs.replace(self.settings, socket=str(self.folder / name)).line())
        engine.stdin.flush()
        return engine

    def connect(self, name: str) -> Client:
        """Connect to an engine once it listens."""
        until(lambda: (self.folder / name).exists())
        return Client(self.folder / name)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def tokens(client: Client) -> tuple[int, ...]:
    """The answer to the prompt."""
    client.send(Submit("a", PROMPT, GREEDY))
    events = client.until(Finished)
    return tuple(token for event in events if isinstance(event, Delta) for token in event.token_ids)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def engines_below() -> list[int]:
    """Process ids of the engines that a child of this process has forked."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # processes end meanwhile
            pid = int(comm.parent.name)
            if comm.read_text() == "attar-engine\n" and parent(parent(pid)) == os.getpid():
                found.append(pid)
    return sorted(found)


def anonymous(pid: int, name: str) -> int:
    """Bytes of a kind of a process's memory: `Anonymous` is all that is no file's."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) << 10


@pytest.fixture
def forked(demo: Path, tmp_path: Path) -> Iterator[Forked]:
    tmp_path.chmod(0o700)
    made = Forked(demo, tmp_path)
    yield made
    made.server.end()
    assert not engines_below()


def test_engines_answer_as_one_that_loads_by_itself(forked: Forked) -> None:
    """On all processors and on one."""
    engines = [forked.start("a"), forked.start("b", CORES[-1:])]
    clients = [forked.connect(name) for name in "ab"]
    (wanted,) = (each.token_ids for each in LLM(forked.settings.model).generate([PROMPT], GREEDY))
    assert [tokens(each) for each in clients] == [wanted, wanted]
    assert [sorted(os.sched_getaffinity(pid)) for pid in engines_below()] == [CORES, CORES[-1:]]
    for each in engines:
        assert each.stdin is not None
        each.stdin.close()  # the server's end: an engine ends with it
    assert [each.wait(SECONDS) for each in engines] == [0, 0]


def test_an_engine_that_dies_harms_no_other_and_the_next_one_needs_no_loading(forked: Forked) -> None:
    first, second = forked.start("a"), forked.start("b")
    clients = [forked.connect(name) for name in "ab"]
    before = [tokens(each) for each in clients]
    first.kill()
    assert first.wait(SECONDS) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.0)
    first.kill()  # there is none: nobody else is killed
    third = forked.start("c")
    assert [tokens(clients[1]), tokens(forked.connect("c"))] == before
    for each in (second, third):
        each.kill()
        assert each.wait(SECONDS) == -signal.SIGKILL


def test_memory_that_was_loaded_is_held_once(forked: Forked) -> None:
    engines = [forked.start(name) for name in "ab"]
    for name in "ab":
        tokens(forked.connect(name))
    below = engines_below()
    assert len(below) == 2
    loaded = anonymous(parent(below[0]), "Anonymous")
    assert loaded > sum(each.stat().st_size for each in Path(forked.settings.model).glob("*.safetensors"))
    for pid in below:
        assert anonymous(pid, "Shared_Dirty") > SHARED * loaded
    for each in engines:
        each.kill()
        each.wait(SECONDS)


def test_all_end_with_the_process_that_forked_them_and_the_next_start_begins_another(forked: Forked) -> None:
    engines = [forked.start(name) for name in "ab"]
    before = tokens(forked.connect("a"))
    forked.connect("b")
    gone = engines_below()
    os.kill(parent(engines_below()[0]), signal.SIGKILL)
    assert [each.wait(SECONDS) for each in engines] == [-signal.SIGKILL] * 2
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone))
    engine = forked.start("c")
    assert tokens(forked.connect("c")) == before
    engine.kill()
    engine.wait(SECONDS)


def test_one_that_waits_for_the_model_is_killed_at_once(forked: Forked) -> None:
    engine = forked.start("a")
    engine.kill()
    assert engine.wait(SECONDS) == -signal.SIGKILL
    assert not (forked.folder / "a").exists()


def test_a_model_that_cannot_be_loaded_ends_all_with_the_status_that_says_so(tmp_path: Path) -> None:
    server = ForkServerProcess(COMMAND, Settings(str(tmp_path), "", sharers=2), CORES)
    engines = [server.start(CORES) for _ in range(2)]
    assert [each.wait(SECONDS) for each in engines] == [HOPELESS] * 2
    server.end()
