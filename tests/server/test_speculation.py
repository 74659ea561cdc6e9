"""`attar serve --draft` as a user sees it: the same answers, fewer steps, and counters that say so."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from soaks.served import Served

PROMPT = "One two three four. One two three four. One two three four. One two"
SEEDED = {"prompt": PROMPT, "max_tokens": 64, "ignore_eos": True, "seed": 5, "logprobs": 1}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Served]:
    if sys.platform != "linux":
        pytest.skip("looks at processes by /proc")
    made = Served("--threads", "1", "--draft", "suffix", "--draft-tokens", "4")
    try:
        yield made
    finally:
        made.end()


def call(served: Served, path: str, body: dict[str, Any] | None = None) -> tuple[str, str]:
    """Return the body of an answer, and its request's id."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{served.address.port}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return answer.read().decode(), answer.headers["x-request-id"]


def counters(served: Served) -> dict[str, float]:
    lines = [line for line in call(served, "/metrics")[0].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_answers_are_those_of_a_server_without_drafts(drafting: Served, real: Served, temperature: float) -> None:
    body = SEEDED | {"temperature": temperature}
    text, id = call(drafting, "/v1/completions", body)
    expected, _ = call(real, "/v1/completions", body)
    assert json.loads(text)["choices"] == json.loads(expected)["choices"]
    off, _ = call(drafting, "/v1/completions", body | {"speculation": {"max_tokens": 0}})
    assert json.loads(off)["choices"] == json.loads(expected)["choices"]
    why = json.loads(call(drafting, f"/v1/requests/{id}/why")[0])
    (report,) = why["prompts"]
    assert report["draft_steps"] + report["accepted_tokens"] == 63
    assert report["draft_seconds"] > 0
    assert temperature or report["accepted_tokens"] > 0


def test_drafts_are_counted(drafting: Served) -> None:
    before = counters(drafting)
    call(drafting, "/v1/completions", SEEDED | {"temperature": 0})
    after = counters(drafting)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["attar_draft_tokens_total"] >= grown["attar_draft_tokens_accepted_total"] > 0
    assert grown["attar_draft_errors_total"] == 0
    assert grown["attar_draft_seconds_total"] > 0
    assert grown["attar_draft_steps_total"] == 63 - grown["attar_draft_tokens_accepted_total"]
    by_position = [grown[f'attar_draft_tokens_accepted_by_position_total{{position="{at}"}}'] for at in (1, 2, 3, 4)]
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == grown["attar_draft_tokens_accepted_total"]
    steps = grown["attar_steps_total"]
    assert steps <= 1 + 64 - grown["attar_draft_tokens_accepted_total"]
    call(drafting, "/v1/completions", SEEDED | {"temperature": 0, "speculation": {"max_tokens": 0}})
    assert counters(drafting)["attar_draft_tokens_total"] == after["attar_draft_tokens_total"]
