"""What records of a block compare with: one plain rounding, whatever the recipe does before its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attar.compression.recipe.recipe_file import recipe_from_dict
from attar.compression.runs.pipeline import compress

Ids = list[list[int]]

SAME = 1e-3  # relative: rows one by one against their Hessian, whose mean is of float32

NOTHING = {"key_alpha": 0.0, "values": False}  # divides by ones


def errors(folder: Path) -> dict[str, tuple[str, float, float]]:
    layers = json.loads((folder / "receipt.json").read_text())["layers"]
    return {each["name"]: (each["measure"], each["error"], each["rtn_error"]) for each in layers}


@pytest.mark.parametrize(
    "options",
    [{"recipe": "gptq-w3g32"}, {"recipe": "gptq-w3g32", "couple": True}, {"recipe": "autoround-w3g32", "steps": 1}],
    ids=["gptq", "coupled", "autoround"],
)
def test_plain_rounding_is_one_thing_behind_transforms_and_without(
    options: dict[str, object], tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    """A transform that changes nothing changes no figure: scales are searched alike, and the measure is the same."""
    behind = options | {"recipe": f"smoothattention+{options['recipe']}"} | NOTHING
    for name, each in (("alone", options), ("behind", behind)):
        compress(tiny, tmp_path / name, recipe=recipe_from_dict(each), calibration=calibration[:4])
    alone, after = errors(tmp_path / "alone"), errors(tmp_path / "behind")
    assert alone.keys() == after.keys()
    for name, (measure, error, plain) in alone.items():
        assert after[name] == (measure, pytest.approx(error, rel=SAME), pytest.approx(plain, rel=SAME)), name
        assert error < plain or options["recipe"] != "gptq-w3g32", name


def test_what_prunes_is_compared_with_zeroing_the_smallest(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """Behind a transform too: rounding to nearest without a zero would be no way to the same."""
    for name in ("prune-2:4-w4g32", "smoothquant+prune-2:4-w4g32"):
        compress(tiny, tmp_path / name, recipe=name, calibration=calibration[:4])
        found = errors(tmp_path / name)
        assert all(error < plain for _, error, plain in found.values()), name
