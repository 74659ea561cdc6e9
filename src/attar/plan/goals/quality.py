"""Quality of compressed weights and KV caches: divergences from receipts, or from a fitted table.

A receipt's KL divergence was measured on that output, so it is `measured`. Without one the table below gives a range,
labelled `fitted`. Its ends are measurements of the embedded model (5.8 M parameters, a novel) and of SmolLM2-135M or
Qwen2.5-Coder-0.5B (WikiText-2): real models of that size lose 4 to 47 times what the embedded one does. Entries with
one measurement span `FACTOR`. The middle of a range is the geometric mean of its ends. A range says what to expect,
never what a model has: `attar eval --against` measures that.

KL divergences of weights and KV formats add: 16 sums were within 6.2 % of the measured pairs. Those with `klt4` were
within 19 %: its bases are found anew for each output (`bench/plan_pairs.py`). Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attar.plan.rates.step_time import Evidence, weakest

FACTOR = 16.0  # of SmolLM2-135M over the embedded model: gptq at 4 bits, 0.161 / 0.0101
PAIR = 0.05  # relative band of the sum of two divergences
TOP1 = 0.777  # top-1 disagreement over the root of KL: 0.773, 0.781 and 0.776 for rtn, awq and gptq at 4 bits


@dataclass(frozen=True, slots=True)
class Quality:
    """A KL divergence in nats per token: its expected value, its range, its evidence and its source."""

    kl: float
    low: float
    high: float
    evidence: Evidence
    source: str = ""
    top1: float | None = None

    def __add__(self, other: Quality) -> Quality:
        band = PAIR * min(self.kl, other.kl)
        evidence = weakest((self.evidence, other.evidence))
        sources = "; ".join(dict.fromkeys(each for each in (self.source, other.source) if each))
        top1 = self.top1 if other.kl == 0 else None
        return Quality(
            self.kl + other.kl, max(0.0, self.low + other.low - band), self.high + other.high + band, evidence, sources,
            top1,
        )  # fmt: skip

    @property
    def agreement(self) -> float:
        """Return the share of tokens whose most probable next token stays; fitted, where it was not measured."""
        return self.top1 if self.top1 is not None else max(0.0, 1.0 - TOP1 * math.sqrt(self.kl))


UNCHANGED = Quality(0.0, 0.0, 0.0, "exact", top1=1.0)


def receipt(kl: float, low: float, high: float, top1: float | None, source: str) -> Quality:
    """Return the quality that a receipt states."""
    return Quality(kl, low, high, "measured", source, top1)


def ranged(low: float, high: float | None = None) -> Quality:
    """Return a fitted quality between two measurements, or around one of the embedded model."""
    high = FACTOR * low if high is None else high
    return Quality(math.sqrt(low * high), low, high, "fitted", "table")


WEIGHTS: Mapping[str, Quality] = {
    "smoothquant+gptq-w8a8": ranged(0.0006, 0.0121),
    "gptq-w4": ranged(0.0093, 0.161),
    "rtn-w4": ranged(0.0350, 0.409),
    "guided-w4-asym": ranged(0.0051),
    "gptq-w3": ranged(0.0502),
    "guided-w3-asym": ranged(0.0209),
    "prune-2:4": ranged(0.105),
}
"""Quality of recipes by method, bits and zero points; groups of 32 to 128 columns differ less than models do."""

KV: Mapping[str, Quality] = {
    "float32": UNCHANGED,
    "bfloat16": ranged(0.000005, 0.00008),
    "int8": ranged(0.00006, 0.0152),
    "fp8": ranged(0.0003, 0.0041),
    "kivi4": ranged(0.00019, 0.0073),
    "klt4": ranged(0.00285, 0.0232),
    "int4": ranged(0.00957, 0.043),
    "kivi2": ranged(0.01216, 0.210),
}
"""Quality of KV formats."""
