"""The suffix automaton of a text: where its present end, or another text's, occurred in it.

The longest suffix of a text that occurs in it earlier is found online and in constant amortized time a token (Blumer et
al., "The smallest automaton recognizing the subwords of a text", 1985). Of several occurrences a recent one is taken.
"""

from __future__ import annotations

from array import array

RECENT = 8  # suffixes of the present match whose last occurrence is brought up to date


class SuffixAutomaton:
    """The suffix automaton of a text that grows: `match` is the longest suffix with an earlier occurrence.

    A state stands for substrings with the same occurrences; state 0 is the empty one. Most states have one successor,
    which lies in two arrays; those of the others are in a dict.
    """

    def __init__(self) -> None:
        self.text = array("i")
        self._length, self._link, self._end = array("i", [0]), array("i", [-1]), array("i", [-1])
        self._token, self._target = array("i", [-1]), array("i", [0])
        self._more: dict[int, dict[int, int]] = {}
        self._last = 0
        self.match = 0
        """Length of the longest suffix of the text that occurs earlier in it too."""
        self.behind = 0
        """Place in the text behind an earlier occurrence of that suffix, where `match` is not 0."""

    def __len__(self) -> int:
        return len(self.text)

    def push(self, token: int) -> None:
        """Append a token."""
        place = len(self.text)
        self.text.append(token)
        new = self._state(self._length[self._last] + 1, place)
        at = self._last
        while at >= 0 and self._next(at, token) < 0:
            self._connect(at, token, new)
            at = self._link[at]
        if at < 0:
            self._link[new] = 0
        else:
            target = self._next(at, token)
            if self._length[target] != self._length[at] + 1:
                target = self._split(at, token, target)
            self._link[new] = target
        self._last = new
        found = self._link[new]
        self.match, self.behind = self._length[found], self._end[found] + 1
        for _ in range(RECENT):
            if found <= 0:
                break
            self._end[found] = place
            found = self._link[found]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and length of the longest suffix of a string and `token` that the text has, given those of
        the string's own longest suffix; 0 and 0 where it has none."""
        while state > 0 and length <= self._length[self._link[state]]:  # the state was split since
            state = self._link[state]
        while (target := self._next(state, token)) < 0:
            state = self._link[state]
            if state < 0:
                return 0, 0
            length = self._length[state]
        return target, length + 1

    def behind_state(self, state: int) -> int:
        """Return a place in the text behind an occurrence of the state's strings."""
        return self._end[state] + 1

    def _split(self, at: int, token: int, target: int) -> int:
        """Make a state for the shorter substrings of `target`, which now occur at one more place than the others."""
        clone = self._state(self._length[at] + 1, self._end[target])
        self._link[clone], self._link[target] = self._link[target], clone
        self._token[clone], self._target[clone] = self._token[target], self._target[target]
        if target in self._more:
            self._more[clone] = dict(self._more[target])
        while at >= 0 and self._next(at, token) == target:
            self._connect(at, token, clone)
            at = self._link[at]
        return clone

    def _state(self, length: int, end: int) -> int:
        self._length.append(length)
        self._link.append(-1)
        self._end.append(end)
        self._token.append(-1)
        self._target.append(0)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        """Return the successor of a state, or -1."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (-1, token):
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target
