"""What a drafter is: the protocol, its requests and its drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from attar.model.cache import KeptStates
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence as Tokens


def _always(_: Sequence[int]) -> bool:
    return True


class DraftRequest(NamedTuple):
    """A request for at most `limit` drafts behind the last token of a sequence, and its sampling state there.

    A drafter that knows how sure it is of each draft asks `continues` before one more, with the evidence of those made.
    """

    sequence: Tokens
    sampler: Sampler
    limit: int
    continues: Callable[[Sequence[int]], bool] = _always


class Draft(NamedTuple):
    """Drafts of one sequence, none to `limit`, and how sure the drafter is of them.

    `evidence` is a small number for the first draft, larger where drafts are more often right: the length of a match,
    for example. That of each further draft is one more. What it is worth is measured (`sampling/pace.py`). Where a
    drafter knows how sure it is of each draft, `sure` has the evidence of each besides, and that counts. The first
    `forced` drafts are what a constraint forces, whose share of right ones is another. With `parents` the drafts are a
    tree, the best first: the row that each follows, 0 the last token's and i + 1 that of draft i.
    """

    tokens: tuple[int, ...] = ()
    evidence: int = 0
    forced: int = 0
    parents: tuple[int, ...] = ()
    sure: tuple[int, ...] = ()

    def first(self, count: int) -> Draft:
        """Return the first `count` drafts."""
        return self._replace(tokens=self.tokens[:count], parents=self.parents[:count], sure=self.sure[:count])


NO_DRAFT = Draft()


def text_only(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return tokens up to the first that is the row of an image, which no answer has."""
    return tuple(itertools.takewhile(lambda token: token >= 0, tokens))


class Drafter(Protocol):
    """A source of drafts. What it keeps of a sequence is bounded, and lasts until `forget`."""

    name: str
    costly: bool
    """Whether drafts take time, so that their number is decided before they are made. Others are made to the limit, and
    their number is decided by what they are."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the drafts for each request. Token ids may be of any value: the caller checks them."""

    def forget(self, sequence: Tokens) -> None:
        """Drop what is kept of a sequence that has ended; of an unknown one there is nothing."""

    def reset(self) -> None:
        """Drop what is kept of all sequences: a new engine begins, and those of another are gone with it."""


@runtime_checkable
class StateReader(Protocol):
    """What a drafter is besides, if it reads hidden states of the target."""

    layers: tuple[int, ...]
    """Layers whose inputs it reads; the number of layers stands for the input of the final norm."""

    def see(self, sequence: Tokens, start: int, states: KeptStates) -> None:
        """Take the hidden states of a sequence's positions from `start` on, whose tokens stay. They are overwritten
        later.

        Positions may be missing, or come again: of tokens that the prefix cache had, and after a preemption.
        """


@runtime_checkable
class Stopping(Protocol):
    """A drafter that may ask before each further draft whether it pays (`DraftRequest.continues`)."""

    stops: bool
    """True where it does so."""


@runtime_checkable
class TrialReader(Protocol):
    """What a drafter is besides, if it reads the tokens sampled behind its drafts, wrong ones included."""

    def tried(self, sequence: Tokens, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """Take the tokens sampled behind a sequence's last token and each of the drafts, before they are committed. The
        last ones may be missing."""
