"""How many replicas there should be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attar.integrations.ray import autoscaling


def desired(current: int, queued: list[float], use: list[float]) -> int:
    metrics = {
        "queued_prefill_seconds": dict(enumerate(queued)), "cache_use": dict(enumerate(use)),
    }  # fmt: skip
    context = SimpleNamespace(current_num_replicas=current, target_num_replicas=current, aggregated_metrics=metrics)
    return autoscaling.desired(context)[0]


@pytest.mark.parametrize("current, queued, use, count", [
    (2, [0.0, 0.0], [0.0, 0.0], 1),  # idle: one is enough
    (2, [1.0, 1.0], [0.1, 0.1], 2),  # as it should be
    (2, [3.0, 1.0], [0.1, 0.1], 4),
    (2, [0.0, 0.0], [0.8, 0.8], 2),
    (2, [0.0, 0.0], [1.0, 1.0], 3),  # the caches are full although nothing is queued
    (3, [], [], 3),  # nothing was reported
])  # fmt: skip
def test_the_number_follows_queues_and_caches(current: int, queued: list[float], use: list[float], count: int) -> None:
    assert desired(current, queued, use) == count
