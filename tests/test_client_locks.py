"""The locks of `make test-clients`: each client has one, every package in it has hashes, and none names a host."""

from __future__ import annotations

import json
import re

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
