"""The schemes that bits are chosen among."""

from __future__ import annotations

from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.search.target import K_QUANTS, candidates_for
from tests.errors import user_error


def test_candidates() -> None:
    names = [scheme.name for scheme in candidates_for(load_recipe("gptq-w4g128"))]
    assert names == ["w2g64", "w3g128", "w3g64", "w4g128", "w5g128", "w6g128", "w8g128"]
    assert [s.name for s in candidates_for(load_recipe("rtn-w3g32-asym"))][:2] == ["w2g32-asym", "w3g32-asym"]
    assert [s.name for s in candidates_for(load_recipe("rtn-q4_k"))] == list(K_QUANTS)
    for name in ("rtn-w8a8", "rtn-w4", "rtn-fp8"):
        with user_error("scheme_unsupported"):
            candidates_for(load_recipe(name))
