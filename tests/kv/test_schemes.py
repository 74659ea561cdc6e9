"""Schemes of keys and values: sizes by hand, and the division of bits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.schemes import DISTORTION, LEVELS, MOST_BITS, SCHEMES, UNIT, divide, scheme
from tests.errors import user_error

LARGEST = {1: 0.7979, 2: 1.5104, 3: 2.1520, 4: 2.7326, 5: 3.2607, 6: 3.7441}
"""Level of a normal variable of variance 1."""


@pytest.mark.parametrize(
    "name, head_dim, bits",
    [
        ("float32", 64, 32), ("bfloat16", 128, 16), ("int8", 64, 8.5), ("int8", 128, 8.25), ("fp8", 64, 8.5),
        ("int4", 64, 4.25), ("int4", 128, 4.125), ("klt4", 64, 4.5), ("klt4", 128, 4.4375), ("klt2", 64, 2.5),
        ("kivi4", 64, 5), ("kivi2", 64, 3), ("kivi2", 128, 3), ("nuq4", 64, 4.75), ("nuq3", 128, 3.5),
    ],
)  # fmt: skip
def test_bits_of_a_number_with_all_that_stands_beside_it(name: str, head_dim: int, bits: float) -> None:
    assert scheme(name).bits_per_value(head_dim, 64) == bits


def test_the_unfinished_block_counts() -> None:
    """At 4096 tokens a block of 64 in 16 bits is a quarter of a bit a number."""
    assert scheme("klt2").bits_per_value(64, 64, 4096) == 2.75
    assert scheme("kivi2").bits_per_value(64, 64, 4096) == 3.25
    assert scheme("int4").bits_per_value(64, 64, 4096) == 4.25
    assert [name for name, each in SCHEMES.items() if each.round_to(64) == 64] == ["kivi4", "kivi2", "klt2"]


def test_what_a_scheme_does_not_keep() -> None:
    with user_error("kv_unsupported"):
        scheme("int4").bytes(2, 40, 64)
    with user_error("kv_unsupported"):
        scheme("kivi2").bytes(2, 64, 16)
    with pytest.raises(ValueError, match="a multiple of 16 slots, not 24"):
        scheme("float32").bytes(2, 64, 24)
    with user_error("kv_unknown"):
        scheme("q4_0")


def test_levels_are_where_a_normal_variable_wants_them() -> None:
    """As many as bits say, increasing, the last where Lloyd's is; and no cell wider than the last."""
    for bits, half in LEVELS.items():
        assert len(half) == 1 << (bits - 1)
        assert half[-1] == round(LARGEST[bits] * UNIT)
        steps = [b - a for a, b in zip((-half[0], *half), half, strict=False)]
        assert min(steps) > 0
        assert steps[-1] == max(steps)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=16), st.integers(0, 6))
def test_bits_go_where_they_take_away_most(variances: list[float], average: int) -> None:
    units = min(average * len(variances), MOST_BITS * len(variances))
    dealt = divide(variances, units)
    assert sum(dealt) == units
    assert all(
        a >= b for v, a in zip(variances, dealt, strict=True) for w, b in zip(variances, dealt, strict=True) if v > w
    )
    spent = [v * (DISTORTION[b - 1] - DISTORTION[b]) for v, b in zip(variances, dealt, strict=True) if b]
    saved = [v * (DISTORTION[b] - DISTORTION[b + 1]) for v, b in zip(variances, dealt, strict=True) if b < MOST_BITS]
    assert min(spent, default=float("inf")) >= max(saved, default=0.0)  # no bit would do more elsewhere


def test_more_bits_than_there_are_places() -> None:
    with pytest.raises(ValueError, match="13 bits are too many for 2 buckets"):
        divide([1.0, 2.0], 13)
