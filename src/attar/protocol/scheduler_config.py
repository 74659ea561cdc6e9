"""Settings of the scheduler: how much runs at once and which sequences wait, with three presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from attar.errors import UserError

Policy = Literal["none", "static", "dynamic", "continuous"]
TOWER_SHARE = 0.29  # of a step's time, for the vision tower before the next one


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler. Raises ValueError where nothing could run.

    policy: `continuous` admits sequences at every step. The others admit only when none is running: one (`none`), all
        that wait, up to max_running (`static`), or as `static` once max_running of them wait or the first has waited
        max_delay (`dynamic`).
    max_running: most running sequences.
    max_step_tokens: most tokens of a step. Small: short steps, so even gaps between tokens. Large: prompts cost less.
    max_waiting: most sequences in the queue; more are refused.
    max_delay: seconds. A tenth is short beside an answer, and long enough for requests that were sent together.
    max_passed: most later sequences of better priority that may overtake a sequence.
    max_preemptions: most times that a sequence may have to start over.
    headroom: fraction of all blocks that an admission leaves to the running sequences.
    max_drafts: most drafts of a step, of all sequences together; 0 without speculative decoding.
    """

    policy: Policy = "continuous"
    max_running: int = 32
    max_step_tokens: int = 512
    max_waiting: int = 256
    max_delay: float = 0.1
    max_passed: int = 16
    max_preemptions: int = 4
    headroom: float = 0.02
    max_drafts: int = 0

    def __post_init__(self) -> None:
        if self.policy not in ("none", "static", "dynamic", "continuous"):
            message = f"unknown policy {self.policy!r}: known are none, static, dynamic, continuous"
            raise UserError("name_unknown", message)
        if self.max_running < 1 or self.max_waiting < 1:
            raise UserError("option_out_of_range", "at least one sequence must be able to run, and one to wait")
        if self.max_step_tokens < self.max_running:
            raise UserError(
                "option_conflict",
                f"a step of {self.max_step_tokens} tokens has not one for each of {self.max_running} sequences: "
                "raise max-step-tokens, or lower max-running",
            )
        if (
            min(self.max_passed, self.max_preemptions, self.max_drafts) < 0
            or self.max_delay < 0
            or not 0 <= self.headroom < 1
        ):
            raise UserError("option_out_of_range", "counts and times are not negative, and headroom is a share below 1")
        if not math.isfinite(self.max_delay):
            raise UserError("option_malformed", f"max-delay is a number of seconds, not {self.max_delay}")

    @property
    def together(self) -> int:
        """Return the number of sequences that may run at the same time."""
        return 1 if self.policy == "none" else self.max_running

    @property
    def prompt_rows(self) -> int:
        """Return the rows of a step that one prompt has at least, beside tokens and drafts of all others."""
        return self.max_step_tokens - self.together + 1 - self.max_drafts

    def told(self, preset: str | None) -> str:
        """Return all settings in one line, with the default beside each value that differs from it."""
        said = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "max_delay" and self.policy != "dynamic":  # only `dynamic` uses it
                continue
            if field.name == "max_drafts":  # no option: it follows from the drafter
                continue
            default = "" if value == field.default else f" (default {field.default})"
            said.append(f"{field.name.replace('_', '-')} {value}{default}")
        return f"{preset or 'scheduler'}: {', '.join(said)}"


PRESETS = {
    "latency": SchedulerConfig(max_running=16, max_step_tokens=128, max_waiting=64, headroom=0.05),
    "throughput": SchedulerConfig(max_running=128, max_step_tokens=2048, max_waiting=1024, headroom=0.01),
    "long-context": SchedulerConfig(max_running=8, max_step_tokens=1024, max_waiting=64, headroom=0.05),
}
"""Named settings. `latency`: short gaps between tokens; `throughput`: most tokens a second; `long-context`: few
requests with long prompts."""
