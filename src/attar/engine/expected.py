"""Expected time of steps: the step-time model of `attar plan` by the kept rates of this machine.

A start does not measure these rates, which takes a minute: `attar bench --rates` and plans by goals do, and keep them.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from attar.plan.fit import Deployment
from attar.plan.rates import store
from attar.plan.rates.step_time import StepModel
from attar.protocol.settings import Settings

MEASURED = "int8g128"  # activations of the products that rates are measured with

logger = logging.getLogger(__name__)


def step_model(settings: Settings, held: Deployment, threads: int) -> StepModel | None:
    """Return the model of a CPU engine's steps with so many threads.

    None where no rates of this machine, build and number of threads are kept, and for what they do not describe: other
    activations than the default, several processes, and attention that reads few keys.
    """
    few = settings.sparse_attention is not None or settings.sparse_prefill is not None
    if settings.activations != MEASURED or held.share.count > 1 or few:
        return None
    kept = store.RatesStore(store.folder())
    profile = kept.find(replace(store.key(), threads=threads))
    if kept.problem is not None:
        logger.warning("requests have no expected_seconds; %s", kept.problem)
    return None if profile is None else StepModel(held.config, held.storage, held.kv, profile)
