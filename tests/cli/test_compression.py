"""Mistakes in the arguments of `compress` are told without torch, whose import takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, shlex, sys
from attar.cli.main import app
for command in json.loads(sys.argv[1]):
    try:
        app(shlex.split(command))
    except SystemExit as end:
        assert end.code == 2, command
    assert "torch" not in sys.modules, command
"""

MISTAKES = {
    "compress ./absent ./new": "file_not_found",
    "compress ./model.gguf ./new": "file_not_found",
    "compress '' ./new": "option_missing",
    "compress demo ''": "output_invalid",
    "compress demo ./there": "output_exists",
    "compress demo ./there/out.gguf": "output_exists",
    "compress demo ./there/text.txt --overwrite": "output_invalid",
    "compress ./there ./there": "output_is_source",
    "compress demo ./new --recipe gtpq-w4g128": "method_unknown",
    "compress demo ./new --recipe rtn-w4g128,gtpq-w4g128": "method_unknown",
    "compress demo ./new --recipe absent.yaml": "file_not_found",
    "compress demo ./new --recipe q4_k_m": "output_invalid",
    "compress demo ./new.gguf --recipe wanda-2:4": "gguf_inexpressible",
    "compress demo ./new --recipe rtn-w4g128 --head int9": "scheme_unknown",
    "compress demo ./new --vision w4": "name_unknown",
    "compress demo ./new --recipe best-w4g128 --target-bits 3": "option_conflict",
    "compress demo ./new --target-bits 3 --target-kl 1": "option_conflict",
    "compress demo ./new --candidates w4": "option_missing",
    "compress demo ./new --calib ./absent.txt": "file_not_found",
    "compress demo ./new --eval ./absent.txt": "file_not_found",
    "compress demo ./new --calib-images ./absent": "calibration_missing",
    "compress demo ./new --calib self --calib-images ./absent": "file_not_found",
    "compress demo ./new --eval-images ./absent": "file_not_found",
    "compress demo ./new --imatrix m.dat": "option_conflict",
    "compress demo ./new.gguf --imatrix ./absent.dat": "file_not_found",
    "compress demo ./new --self-samples 4": "calibration_missing",
    "compress demo ./new --calib self --length 1": "option_out_of_range",
}


def test_mistakes_in_arguments_load_no_torch(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "there" / "out.gguf").write_bytes(b"GGUF")
    (tmp_path / "there" / "text.txt").write_text("text")
    commands = json.dumps([f"{command} --json" for command in MISTAKES])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, commands], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line)["code"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert dict(zip(MISTAKES, said, strict=True)) == MISTAKES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
