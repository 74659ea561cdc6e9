"""Measured rates: a whole profile in a short time, from which a step is predicted."""

from __future__ import annotations

import pytest

from attar.evaluation.planning import machine_rates
from attar.kernels.native import extension
from attar.plan.rates import profile as profiles
from attar.plan.rates.profile import MEASURED_KV, MEASURED_SCHEMES
from tests.errors import user_error

pytestmark = pytest.mark.skipif(not extension.loaded(), reason="the kernels do not load")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "READ", 8 << 20)
    monkeypatch.setattr(machine_rates, "ROWS", (1, 4, 64))
    monkeypatch.setattr(machine_rates, "ROUNDS", 2)
    monkeypatch.setattr(machine_rates, "MOST_ROUNDS", 3)
    monkeypatch.setattr(machine_rates, "CONTEXT", 512)
    monkeypatch.setattr(machine_rates.limits, "READ", 16 << 20)


def test_a_profile_is_whole_and_read_back() -> None:
    found = machine_rates.measure(["w3g128"])
    assert set(found.products) == {*MEASURED_SCHEMES, "w3g128"}
    assert set(found.attention) == set(MEASURED_KV)
    assert found.products["bf16"].bytes == pytest.approx(2.0, rel=0.01)
    assert found.products["w3g128"].bytes < found.products["w4g128"].bytes < found.products["w8a8"].bytes
    assert profiles.decode(profiles.encode(found)) == found
    assert machine_rates.to_text(found)
    more = machine_rates.extended(found, ["w4g64", "bf16"])
    assert set(more.products) == {*found.products, "w4g64"}
    assert more.products["bf16"] == found.products["bf16"]


def test_a_scheme_that_no_kernel_takes_is_named() -> None:
    with user_error("scheme_unknown"):
        machine_rates.product_curve("w99")


def test_rates_are_medians() -> None:
    found = machine_rates.rate([1.0, 2.0, 4.0])
    assert (found.value, found.spread) == (2.0, 0.75)


def test_tiles_have_a_rate_where_the_processor_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates.tiles, "faster", lambda: False)
    without = machine_rates.measure([], usual=False)
    assert without.bf16_tiles is None
    monkeypatch.setattr(machine_rates.tiles, "faster", lambda: True)
    found = machine_rates.with_tiles(without)
    assert found.bf16_tiles is not None
    assert found.bf16_tiles.value > 0
    assert machine_rates.with_tiles(found) is found
    assert profiles.decode(profiles.encode(found)) == found
    assert len(machine_rates.to_text(found).splitlines()) == len(machine_rates.to_text(without).splitlines()) + 1
