"""Costs of work in seconds, from what ended requests took: a prompt token to be computed, and a token of an output."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.05  # weight of the newest request
PREFILL_SECONDS = 5e-4  # a token, before the first request has ended
DECODE_SECONDS = 2e-2  # a token, likewise
OUTPUT_TOKENS = 64.0  # of a choice, likewise


@dataclass
class Costs:
    """Moving averages over requests: `prefill` and `decode` are seconds a token, `output` tokens a choice."""

    prefill: float = PREFILL_SECONDS
    decode: float = DECODE_SECONDS
    output: float = OUTPUT_TOKENS
    measured: bool = False

    def learn(self, computed: int, prefill: float, generated: int, decode: float, choices: int) -> None:
        """Take an ended request: prompt tokens that were computed, in `prefill` seconds, and tokens that its choices
        generated, in `decode` seconds of the longest."""
        weight = SMOOTHING if self.measured else 1.0
        if computed >= 1 and prefill > 0:
            self.prefill += weight * (prefill / computed - self.prefill)
            self.measured = True
        if generated > choices and decode > 0:
            each = generated / choices
            self.decode += weight * (decode / each - self.decode)
            self.output += weight * (each - self.output)
