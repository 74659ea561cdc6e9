"""The options of `compress` that choose bits by layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attar.cli.compression import parse_target
from attar.cli.main import app
from attar.compression.request.request import CompressionRequest, Target


def test_a_target_on_the_command_line(tiny: Path, tmp_path: Path) -> None:
    command = ["compress", str(tiny), str(tmp_path / "out"), "--recipe", "rtn-w4g64", "--candidates", "w2g32, w4g64"]
    command += ["--calib", "self", "--samples", "3", "--length", "16", "--json", "-q"]
    done = CliRunner().invoke(app, [*command, "--target-bits", "3.5"])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout.splitlines()[-1])
    assert 3 < value["bits_per_weight"] <= 3.5
    assert {layer["scheme"] for layer in value["layers"]} == {"w2g32", "w4g64"}
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "--candidates is what a target chooses among" in json.loads(refused.stdout.splitlines()[-1])["error"]


def test_what_the_options_say() -> None:
    assert parse_target(None, None, None, None) is None
    target = parse_target(None, 1_500_000, None, "w2g64,w4")
    assert target is not None
    assert target.to_dict() == {"size": 1_500_000}
    assert target.candidates is not None
    assert [scheme.name for scheme in target.candidates] == ["w2g64", "w4"]
    for wrong in ((3.0, 10**6, None, None), (None, None, 0.0, None), (3.0, None, None, "w9")):
        with pytest.raises(ValueError):
            parse_target(*wrong)


@pytest.mark.parametrize("size, target", [("1.5MB", 1_500_000), ("much", None)])
def test_a_size_is_read_with_its_unit(size: str, target: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Target | None] = []

    def run(request: CompressionRequest, _: object) -> None:
        asked.append(request.target)
        raise ValueError("no further")

    monkeypatch.setattr("attar.compression.runs.pipeline.compress_request", run)
    done = CliRunner().invoke(app, ["compress", "demo", "out", "--target-size", size])
    assert done.exit_code == 2
    assert [each and each.to_dict() for each in asked] == ([] if target is None else [{"size": target}])
    assert ("is not a size" in done.stderr) is (target is None)
