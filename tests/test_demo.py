"""`attar demo` on a sliver of its text: every model is measured, and leaves what it should where it was asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attar import demo
from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT
from attar.compression.calibration.amount import Amount
from attar.protocol.request import SamplingParams


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CALIBRATION", Amount(2, 32, seed=0))
    monkeypatch.setattr(demo, "HELD_OUT", Amount(2, 32, seed=1))
    monkeypatch.setattr(demo, "GREEDY", SamplingParams(max_tokens=4, temperature=0.0))
    monkeypatch.setattr(demo, "RECIPES", ("rtn-w4g128", "smoothquant-w8a8"))  # the quickest
    result = CliRunner().invoke(app, ["demo", "--folder", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout.splitlines()[-1])
    original, *compressed = shown["models"]
    assert original["name"] == demo.ORIGINAL
    assert original["bits_per_weight"] == 16
    assert [model["name"] for model in compressed] == list(demo.RECIPES)
    for model in compressed:
        assert model["figures"]["kl_mean"] > 0
        assert model["bytes"] < original["bytes"]
        assert model["tokens_per_second"] > 0
        assert (tmp_path / model["name"] / "receipt.json").is_file()
    assert set(shown["texts"]) == {demo.ORIGINAL, *demo.RECIPES}
    assert result.stdout.splitlines()[0].split()[0] == "model"
    assert f"rtn-w4g128:\n{demo.PROMPT}{shown['texts']['rtn-w4g128']}" in result.stdout
    (tmp_path / "rtn-w4g128" / "mine.txt").touch()
    assert CliRunner().invoke(app, ["demo", "--folder", str(tmp_path), "--overwrite"]).exit_code == 0
    assert not (tmp_path / "rtn-w4g128" / "mine.txt").exists()


def test_what_is_there_is_kept_and_where_nothing_can_be_written_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("attar.demo.hub.resolve", begun)
    (tmp_path / "awq-w4g128").mkdir()
    (tmp_path / "file").touch()
    for folder, words in ((tmp_path, "awq-w4g128 exists and is kept"), (tmp_path / "file" / "in", "not a directory")):
        result = CliRunner().invoke(app, ["demo", "--folder", str(folder)])
        assert result.exit_code == BAD_INPUT, result.output
        assert words in result.stderr
