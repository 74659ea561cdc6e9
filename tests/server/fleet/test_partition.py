"""`attar route` before two `attar serve demo`, each in a network namespace of its own, and a link that goes down.

A host that is cut off sends nothing, not even the end of its connections. The router hears no more of it, and lets the
other host continue its answers. The namespaces are hosts as far as the network goes: the router reaches each by a link
of its own, and they do not reach each other. They are made by `ip`, which needs the rights of an administrator; where
it is refused, these tests skip with what it says.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.server.fleet.test_served import NAMES, SECONDS, Process, ask, key_files, told, wait
from tests.server.replicas.test_served import FEATURES

pytestmark = pytest.mark.slow
CLONE_NEWNET = 0x40000000
ASKED = {name: (FEATURES[name][0], FEATURES[name][1] | {"max_tokens": 420}) for name in NAMES}
T = TypeVar("T")


def ip(*arguments: str) -> None:
    """Run `ip`."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def make(*arguments: str) -> None:
    """Make a namespace or a link; skip the test with what `ip` says where that is refused."""
    try:
        ip(*arguments)
    except OSError as error:
        pytest.skip(f"network namespaces are refused: {error}")


class Network:
    """A namespace for the router and one for each of two hosts, joined by two links."""

    def __init__(self, stack: ExitStack) -> None:
        mark = f"attar{os.getpid()}"
        self.router, self.hosts = f"{mark}r", [f"{mark}h{at}" for at in range(2)]
        for name in (self.router, *self.hosts):
            make("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name])
            ip("-n", name, "link", "set", "lo", "up")
        for at, name in enumerate(self.hosts):
            make("-n", self.router, "link", "add", f"to{at}", "type", "veth", "peer", "name", "out", "netns", name)
            for space, link, last in ((self.router, f"to{at}", 1), (name, "out", 2)):
                ip("-n", space, "addr", "add", f"10.213.{at}.{last}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")

    def link(self, at: int, state: str) -> None:
        """Set the link of a host up or down, at the router's end."""
        ip("-n", self.router, "link", "set", f"to{at}", state)

    def within(self, call: Callable[[], T]) -> Future[T]:
        """Call a function in the router's namespace, in a thread that belongs to it from then on."""
        found = Future[T]()

        def run() -> None:
            try:
                with open(f"/run/netns/{self.router}", "rb") as space:
                    if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "a thread cannot enter the namespace")
                found.set_result(call())
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return found


class Hosts:
    """The network, with a server in each namespace."""

    def __init__(self, network: Network, router: Process) -> None:
        self.network, self.router = network, router

    def ask(self, name: str, begun: Callable[[], Any] = lambda: None) -> Future[dict[int, list[Any]]]:
        return self.network.within(lambda: ask(self.router.port, *ASKED[name], begun))

    def told(self) -> list[dict[str, Any]]:
        return self.network.within(lambda: told(self.router.port)).result(SECONDS)

    def wait_for(self, *states: str) -> None:
        wait(lambda: [each["state"] for each in self.told()] == list(states))


@pytest.fixture(scope="module")
def hosts(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    folder = tmp_path_factory.mktemp("partition")
    files = key_files(folder)
    serve = ("serve", str(demo), "--port", "8000", "--memory", "1GB", "--threads", "1", "--no-verify", *files)
    with ExitStack() as stack:
        network = Network(stack)
        made = [
            Process(*serve, "--host", f"10.213.{at}.2", within=("ip", "netns", "exec", name))
            for at, name in enumerate(network.hosts)
        ]
        for each in made:
            stack.callback(each.kill)
        for each in made:
            each.listens()
        urls = [f"http://10.213.{at}.2:8000" for at in range(2)]
        router = Process("route", *urls, "--port", "0", *files, within=("ip", "netns", "exec", network.router))
        stack.callback(router.kill)
        router.listens()
        found = Hosts(network, router)
        found.wait_for("ready", "ready")
        yield found
        assert router.end() == 0


@pytest.mark.parametrize("cut", [0, 1])
def test_answers_go_on_when_a_host_is_cut_off(cut: int, hosts: Hosts) -> None:
    """All features at once, on both hosts; then the link of one goes down, and comes up again."""
    alone = {name: hosts.ask(name).result(SECONDS) for name in NAMES}
    assert all(each[0] for told in alone.values() for each in told.values())
    before = hosts.told()
    begun = threading.Barrier(len(NAMES) + 1, timeout=SECONDS)
    again = {name: hosts.ask(name, begun.wait) for name in NAMES}
    begun.wait()
    assert hosts.told()[cut]["open"], "the host that is cut off answers nothing"
    hosts.network.link(cut, "down")
    try:
        assert {name: each.result(SECONDS) for name, each in again.items()} == alone
        after = hosts.told()
        sent = [now["requests"] - last["requests"] for now, last in zip(after, before, strict=True)]
        assert sum(sent) > len(NAMES), "none was continued"
        assert after[cut]["state"] != "ready"
        assert hosts.ask("greedy").result(SECONDS) == alone["greedy"]  # by the other host
    finally:
        hosts.network.link(cut, "up")
    hosts.wait_for("ready", "ready")
    assert {name: hosts.ask(name).result(SECONDS) for name in NAMES} == alone
