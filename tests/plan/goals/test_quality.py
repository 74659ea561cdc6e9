"""Divergences: sums and ranges, and the pairs that were measured."""

from __future__ import annotations

import pytest

from attar.plan.goals import quality
from attar.plan.goals.quality import KV, PAIR, TOP1, UNCHANGED, WEIGHTS, Quality, receipt


@pytest.mark.parametrize(("weights", "kv", "measured"), [
    (0.0114, 0.00006, 0.01144), (0.0114, 0.00285, 0.01385), (0.0114, 0.00957, 0.02034), (0.0114, 0.01216, 0.02328),
    (0.0502, 0.00006, 0.05031), (0.0502, 0.00285, 0.05428), (0.0502, 0.00957, 0.05900), (0.0502, 0.01216, 0.06403),
])  # fmt: skip
def test_weights_and_caches_add(weights: float, kv: float, measured: float) -> None:
    """Eight measured pairs of the embedded model lie within 5 % of the sum."""
    found = receipt(weights, weights, weights, None, "a") + receipt(kv, kv, kv, None, "b")
    assert found.kl == pytest.approx(measured, rel=PAIR)
    assert found.low <= found.kl <= found.high


@pytest.mark.parametrize(("kl", "top1"), [(0.0428, 0.840), (0.0232, 0.881), (0.0109, 0.919)])
def test_agreement_follows_the_root_of_the_divergence(kl: float, top1: float) -> None:
    assert 1 - TOP1 * kl**0.5 == pytest.approx(top1, abs=0.002)


def test_only_what_was_measured_is_called_so() -> None:
    assert all(each.evidence == "fitted" for each in WEIGHTS.values())
    assert (receipt(0.01, 0.009, 0.011, 0.9, "r") + KV["int8"]).evidence == "fitted"
    assert (receipt(0.01, 0.009, 0.011, 0.9, "r") + UNCHANGED).evidence == "measured"
    assert UNCHANGED.evidence == "exact"


def test_a_range_holds_its_middle() -> None:
    for each in (*WEIGHTS.values(), *KV.values()):
        assert each.low <= each.kl <= each.high


def test_a_measured_agreement_stays_where_the_cache_changes_nothing() -> None:
    own = Quality(0.01, 0.01, 0.01, "measured", top1=0.93)
    assert (own + UNCHANGED).agreement == 0.93
    assert (own + KV["int8"]).top1 is None
    assert quality.ranged(0.01).agreement < 1
