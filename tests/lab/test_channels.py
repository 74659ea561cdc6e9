"""Sampled channels against the profile of reports, and the page's rounding against torch."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attar.checkpoints.sources import opening
from attar.evaluation.outliers import profile
from attar.lab import formulas
from attar.lab.channels import CHANNELS, ROWS, sampled
from attar.model.decoder import Decoder
from tests.errors import user_error

TOKENS = [list(range(2, 66)), list(range(70, 100))]


@pytest.fixture(scope="module")
def decoder(demo: Path) -> Decoder:
    return opening.load(demo, torch.float32)


@pytest.fixture(scope="module")
def groups(decoder: Decoder) -> list[dict[str, Any]]:
    return sampled(decoder, TOKENS, lambda done, total: None)


def numbers(text: str, columns: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy()).reshape(-1, columns)


def test_maxima_are_those_of_a_profile(decoder: Decoder, groups: list[dict[str, Any]]) -> None:
    places = {f"block {each.layer}: {each.kind}": each for each in profile(decoder, TOKENS)}
    assert groups[0]["name"].startswith("block 0: ")
    assert len({each["name"].partition(":")[0] for each in groups}) == 3
    for group in groups:
        place, index = places[group["name"]], group["index"]
        assert group["inputs"] == pytest.approx(place.inputs[index].tolist(), rel=1e-5)
        assert group["weights"] == pytest.approx(place.weights[index].tolist(), rel=1e-5)
        assert group["tokens"] == sum(map(len, TOKENS))
        assert max(group["inputs"]) == pytest.approx(float(place.inputs.max()), rel=1e-5)  # the largest is among them


def test_rows_are_real_ones(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        columns = len(group["index"])
        rows, outs = numbers(group["rows"], columns), numbers(group["outs"], columns)
        assert columns == min(CHANNELS, group["of"])
        assert (len(rows), len(outs)) == (ROWS, ROWS)
        assert (rows.abs().amax(0) <= torch.tensor(group["inputs"]) * (1 + 1e-5)).all()
        assert (outs.abs().amax(0) <= torch.tensor(group["weights"]) * (1 + 1e-5)).all()


def test_the_error_of_a_sample_is_torchs(groups: list[dict[str, Any]]) -> None:
    group = groups[0]
    x, w = (numbers(group[name], len(group["index"])).double() for name in ("rows", "outs"))
    scales = formulas.smoothing(group["inputs"], group["weights"], 0.5)
    s = torch.tensor(scales, dtype=torch.float64)

    def near(rows: torch.Tensor) -> torch.Tensor:
        step = rows.abs().amax(1, keepdim=True) / 127
        return (rows / step).round() * step

    exact = x @ w.T
    expected = float(((near(x / s) @ near(w * s).T - exact) ** 2).sum() / (exact**2).sum())
    found = formulas.smoothed_error(x.tolist(), w.tolist(), scales, 8, 8)
    assert found == pytest.approx(expected, rel=1e-6)


def test_an_empty_text_is_refused(decoder: Decoder) -> None:
    with user_error("text_empty"):
        sampled(decoder, [[]], lambda done, total: None)
