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
