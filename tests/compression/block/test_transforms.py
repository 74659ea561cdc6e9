"""What is known of a linear goes with it when a transform changes what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.compression.block import transforms
from attar.compression.block.work import BlockWork
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.groups import input_groups
from attar.compression.recipe.methods import Awq, SmoothQuant
from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.solvers.rounding.means import ColumnMean
from attar.compression.solvers.transforms import smoothquant
from attar.formats.scheme import Scheme
from attar.model.decoder import Decoder
from attar.model.layers import Block

SAME = 1e-3  # relative: transforms leave what a block computes as it was within the rounding of float32


def working(block: Block, recipe: str, folder: Path, importances: Mapping[str, Tensor] | None = None) -> BlockWork:
    plan = load_recipe(recipe)
    passes = tuple(replace(each, points=4, clip=False) if isinstance(each, Awq) else each for each in plan.passes)
    states = HiddenStates(folder / "states.f32", (4, 24, 64), 1 << 20, 48)
    for s in range(4):
        states.write(range(s, s + 1), torch.randn(24, 64, generator=torch.Generator().manual_seed(s)))
    schemes: dict[str, Scheme | None] = {linear.name: plan.scheme for linear in block.linears()}
    return BlockWork(block, (states, None), replace(plan, passes=passes), schemes, "LlamaForCausalLM", importances)


def measured(block: Block, folder: Path) -> dict[str, Tensor]:
    """The mean squares of what each linear reads."""
    means = {group[0].name: ColumnMean(group[0].shape[1], 2) for group in input_groups(block)}
    working(block, "rtn-w4g32", folder).watch({name: mean.add for name, mean in means.items()})
    return {linear.name: means[group[0].name].value for group in input_groups(block) for linear in group}


def uneven(decoder: Decoder) -> Block:
    """Its first block, whose channels differ in size."""
    block = decoder.blocks[0]
    for norm in block.norms():
        norm.weight = norm.weight * torch.logspace(-1, 1, len(norm.weight))
    return block


@pytest.mark.parametrize(
    "recipe, linears",
    [
        ("smoothquant+rtn-w4g32", "qkv gate up"),
        ("awq+rtn-w4g32", "qkv gate up down"),
        ("smoothattention+rtn-w4g32", "output"),
    ],
)
@torch.no_grad()
def test_importances_are_those_of_the_transformed_model(
    recipe: str, linears: str, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    block = uneven(tiny_decoder(layers=1))
    before = measured(block, tmp_path)
    work = working(block, recipe, tmp_path, before)
    for each in work.recipe.passes[:-1]:
        transforms.run(work, each)
    after = measured(block, tmp_path)
    for name, mean in after.items():
        torch.testing.assert_close(work.importances[name], mean, rtol=SAME, atol=0, msg=name)
    words = {"qkv": ("q_proj", "k_proj", "v_proj"), "output": ("o_proj",)}
    for word in linears.split():
        for ending in words.get(word, (f"{word}_proj",)):
            name = next(name for name in before if name.endswith(ending))
            assert not torch.allclose(before[name], after[name], rtol=0.1), f"{name} is not put to the test"


@torch.no_grad()
def test_smoothing_by_a_search_takes_an_alpha_for_each_place(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    """One of the grid each, not the family's everywhere, and the block computes what it did."""
    found: dict[object, tuple[Tensor, Tensor]] = {}
    for alpha in ("search", *smoothquant.GRID):
        block = uneven(tiny_decoder(layers=1))
        work = working(block, "smoothquant+rtn-w8a8", tmp_path)
        wanted = block.run(work.hidden.read(range(4)), work.hidden.step(range(4)))
        transforms.run(work, SmoothQuant(alpha=alpha))  # type: ignore[arg-type]
        output = block.run(work.hidden.read(range(4)), work.hidden.step(range(4)))
        torch.testing.assert_close(output, wanted, rtol=SAME, atol=SAME)
        found[alpha] = block.attention_norm.weight, block.feed_forward_norm.weight
    searched = found.pop("search")
    chosen = [[alpha for alpha, norms in found.items() if norms[at].equal(searched[at])] for at in range(2)]
    assert all(len(each) == 1 for each in chosen)
    assert chosen != [[smoothquant.alpha_for("LlamaForCausalLM")]] * 2


@pytest.mark.parametrize(
    "options", [SmoothQuant(alpha="search"), Awq(points=3, clip=False)], ids=["smoothquant", "awq"]
)
@pytest.mark.parametrize("scheme", ["sparse24", "sparse24-w4g32"])
@torch.no_grad()
def test_searches_round_what_is_not_pruned_yet(
    options: SmoothQuant | Awq, scheme: str, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    block = uneven(tiny_decoder(layers=1))
    work = working(block, f"{options.method}+prune-2:4-{scheme}", tmp_path)
    wanted = block.run(work.hidden.read(range(4)), work.hidden.step(range(4)))
    transforms.run(work, options)
    found = block.run(work.hidden.read(range(4)), work.hidden.step(range(4)))
    torch.testing.assert_close(found, wanted, rtol=SAME, atol=SAME)


@torch.no_grad()
def test_given_importances_keep_what_they_say_of_columns(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    """Those of another text, twice as large everywhere, are twice as large afterwards; and a channel that is zero on
    the calibration text alone does not disappear."""
    before = measured(uneven(tiny_decoder(layers=1)), tmp_path)
    found = []
    for factor in (1.0, 2.0):
        block = uneven(tiny_decoder(layers=1))
        work = working(block, "smoothattention+rtn-w4g32", tmp_path, {k: factor * mean for k, mean in before.items()})
        transforms.run(work, work.recipe.passes[0])
        found.append(work.importances[block.attention.output.name])
    torch.testing.assert_close(found[1], 2 * found[0])
    dead = uneven(tiny_decoder(layers=1))
    weight = dead.attention.qkv[-1].weight
    assert isinstance(weight, Tensor)
    dead.attention.qkv[-1].weight = torch.zeros_like(weight)
    work = working(dead, "smoothattention+rtn-w4g32", tmp_path, before)
    transforms.run(work, work.recipe.passes[0])
    assert work.importances[dead.attention.output.name].gt(0).all()
