"""Goals: what is read, and what each mistake is called."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.errors import UserError
from attar.plan.goals import parse
from attar.plan.goals.parse import LONGEST, QUANTITIES, SCENARIOS, Goal
from tests.errors import user_error


def test_goals_are_read_with_their_units() -> None:
    found = parse.parse(
        "kl<=0.02, ttft<=1s,tpot_p99 <= 60 ms, memory<=4GB, size<=4GiB, top1>=92%, tokens_per_second>=5"
    )
    assert found == (
        Goal("kl", 0.02), Goal("ttft", 1.0), Goal("tpot", pytest.approx(0.06), "p99"), Goal("memory", 4e9),
        Goal("size", 2.0**32), Goal("top1", pytest.approx(0.92)), Goal("tokens_per_second", 5.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "option_missing"), (" , ", "option_missing"), ("fast", "option_malformed"), ("kl<=", "option_malformed"),
        ("kl<=low", "option_malformed"), ("kl==0.1", "option_malformed"), ("kl<=0", "option_out_of_range"),
        ("kl<=-1", "option_out_of_range"), ("kl<=nan", "option_out_of_range"), ("kl<=inf", "option_out_of_range"),
        ("kl<=1e400", "option_out_of_range"), ("memory<=1e300GB", "option_out_of_range"),
        ("top1>=1.5", "option_out_of_range"), ("kl>=0.1", "option_conflict"), ("top1<=0.9", "option_conflict"),
        ("ttft<=1s, ttft<=2s", "option_conflict"), ("ttft_p95<=1s, ttft-p95<=2s", "option_conflict"),
        ("latency<=1s", "name_unknown"), ("tpot<=60", "name_unknown"), ("tpot<=60mss", "name_unknown"),
        ("memory<=4G", "name_unknown"), ("kl_p95<=0.1", "option_unused"), ("a" * (LONGEST + 1), "option_out_of_range"),
        (",".join(f"kl<={n}" for n in range(1, 40)), "option_out_of_range"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_code(text: str, code: str) -> None:
    with user_error(code):
        parse.parse(text)


@pytest.mark.parametrize(
    ("text", "near"), [("tpto<=60ms", "tpot"), ("memry<=4GB", "memory"), ("token_per_second>=4", "tokens_per_second")]
)
def test_near_names_are_offered(text: str, near: str) -> None:
    with user_error("name_unknown", f"did you mean {near}"):
        parse.parse(text)


def test_near_units_and_scenarios_are_offered() -> None:
    with user_error("name_unknown", "did you mean GiB"):
        parse.parse("memory<=4Gib")
    with user_error("name_unknown", "did you mean latency"):
        parse.scenario("latencyy")


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_are_goals(name: str) -> None:
    assert parse.parse(parse.scenario(name))


@given(st.sampled_from(sorted(QUANTITIES)), st.floats(1e-6, 0.99))
def test_what_is_shown_is_read_again(name: str, limit: float) -> None:
    goal = Goal(name, limit)
    try:
        (again,) = parse.parse(str(goal).replace(" ", ""))
    except UserError:
        assert QUANTITIES[name].unit == "B", "less than a byte is shown as none"
        return
    assert again.name == name
    assert again.limit == pytest.approx(limit, rel=0.01) or QUANTITIES[name].unit == "B"


@given(st.text(max_size=60))
def test_no_text_does_more_than_a_named_error(text: str) -> None:
    try:
        found = parse.parse(text)
    except UserError:
        return
    assert all(math.isfinite(goal.limit) and goal.limit > 0 for goal in found)


def test_a_value_is_judged_by_the_side_of_its_limit() -> None:
    assert Goal("kl", 0.1).excess(0.2) == pytest.approx(2)
    assert Goal("top1", 0.9).excess(0.45) == pytest.approx(2)
    assert Goal("top1", 0.9).excess(0.0) == math.inf
