"""`--tp` and `--pp` on the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT
from tests.engine.test_adapters import save

TEXT = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
WITHIN = 1e-4  # of perplexity: the order of sums


def attar(command: str) -> Result:
    return CliRunner().invoke(app, shlex.split(command))


def test_eval_in_two_processes_says_what_one_says(tmp_path: Path) -> None:
    """With an adapter."""
    (tmp_path / "text.txt").write_text(TEXT[:600])
    shapes = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 768)}
    save(tmp_path / "adapter", shapes, seed=0)
    command = f"eval demo --text {tmp_path / 'text.txt'} --context 64 --max-tokens 130 --json -q"
    command += f" --adapter {tmp_path / 'adapter'}"
    alone, together = attar(command), attar(f"{command} --tp 2")
    assert together.exit_code == 0, together.output
    assert "2 processes share this machine's cores: that is for checks" in together.stderr
    found = [json.loads(each.stdout.splitlines()[-1])["ppl"] for each in (alone, together)]
    values = [each["value"] if isinstance(each, dict) else each for each in found]
    assert values[1] == pytest.approx(values[0], rel=WITHIN)


@pytest.mark.parametrize(
    "command, sentence",
    [
        ("generate demo --prompt x --tp 3", "--tp 3 does not divide the model's 4 query heads: 2, 4 would do"),
        ("generate demo --prompt x --pp 7", "--pp 7 is more stages than the model has layers, 6"),
        ("generate demo --prompt x --tp 3 --adapter folder", "--tp 3 does not divide"),
        ("bench --shape llama-3.2-1b --tp 2", "--tp and --pp need a model"),
        ("plan --shape llama-3.2-1b --tp 3 --bandwidth 1GB", "--tp 3 does not divide the model's 32 query heads"),
    ],
)
def test_what_cannot_be_is_one_sentence(command: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.cli.evaluation.tell_doubt", lambda adapter, base: None)
    result = attar(command)
    assert result.exit_code == BAD_INPUT, result.output
    assert sentence in result.stderr


def test_a_plan_of_two_gpus() -> None:
    result = attar("plan --shape llama-3.1-8b --memory 24GB --bandwidth 900GB --context 8192 --tp 2 --json")
    assert result.exit_code == 0, result.output
    assert "in 24 GB (--memory, each of 2 processes)" in result.stdout
    first = json.loads(result.stdout.splitlines()[-1])["rows"][0]
    assert 8.0e9 < first["weights"] < 8.1e9, "half of 16.1 GB"
