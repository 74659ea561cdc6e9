"""A block compressed on another device, one that only pretends to be (`tests/pretend.py`).

What would fail on a card for want of a tensor there fails here, and what comes of it is what comes of it on a CPU. But
for one thing: attention is computed by another of torch's ways, so inputs differ in their last bits, and what is solved
for with them falls here and there to a neighbouring code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attar.compression import device_placement
from attar.compression.block import passes
from attar.compression.block.record import Record
from attar.compression.block.work import BlockWork
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.recipe.methods import ActivationRange, Awq
from attar.compression.recipe.recipe_file import load_recipe
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.model.decoder import Decoder
from attar.model.layers import Block
from tests.errors import user_error
from tests.pretend import there

ERRORS = 0.1
"""Relative, of what rounding costs: 36 rows leave many near-ties, which go either way with the order of a sum."""

RECIPES = ("hqq-w4g32-asym", "qronos-w4g32", "awq+gptq-w4g32", "smoothquant+rtn-w8a8")


def compressed(
    block: Block, recipe: str, folder: Path, device: torch.device, activation_range: ActivationRange = "minmax"
) -> tuple[list[Record], Block]:
    plan = replace(load_recipe(recipe), activation_range=activation_range)
    few = tuple(replace(each, points=3) if isinstance(each, Awq) else each for each in plan.passes)
    plan = replace(plan, passes=few)
    pair = []
    for name in ("seen", "original"):
        states = HiddenStates(folder / f"{name}-{device}.f32", (3, 12, 64), 1 << 20, 24, device)
        for s in range(3):
            numbers = torch.randn(12, 64, generator=torch.Generator().manual_seed(s))
            states.write(range(s, s + 1), numbers)
        pair.append(states)
    schemes: dict[str, Scheme | None] = {linear.name: plan.scheme for linear in block.linears()}
    device_placement.move(block, device)
    records = passes.run(BlockWork(block, (pair[0], pair[1]), plan, schemes, "LlamaForCausalLM"))
    device_placement.move(block, device_placement.CPU)
    return records, block


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_is_compressed_where_it_lies(recipe: str, tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    with torch.no_grad():
        expected, here = compressed(tiny_decoder(layers=1).blocks[0], recipe, tmp_path, device_placement.CPU)
        with there() as device:
            found, away = compressed(tiny_decoder(layers=1).blocks[0], recipe, tmp_path, device)
    for one, other in zip(found, expected, strict=True):
        assert one.name == other.name
        assert one.error == pytest.approx(other.error, rel=ERRORS)
    for ours, theirs in zip(away.linears(), here.linears(), strict=True):
        assert isinstance(ours.weight, PackedTensor)
        assert isinstance(theirs.weight, PackedTensor)
        assert all(part.device == device_placement.CPU for part in ours.weight.parts.values())
        if recipe == "hqq-w4g32-asym":  # which reads no inputs
            assert torch.equal(ours.weight.dequantize(), theirs.weight.dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("word", ["percentile", "mse"])
def test_ranges_of_histograms_go_where_the_block_lies(
    word: ActivationRange, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    """Which are counted in ordinary memory, while a recipe that corrects rounds inputs by them on the device."""
    with torch.no_grad():
        _, here = compressed(
            tiny_decoder(layers=1).blocks[0], "qronos-w8a8-static", tmp_path, device_placement.CPU, word
        )
        with there() as device:
            _, away = compressed(tiny_decoder(layers=1).blocks[0], "qronos-w8a8-static", tmp_path, device, word)
    for ours, theirs in zip(away.linears(), here.linears(), strict=True):
        assert ours.activation_scale is not None
        assert theirs.activation_scale is not None
        assert ours.activation_scale.device == device_placement.CPU
        torch.testing.assert_close(ours.activation_scale, theirs.activation_scale, rtol=ERRORS, atol=0)


def test_a_tensor_left_behind_is_found_out() -> None:
    with there() as device:
        near, far = torch.ones(3), torch.ones(3).to(device)
        assert (far + 1).tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="tensors of both devices"):
            near + far


def test_on_a_cpu_nothing_moves(tiny_decoder: Callable[..., Decoder]) -> None:
    block = tiny_decoder(layers=1, scheme="w4g32").blocks[0]
    before = [(linear.weight, linear.bias) for linear in block.linears()]
    device_placement.move(block, device_placement.CPU)
    assert all(a is b for held, linear in zip(before, block.linears(), strict=True)
               for a, b in zip(held, (linear.weight, linear.bias), strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "what"),
    [("autoround-w4g32", "autoround"), ("rtn-nf4", "nf4"), ("gptq-w4g32", "a GGUF file")],
)
def test_what_does_not_go_there_is_said(recipe: str, what: str) -> None:
    plan = load_recipe(recipe)
    with user_error("device_unsupported"):
        device_placement.check(plan, [plan.scheme], what == "a GGUF file", "cuda")
    device_placement.check(plan, [plan.scheme], True, "cpu")
