"""Which linears of a block belong together: what reads the same rows, and where a scale may move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.checkpoints.sources import hf
from attar.compression.groups import folds, input_groups
from attar.compression.solvers.rounding import awq
from attar.model.assembly import compressible, gates
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.model.layers import Block
from tests.compression.test_experts import write

SAME = 1e-4  # of the largest output, float32 on scales from about 1/8 to 8
LENGTH = 12


@pytest.fixture(params=["dense", "Qwen2Moe"])
def decoder(request: pytest.FixtureRequest, tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Decoder:
    if request.param == "dense":
        return tiny_decoder(layers=1)
    return hf.load(write(request.param, tmp_path / "source"), torch.float32)


def states() -> Tensor:
    return torch.randn(LENGTH, 64, generator=torch.Generator().manual_seed(0))


def seen(block: Block) -> dict[str, Tensor]:
    """The last rows that each linear read."""
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        block.run(states(), ForwardBatch((LENGTH,), LENGTH), lambda linear, x: found.update({linear.name: x.clone()}))
    return found


def test_groups_read_the_same_rows_and_are_all_that_a_recipe_may_compress(decoder: Decoder) -> None:
    block, groups = decoder.blocks[0], list(input_groups(decoder.blocks[0]))
    names = [linear.name for group in groups for linear in group]
    assert sorted(names) == sorted(compressible(decoder.config, 0))
    assert {linear.name for linear in block.linears()} == {*names, *gates(decoder.config, 0)}
    rows = seen(block)
    for group in groups:
        assert all(torch.equal(rows[group[0].name], rows[linear.name]) for linear in group if linear.name in rows)


def test_a_scale_may_move_at_each_fold(decoder: Decoder) -> None:
    """Out of what comes before and into all that reads it: the block computes what it did."""
    block, numbers = decoder.blocks[0], torch.Generator().manual_seed(1)
    step = ForwardBatch((LENGTH,), LENGTH)
    with torch.no_grad():
        before = block.run(states(), step)
        places = folds(block)
        assert {type(place.before).__name__ for place in places} == {"Norm", "Linear"}
        for place in places:
            scales = torch.randn(place.linears[0].shape[1], generator=numbers).clamp(-3, 3).mul(0.7).exp()
            awq.apply(place.before, place.linears, scales)
            after = block.run(states(), step)
            assert (after - before).abs().max() <= SAME * before.abs().max()
