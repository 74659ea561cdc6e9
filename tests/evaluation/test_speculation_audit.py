"""The audit of speculative decoding: it finds nothing where nothing is wrong, and a verifier that lets errors pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attar.cli.terminal import BAD_INPUT
from attar.engine import engine
from attar.engine.llm.llm import LLM
from attar.evaluation.speculation_audit import audit
from attar.sampling.sampler import SampledToken
from tests.cli.test_commands import attar, refused


def test_nothing_differs_and_drafts_were_made(demo: Path) -> None:
    found = audit(LLM(demo, draft="suffix", draft_tokens=16, verify=False), 12)
    assert found.ok
    assert found.tokens > 12 * 8
    assert found.drafted > found.accepted > 0
    assert "same with drafts as without" in found.sentence


def test_a_verifier_that_keeps_wrong_drafts_is_found(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine,
        "confirmed",
        lambda drafts, draws, *_: [*(SampledToken(each, draws[0].logprobs) for each in drafts), draws[0]],
    )
    found = audit(LLM(demo, draft="suffix", draft_tokens=16, verify=False), 8)
    assert not found.ok
    assert "differ with drafts" in found.sentence
    assert found.to_dict()["differing"]


def test_on_the_command_line() -> None:
    found = json.loads(attar("verify demo --speculation 2 --draft suffix --json").stdout.splitlines()[-1])
    assert found["ok"]
    assert found["requests"] == 2
    assert found["drafted"] > 0
    refused(attar("verify demo --speculation 2"), BAD_INPUT, "option_missing", "--draft")
    refused(attar("verify demo --draft suffix"), BAD_INPUT, "option_unused")
    refused(attar("verify demo --speculation 2 --draft suffix --no-hashes"), BAD_INPUT, "option_unused")
