"""`attar serve` with three models in memory for two, as a user runs it: real engines, one that is broken, and /proc.

`TEST_SEVERAL_REQUESTS` is the number of requests of the longest test.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.server.test_supervisor import SECONDS, Served

REQUESTS = int(os.environ.get("TEST_SEVERAL_REQUESTS", "150"))
MEMORY = 850  # MB: for two engines of the embedded model and the server's process, by plan
PROMPT = "The little dog"
EDGE = 0.02  # seconds between two looks at the memory


def variant(demo: Path, folder: Path, number: int) -> Path:
    """Copy the embedded model with the numbers of its last norm in another order, so that it says something else."""
    shutil.copytree(demo, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    begin, end = (8 + size + at for at in header["model.norm.weight"]["data_offsets"])
    numbers = [data[at : at + 2] for at in range(begin, end, 2)]
    data[begin:end] = b"".join(numbers[7 * number :] + numbers[: 7 * number])
    file.write_bytes(data)
    return folder


def anonymous(pid: int) -> int:
    """The bytes of a process and its children that are its own; those that end meanwhile count nothing."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            total += int(line.split()[1]) << 10 if line.startswith("RssAnon:") else 0
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(anonymous(int(child)) for child in file.read_text().split())
    except OSError:
        pass
    return total


class Watch:
    """Looks at the memory of a server and its engines until it is stopped."""

    def __init__(self, pid: int) -> None:
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, args=(pid,), daemon=True)
        self._thread.start()

    def _look(self, pid: int) -> None:
        while not self._stop.wait(EDGE):
            self.peak = max(self.peak, anonymous(pid))

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak


@pytest.fixture(scope="module")
def served(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("looks at processes by /proc")
    folder = tmp_path_factory.mktemp("models")
    paths = {"a": demo, **{name: variant(demo, folder / name, at) for at, name in enumerate("bcd", 1)}}
    given = [part for name, path in paths.items() for part in ("--model", f"{name}={path}")]
    made = Served.__new__(Served)
    made.process = subprocess.Popen(
        [
            sys.executable, "-m", "attar", "serve", "--port", "0", "--json", "--threads", "1", "--memory",
            f"{MEMORY}MB", *given,
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert made.process.stdout is not None
        made.url = json.loads(made.process.stdout.readline())["url"]
        with (folder / "d" / "model.safetensors").open("r+b") as file:  # changed since: it cannot be loaded any more
            file.seek(-4, 2)
            file.write(b"\1\2\3\4")
        yield made
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(SECONDS) == 0
    finally:
        made.process.kill()
        made.process.wait()


def run(served: Served, count: int, seed: int) -> None:
    """Random requests of three models and some of the broken one, 16 at a time: each gets its model's own text."""
    random, watch, began = Random(seed), Watch(served.process.pid), time.monotonic()
    asked = [*random.choices("abcd", (10, 10, 10, 1), k=count - 1), "d"]

    def one(model: str) -> tuple[str, int, str]:
        body: dict[str, object] = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        status, answer = served.get("/v1/completions", body)
        if status != 200:
            return model, status, str(answer["error"]["code"])  # type: ignore[index]
        assert answer["model"] == model
        return model, status, str(answer["choices"][0]["text"])  # type: ignore[index]

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(one, asked))
    texts = {model: {text for name, _, text in answers if name == model} for model in "abcd"}
    assert {status for model, status, _ in answers if model != "d"} == {200}
    assert {status for model, status, _ in answers if model == "d"} == {503}
    assert texts["d"] == {"model_failed"}
    assert all(len(texts[model]) == 1 for model in "abc"), texts
    assert len(set.union(*(texts[model] for model in "abc"))) == 3
    peak = watch.stop()
    assert peak <= MEMORY * 10**6
    _, listed = served.get("/v1/models")
    states = {each["id"]: each["state"] for each in listed["data"]}  # type: ignore[index, attr-defined]
    assert states["d"] == "failed"
    assert sum(state == "ready" for state in states.values()) <= 2
    print(f"{count} requests in {time.monotonic() - began:.1f} s, at most {peak / 1e6:.0f} MB of {MEMORY}, {states}")


def test_three_models_take_turns_in_memory_for_two(served: Served) -> None:
    run(served, 48, 1)


def test_a_loaded_server_answers_its_monitors(served: Served) -> None:
    assert served.get("/load") == (200, {"server_load": 0})
    assert served.get("/ping") == (200, {"status": "ready"})


@pytest.mark.slow
def test_random_requests_get_their_own_models_answers(served: Served) -> None:
    run(served, REQUESTS, 2)


def test_a_model_that_does_not_fit_alone_is_refused_with_both_numbers() -> None:
    command = [sys.executable, "-m", "attar", "serve", "--port", "0", "--json", "--memory", "300MB"]
    done = subprocess.run([*command, "--model", "a=demo"], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert told["code"] == "memory_insufficient"
    assert told["error"].startswith("model a: ")
    assert "300 MB" in told["error"]
