"""Masks of answers that may begin with a reasoning section: a constraint holds behind it, and a budget ends it.

Inside the section every token may come, except those that would end an answer whose constraint is not fulfilled yet.
Once the budget is used up, only the end marker may. The phase is a function of the answer's tokens alone. So a mask
behind drafts is what it will be without drafts, and no text depends on speculation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attar.protocol.reasoning import ReasoningSection
from attar.sampling.masks import GrammarMask

BITS = 32


class Phase(Enum):
    """Place of the next token: where a section may begin, inside one, or behind it."""

    BEFORE = "before"
    INSIDE = "inside"
    BEHIND = "behind"


class _State(NamedTuple):
    phase: Phase
    used: int = 0  # tokens inside the section


class ReasoningMask:
    """A mask along one output with a `section`, for logits of `size` columns.

    `grammar` is the mask of what follows the section, at its beginning; None allows every token there. It also holds
    where the first token begins no section. `ending` are the tokens that end the output.
    """

    def __init__(
        self, section: ReasoningSection, size: int, grammar: GrammarMask | None = None, ending: Iterable[int] = ()
    ) -> None:
        self._section, self._grammar = section, grammar
        self._state = _State(Phase.INSIDE if section.opened else Phase.BEFORE)
        held = set() if grammar is None else {token for token in ending if token < size} - {section.end}
        self._all, self._inside = _bits(size, (), rest=True), _bits(size, held, rest=True)
        self._start, self._end = _bits(size, (section.start,)), _bits(size, (section.end,))

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor:
        """Return the tokens that may come next, behind `drafts` where there are some: bits as `GrammarMask.allowed`."""
        state, taken = self._state, 0
        while taken < len(drafts) and state.phase is not Phase.BEHIND:
            state, taken = self._after(state, drafts[taken], taken)
        match state.phase:
            case Phase.INSIDE:
                return self._end if self._spent(state) else self._inside
            case Phase.BEFORE:
                return self._all if self._grammar is None else self._beginning(self._grammar)
        return self._all if self._grammar is None else self._grammar.allowed(drafts[taken:])

    def _beginning(self, grammar: GrammarMask) -> Tensor:
        bits = grammar.allowed()
        return bits if grammar.failed else bits | self._start

    def _after(self, state: _State, token: int, place: int) -> tuple[_State, int]:
        """Return the state behind a token at a place of an output, and the place of the first token that it leaves to
        the grammar."""
        if state.phase is Phase.BEFORE:
            begins = token == self._section.start
            return (_State(Phase.INSIDE), place + 1) if begins else (_State(Phase.BEHIND), place)
        ends = token == self._section.end
        return (_State(Phase.BEHIND) if ends else _State(Phase.INSIDE, state.used + 1)), place + 1

    def _spent(self, state: _State) -> bool:
        return self._section.budget is not None and state.used >= self._section.budget

    def forced(self) -> bytes:
        """Return the bytes that begin every text that may follow: the end marker, written as its token, once the budget
        is used up; behind the section those of the grammar."""
        ends = self._state.phase is Phase.INSIDE and self._spent(self._state)
        if not ends and self._state.phase is not Phase.BEHIND:
            return b""
        behind = b"" if self._grammar is None else self._grammar.forced()
        return b"\xff[%d]" % self._section.end + behind if ends else behind

    def consume(self, token_id: int) -> None:
        """Take the token as the next one."""
        left = 0
        if self._state.phase is not Phase.BEHIND:
            self._state, left = self._after(self._state, token_id, 0)
        if self._grammar is not None and not left:
            self._grammar.consume(token_id)

    @property
    def finished(self) -> bool:
        """True where the constraint lets nothing follow."""
        return self._state.phase is Phase.BEHIND and self._grammar is not None and self._grammar.finished

    @property
    def failed(self) -> bool:
        """True where the constraint has passed one of its limits."""
        return self._grammar is not None and self._grammar.failed


def _bits(size: int, tokens: Iterable[int], rest: bool = False) -> Tensor:
    """Return bits of int32 [ceil(size/32)], the lowest first: set for `tokens`, or for all the `rest`."""
    chosen = np.full(-(-size // BITS) * BITS, rest)
    chosen[list(tokens)] = not rest
    return torch.from_numpy(np.packbits(chosen, bitorder="little").view("<i4"))
