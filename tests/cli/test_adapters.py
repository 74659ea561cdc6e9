"""`--adapter`: trained, used beside the weights by every command that runs a model, and refused in a sentence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from attar.cli.terminal import BAD_INPUT
from tests.cli.test_commands import TEXT, attar, last_json, refused


@pytest.fixture(scope="module")
def place(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and an adapter that has learned some of it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_text(TEXT[1000:2200])
    options = "--samples 4 --length 64 --rank 4 --epochs 2 --rate 0.02 --batch 128 --targets *_proj"
    result = attar(f"finetune demo {folder}/adapter --text {folder}/text.txt {options}")
    assert result.exit_code == 0, result.output
    return folder


def test_evaluating_and_generating_with_it(place: Path) -> None:
    measured = f"eval demo --text {place}/text.txt --max-tokens 128 --context 64 --json"
    plain, changed = (last_json(attar(measured + more)) for more in ("", f" --adapter {place}/adapter --against demo"))
    assert math.log(changed["ppl"]) < math.log(plain["ppl"]) - 0.1
    assert changed["ppl_base"] == pytest.approx(plain["ppl"])
    spoken = "generate demo --prompt 'Permission is' --max-tokens 8 --temperature 0 --json"
    texts = [last_json(attar(spoken + more))["text"] for more in ("", f" --adapter {place}/adapter")]
    assert texts[0] != texts[1]
    said = attar(f"chat demo --max-tokens 4 --temperature 0 --adapter {place}/adapter", stdin="Permission is\n")
    assert said.exit_code == 0, said.output


def test_a_plan_counts_it(place: Path) -> None:
    command = "plan demo --memory 2GB --bandwidth 10GB --json"
    plain, beside = (last_json(attar(command + more)) for more in ("", f" --adapter {place}/adapter"))
    assert plain["rows"][0]["adapters"] == 0
    assert beside["rows"][0]["adapters"] > (place / "adapter" / "adapter_model.safetensors").stat().st_size


def test_merged_into_a_compressed_model(place: Path) -> None:
    """Dense then, and no surprise: what rounding again would cost is said."""
    assert attar(f"compress demo {place}/packed --recipe rtn-w4g32").exit_code == 0
    result = attar(f"merge {place}/packed {place}/adapter {place}/merged --json")
    assert result.exit_code == 0, result.output
    assert "became dense" in result.output
    assert "rounded to nearest on the base's grids again they would be off by" in result.output
    found = last_json(result)
    assert (len(found["dequantized"]), found["dtype"]) == (1, "bfloat16")
    assert 0 < found["change"] < 1 > found["requantized"] > 0
    assert "quantization_config" not in (place / "merged" / "config.json").read_text()


def test_training_anew_replaces_an_adapter_when_told_to(place: Path) -> None:
    command = (
        f"finetune demo {place}/again --text {place}/text.txt --samples 2 --length 32 --rank 2 --targets *.0.*q_proj"
    )
    assert attar(command).exit_code == 0
    refused(attar(command), BAD_INPUT, "output_exists", "--overwrite")
    result = attar(f"{command} --overwrite --json")
    assert result.exit_code == 0, result.output
    assert last_json(result)["notes"] == []
    refused(attar(f"{command} --overwrite --length 513"), BAD_INPUT, "context_exceeded", "513")
    assert (place / "again" / "adapter_model.safetensors").exists()


def test_mistakes(place: Path) -> None:
    for command, words in (
        (f"generate demo --prompt a --adapter {place}/none", ("file_not_found", "adapter")),
        (f"generate demo --prompt a --adapter {place}", ("file_not_found", "adapter")),
        (f"eval demo --text {place}/text.txt --adapter {place}", ("file_not_found", "adapter")),
        (f"serve demo --adapter {place}/adapter", ("option_malformed", "NAME=FOLDER")),
        (f"serve demo --adapter a={place}", ("adapter_invalid", "adapter_config.json")),
        (f"generate {place}/adapter --prompt a", ("file_wrong_kind", "--adapter")),
    ):
        refused(attar(command), BAD_INPUT, *words)
