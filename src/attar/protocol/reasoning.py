"""The reasoning section of an answer as tokens: what the engine needs to leave it free, and to end it in time."""

from __future__ import annotations

from dataclasses import dataclass

from attar.errors import UserError


@dataclass(frozen=True, slots=True)
class ReasoningSection:
    """Section at the beginning of an answer, from the token `start` to the token `end`.

    opened: whether the prompt ends inside the section; otherwise it begins only where `start` is the first token of the
        answer.
    budget: most tokens between the two, >= 0; behind them `end` is forced. None sets no limit.

    Raises UserError for a number out of range, and where `start` is `end`.
    """

    start: int
    end: int
    opened: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.end), ("budget", self.budget)):
            if value is not None:
                _check(name, value)
        if self.start == self.end:
            raise UserError("option_conflict", "a reasoning section ends with another token than it begins with")


def _check(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError("option_out_of_range", f"{name} must be an integer, at least 0, not {value!r}")
