"""How many replicas there should be: Serve's autoscaling policy by queued prompts, in seconds, and by use of the cache.

The processor of an engine is busy whenever it has any request, so its load says nothing. What a user waits for are the
prompts that are queued before theirs. A cache that running requests fill makes others wait, too.
Serve pickles this module by value, so it imports none of attar's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

QUEUED_SECONDS = 1.0  # of prompts that wait at a replica, on average
CACHE_USE = 0.8  # part of the blocks that running requests hold, on average


def desired(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for Serve's `AutoscalingContext`, and no state. Serve applies the bounds and delays
    of `autoscaling_config`.

    It is ceil(replicas * max(queued seconds / QUEUED_SECONDS, use / CACHE_USE)) with means over the replicas that have
    reported, and at least one. Without a report the number stays.
    """
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    queued, use = (list(metrics.get(name, {}).values()) for name in ("queued_prefill_seconds", "cache_use"))
    if not queued or not use:
        return context.target_num_replicas, {}
    load = max(sum(queued) / len(queued) / QUEUED_SECONDS, sum(use) / len(use) / CACHE_USE)
    return max(1, math.ceil(context.current_num_replicas * load - 1e-6)), {}
