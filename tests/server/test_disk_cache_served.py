"""`attar serve --cache-dir`: a server that is started again answers from disk, and forgets a key that was removed."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soaks.served import Served

KEYS = ("a" * 32, "b" * 32)
BODY: dict[str, Any] = {
    "prompt": 6 * "Once upon a time there was a little fox. ", "max_tokens": 12, "seed": 5, "temperature": 0.9,
    "ignore_eos": True, "logprobs": 1,
}  # fmt: skip


class Answered:
    """A server that was asked with some keys, and has ended: choices, reports and metrics of each."""

    def __init__(self, folder: Path, keys: Sequence[str], asks: Sequence[str]) -> None:
        (folder / "keys").write_text("\n".join(keys))
        (folder / "keys").chmod(0o600)
        options = ("--memory", "2GB", "--cache-dir", str(folder / "cache"), "--cache-bytes", "1GB")
        served = Served("demo", *options, "--api-key-file", str(folder / "keys"), key=keys[0])
        try:
            self.address = served.address
            self.choices, self.reports = [], []
            for key in asks:
                reply = json.loads(self.send("POST", "/v1/completions", key, BODY))
                self.choices.append(reply["choices"])
                why = json.loads(self.send("GET", f"/v1/requests/{reply['id']}/why", key))
                self.reports.append(why["prompts"][0])
            self.metrics = self.send("GET", "/metrics", keys[0]).decode()
        finally:
            served.process.terminate()
            self.status = served.process.wait(60)
            served.end()

    def send(self, method: str, path: str, key: str, body: Any = None) -> bytes:
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=60)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        reply = connection.getresponse()
        found = reply.read()
        connection.close()
        assert reply.status == 200, found
        return found

    def metric(self, name: str) -> float:
        (found,) = re.findall(rf"^attar_disk_cache_{name} (\S+)$", self.metrics, re.M)
        return float(found)


def test_a_restarted_server_answers_from_disk(tmp_path: Path) -> None:
    first = Answered(tmp_path, KEYS, KEYS)
    assert [report["fetched_tokens"] for report in first.reports] == [0, 0]  # no key has another's
    assert first.status == 0
    names = [path for path in (tmp_path / "cache").iterdir() if path.name != "key"]
    assert names
    assert not any(key.encode() in path.read_bytes() for path in names for key in KEYS)
    second = Answered(tmp_path, KEYS[:1], KEYS[:1])
    assert second.choices == first.choices[:1]
    (report,) = second.reports
    assert report["fetched_tokens"] == report["reused_tokens"] > 0
    assert report["fetching"] > 0
    assert second.metric("loaded_blocks_total") * 64 == report["fetched_tokens"]
    assert second.metric("refused_total") == second.metric("failed_total") == 0
    left = [path for path in (tmp_path / "cache").iterdir() if path.name != "key"]
    assert len(left) == len(names) / 2  # those of the removed key are gone
    assert second.metric("blocks") == len(left)
