"""The locks of `make test-clients`: each client has one, every package in it has hashes, and none names a host. And how
environments are made of them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import clients
import pytest
from client_programs.catalog import CLIENTS, HERE, LOCKS

HASHED = re.compile(r"[\w.-]+==\S+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+")


@pytest.mark.parametrize("name", CLIENTS)
def test_lock(name: str) -> None:
    client = CLIENTS[name]
    assert (HERE / ("node" if client.node else "python") / client.program).exists()
    if client.node:
        text = (LOCKS / name / "package-lock.json").read_text()
        packages = {place: each for place, each in json.loads(text)["packages"].items() if place}
        assert packages
        assert all(each["integrity"].startswith("sha512-") for each in packages.values())
    else:
        text = (LOCKS / f"{name}.txt").read_text()
        entries = re.split(r"\n(?! )", text.strip())[1:]
        assert entries
        assert all(HASHED.fullmatch(each) for each in entries)
    assert "://" not in text


def test_a_set_up_that_does_not_end_is_told_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def endless(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(clients, "BUILD", tmp_path)
    monkeypatch.setattr(subprocess, "run", endless)
    assert not clients.set_up("openai")
    assert "openai could not be set up: no end in" in capsys.readouterr().out
