"""What can be asked for, before any model is looked at, and what it comes to."""

from __future__ import annotations

import dataclasses
import json

import pytest

from attar.compression.calibration.amount import Amount
from attar.compression.request.request import CompressionRequest, Target, default_recipe
from tests.errors import user_error


def test_a_target_is_one_positive_number() -> None:
    for wrong in ({}, {"bits": 3.0, "kl": 0.1}, {"bits": -1.0}, {"kl": float("nan")}):
        with pytest.raises(ValueError, match="target"):
            Target(**wrong)  # type: ignore[arg-type]
    assert json.loads(json.dumps(Target(size=7).to_dict())) == {"size": 7}


@pytest.mark.parametrize("calibration", [None, "self"])
def test_text_is_drawn_to_go_with_another(calibration: str | None) -> None:
    with user_error("calibration_missing"):
        CompressionRequest("in", "out", calibration=calibration, drawn=3)


@pytest.mark.parametrize("count", [-1, 4097])
def test_how_much_can_be_drawn(count: int) -> None:
    with user_error("option_out_of_range"):
        CompressionRequest("in", "out", calibration="text.txt", drawn=count)


def test_an_output_has_a_name_and_an_importance_matrix_a_file() -> None:
    with user_error("output_invalid"):
        CompressionRequest("in", "")
    with user_error("option_conflict"):
        CompressionRequest("in", "out", imatrix="m.dat")
    assert CompressionRequest("in", "out.GGUF", imatrix="m.dat").to_file
    assert (default_recipe("out"), default_recipe("out.gguf")) == ("gptq-w4g128", "q4_k_m")


def test_what_a_vision_tower_may_be_stored_as() -> None:
    with user_error("name_unknown", "w4", "16bit", "w8a8"):
        CompressionRequest("in", "out", vision="w4")
    with user_error("option_conflict"):
        CompressionRequest("in", "out.gguf", vision="w8a8")
    assert CompressionRequest("in", "out.gguf").vision == "16bit"


def test_a_request_stays_as_it_was_asked() -> None:
    request = CompressionRequest("in", "out", calibration=[[1, 2]] * 3, samples=5, length=2, seed=7, drawn=4)
    assert (request.amount, request.given, request.sequences) == (Amount(5, 2, 7, 4), 3, 7)
    assert CompressionRequest("in", "out", calibration="text.txt", samples=5).sequences == 5
    assert CompressionRequest("in", "out").sequences is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.seed = 1  # type: ignore[misc]
