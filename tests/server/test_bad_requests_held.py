"""The bad requests again, at the embedded model: real canaries after each keep every bit.

The table's own test has a fake engine, which has no cache that a bad request could damage. Here two requests follow
every bad one, a greedy and a seeded, side by side. Most of their prompt is found in the prefix tree, so they read keys
and values that were there before all the bad requests, and all their log probabilities are compared.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from soaks.served import Served

from attar.server.errors import CATALOGUE
from tests.server import bad_requests

BLOCK = 64  # tokens
PROMPT = [7 * i % 4001 + 40 for i in range(BLOCK + 8)]
CANARIES = [
    {"prompt": PROMPT, "max_tokens": 2, "logprobs": 3, "ignore_eos": True} | sampling
    for sampling in ({"temperature": 0}, {"temperature": 1.1, "seed": 11, "top_p": 0.9})
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served("--threads", "1", "--max-running", "4", "--max-tokens-in-cache", "2048")
    try:
        yield made
    finally:
        made.end()


@pytest.mark.slow
def test_bad_requests_leave_real_answers_as_they_were(served: Served) -> None:
    address = served.address
    connections = [http.client.HTTPConnection(address.host, address.port, timeout=60) for _ in CANARIES]

    def ask(path: str, *bodies: bytes) -> list[tuple[int, Any]]:
        """Side by side, each over a connection of its own."""
        pairs = list(zip(connections, bodies, strict=False))
        for connection, body in pairs:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
        replies = [connection.getresponse() for connection, _ in pairs]
        return [(reply.status, json.loads(reply.read())) for reply in replies]

    def canaries() -> tuple[list[Any], list[int]]:
        """Their answers, and how many tokens of each prompt were in the cache."""
        replies = ask(bad_requests.COMPLETIONS, *(json.dumps(canary).encode() for canary in CANARIES))
        assert [status for status, _ in replies] == [200, 200], replies
        details = [reply["usage"]["prompt_tokens_details"] for _, reply in replies]
        return [reply["choices"] for _, reply in replies], [each["cached_tokens"] for each in details]

    expected, _ = canaries()
    assert expected[0] != expected[1]
    wrong = []
    for case in bad_requests.cases():
        [(status, reply)] = ask(case.path, case.body)
        assert "error" in reply, (case.path, case.body[:300], reply)
        found = reply["error"].get("code", reply["error"]["type"])  # Anthropic's errors have a type alone
        right = CATALOGUE[case.code].anthropic if case.path == bad_requests.MESSAGES else case.code
        if (status, found) != (case.status, right):
            wrong.append((case.name, case.status, right, status, reply))
        answers, cached = canaries()
        assert answers == expected, case.name
        assert min(cached) >= BLOCK, case.name
    for connection in connections:
        connection.close()
    assert not wrong
