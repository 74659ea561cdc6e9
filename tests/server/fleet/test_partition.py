"""`attar route` before two `attar serve demo`, each in a network namespace of its own, and a link that goes down.

A host that is cut off sends nothing, not even the end of its connections. The router hears no more of it, and lets the
other host continue its answers. The router reaches each host by a link of its own, and they do not reach each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.network_spaces import Network, outer, within
from tests.server.fleet.test_served import NAMES, SECONDS, Process, ask, key_files, told, wait
from tests.server.replicas.test_served import FEATURES

pytestmark = pytest.mark.slow
ASKED = {name: (FEATURES[name][0], FEATURES[name][1] | {"max_tokens": 420}) for name in NAMES}


class Hosts:
    """The network, with a server in each namespace."""

    def __init__(self, network: Network, router: Process) -> None:
        self.network, self.router = network, router

    def ask(self, name: str, begun: Callable[[], Any] = lambda: None) -> Future[dict[int, list[Any]]]:
        return self.network.call(lambda: ask(self.router.port, *ASKED[name], begun))

    def told(self) -> list[dict[str, Any]]:
        return self.network.call(lambda: told(self.router.port)).result(SECONDS)

    def wait_for(self, *states: str) -> None:
        wait(lambda: [each["state"] for each in self.told()] == list(states))


@pytest.fixture(scope="module")
def hosts(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("partition")
    files = key_files(folder)
    serve = ("serve", str(demo), "--port", "8000", "--memory", "1GB", "--threads", "1", "--no-verify", *files)
    with ExitStack() as stack:
        network = Network(stack)
        made = [Process(*serve, "--host", outer(at), within=within(name)) for at, name in enumerate(network.hosts)]
        for each in made:
            stack.callback(each.kill)
        for each in made:
            each.listens()
        urls = [f"http://{outer(at)}:8000" for at in range(2)]
        router = Process("route", *urls, "--port", "0", *files, within=within(network.middle))
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
