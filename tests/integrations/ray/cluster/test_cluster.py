"""`attar deploy --start` on a real cluster of this machine: answers, killed processes, and what listens.

One cluster serves all tests of this file, and ends with the process that started it.
"""

from __future__ import annotations

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

from attar.integrations.ray import exposure
from tests.integrations.ray.cluster.client import SECONDS, Client, texts

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: see `make test-ray`"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc"),
]

ROOT = Path(__file__).resolve().parents[4]


class Cluster(Client):
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
        super().__init__(int(json.loads(line)["url"].rpartition(":")[2]))
        self.wait(lambda: self.ready() == 2)

    def wait(self, true: Callable[[], Any]) -> None:
        end = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.1)

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


def test_answers_are_those_of_one_engine(cluster: Cluster) -> None:
    assert {seed: cluster.ask(seed) for seed in range(3)} == texts(*range(3))


@pytest.mark.parametrize("what", [b"ray::ServeReplica:attar:Engine", b"attar.engine.main"], ids=["replica", "engine"])
def test_a_killed_process_costs_a_pause_and_no_token(cluster: Cluster, what: bytes) -> None:
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
    assert found == texts(*range(10, 16))
    cluster.wait(lambda: cluster.ready() == 2)
