"""One engine beside several: weights are read once or once a replica, and overheads one after another or together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.schemes import SCHEMES
from attar.model.shapes import shape
from attar.plan.costs import Storage
from attar.plan.rates.profile import NO_OVERHEADS, Overheads
from attar.plan.rates.step_time import StepModel
from attar.plan.replicas import compare
from tests.pretend_rates import profile

CONFIG = shape("llama-3.2-1b")
NEAR = 1e-9


def model(overheads: Overheads = NO_OVERHEADS) -> StepModel:
    return StepModel(CONFIG, Storage.named("w4g128"), SCHEMES["int8"], profile(overheads=overheads))


@given(st.integers(2, 8), st.integers(1, 64), st.integers(1, 4096))
def test_replicas_gain_nothing_where_steps_have_no_overhead(count: int, users: int, context: int) -> None:
    found = compare(model(), count, users, context)
    assert found.users % count == 0
    assert users <= found.users < users + count
    assert found.one >= found.several * (1 - NEAR)


def test_replicas_read_all_weights_for_their_own_sequences() -> None:
    made = model()
    found = compare(made, 4, 8, 512)
    one, two = made.decode(8, 512), made.decode(2, 512)
    assert found.one == pytest.approx(8 / one.total, rel=NEAR)
    assert found.several == pytest.approx(8 / (4 * two.products + one.attention), rel=NEAR)
    assert found.one_is_faster


def test_replicas_win_where_overheads_take_most_of_a_step() -> None:
    found = compare(model(Overheads(0.0, 0.0, 0.0, 1e-6)), 4, 64, 512)  # of each row: it is divided
    assert not found.one_is_faster
    assert found.several > found.one


@pytest.mark.parametrize(("count", "users", "context"), [(1, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_nothing_is_compared_with_nothing(count: int, users: int, context: int) -> None:
    with pytest.raises(ValueError, match=f"{count} replicas, {users} users and {context} tokens"):
        compare(model(), count, users, context)
