"""Figures of draft heads: counts that add up, a drafter that is always right, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attar.drafting.early_exit import ExitLearner
from attar.drafting.target import Target
from attar.engine.llm.llm import LLM
from attar.evaluation import head_quality as module
from attar.evaluation.head_quality import measure
from attar.protocol.request import SamplingParams
from tests.cli.test_commands import attar, last_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPTS", 4)
    monkeypatch.setattr(module, "TOKENS", 20)
    monkeypatch.setattr(module, "COUNTS", (0, 2))


def test_a_model_that_drafts_for_itself_is_always_right(demo: Path) -> None:
    found = measure(demo, str(demo), ROOT / "LICENSE")
    assert found.acceptance == (1.0,) * module.DEPTHS
    assert found.speeds[1].tokens > 2.8  # the last step of a text has fewer
    assert found.draft_cost > 0.3  # steps of a draft model are not recorded


def test_counts_of_a_head_are_those_of_its_texts(demo: Path, tmp_path: Path) -> None:
    """An exit before the last layer is often right. Each step makes a token, and one for each right draft."""
    learner = ExitLearner(Target(demo), 5, None, "published")
    learner.write(tmp_path)
    llm = LLM(demo, draft=str(tmp_path), draft_tokens=module.DEPTHS, verify=False)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, draft_tokens=3)
    prompts = torch.arange(24).view(3, 8).add(300).tolist()
    found = module._counted(llm, prompts, params, 0)
    assert found.steps + sum(found.right) == 3 * 23  # the prompt's step makes the first
    assert found.tried[0] <= found.steps
    assert all(right <= tried for right, tried in zip(found.right, found.tried, strict=True))
    assert list(found.right) == sorted(found.right, reverse=True)
    assert found.right[3] == found.tried[3] == 0
    assert found.tokens(3) == pytest.approx(3 * 23 / found.steps)


def test_the_command_measures_heads(demo: Path, tmp_path: Path) -> None:
    ExitLearner(Target(demo), 5, None, "published").write(tmp_path)
    found = last_json(attar(f"eval demo --draft {tmp_path} --text {ROOT}/LICENSE --temperature 0 --quiet --json"))
    assert found["drafter"] == "exit"
    assert len(found["acceptance"]) == len(found["tried"]) == module.DEPTHS
    assert 0 < found["acceptance"][0] < 1
    assert [each["drafts"] for each in found["speeds"]] == [0, 2]
    assert found["speeds"][0]["tokens"] == found["speeds"][0]["measured"] == 1.0
