"""The place in its own text that a sequence is copying from, across edits.

A text that repeats an earlier passage with edits differs from it at each edit. Just after an edit, the longest suffix
that occurred before is short, or belongs to the edit: after a name that was replaced everywhere, it ends at the last
occurrence of the new name and not in the passage that is being copied. So the place in the passage is kept. After a
token that differs, the copy resumes at the expected token (the edit was an insertion), or at one of the tokens that
follow it (a deletion or a replacement).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

BEGUN = 4  # tokens of a match from which a copy begins
SKIPPED = 3  # tokens of the passage that a change may replace, at most
PATIENCE = 16  # tokens of a change, at most
FRESH = 8  # tokens behind a change in which the place is more certain than a match


@dataclass(eq=False, slots=True)
class Copy:
    """A place in a text that the text itself is copying, followed token by token."""

    at: int = -1  # the place of the token that is expected next; -1: nothing is copied
    changed: int = 0  # tokens of the present change; 0: the copy goes on
    since: int = FRESH  # tokens that were copied since the last change

    @property
    def resumed(self) -> bool:
        """Whether the copy has just gone on behind a change."""
        return self.at >= 0 and not self.changed and self.since < FRESH

    def follow(self, text: array[int], token: int, match: int, behind: int) -> None:
        """Follow the text by its next token, which is the last of `text`. `match` is the length of the longest suffix
        that occurs earlier, and `behind` the place behind that."""
        last = len(text) - 1
        if 0 <= self.at < last and not self.changed and text[self.at] == token:
            self.at, self.since = self.at + 1, self.since + 1
        elif 0 <= self.at < last and self.changed < PATIENCE:
            first = self.at if self.changed else self.at + 1  # that it is not the expected one is known
            found = next((i for i in range(first, min(first + SKIPPED, last)) if text[i] == token), -1)
            if found >= 0:
                self.at, self.changed, self.since = found + 1, 0, 0
            else:
                self.changed += 1
        else:
            self.at, self.changed, self.since = (behind if match >= BEGUN else -1), 0, FRESH
