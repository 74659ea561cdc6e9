"""The match rule: the target's own tokens, up to the first that is no draft."""

from __future__ import annotations

import pytest
import torch

from attar.protocol.request import SamplingParams
from attar.sampling import verify
from attar.sampling.sampler import BadLogits, SampledToken, Sampler, sample
from attar.sampling.verify import Drawn, confirmed, draw_reached


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


VOCAB = 6  # so few that drafts are often right


def token_of(draw: Drawn) -> int | None:
    return draw.token_id if isinstance(draw, SampledToken) else None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_the_walk_reaches_are_drawn_and_no_others(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[int]()

    def counting(logits: torch.Tensor, samplers: list[Sampler]) -> object:
        counted.append(len(samplers))
        return sample(logits, samplers)

    monkeypatch.setattr(verify, "sample", counting)
    generator = torch.Generator().manual_seed(1)
    kept = 0
    for seed in range(200):
        params = SamplingParams(temperature=temperature, seed=seed, presence_penalty=0.5)
        chains = [
            tuple(torch.randint(VOCAB, (count,), generator=generator).tolist())
            for count in torch.randint(5, (3,), generator=generator).tolist()
        ]
        samplers = [state for chain in chains for state in Sampler(params, (1,), VOCAB).along(chain)]
        logits = torch.randn(len(samplers), VOCAB, generator=generator)
        logits[torch.rand(len(samplers), generator=generator) < 0.05] = torch.nan
        every = sample(logits, samplers)
        counted.clear()
        drawn = draw_reached(logits, samplers, chains)
        wanted, first = 0, 0
        for chain in chains:
            rows = slice(first, first + 1 + len(chain))
            walked = confirmed(chain, every[rows])
            assert list(map(token_of, confirmed(chain, drawn[rows]))) == list(map(token_of, walked))
            wanted, first = wanted + len(walked), rows.stop
        assert sum(counted) == wanted
        kept += wanted - len(chains)
        alone = draw_reached(logits, samplers, [None] * len(samplers))
        assert list(map(token_of, alone)) == list(map(token_of, every))
    assert kept > 50, "no draft was right, and nothing is tested"
