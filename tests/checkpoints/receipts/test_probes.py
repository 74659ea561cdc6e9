"""Probes: their random numbers are fixed, a replay passes on the same weights in other company, dtype and kernels, and
damage is named where it is."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from attar.checkpoints.receipts import probes
from attar.checkpoints.receipts.probes import Probes
from attar.formats.packed import PackedTensor
from attar.kernels import dispatch
from attar.kernels.native.linear import PackedWeight
from attar.model.decoder import Decoder
from tests.checkpoints.conftest import make_probes
from tests.errors import user_error

Make = Callable[..., Decoder]
LAYERS = 3
SAME_KERNELS = 2e-6  # of a hidden state: attention with a cache sums in another order than without
FORMS = get_args(dispatch.Activations)


def module(decoder: Decoder, layer: int, name: str) -> str:
    return f"{decoder.config.names.layer.format(i=layer)}.{name}"


def test_random_numbers_are_fixed_for_good(tiny_decoder: Make) -> None:
    """They must be those of every earlier and later version: receipts hold what was made of them."""
    assert probes.prompts(tiny_decoder(0).config, 0)[0, :6].tolist() == [1, 23, 10, 54, 48, 26]
    assert probes._signs(probes._SIGNS, 0, 2, 8).tolist() == [[-1, 1, 1, -1, 1, 1, 1, -1], [1, -1, -1, -1, 1, -1, 1, 1]]
    assert abs(probes._signs(probes._SIGNS, 5, 16, 4096).mean().item()) < 0.01


def test_a_projection_keeps_the_norm_on_average() -> None:
    hidden = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    kept = probes.project(1, hidden).square().mean() / hidden.square().mean()
    assert kept.item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("scheme", [None, "w4g32", "w8a8", "w8a8-atensor"])
def test_replay_on_the_same_machine(tiny_decoder: Make, scheme: str | None) -> None:
    made = make_probes(tiny_decoder(0, scheme=scheme), seed=7)
    assert json.loads(json.dumps(made, allow_nan=False)) == made == make_probes(tiny_decoder(0, scheme=scheme), seed=7)
    assert len(made["prompts"]) == 8
    assert {len(p["tokens"]) for p in made["prompts"]} == {16}
    assert {len(p["top"]) for p in made["prompts"]} == {8}
    assert all(len(p["layers"]) == LAYERS and len(p["layers"][0]) == 16 for p in made["prompts"])
    by_scheme = scheme is not None and "a8" in scheme
    assert (made["noise"]["exact"] is None) == by_scheme
    assert (made["noise"]["int8_activations"] is None) == (scheme is None)
    assert made["noise"]["cuda"] is None
    decoder, read = tiny_decoder(0, scheme=scheme), Probes.parse(made, "here")
    assert read.replay(decoder) is None
    path = "int8_activations" if by_scheme else "exact"
    assert probes.kernel_path(decoder) == path
    noise = read.noise[path]
    assert noise is not None
    if not by_scheme:
        for _, found in probes._differences(decoder, read.prompts[3], path, noise):
            assert found.difference < SAME_KERNELS
            assert found.allowed < 10 * SAME_KERNELS


@pytest.mark.parametrize("scheme", [None, "w4g32", "w8", "w8a8", "w8a8-atensor", "w4g16", "fp8"])
@pytest.mark.parametrize("seed", range(3))
def test_replay_on_native_kernels(tiny_decoder: Make, scheme: str | None, seed: int) -> None:
    """Whatever the native kernels do to rows, the floor that was measured with the coarsest form allows it."""
    read = Probes.parse(make_probes(tiny_decoder(seed, scheme=scheme), seed), "here")
    by_scheme = scheme is not None and ("a8" in scheme or scheme == "fp8")
    for form in FORMS:
        native = tiny_decoder(seed, scheme=scheme, store=dispatch.store(form))
        by_kernels = scheme in ("w4g32", "w8", "w4g16") and form != "exact"
        assert probes.kernel_path(native) == ("int8_activations" if by_scheme or by_kernels else "exact"), form
        assert read.replay(native) is None, form
        with probes.unrounded(native):
            assert probes.kernel_path(native) == ("int8_activations" if by_scheme else "exact"), form
            assert read.replay(native) is None, form
        weight = native.blocks[0].attention.output.weight
        assert isinstance(weight, PackedTensor if scheme == "w8a8-atensor" else PackedWeight)
        assert read.replay(native) is None, form


def test_the_floor_of_rounded_rows_is_what_rounding_does(tiny_decoder: Make) -> None:
    """Measured on a stream that is rounded from the first block on, and the same to the bit as a replay's."""
    decoder = tiny_decoder(0, scheme="w4g32")
    made = make_probes(decoder, 0)
    assert make_probes(decoder, 0) == made, "making probes leaves the decoder as it was"
    read = Probes.parse(made, "here")
    noise = read.noise["int8_activations"]
    assert noise is not None
    native = tiny_decoder(0, scheme="w4g32", store=dispatch.store(probes.COARSEST))
    found = [[d.difference for _, d in probes._differences(native, p, "int8_activations", noise)] for p in read.prompts]
    largest = [max(some) for some in zip(*found, strict=True)]
    assert largest == pytest.approx([*noise.layers, noise.head], rel=0.25)
    assert max(noise.layers) < 0.1


def test_the_native_copy_of_a_block_goes_with_it(tiny_decoder: Make) -> None:
    """Compression holds one block: nothing of a measured one may stay, not even until a collector runs."""
    decoder = tiny_decoder(0, scheme="w4g32")
    run = probes.ProbeRun(decoder.config, 0)
    assert run.ids.shape == (24, 16)
    block = copy.deepcopy(decoder.blocks[0])
    run.run(0, block, torch.randn(24 * 16, 64, generator=torch.Generator().manual_seed(0)))
    weights = [weakref.ref(linear.weight) for linear in block.linears()]
    assert all(isinstance(weight(), PackedWeight) for weight in weights)
    del block
    assert all(weight() is None for weight in weights)


def test_without_native_kernels_rounded_rows_have_no_floor(tiny_decoder: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "store", lambda form="int8": None)
    made = make_probes(tiny_decoder(0, scheme="w4g32"), 0)
    by_scheme = make_probes(tiny_decoder(0, scheme="w8a8"), 0)
    monkeypatch.undo()
    assert made["noise"]["exact"] == make_probes(tiny_decoder(0, scheme="w4g32"), 0)["noise"]["exact"]
    assert made["noise"]["int8_activations"] is None
    assert by_scheme["noise"]["int8_activations"] is not None
    read, native = Probes.parse(made, "here"), tiny_decoder(0, scheme="w4g32", store=dispatch.store())
    with user_error("device_unsupported"):
        read.replay(native)
    with probes.unrounded(native):
        assert read.replay(native) is None


def flip_a_scale(parts: dict[str, torch.Tensor]) -> None:
    parts["scale"].view(-1)[3] *= -1


def flip_all_scales(parts: dict[str, torch.Tensor]) -> None:
    parts["scale"].neg_()


def shift_codes(parts: dict[str, torch.Tensor]) -> None:
    parts["codes"].copy_(parts["codes"].roll(1))


def wrong_zeros(parts: dict[str, torch.Tensor]) -> None:
    """Every zero point one too high, as in GPTQ checkpoints of version 1 read as version 2."""
    parts["zero"].add_(0x11111111)  # eight of 4 bits in a word


@pytest.mark.parametrize("form", ["exact", "int8"])
@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.down_proj"])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(
    "damage, scheme, gross",
    [
        (flip_a_scale, "w4g32", False),
        (flip_all_scales, "w4g32", True),
        (shift_codes, "w4g32", True),
        (wrong_zeros, "w4g32-asym", True),
    ],
)
def test_damaged_native_weights_are_found(
    tiny_decoder: Make,
    damage: Callable[[dict[str, torch.Tensor]], None],
    scheme: str,
    gross: bool,
    name: str,
    layer: int,
    form: str,
) -> None:
    """On exact rows anything, by one probe, in its block; on rounded ones what exceeds the rounding, by all."""
    good = tiny_decoder(0, scheme=scheme)
    read = Probes.parse(make_probes(good, 0), "here")
    for linear in good.blocks[layer].linears():
        if linear.name == module(good, layer, name):
            assert isinstance(linear.weight, PackedTensor)
            damage(linear.weight.parts)  # type: ignore[arg-type]
    store = dispatch.store(form)
    assert store is not None
    for linear in (linear for block in good.blocks for linear in block.linears()):
        store.take(linear)
    if form != "exact" and gross:
        assert probes.kernel_path(good) == "int8_activations"
        assert read.replay(good) is not None
    with probes.unrounded(good):
        found = read.replay(good, 1)
    assert found is not None
    assert found.where == f"model.layers.{layer}"
    assert found.difference > 10 * found.allowed


def test_the_largest_logits_are_those_of_the_last_position(tiny_decoder: Make) -> None:
    from attar.model.cache import ForwardBatch

    decoder = tiny_decoder(0)
    for probe in make_probes(decoder, 0)["prompts"]:
        last = decoder.forward(torch.tensor(probe["tokens"]), ForwardBatch((16,), 16))[-1].topk(8)
        assert [i for i, _ in probe["top"]] == last.indices.tolist()
        assert [x for _, x in probe["top"]] == pytest.approx(last.values.tolist(), rel=1e-4)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("name", ["self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"])
@pytest.mark.parametrize("count", [1, None])
def test_a_scaled_weight_is_found_in_its_layer(tiny_decoder: Make, layer: int, name: str, count: int | None) -> None:
    good = tiny_decoder(0, scheme="w4g32")
    read = Probes.parse(make_probes(good, 0), "here")
    for linear in good.blocks[layer].linears():
        if linear.name == module(good, layer, name):
            linear.dense = 1.1 * linear.weight.dequantize()  # type: ignore[union-attr]
    found = read.replay(good, count)
    assert found is not None
    assert found.where == f"model.layers.{layer}"
    assert found.difference > 10 * found.allowed


def test_one_scaled_element_is_found(tiny_decoder: Make) -> None:
    decoder = tiny_decoder(0)
    read = Probes.parse(make_probes(decoder, 0), "here")
    weight = decoder.blocks[1].attention.output.weight
    assert isinstance(weight, torch.Tensor)
    weight.view(-1)[weight.abs().argmax()] *= 1.1
    found = read.replay(decoder)
    assert found is not None
    assert found.where == "model.layers.1"


def test_damage_behind_the_blocks_is_named(tiny_decoder: Make) -> None:
    decoder = tiny_decoder(0)
    read = Probes.parse(make_probes(decoder, 0), "here")
    decoder.final_norm.weight[::2] *= 1.1
    found = read.replay(decoder)
    assert found is not None
    assert found.where == "lm_head"
    decoder.final_norm.weight[0] = torch.nan
    assert read.replay(decoder) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replay_in_half_precision(tiny_decoder: Make, dtype: torch.dtype) -> None:
    whole = tiny_decoder(0)
    read = Probes.parse(make_probes(whole, 0), "here")
    half = cast(whole, dtype)
    assert half.dtype == dtype
    assert read.replay(half) is None
    half.blocks[1].attention.output.weight *= -1  # type: ignore[operator, assignment]
    found = read.replay(half)
    assert found is not None
    assert found.where == "model.layers.1"


def cast(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    decoder = copy.deepcopy(decoder)
    decoder.embedding.table = decoder.head.weight = decoder.embedding.table.to(dtype)  # type: ignore[union-attr]
    decoder.embedding.dtype = dtype
    norms = [decoder.final_norm]
    for block in decoder.blocks:
        norms += [block.attention_norm, block.feed_forward_norm]
        for linear in block.linears():
            linear.weight = linear.weight.to(dtype)  # type: ignore[union-attr]
    for norm in norms:
        norm.weight = norm.weight.to(dtype)
    return decoder


def test_rounding_noise_is_measured(tiny_decoder: Make) -> None:
    """Where schemes decide, the floor is what a shaken copy shows: last places, or, if rounded, far more."""
    exact = make_probes(tiny_decoder(0), 0)["noise"]["exact"]
    rounded = make_probes(tiny_decoder(0, scheme="w8a8"), 0)["noise"]["int8_activations"]
    assert all(1e-7 < level < 1e-5 for level in exact["layers"])
    assert 1e-7 < exact["head"] < 1e-5
    assert 1e-4 < max(rounded["layers"]) < 0.3


def test_nan_is_named_when_probes_are_made(tiny_decoder: Make) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with user_error("not_finite", "model.layers.1"):
        make_probes(tiny_decoder(0, tensors={name: torch.full((64, 128), torch.nan)}), 0)


def test_probes_of_another_model_are_refused(tiny_decoder: Make) -> None:
    read = Probes.parse(make_probes(tiny_decoder(0), 0), "here")
    with user_error("receipt_invalid"):
        read.replay(tiny_decoder(0, layers=2))
    with user_error("receipt_invalid"):
        read.replay(tiny_decoder(0, vocab=20))
    with user_error("device_unsupported"):
        read.replay(tiny_decoder(0, scheme="w8a8"))


def test_damaged_probes_are_refused(tiny_decoder: Make) -> None:
    made = make_probes(tiny_decoder(0, layers=1), 0)

    def spoil(change: Callable[[Any], object]) -> Any:
        copied = copy.deepcopy(made)
        change(copied)
        return copied

    for bad in (
        None,
        {},
        [],
        {"prompts": [], "noise": {}},
        spoil(lambda p: p["prompts"][0].pop("top")),
        spoil(lambda p: p["prompts"][0].update(tokens=[-1])),
        spoil(lambda p: p["prompts"][0].update(tokens=[1.5])),
        spoil(lambda p: p["prompts"][0].update(tokens=[True])),
        spoil(lambda p: p["prompts"][0].update(top=[[1, "2"]])),
        spoil(lambda p: p["prompts"][0].update(top=[])),
        spoil(lambda p: p["prompts"][0]["layers"].append([0.0] * 16)),
        spoil(lambda p: p["prompts"][0]["layers"][0].pop()),
        spoil(lambda p: p["noise"]["exact"]["layers"].append(0.0)),
        spoil(lambda p: p.update(noise=7)),
    ):
        with user_error("receipt_invalid"):
            Probes.parse(bad, "here")
