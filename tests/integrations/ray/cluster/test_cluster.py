"""`attar deploy --start` on a real cluster of this machine: answers, killed processes, and what listens.

One cluster serves all tests of this file, and ends with the process that started it.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attar.engine.llm.llm import LLM
from attar.integrations.ray import exposure
from attar.protocol.request import SamplingParams

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: see `make test-ray`"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc"),
]

ROOT = Path(__file__).resolve().parents[4]
SECONDS = 120.0
PROMPT = "Once upon a time there was a little fox"
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0.9}


class Cluster:
    """The process of `attar deploy --start`, with two replicas of one thread."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        command = [
            sys.executable, "-m", "attar", "deploy", "demo", "--ray", str(folder / "app.yaml"), "--ray-replicas", "2",
            "--threads", "1", "--memory", "1GB", "--no-verify", "--port", "0", "--start", "--json",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith('{"url"'), line + self.log.read_text()
        self.port = int(json.loads(line)["url"].rpartition(":")[2])
        self.wait(lambda: self.ready() == 2)

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        connection.request("GET", path)
        reply = connection.getresponse()
        found = reply.read()
        connection.close()
        return json.loads(found) if reply.status == 200 else None

    def ready(self) -> int:
        """Replicas that take requests."""
        told = self.get("/v1/engine")
        return 0 if told is None else sum(each["state"] == "ready" for each in told["replicas"])

    def wait(self, true: Callable[[], Any]) -> None:
        end = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.1)

    def ask(self, seed: int, begun: Callable[[], Any] = lambda: None) -> str:
        """A streamed answer. `begun` is called once some of it has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        body = json.dumps(ASKED | {"seed": seed, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        text = ""
        for count, line in enumerate(line for line in reply if line.startswith(b"data: {")):
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            if count == 10:
                begun()
        connection.close()
        return text

    def processes(self, *parts: bytes) -> list[int]:
        """Ids of processes that this cluster started, whose command line has all parts."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self._ours(int(folder.name)):
                    line = (folder / "cmdline").read_bytes()
                    if line and all(part in line for part in parts):
                        found.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return sorted(found)

    def _ours(self, pid: int) -> bool:
        while pid > 1 and pid != self.process.pid:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return pid == self.process.pid


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("ray"))
    started = made.processes()
    try:
        yield made
        started += made.processes()
    finally:
        made.process.terminate()
        try:
            assert made.process.wait(SECONDS) == 0
        finally:
            made.process.kill()
    end = time.monotonic() + 20
    while left := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes that outlived their cluster: {left}")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def expected() -> Callable[[int], str]:
    """The text of a seed, by an engine in this process."""
    llm = LLM("demo", verify=False)
    known: dict[int, str] = {}

    def text(seed: int) -> str:
        if seed not in known:
            params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.9, seed=seed)
            known[seed] = llm.generate(PROMPT, params)[0].text
        return known[seed]

    return text


def test_what_listens_is_what_security_md_lists_and_on_loopback(cluster: Cluster) -> None:
    pids = set(cluster.processes())
    text = (ROOT / "SECURITY.md").read_text()
    table = text[text.index("## Ray") : text.index("## Running it")]
    listed = set(re.findall(r"^\| `([^`]+)` \|", table, re.M))
    found = exposure.listeners()
    assert pids
    assert {each.process for each in found} == listed - {"client server"}  # that one is of `ray start`
    assert all(each.loopback for each in found), found
    counts = Counter(each.process for each in found)
    assert (counts["gcs_server"], counts["raylet"], counts["monitor"], counts["dashboard"]) == (1, 2, 1, 1)
    assert counts["dashboard agent"] <= 3
    assert counts["runtime environment agent"] == 1


def test_answers_are_those_of_one_engine(cluster: Cluster, expected: Callable[[int], str]) -> None:
    assert [cluster.ask(seed) for seed in range(3)] == [expected(seed) for seed in range(3)]


@pytest.mark.parametrize("what", [b"ray::ServeReplica:attar:Engine", b"attar.engine.main"], ids=["replica", "engine"])
def test_a_killed_process_costs_a_pause_and_no_token(
    cluster: Cluster, expected: Callable[[int], str], what: bytes
) -> None:
    cluster.wait(lambda: cluster.ready() == 2 and len(cluster.processes(what)) >= 2)
    victim, begun, found = cluster.processes(what)[0], threading.Barrier(7, timeout=SECONDS), dict[int, str]()

    def read(seed: int) -> None:
        found[seed] = cluster.ask(seed, begun.wait)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(10, 16)]
    for each in readers:
        each.start()
    begun.wait()  # all have begun, on both replicas
    os.kill(victim, signal.SIGKILL)
    for each in readers:
        each.join(SECONDS)
    assert found == {seed: expected(seed) for seed in range(10, 16)}
    cluster.wait(lambda: cluster.ready() == 2)
