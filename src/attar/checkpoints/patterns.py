"""Regular expressions from a checkpoint's config, which come from strangers.

They run in Python's `re`, which can take exponential time. Hence a guard: at most 256 characters and 4 unbounded
repetitions, no repeated group, no back-reference. Every pattern met in published checkpoints passes.
"""

from __future__ import annotations

import re

from attar.checkpoints.safetensors import CheckpointError

MAX_PATTERN = 256
MAX_REPETITIONS = 4


def pattern(text: str, where: str) -> re.Pattern[str]:
    """Compile a pattern from a config, which is matched from a name's beginning. Raises CheckpointError where it could
    take long to match, or is not a regular expression."""
    if problem := _slow(text):
        raise CheckpointError(f"{where}: the pattern {text[:MAX_PATTERN]!r} is not accepted: {problem}")
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{where}: the pattern {text!r} is not a regular expression: {error}") from None


def _slow(text: str) -> str | None:
    """What could make a pattern slow, or None. Counts a little too much rather than too little."""
    if len(text) > MAX_PATTERN:
        return f"it is longer than {MAX_PATTERN} characters"
    at, repetitions, in_class, previous = 0, 0, False, ""
    while at < len(text):
        char, width = text[at], 1
        if char == "\\":
            char, width = text[at : at + 2], 2
            if char[1:].isdigit():
                return "it refers back to a group"
        elif in_class:
            in_class = char != "]"
            char = "x" if in_class else "]"
        elif char == "[":
            in_class = True
        elif char == "(" and text[at + 1 : at + 2] == "?" and text[at + 2 : at + 3] not in (":", "=", "!", "<"):
            return f"groups that begin with {text[at : at + 3]!r} are not supported"
        elif char in "*+{":
            repetitions += 1
            if previous == ")":
                return "it repeats a group"
        previous, at = char, at + width
    return f"it has more than {MAX_REPETITIONS} repetitions" if repetitions > MAX_REPETITIONS else None
