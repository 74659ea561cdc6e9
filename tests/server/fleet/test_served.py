"""`attar route` before two `attar serve demo`: answers go on with the same tokens when a host is killed by SIGKILL."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server.replicas.test_served import FEATURES

SECONDS = 90.0
NAMES = ("greedy", "sampled, with log-probabilities", "n", "grammar")
KEYS = tuple(f"client-key-{at}-of-at-least-32-characters" for at in range(2))


class Process:
    """`python -m attar ARGUMENTS --json`, in a group of its own. `port` is where it listens. `within` precedes the
    command."""

    def __init__(self, *arguments: str, within: Sequence[str] = ()) -> None:
        command = [*within, sys.executable, "-m", "attar", *arguments, "--json"]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.port = 0

    def listens(self) -> None:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"it ended with {self.child.wait()}"
        self.port = int(json.loads(line)["url"].rpartition(":")[2])

    def kill(self) -> None:
        """Kill it and its engine at once, as a host dies."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def end(self) -> int:
        self.child.terminate()
        try:
            return self.child.wait(SECONDS)
        finally:
            self.kill()


def ask(port: int, path: str, body: dict[str, Any], begun: Callable[[], Any] = lambda: None) -> dict[int, list[Any]]:
    """The choices of a streamed answer: text, log-probabilities and reason by choice. `begun` is called at event 20."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[0]}"}
    connection.request("POST", path, json.dumps(body | {"stream": True}), headers)
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    found: dict[int, list[Any]] = {}
    for count, line in enumerate(line for line in reply if line.startswith(b"data: {")):
        event = json.loads(line[6:])
        assert "error" not in event, event
        for choice in event["choices"]:
            told = found.setdefault(choice["index"], ["", [], None])
            told[0] += choice.get("text") or ""
            told[1] += (choice.get("logprobs") or {}).get("token_logprobs", [])
            told[2] = choice["finish_reason"] or told[2]
        if count == 20:
            begun()
    connection.close()
    return found


def told(port: int) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("GET", "/v1/engine", headers={"Authorization": f"Bearer {KEYS[0]}"})
    reply = connection.getresponse()
    found = json.loads(reply.read())
    connection.close()
    return found["replicas"] if reply.status == 200 else []  # type: ignore[no-any-return]


def wait(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def key_files(folder: Path) -> tuple[str, ...]:
    """Write key files, and return the options that name them."""
    for name, keys in (("router.key", ["router-key-of-at-least-32-characters"]), ("api.keys", KEYS)):
        (folder / name).touch(0o600)
        (folder / name).write_text("\n".join(keys))
    return ("--router-key-file", str(folder / "router.key"), "--api-key-file", str(folder / "api.keys"))


@pytest.fixture(scope="module")
def fleet(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, list[Process]]]:
    """A router and two hosts."""
    if sys.platform != "linux":
        pytest.skip("kills groups of processes")
    folder = tmp_path_factory.mktemp("fleet")
    files = key_files(folder)
    serve = ("serve", str(demo), "--port", "0", "--memory", "1GB", "--threads", "1", "--no-verify", *files)
    hosts = [Process(*serve) for _ in range(2)]
    made = list(hosts)
    try:
        for each in hosts:
            each.listens()
        router = Process("route", *(f"http://127.0.0.1:{each.port}" for each in hosts), "--port", "0", *files)
        made.append(router)
        router.listens()
        wait(lambda: [each["state"] for each in told(router.port)] == ["ready", "ready"])
        yield router, hosts
        assert router.end() == 0
    finally:
        for each in made:
            each.kill()


def test_a_prompt_goes_where_it_is_cached(fleet: tuple[Process, list[Process]]) -> None:
    """The router's digests, of the key's salt, are those that the hosts' engines tell."""
    router, _ = fleet
    body = {"prompt": [5 + at % 90 for at in range(200)], "max_tokens": 1}
    before = [each["cached_prompt_tokens"] for each in told(router.port)]
    for _ in range(3):
        ask(router.port, "/v1/completions", body)
        time.sleep(0.2)  # until the host has told of its blocks
    after = [each["cached_prompt_tokens"] for each in told(router.port)]
    assert sorted(now - last for now, last in zip(after, before, strict=True)) == [0, 2 * 192]


def test_answers_go_on_when_a_host_is_killed(fleet: tuple[Process, list[Process]]) -> None:
    router, hosts = fleet
    alone = {name: ask(router.port, *FEATURES[name]) for name in NAMES}
    assert all(each[0] for told in alone.values() for each in told.values())
    begun, found = threading.Barrier(len(NAMES) + 1, timeout=SECONDS), dict[str, Any]()

    def again(name: str) -> None:
        found[name] = ask(router.port, *FEATURES[name], begun.wait)

    threads = [threading.Thread(target=again, args=(name,)) for name in NAMES]
    for each in threads:
        each.start()
    begun.wait()
    busiest = max(range(2), key=lambda at: told(router.port)[at]["open"])
    assert told(router.port)[busiest]["open"] > 0
    hosts[busiest].kill()
    for each in threads:
        each.join(SECONDS)
    assert found == alone
    after = told(router.port)[busiest]
    assert (after["state"], after["deaths"]) == ("down", 1)
