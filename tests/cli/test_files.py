"""The commands about other programs' files, as they are typed: an importance matrix, a GGUF file made with it, verified
and read, and the way from one format to another."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 12


@pytest.fixture(scope="module")
def place(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(demo, folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return folder


def attar(place: Path, command: str, status: int = 0) -> Any:
    """What a command printed: its JSON, or where it fails, its one sentence."""
    with contextlib.chdir(place):
        result = CliRunner().invoke(app, [*command.split(), "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_a_file_is_made_with_importances_and_verified(place: Path) -> None:
    made = attar(place, "imatrix ./model m.gguf --calib text.txt --samples 4 --length 32 -q")
    assert made["matrices"] == 43
    done = attar(place, "compress ./model m.q4.gguf --imatrix m.gguf -q")
    assert done["recipe"] == "q4_k_m", "what a file is, where nobody says"
    assert done["bytes"] == (place / "m.q4.gguf").stat().st_size
    assert attar(place, "verify m.q4.gguf -q")["ok"]
    assert "Q4_K" in str(attar(place, "inspect m.q4.gguf"))
    with (place / "m.q4.gguf").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert attar(place, "verify m.q4.gguf -q", 1)["first_divergence"] == "m.q4.gguf"


def test_a_model_is_written_in_another_format(place: Path) -> None:
    attar(place, "compress ./model ct --recipe rtn-w4g64 -q")
    first = attar(place, "convert ct awq --to awq -q")
    assert (first["format"], first["packed"]) == ("awq", 42)
    assert attar(place, "convert awq out.gguf --to gguf -q")["packed"] == 42
    assert attar(place, "convert out.gguf dense --to dense --dtype fp16 -q")["dtype"] == "float16"
    assert attar(place, "compress awq again --recipe rtn-w8 -q", 2)["code"] == "source_compressed"
    (warning,) = attar(place, "compress awq again --recipe rtn-w8 --requantize -q")["warnings"]
    assert "42 of w4g64" in warning


MISTAKES = {
    "compress ./model new --recipe q4_k_m": "q4_k_m is a mix of GGUF files: give an output that ends in .gguf, not new",
    "compress ./model new.gguf --recipe rtn-w4g128": "rtn-w4g128 has no place in a GGUF file",
    "compress ./model new.gguf --recipe q4_k_n": "did you mean q4_k",
    "compress ./model new --recipe rtn-w8 --imatrix m.dat": "an importance matrix is for GGUF files",
    "compress ./model new.gguf --imatrix absent.dat": "absent.dat: no such file",
    "compress ./model new.gguf --imatrix text.txt": "not an importance matrix",
    "compress absent.gguf new": "absent.gguf: no such file",
    "imatrix ./model text.txt --calib text.txt": "text.txt exists and is kept",
    "imatrix ./model new.gguf --calib absent.txt": "absent.txt: no such file",
    "convert ./model new --to gptq": "is not compressed",
    "convert ./model new --to gptq --dtype float16": "a dtype is of a dense output",
    "convert ./model new --to dense --dtype int8": "'int8' is no dtype here: known are bfloat16, float16, float32",
    "convert ./model new --to gguf": "--to gguf writes a file whose name ends in .gguf, not new",
    "convert ./model new --to ggml": "'ggml' is not one of",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_gets_one_sentence(command: str, place: Path) -> None:
    assert MISTAKES[command] in attar(place, command, BAD_INPUT)["error"]
    assert not (place / "new").exists()
    assert not (place / "new.gguf").exists()
    assert not list(place.glob(".*")), "a run that never began leaves nothing behind"
