"""What a block's linears read, found by running the block no further than the last of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.sources import hf
from attar.compression.block.work import BlockWork
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.recipe.recipe_file import load_recipe
from attar.model.assembly import build_block
from tests.model.random_model import LLAMA, write


def test_watching_stops_at_the_last_input(tmp_path: Path) -> None:
    checkpoint = hf.Checkpoint.open(write(tmp_path / "model", LLAMA))
    block, hidden = build_block(checkpoint.config, checkpoint, 0), checkpoint.config.hidden
    states = HiddenStates(tmp_path / "states.f32", (3, 8, hidden), 0, rows_at_once=16)
    states.write(range(3), torch.randn(24, hidden, generator=torch.Generator().manual_seed(0)))
    work = BlockWork(block, (states, None), load_recipe("rtn-w4g32"), {}, checkpoint.config.architecture)
    down, seen = next(block.feed_forwards()).down, list[Tensor]()
    down.weight = torch.empty(down.shape, device="meta")  # no product with it is possible
    work.watch({block.attention.output.name: lambda x: None, down.name: seen.append})
    assert [len(x) for x in seen] == [16, 8]
