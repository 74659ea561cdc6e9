"""What short names say, and what is wrong with those that say nothing."""

from __future__ import annotations

import pytest

from attar.compression.recipe import parser
from attar.compression.recipe.methods import Awq, Gptq, Rtn, SmoothQuant
from attar.formats.scheme import Scheme
from tests.errors import user_error


@pytest.mark.parametrize(
    ("name", "passes", "scheme"),
    [
        ("rtn-w4g128", (Rtn(),), "w4g128"),
        ("awq-w3g64", (Awq(), Rtn()), "w3g64"),
        ("gptq-w4g128", (Gptq(),), "w4g128"),
        ("gptq-w4g128-asym", (Gptq(),), "w4g128-asym"),
        ("awq+gptq-w4g64", (Awq(), Gptq()), "w4g64"),
        ("smoothquant-w8a8", (SmoothQuant(), Rtn()), "w8a8"),
        ("smoothquant+rtn-w8a8", (SmoothQuant(), Rtn()), "w8a8"),
        ("smoothquant-w8a8-o1", (SmoothQuant(), Rtn()), "w8a8"),
        ("smoothquant-w8a8-o2", (SmoothQuant(), Rtn()), "w8a8-atensor"),
        ("smoothquant+gptq-w8a8-o3", (SmoothQuant(), Gptq()), "w8a8-static"),
        ("gptq-fp8", (Gptq(),), "fp8"),
    ],
)
def test_a_name_says_passes_and_scheme(name: str, passes: tuple[object, ...], scheme: str) -> None:
    said = parser.parse(name)
    assert said.passes == passes
    assert said.scheme == Scheme.parse(scheme)
    assert parser.parse(said.name) == said


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gtpq-w4g128", "did you mean gptq"),
        ("gptq-w4g12x", "did you mean w4g128"),
        ("gptq", "did you mean gptq-w4g128"),
        ("w4g128", "did you mean rtn-w4g128"),
        ("zzz-w4g128", "known are autoround, awq, clip, distill, gptq, guided"),
        ("gptq-w9g128", "2 to 8 bits"),
        ("gptq+rtn-w4", "comes last"),
        ("awq+awq-w4", "twice"),
        ("gptq+awq-w4", "comes last"),
        ("", "method"),
        ("fp8", "did you mean rtn-fp8?"),
        ("nf4", "did you mean rtn-nf4?"),
        ("llm-int8", "did you mean rtn-llm-int8?"),
        ("w8a8-o2", "did you mean rtn-w8a8-o2?"),
        ("sparse24", "did you mean prune-2:4-sparse24?"),
        ("RTN-W4G128", "did you mean rtn-w4g128?"),
        ("FP8-block", "did you mean rtn-fp8-block?"),
        ("rtn-nf5", "did you mean nf4"),
        ("zzz-w4", "wanda"),
    ],
)
def test_unknown_words_offer_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        parser.parse(name)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gptq+rotate-w8", "recipe_malformed"),
        ("rotate+quarot-w8", "recipe_malformed"),
        ("quarot-keep", "recipe_conflict"),
        ("rotate+gptq-keep", "recipe_conflict"),
        ("gptq+rotate-q4_k_m", "recipe_malformed"),
        ("rotate+gptq-f16", "recipe_without_effect"),
        ("rotate+structured-p25", "recipe_conflict"),
        ("rotat-w8", "method_unknown"),
    ],
)
def test_a_rotation_out_of_place_is_refused(name: str, hint: str) -> None:
    with user_error(hint):
        parser.parse(name)


def test_of_very_many_names_the_nearest_are_offered() -> None:
    names = [f"layers.{i}.q" for i in range(100)]
    said = parser.offer("zzzzzz.42.zzzzzz", names)
    assert said.startswith(": the nearest of 100 are layers.42.q, ")
    assert said.count(",") == 11
