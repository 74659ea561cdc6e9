"""Regular expressions from a checkpoint's config, which is untrusted input.

They run in Python's `re`, which tries one way after another to share a name among the parts of a pattern, and so may
never finish. Hence a guard: the ways are counted, and few are accepted; repeated groups and back-references are
refused. Every pattern met in published checkpoints passes.
"""

from __future__ import annotations

import math
import re
import string

from attar.checkpoints.strict_io import CheckpointError, invalid, unsupported

MAX_PATTERN = 256
MAX_WAYS = 50_000  # to share a name of LONGEST characters: some milliseconds. `.*a.*b.*c` has 47,905
MAX_WAYS_OF_ALL = 10 * MAX_WAYS
MAX_PATTERNS = 1000  # adapters may name each of their linears: a model of 80 layers has 560
LONGEST = 64  # characters: names of linears are shorter, and ASCII

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|\((?:\?<?.)?|\{\d+,?\d*\}|\{,\d*\}|.", re.DOTALL)
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUPS = ("(", "(?:", "(?=", "(?!", "(?<=", "(?<!")


class Patterns:
    """The patterns of one config. Raises CheckpointError where they are too many, or could take long to match."""

    def __init__(self) -> None:
        self._count = self._ways = 0

    def compile(self, text: str, where: str) -> re.Pattern[str]:
        """Compile one pattern, which is matched from a name's beginning. Raises CheckpointError also where it is not a
        regular expression."""
        self._count += 1
        if self._count > MAX_PATTERNS:
            raise CheckpointError(
                "checkpoint_too_large", f"{where}: more than the {MAX_PATTERNS} patterns that attar accepts in a config"
            )
        if len(text) > MAX_PATTERN:
            raise CheckpointError(
                "checkpoint_too_large",
                f"{where}: the pattern {text[:MAX_PATTERN]!r}... is longer than {MAX_PATTERN} characters",
            )
        try:
            compiled = re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise invalid(f"{where}: the pattern {text!r} is not a regular expression: {error}") from None
        ways = _ways(_TOKEN.findall(text))
        self._ways += ways if isinstance(ways, int) else 0
        if isinstance(ways, int) and ways > MAX_WAYS:
            ways = f"its parts can share a name in {ways} ways; attar accepts {MAX_WAYS}"
        if isinstance(ways, str):
            raise unsupported(f"{where}: the pattern {text!r} is not accepted: {ways}")
        if self._ways > MAX_WAYS_OF_ALL:
            raise CheckpointError(
                "checkpoint_too_large",
                f"{where}: the patterns up to {text!r} can share a name in {self._ways} ways; attar accepts "
                f"{MAX_WAYS_OF_ALL} in a config",
            )
        return compiled


def _ways(tokens: list[str]) -> int | str:
    """Return in how many ways a valid pattern can share a name among its parts, or the reason why that is unknown. The
    count is a little too high rather than too low.

    Two numbers count for each way through the alternatives: the unbounded repetitions, among which a name's characters
    are shared, and the product of all other choices.
    """
    while tokens[-2:] == [".", "*"] or tokens[-3:] == [".", "*", "$"]:  # takes whatever is left
        tokens = tokens[: tokens.index("*", -2) - 1]
    done, now = [(0, 0)], [(0, 1)]  # per open group: the alternatives read so far, and the present one
    closed = repeated = False  # whether a group, a repetition ended just before
    for i, token in enumerate(tokens):
        if token[0] == "\\" and token[1] in string.digits + "NUux":
            return f"it refers back to a group, or spells a character by its number: {token}"
        if token[0] == "(" and token not in _GROUPS:
            return f"groups that begin with {token!r} are not supported"
        bounds = None if repeated else _bounds(token)  # after a repetition "?" and "+" only set how it is tried
        if bounds and closed and token != "?":
            return "it repeats a group"
        closed, repeated = token == ")", bounds is not None
        if token[0] == "(":
            done.append((0, 0))
            now.append((0, 1))
        elif token == "|":
            done[-1], now[-1] = _either(done[-1], now[-1]), (0, 1)
        elif token == ")":
            now[-2:] = [_both(now[-2], _either(done.pop(), now[-1]))]
        elif bounds and bounds[1] is not None:
            now[-1] = _both(now[-1], (0, bounds[1] - bounds[0] + 1))
        elif bounds and not _apart(tokens[i - 1], [*tokens[i + 1 :], "", ""]):
            now[-1] = _both(now[-1], (1, 1))
    repetitions, choices = _either(done[0], now[0])
    return math.comb(LONGEST + repetitions, repetitions) * choices


def _either(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), one[1] + other[1]


def _both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] * other[1]


def _bounds(token: str) -> tuple[int, int | None] | None:
    """Return how often a token lets the item before it occur, at least and at most (None: unbounded); None: once."""
    if token in ("*", "+", "?"):
        return int(token == "+"), 1 if token == "?" else None
    if (found := _COUNT.fullmatch(token)) is None:
        return None
    low, comma, high = found.groups()
    return int(low or 0), int(high) if high else None if comma else int(low)


def _apart(repeated: str, following: list[str]) -> bool:
    """Return whether a repeated character must be followed by one that it cannot be, as in `\\d+\\.`: then it has one
    end."""
    if following[0] in ("", ")", "*", "+", "?", *_GROUPS) or _bounds(following[1]) not in (None, (1, None)):
        return False
    ends = {each for each in string.printable if re.fullmatch(following[0], each)}
    return bool(ends) and not any(re.fullmatch(repeated, each) for each in ends)
