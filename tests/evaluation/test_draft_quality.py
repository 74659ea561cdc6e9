"""Figures of a draft model: against theory where it is another model, and what is certain where it is the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attar.cli.terminal import BAD_INPUT
from attar.evaluation import draft_quality as module
from attar.evaluation.draft_quality import Positions, measure
from tests.cli.test_commands import attar, last_json, refused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPTS", 4)
    monkeypatch.setattr(module, "TOKENS", 24)
    monkeypatch.setattr(module, "COUNTS", (0, 3))


@pytest.mark.usefixtures("few")
def test_a_model_drafts_for_itself_without_an_error(demo: Path) -> None:
    found = measure(demo, str(demo), ROOT / "LICENSE")
    assert found.tokens == 96
    assert found.ratio_rejections == found.match_rejections == 0
    assert found.ratio_expected == found.match_most < 1e-9
    assert max(found.tv_by_depth) < 1e-9
    assert found.speeds[1].tokens == found.speeds[1].predicted_tokens == 4.0
    assert 0.5 < found.draft_cost < 2


@pytest.mark.usefixtures("few")
def test_a_coarser_copy_rejects_as_theory_says(demo: Path, tmp_path: Path) -> None:
    assert attar(f"compress demo {tmp_path}/copy --recipe rtn-w3g32 --quiet").exit_code == 0
    found = last_json(attar(f"eval demo --draft {tmp_path}/copy --text {ROOT}/LICENSE --quiet --json"))
    assert 0 < found["match_least"] == found["ratio_expected"] < found["match_most"]
    spread = 4 * found["ratio_expected"] ** 0.5 + 1
    assert abs(found["ratio_rejections"] - found["ratio_expected"]) < spread
    assert found["match_least"] - spread < found["match_rejections"] < found["match_most"] + spread
    assert found["speeds"][0]["tokens"] == 1.0
    assert 1.0 < found["speeds"][1]["tokens"] < 4.0


def test_tokens_of_a_step_are_counted_along_the_text() -> None:
    match = torch.tensor([True, True, False, True, False, True])
    each = Positions(torch.zeros(6), match, match, 0.0)
    assert module._tokens([each], 0) == 1.0
    assert module._tokens([each], 1) == 6 / 4  # two, two (the second draft is wrong: one), ...
    assert module._tokens([each], 8) == 6 / 3


def test_what_does_not_go_with_it_is_refused() -> None:
    refused(attar("eval demo --draft suffix --text LICENSE"), BAD_INPUT, "option_conflict", "suffix")
    refused(attar("eval demo --draft demo"), BAD_INPUT, "option_missing", "--text")
    refused(attar("eval demo --draft demo --text LICENSE --kv int4"), BAD_INPUT, "option_conflict", "--draft")
