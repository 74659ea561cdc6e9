"""The scheduler's run of a trace against the formula that the page draws, and the page's first trace."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.lab import formulas
from attar.lab.replay import of_page, replay
from attar.protocol.scheduler_config import Policy
from attar.scheduling.admission import Refused


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=12), st.integers(1, 5),
    st.sampled_from(["none", "static", "dynamic", "continuous"]), st.integers(0, 30),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_the_scheduler_starts_requests_as_the_formula_says(
    requests: list[tuple[int, int]], slots: int, policy: Policy, delay: int
) -> None:
    arrivals = [float(each) for each in itertools.accumulate(gap for gap, _ in requests)]
    lengths = [float(length) for _, length in requests]
    found = replay(arrivals, lengths, policy, slots, delay)
    expected = formulas.starts(arrivals, lengths, slots, policy, delay)
    assert found["starts"] == expected
    assert found["steps"] == max(start + length for start, length in zip(expected, lengths, strict=True))
    assert found["waits"] == [start - arrival for start, arrival in zip(expected, arrivals, strict=True)]
    assert found["preemptions"] == 0


def test_the_pages_trace_under_every_policy() -> None:
    runs = {(each["policy"], each["slots"]): each for each in of_page()}
    assert len(runs) == 10
    assert runs["continuous", 4]["rate"] > runs["static", 4]["rate"] > runs["none", 1]["rate"]
    tokens = {round(each["rate"] * each["steps"]) for each in runs.values()}
    assert len(tokens) == 1  # the same work, whatever the policy


def test_a_request_that_cannot_fit_is_refused() -> None:
    with pytest.raises(Refused):
        replay([0.0], [500.0], "continuous", 1, 0.0, blocks=2)
