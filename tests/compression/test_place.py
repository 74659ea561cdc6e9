"""A block compressed on another device, one that only pretends to be (`tests/pretend.py`).

What would fail on a card for want of a tensor there fails here, and what comes of it is what comes of it on a CPU. But
for one thing: attention is computed by another of torch's ways, so inputs differ in their last bits, and what is solved
for with them falls here and there to a neighbouring code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attar.checkpoints import sources
from attar.compression import pipeline, place
from attar.compression.calibrate import HiddenStates
from attar.compression.methods import ActivationRange, Awq
from attar.compression.passes import BlockWork, Record
from attar.compression.pipeline import Run
from attar.compression.recipe import Recipe
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import ops
from attar.model.decoder import Decoder
from attar.model.layers import Block
from tests.pretend import there

ERRORS = 0.02  # relative, of what rounding costs

RECIPES = ("hqq-w4g32-asym", "qronos-w4g32", "awq+gptq-w4g32", "smoothquant+rtn-w8a8")


def compressed(
    block: Block, recipe: str, folder: Path, device: torch.device, activation_range: ActivationRange = "minmax"
) -> tuple[list[Record], Block]:
    plan = replace(Recipe.load(recipe), activation_range=activation_range)
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
    place.move(block, device)
    records = BlockWork(block, pair[0], plan, schemes, "LlamaForCausalLM", original=pair[1]).run()
    place.move(block, place.CPU)
    return records, block


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_is_compressed_where_it_lies(recipe: str, tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    with torch.no_grad():
        expected, here = compressed(tiny_decoder(layers=1).blocks[0], recipe, tmp_path, place.CPU)
        with there() as device:
            found, away = compressed(tiny_decoder(layers=1).blocks[0], recipe, tmp_path, device)
    for one, other in zip(found, expected, strict=True):
        assert one.name == other.name
        assert one.error == pytest.approx(other.error, rel=ERRORS)
    for ours, theirs in zip(away.linears(), here.linears(), strict=True):
        assert isinstance(ours.weight, PackedTensor)
        assert isinstance(theirs.weight, PackedTensor)
        assert all(part.device == place.CPU for part in ours.weight.parts.values())
        if recipe == "hqq-w4g32-asym":  # which reads no inputs
            assert torch.equal(ours.weight.dequantize(), theirs.weight.dequantize())


@pytest.mark.parametrize("word", ["percentile", "mse"])
def test_ranges_of_histograms_go_where_the_block_lies(
    word: ActivationRange, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    """Which are counted in ordinary memory, while a recipe that corrects rounds inputs by them on the device."""
    with torch.no_grad():
        _, here = compressed(tiny_decoder(layers=1).blocks[0], "qronos-w8a8-static", tmp_path, place.CPU, word)
        with there() as device:
            _, away = compressed(tiny_decoder(layers=1).blocks[0], "qronos-w8a8-static", tmp_path, device, word)
    for ours, theirs in zip(away.linears(), here.linears(), strict=True):
        assert ours.activation_scale is not None
        assert theirs.activation_scale is not None
        assert ours.activation_scale.device == place.CPU
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
    place.move(block, place.CPU)
    assert all(a is b for held, linear in zip(before, block.linears(), strict=True)
               for a, b in zip(held, (linear.weight, linear.bias), strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "what"),
    [("autoround-w4g32", "autoround"), ("rtn-nf4", "nf4"), ("gptq-w4g32", "a GGUF file")],
)
def test_what_does_not_go_there_is_said(recipe: str, what: str) -> None:
    plan = Recipe.load(recipe)
    with pytest.raises(ValueError, match=f"is compressed on the CPU: {what} is not for cuda yet"):
        place.check(plan, [plan.scheme], what == "a GGUF file", "cuda")
    place.check(plan, [plan.scheme], True, "cpu")


def measuring(device: str) -> Run:
    """What is asked of a run that has written its output."""
    made = Run.__new__(Run)
    made.order = SimpleNamespace(device=device, source=SimpleNamespace(folder=SimpleNamespace(path=Path("original"))))  # type: ignore[assignment]
    made.made, made.report = Path("output"), lambda stage, done, total: None
    return made


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_the_cost_is_measured_where_blocks_were_compressed(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(ops, "store", lambda device, dtype: f"a store of {device}")
    monkeypatch.setattr(sources, "load", lambda *how: loaded.append(how))
    monkeypatch.setattr(pipeline, "measure", lambda *_, **__: SimpleNamespace(to_dict=lambda: {"kl_mean": 0.5}))
    assert measuring(device).measure([1, 2], SimpleNamespace(added_bos=None)) == {"kl_mean": 0.5}  # type: ignore[arg-type]
    store = None if device == "cpu" else "a store of cuda"
    assert loaded == [(Path(name), dtype, None, store) for name in ("output", "original")]


def test_a_card_without_room_for_both_models_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ops, "store", lambda device, dtype: None)
    monkeypatch.setattr(sources, "load", full)
    with pytest.raises(ValueError, match=r"cuda has too little memory .* without --eval .*\(no room\)"):
        measuring("cuda").measure([1, 2], SimpleNamespace(added_bos=None))  # type: ignore[arg-type]
