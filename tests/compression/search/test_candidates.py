"""Which recipes are tried: the names they have, and in which order an ablation asks for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.compression.recipe.parser import parse
from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.search.candidates import Ablation, Listed, candidates
from tests.errors import user_error


def asked(name: str, divergences: list[float]) -> list[str]:
    """What is tried, were these the divergences in turn."""
    tries = candidates(name)
    assert tries is not None
    found = list[str]()
    while (following := tries.following(divergences[: len(found)])) is not None:
        found.append(following)
    assert len(found) == tries.count
    return found


def test_names() -> None:
    assert candidates("gptq-w4g128") is None
    assert candidates(load_recipe("gptq-w4g128")) is None
    assert candidates("rtn-w4, gptq-w4") == Listed(("rtn-w4", "gptq-w4"))
    listed = candidates("best-w3g64")
    assert isinstance(listed, Listed)
    assert listed.own
    assert listed.names[:3] == ("rtn-w3g64", "awq-w3g64", "gptq-w3g64")
    assert listed.names[-1] == "guided+tune-w3g64"
    with user_error("scheme_unknown"):
        candidates("best-w3x")


@pytest.mark.parametrize(
    "scheme, only, never",
    [
        ("w4g128", "autoround", "quarot"),
        ("w4a4", "spinquant+guided", "awq"),
        ("fp8", "quarot+gptq", "autoround"),
        ("lut3-s45", "squeezellm", "guided"),
        ("q4_k_m", "guided", "tune"),
        ("q4_k_m", "rotate+guided", "quarot"),
    ],
)
def test_each_kind_of_scheme_has_recipes_to_try(scheme: str, only: str, never: str) -> None:
    listed = candidates(f"best-{scheme}")
    assert listed is not None
    assert f"{only}-{scheme}" in listed.names
    assert not any(never in name for name in listed.names)
    assert [load_recipe(name).name for name in listed.names][1:] == list(listed.names[1:])
    assert len(set(listed.names)) == len(listed.names)


@pytest.mark.parametrize(
    "name, divergences, tried",
    [
        (
            "rotate+awq+gptq+tune-w4g128", [4, 3, 2, 1, 0],
            ["rtn-w4g128", "gptq-w4g128", "awq+gptq-w4g128", "rotate+awq+gptq-w4g128", "rotate+awq+gptq+tune-w4g128"],
        ),
        (
            "rotate+awq+gptq+tune-w4g128", [1, 2, 1, 1, 2],  # nothing helps: what is equal does not
            ["rtn-w4g128", "gptq-w4g128", "awq-w4g128", "rotate-w4g128", "rtn+tune-w4g128"],
        ),
        ("smoothquant+gptq-w8a8", [2, 1, 3], ["rtn-w8a8", "gptq-w8a8", "smoothquant+gptq-w8a8"]),
        ("smoothquant-w8a8-o3", [2, 1], ["rtn-w8a8-static", "smoothquant-w8a8-static"]),
        (
            "smoothattention+guided-qserve-g128", [2, 1],
            ["smoothattention-qserve-g128", "smoothattention+guided-qserve-g128"],
        ),
        ("prune+tune-2:4-w4g128", [2, 1], ["prune-2:4-w4g128", "prune+tune-2:4-w4g128"]),
        ("squeezellm-lut4", [2, 1], ["rtn-lut4", "squeezellm-lut4"]),
        ("rotate+gptq-q4_k_m", [2, 3, 1], ["q4_k_m", "gptq-q4_k_m", "rotate-q4_k_m"]),
    ],
)  # fmt: skip
def test_steps_are_added_one_at_a_time(name: str, divergences: list[float], tried: list[str]) -> None:
    assert asked(f"ablate-{name}", divergences) == tried
    assert [load_recipe(each).name for each in tried] == tried


@pytest.mark.parametrize("name", ["rtn-w4g128", "rotate-keep", "structured-p25", "prune-2:4", "q4_k_m"])
def test_a_recipe_without_steps_is_refused(name: str) -> None:
    with user_error("recipe_without_effect"):
        Ablation(parse(name))


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=5, max_size=5))
def test_what_is_kept_is_the_best_of_all_that_were_tried(divergences: list[float]) -> None:
    """So that the first of the least is the recipe with the steps that helped: each try has all of these."""
    tried = asked("ablate-rotate+awq+gptq+tune-w4g128", divergences)
    best = tried[divergences.index(min(divergences))]
    steps, kept = ("gptq", "awq", "rotate", "tune"), list[str]()
    for i, step in enumerate(steps, 1):
        assert all(each in tried[i] for each in (*kept, step))
        if divergences[i] < min(divergences[:i]):
            kept.append(step)
    assert [step for step in steps if step in best] == kept
