"""`bench/sparsity.py`: with nothing to skip it is the model itself, and more skipped is more lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import sparsity
import torch
from torch import Tensor

from attar.checkpoints.sources import opening
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder

ROUNDING = 1e-4  # of hidden states: attention in another order
TOKENS = sparsity.PROMPT + 16


@pytest.fixture(scope="module")
def decoder(request: pytest.FixtureRequest) -> Decoder:
    path: Path = request.getfixturevalue("demo")
    return opening.load(path, torch.float32)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 4000, (TOKENS,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plain(decoder: Decoder, ids: Tensor) -> Tensor:
    stream, delta = decoder.states(ids, ForwardBatch((len(ids),), len(ids)))
    assert delta is not None
    return stream + delta


@pytest.mark.parametrize(
    "method",
    [
        sparsity.Nothing(), sparsity.Chosen(keep=1.0), sparsity.Heads(keep=1.0), sparsity.Cascade(keep=1.0, layers=4),
        sparsity.Cascade(keep=1.0, layers=4, of_heads=True),
    ],
    ids=["nothing", "neurons", "heads", "cascade of tokens", "cascade of heads"],
)  # fmt: skip
def test_with_nothing_skipped_it_is_the_model(
    decoder: Decoder, ids: Tensor, plain: Tensor, method: sparsity.Nothing
) -> None:
    ours = sparsity.states(decoder, ids, method)
    assert (ours - plain).abs().max() <= ROUNDING * plain.abs().max()


def test_more_skipped_is_more_lost(decoder: Decoder, ids: Tensor, plain: Tensor) -> None:
    found = sparsity.Statistics()
    sparsity.states(decoder, ids, found)
    every = {each.name: each for each in sparsity.methods(decoder, found)}

    def lost(name: str) -> float:
        first = every[name].first
        return float((sparsity.states(decoder, ids, every[name]) - plain)[first:].norm() / plain[first:].norm())

    for names in (
        ("teal 25% everywhere", "teal 40% everywhere", "teal 50% everywhere"), ("cats 30%", "cats 50%", "cats 70%"),
        ("oracle 50% of neurons", "dejavu 50%, rank full"), ("heads 75% kept, oracle", "heads 50% kept, oracle"),
        ("spatten 50% of tokens", "spatten 25% of tokens"),
    ):  # fmt: skip
        losses = [lost(name) for name in names]
        assert losses[0] > 0
        assert sorted(losses) == losses


def test_maps_of_more_ranks_fit_better() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 12, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(12, 30, generator=generator, dtype=torch.float64) + x[:, :1].abs()
    moments = x.T @ x, x.T @ y
    losses = [float((x @ sparsity.reduced(moments, rank).double() - y).norm()) for rank in (1, 3, 8, 12, None)]
    assert sorted(losses, reverse=True) == losses
    assert losses[-2] == pytest.approx(losses[-1], rel=1e-3)
    left, sizes, right = torch.linalg.svd(x @ torch.linalg.lstsq(x, y).solution, full_matrices=False)
    best = left[:, :3] * sizes[:3] @ right[:3]
    assert losses[1] == pytest.approx(float((best - y).norm()), rel=1e-3)


def test_shares_of_linears_are_a_whole(decoder: Decoder) -> None:
    sizes = sparsity.shares(decoder)
    assert sum(sizes.values()) == pytest.approx(1)
    assert sparsity.Teal(share=0.5).saved(sizes) == pytest.approx(0.5)
    assert sparsity.Cats(share=1.0).saved(sizes) == pytest.approx(sizes["down"] + sizes["up"] / 2)
