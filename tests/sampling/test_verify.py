"""The match rule: the target's own tokens, up to the first that is no draft."""

from __future__ import annotations

import pytest

from attar.sampling.sampler import BadLogits, SampledToken
from attar.sampling.verify import Drawn, confirmed


def tokens(*ids: int) -> list[Drawn]:
    return [SampledToken(id, None) for id in ids]


@pytest.mark.parametrize(
    ("drafts", "drawn", "kept"),
    [
        ((), (7,), 1),
        ((7, 8), (7, 8, 9), 3),  # all right: the last row's token comes on top
        ((7, 8), (7, 5, 9), 2),
        ((7, 8), (6, 8, 9), 1),
    ],
)
def test_the_walk_ends_at_the_first_difference(drafts: tuple[int, ...], drawn: tuple[int, ...], kept: int) -> None:
    assert confirmed(drafts, tokens(*drawn)) == tokens(*drawn)[:kept]


def test_a_row_without_a_token_ends_the_walk_where_it_is_reached() -> None:
    bad = BadLogits("bad")
    assert confirmed((7, 8), [*tokens(7), bad, *tokens(9)]) == [*tokens(7), bad]
    assert confirmed((7, 8), [*tokens(6), bad, None]) == tokens(6)
    assert confirmed((7,), [None, *tokens(1)]) == [None]


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [
        ((6, 9, 9, 9, 9), (6, 9)),
        ((7, 9, 8, 5, 9), (7, 8, 5)),  # the second child, and its child
        ((7, 9, 4, 5, 3), (7, 4, 3)),
        ((5, 9, 9, 9, 9), (5,)),
    ],
)
def test_the_walk_along_a_tree_goes_to_the_child_that_equals_the_token(
    drawn: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    assert confirmed((6, 7, 8, 4), tokens(*drawn), (0, 0, 2, 2)) == tokens(*kept)
