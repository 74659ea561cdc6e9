"""`attar serve --role`: a decode server answers with blocks that a prefill server computed, and without it as well."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from soaks.served import Served

BODY: dict[str, Any] = {
    "prompt": 20 * "Once upon a time there was a little fox. ", "max_tokens": 12, "seed": 5, "temperature": 0.9,
    "ignore_eos": True, "logprobs": 1,
}  # fmt: skip


def send(served: Served, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection(served.address.host, served.address.port, timeout=60)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    found = reply.read()
    connection.close()
    assert reply.status == 200, found
    return json.loads(found)


def asked(served: Served, **changed: Any) -> tuple[Any, Any]:
    """Choices, and the report."""
    reply = send(served, "POST", "/v1/completions", BODY | changed)
    return reply["choices"], send(served, "GET", f"/v1/requests/{reply['id']}/why")["prompts"][0]


def stop(served: Served) -> None:
    served.process.terminate()
    served.process.wait(60)
    served.end()


def test_a_decode_server_takes_what_a_prefill_server_computed_and_goes_on_without(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    peer = ("--memory", "2GB", "--prefill-peer", f"unix:{tmp_path / 'prefill'}")
    prefill = Served("demo", *peer, "--role", "prefill")
    try:
        expected, _ = asked(prefill, seed=5)
        decode = Served("demo", *peer, "--role", "decode")
        try:
            choices, report = asked(decode)
            assert choices == expected
            assert report["fetched_tokens"] == report["reused_tokens"] >= 128
            assert report["fetching"] > 0
            prefill.process.kill()  # its engine ends with it
            prefill.process.wait(60)
            other = "Then the fox went home. " + str(BODY["prompt"])
            choices, report = asked(decode, prompt=other)
            assert report["fetched_tokens"] == 0
            assert len(choices[0]["logprobs"]["tokens"]) == BODY["max_tokens"]
        finally:
            stop(decode)
    finally:
        prefill.process.kill()
        prefill.process.wait(60)
        prefill.end()
