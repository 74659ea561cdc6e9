"""Seconds by stage of a block pass, which `attar compress` reports beside the total.

Stages are `read` (a block's weights), `inputs` (the block on the calibration text, for statistics of what its linears
read), `solve` (the recipe's transforms and rounding), `write`, `outputs` (the compressed block, for the next one's
inputs) and `probes`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Wall seconds by stage, each without those of stages within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = 0.0  # seconds of the stages that the open one holds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time within the context for stage `name`."""
        outer, began, self._within = self._within, time.monotonic(), 0.0
        try:
            yield
        finally:
            took = time.monotonic() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._within
            self._within = outer + took
