"""The bootstrap against values worked out by hand, against numpy's own resampling, and for coverage of a known mean."""

from __future__ import annotations

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from attar.metrics import bootstrap
from tests.errors import user_error

COVERAGE = (0.88, 0.99)  # of a 95 % interval over 40 windows, in 200 trials; percentile intervals run a little short


def test_every_resample_draws_as_many_windows_as_there_are() -> None:
    drawn = bootstrap.resamples(7)
    assert drawn.shape == (bootstrap.RESAMPLES, 7)
    assert (drawn.sum(1) == 7).all()
    assert abs(drawn.mean() - 1) < 1e-12
    assert abs(drawn.var(0).mean() - 6 / 7) < 0.03  # multinomial: W * (1/W) * (1 - 1/W)


def test_draws_are_fixed_by_the_seed_for_good() -> None:
    assert bootstrap.resamples(5, seed=3)[:2].tolist() == [[2, 3, 0, 0, 0], [1, 0, 1, 1, 2]]
    assert not np.array_equal(bootstrap.resamples(5, seed=3), bootstrap.resamples(5, seed=4))


def test_mean_weighs_windows_by_their_tokens() -> None:
    figure = bootstrap.mean(np.array([1.0, 2.0, 3.0, 10.0]), np.array([0, 0, 0, 1]))
    assert figure.value == 4.0
    # Resamples of two windows: both of the first (mean 2), one of each (4), both of the second (10).
    assert (figure.low, figure.high) == (2.0, 10.0)


def test_one_window_has_no_interval() -> None:
    figure = bootstrap.mean(np.array([1.0, 3.0]), np.array([0, 0]))
    assert figure == bootstrap.Interval(2.0, None, None)
    assert figure.map(np.exp).low is None
    assert bootstrap.quantile(np.array([1.0, 3.0]), np.array([0, 0]), 0.5) == bootstrap.Interval(1.0, None, None)


@settings(max_examples=50, deadline=None)
@given(
    arrays.arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e6, 1e6)),
    st.sampled_from([0.25, 0.5, 0.99, 0.999]),
)
def test_quantile_is_that_of_the_empirical_distribution(values: np.ndarray, q: float) -> None:
    found = bootstrap.quantile(values, np.zeros(len(values), dtype=np.int64), q).value
    assert (values <= found).mean() >= q - 1e-9
    assert (values < found).mean() < q + 1e-9


def test_quantile_resamples_whole_windows() -> None:
    values = np.array([1.0, 1.0, 1.0, 5.0, 5.0, 5.0])
    figure = bootstrap.quantile(values, np.array([0, 0, 0, 1, 1, 1]), 0.5)
    assert (figure.value, figure.low, figure.high) == (1.0, 1.0, 5.0)


def test_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    numbers = np.random.default_rng(0)
    window = np.repeat(np.arange(40), 5)
    hits = 0
    for _ in range(200):
        values = np.repeat(numbers.standard_normal(40), 5) + 0.1 * numbers.standard_normal(200)  # alike within a window
        figure = bootstrap.mean(values, window)
        assert figure.low is not None
        assert figure.high is not None
        hits += figure.low <= 0 <= figure.high
    assert COVERAGE[0] <= hits / 200 <= COVERAGE[1]


def test_pairing_sees_a_difference_that_separate_intervals_hide() -> None:
    numbers = np.random.default_rng(1)
    hard = np.exp(numbers.standard_normal(30))  # windows differ a great deal
    a, b = 0.9 * hard * (1 + 0.02 * numbers.standard_normal(30)), hard
    found = bootstrap.paired_bootstrap_ratio(a, b)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.9 < found.high < 1
    ones = np.ones(30)
    apart = bootstrap.ratio(a, ones), bootstrap.ratio(b, ones)
    assert apart[0].high > apart[1].low  # type: ignore[operator]


def test_what_cannot_be_paired_is_refused() -> None:
    with user_error("window_invalid"):
        bootstrap.paired_bootstrap_ratio(np.ones(3), np.ones(4))
    with user_error("text_too_short"):
        bootstrap.paired_bootstrap_ratio(np.ones(1), np.ones(1))
    with user_error("window_invalid"):
        bootstrap.paired_bootstrap_ratio(np.ones(3), np.array([1.0, 0.0, 1.0]))
