"""A Ray cluster of three hosts, played by network namespaces: what runs where, and hosts that are lost.

The head has no cores for Ray, so engines run on the two others: one has room for one thread, the other for two. A host
is cut off (its link goes down), or all its processes are killed. Then its answers go on at the other, and a host that
joins again gets its replica back.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from attar.integrations.ray import exposure
from tests.integrations.ray.cluster.client import SECONDS, Client, texts
from tests.network_spaces import Network, inner, outer, within

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: see `make test-ray`"),
    pytest.mark.slow,
]

CORES = (1, 2)  # of the two hosts beside the head, as Ray is told
HEAD, PORT = inner(0), 6379
HTTP = 8123  # of attar, on the head's loopback
REJOIN_SECONDS = 240.0  # until Ray has found that a host is lost, and one that joined has a replica
ENGINE, HTTP_ACTOR = b"ray::ServeReplica:attar:Engine", b"ray::ServeReplica:attar:Http"


class Hosts:
    """The network, and Ray in each namespace."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.folder, self.network = folder, Network(stack, joined=True)
        token = folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = os.environ | exposure.environment(HEAD) | {"RAY_AUTH_TOKEN_PATH": str(token)}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.client = Client(HTTP)
        stack.callback(self.end)

    def start(self) -> None:
        """Start the head, then the hosts."""
        plain = ("--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", str(self.folder / "r"))
        self._node(
            self.network.middle, "--head", "--port", str(PORT), "--node-ip-address", HEAD, "--num-cpus", "0", *plain
        )
        for at in range(len(CORES)):
            self.join(at)

    def join(self, at: int) -> None:
        """Let a host join the cluster."""
        name = self.network.hosts[at]
        self._node(name, "--address", f"{HEAD}:{PORT}", "--node-ip-address", outer(at), "--num-cpus", str(CORES[at]))

    def _node(self, name: str, *given: str) -> None:
        command = [*within(name), sys.executable, "-m", "ray.scripts.scripts", "start", *given, "--block"]
        command += ["--object-store-memory", str(128 << 20)]
        with self.log(name).open("wb") as log:
            self.nodes[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        # One after another: nodes share a folder here, where they name their sockets.
        self.wait(lambda: "Ray runtime started" in self.log(name).read_text())

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def deploy(self, *options: str) -> None:
        """Write an application by `attar deploy` and run it by `serve run`, both on the head."""
        file = self.folder / "app.yaml"
        command = [sys.executable, "-m", "attar", "deploy", "demo", "--ray", str(file), "--overwrite", "--no-verify"]
        command += ["--memory", "1GB", "--port", str(HTTP), "--ray-address", HEAD, "--ray-insecure", *options]
        self.run(command)
        self.run([sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", str(file)])

    def run(self, command: list[str]) -> None:
        """Run a command on the head."""
        environment = self.environment | {"RAY_ADDRESS": f"{HEAD}:{PORT}"}
        with self.log("deploy").open("ab") as log:
            ended = subprocess.run(
                [*within(self.network.middle), *command], env=environment, stdout=log, stderr=log, timeout=SECONDS
            )
        assert ended.returncode == 0, self.said()

    def said(self) -> str:
        """Return what Ray's processes printed last."""
        return "\n".join(f"{each.name}: {each.read_text()[-1500:]}" for each in sorted(self.folder.glob("*.log")))

    def wait(self, true: Callable[[], Any], seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.said()
            time.sleep(0.2)

    def ready(self) -> int:
        return self.network.call(self.client.ready).result(SECONDS)

    def places(self) -> Mapping[str, list[int]]:
        """Return the ids of the processes of engines' replicas, by namespace."""
        return {name: self.processes(name, ENGINE) for name in (self.network.middle, *self.network.hosts)}

    def processes(self, name: str, part: bytes = b"") -> list[int]:
        """Return the ids of processes in a namespace whose command line has a part."""
        space = os.stat(f"/run/netns/{name}").st_ino
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and os.stat(folder / "ns/net").st_ino == space:
                    line = (folder / "cmdline").read_bytes()
                    if line and part in line:
                        found.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return sorted(found)

    def kill(self, name: str) -> None:
        """Kill all processes of a namespace."""
        self.nodes.pop(name).kill()
        for pid in self.processes(name):
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for each in self.nodes.values():
            each.terminate()
        for each in self.nodes.values():
            try:
                each.wait(30)
            except subprocess.TimeoutExpired:
                each.kill()
        for name in (*self.network.hosts, self.network.middle):
            for pid in self.processes(name):
                os.kill(pid, signal.SIGKILL)

    def answers(self, seeds: range, cut: Callable[[], None]) -> dict[int, str]:
        """Return the text of each seed, asked for at once. `cut` is called when all have begun."""
        begun = threading.Barrier(len(seeds) + 1, timeout=SECONDS)

        def asked(seed: int) -> Callable[[], str]:
            return lambda: self.client.ask(seed, begun.wait)

        found = {seed: self.network.call(asked(seed)) for seed in seeds}
        begun.wait()
        cut()
        return {seed: each.result(REJOIN_SECONDS) for seed, each in found.items()}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        # Not pytest's folder: paths of Ray's sockets are long, and the kernel allows about 100 characters.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attar-")))
        made = Hosts(stack, folder)
        made.start()
        made.deploy("--ray-replicas", "3", "--threads", "1")
        made.wait(lambda: made.ready() == 3)
        yield made


def test_engines_run_where_there_are_cores_and_the_server_on_the_head(hosts: Hosts) -> None:
    one, two = hosts.network.hosts
    assert {name: len(found) for name, found in hosts.places().items()} == {hosts.network.middle: 0, one: 1, two: 2}
    assert len(hosts.processes(hosts.network.middle, HTTP_ACTOR)) == 1
    answers = hosts.answers(range(3), lambda: None)
    assert answers == texts(*range(3))


@pytest.mark.parametrize("how", ["cut off", "killed"])
@pytest.mark.parametrize("lost", [0, 1], ids=["one replica", "two replicas"])
def test_a_lost_host_costs_a_pause_and_no_token(lost: int, how: str, hosts: Hosts) -> None:
    name, seeds = hosts.network.hosts[lost], range(10, 16)
    hosts.wait(lambda: hosts.ready() == 3, REJOIN_SECONDS)

    def cut() -> None:
        if how == "killed":
            hosts.kill(name)
        else:
            hosts.network.link(lost, "down")

    assert hosts.answers(seeds, cut) == texts(*seeds)
    hosts.wait(lambda: hosts.ready() == 3 - CORES[lost])
    if how == "cut off":
        hosts.kill(name)
        hosts.network.link(lost, "up")
    hosts.join(lost)
    hosts.wait(lambda: hosts.ready() == 3, REJOIN_SECONDS)
    assert len(hosts.places()[name]) == CORES[lost]


def test_a_replica_of_two_processes_is_placed_on_the_host_with_two_cores(hosts: Hosts) -> None:
    """After the tests with three replicas: it replaces them."""
    hosts.deploy("--ray-replicas", "1", "--tp", "2", "--threads", "1")
    two = hosts.network.hosts[1]
    hosts.wait(lambda: hosts.ready() == 1 and [len(each) for each in hosts.places().values()] == [0, 0, 1])
    (replica,) = hosts.processes(two, ENGINE)
    assert len(hosts.processes(two, b"attar.execution.parallel")) == 1, "the second process of the engine"
    assert hosts.answers(range(2), lambda: None) == texts(*range(2))
    assert hosts.processes(two, ENGINE) == [replica]
