"""What is asked of an allocation of bits."""

from __future__ import annotations

import json

import pytest

from attar.compression.recipe.recipe import Recipe
from attar.compression.search.target import K_QUANTS, Target, ladder_for


def test_a_target_is_one_positive_number() -> None:
    for wrong in ({}, {"bits": 3.0, "kl": 0.1}, {"bits": -1.0}, {"kl": float("nan")}):
        with pytest.raises(ValueError, match="target"):
            Target(**wrong)  # type: ignore[arg-type]
    assert json.loads(json.dumps(Target(size=7).to_dict())) == {"size": 7}


def test_ladders() -> None:
    names = [scheme.name for scheme in ladder_for(Recipe.load("gptq-w4g128"))]
    assert names == ["w2g64", "w3g128", "w3g64", "w4g128", "w5g128", "w6g128", "w8g128"]
    assert [s.name for s in ladder_for(Recipe.load("rtn-w3g32-asym"))][:2] == ["w2g32-asym", "w3g32-asym"]
    assert [s.name for s in ladder_for(Recipe.load("rtn-q4_k"))] == list(K_QUANTS)
    for name in ("rtn-w8a8", "rtn-w4", "rtn-fp8"):
        with pytest.raises(ValueError, match="has no ladder of bits"):
            ladder_for(Recipe.load(name))
