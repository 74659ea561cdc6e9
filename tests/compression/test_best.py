"""Several recipes tried, one kept: which, on what, and what the receipt says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attar.compression import best
from attar.compression.pipeline import compress

Ids = list[list[int]]


class Stop(Exception):
    pass


def test_names() -> None:
    assert best.recipes("gptq-w4g128") is None
    assert best.recipes("rtn-w4, gptq-w4") == ["rtn-w4", "gptq-w4"]
    names = best.recipes("best-w3g64")
    assert names is not None
    assert names[0] == "gptq-w3g64"
    assert names[-1] == "guided+tune-w3g64"


def test_the_best_is_kept_and_the_receipt_says_why(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """Finer groups lose less, whatever the model; the winner is what it would be alone, on the text it was given."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "recipes" and done == 1:
            raise Stop

    name = "rtn-w4g128,gptq-w8g32,rtn-w3g128"
    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out", recipe=name, calibration=calibration, progress=stop)
    seen: list[int] = []
    done = compress(
        tiny, tmp_path / "out", recipe=name, calibration=calibration,
        progress=lambda stage, count, total: seen.append(count) if stage == "recipes" else None,
    )  # fmt: skip
    assert seen == [1, 2, 3], "the first was known"
    assert done.recipe == "gptq-w8g32"
    selection = json.loads((tmp_path / "out" / "receipt.json").read_text())["selection"]
    assert selection["tokens"] == 32
    assert [each["recipe"] for each in selection["tried"]] == name.split(",")
    kls = [each["kl"] for each in selection["tried"]]
    assert kls[1] < kls[0] < kls[2]
    compress(tiny, tmp_path / "alone", recipe="gptq-w8g32", calibration=calibration[:-1])
    model = "model.safetensors"
    assert (tmp_path / "out" / model).read_bytes() == (tmp_path / "alone" / model).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]


def test_what_cannot_be_chosen_is_refused_first(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    for recipe, ids, sentence in (
        ("rtn-w4g128,gtpq-w4g128", calibration, "did you mean gptq"),
        ("best-w4g128", calibration[:1], "at least 2 calibration sequences"),
        ("best-w4g128", None, "needs calibration"),
    ):
        with pytest.raises(ValueError, match=sentence):
            compress(tiny, tmp_path / "out", recipe=recipe, calibration=ids)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists and is kept"):
        compress(tiny, tmp_path / "out", recipe="best-w4g128", calibration=calibration)
