"""GPTQ: files packed by naive loops over the published layout come back as the numbers that went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts.gptq import Gptq
from attar.formats.packed import PackedTensor
from attar.kernels import ref
from tests.errors import user_error

LOGITS = 1e-5  # of the logit range, float32 against float32


def pack_down(values: Tensor, bits: int) -> Tensor:
    """Unsigned values [R, C] to words [R * bits / 32, C]: value r fills bits r*bits.. of its column's bit string."""
    rows, columns = values.shape
    words = [[0] * columns for _ in range(rows * bits // 32)]
    for c in range(columns):
        string = 0
        for r in range(rows):
            string |= int(values[r, c]) << (r * bits)
        for w in range(len(words)):
            word = (string >> (32 * w)) & 0xFFFFFFFF
            words[w][c] = word - (1 << 32) if word >= 1 << 31 else word
    return torch.tensor(words, dtype=torch.int32).reshape(-1, columns)


class Layer:
    """Random codes, scales, zero points and groups, as a GPTQ module of `outputs` x `inputs` stores them."""

    def __init__(
        self, outputs: int, inputs: int, bits: int, group: int = -1, *, sym: bool = False, shuffled: bool = False,
        minus: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        size = inputs if group == -1 else group
        groups, top = inputs // size, 1 << bits
        codes = torch.randint(0, top, (inputs, outputs), generator=generator)
        self.zero = torch.randint(0, top, (groups, outputs), generator=generator)
        if sym:
            self.zero.fill_(top // 2)
        else:  # both ends of the range: 0 minus one wraps around
            self.zero[0, :2] = torch.tensor([0, top - 1])
        self.scales = (torch.rand(groups, outputs, generator=generator) * 0.02 + 0.01).half()
        self.g_idx = torch.arange(inputs) // size
        if shuffled:
            self.g_idx = self.g_idx[torch.randperm(inputs, generator=generator)]
        self.tensors = {
            "qweight": pack_down(codes, bits),
            "qzeros": pack_down(((self.zero - minus) % top).t(), bits).t().contiguous(),
            "scales": self.scales,
            "g_idx": self.g_idx.int(),
        }
        # The published meaning, in float64: w[i, o] = (code - zero[g_idx[i], o]) * scale[g_idx[i], o].
        dense = (codes - self.zero[self.g_idx]).double() * self.scales.double()[self.g_idx]
        self.weight = dense.t().float()  # [O, I]


def settings(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **more}


def module(folder: Path, layer: Layer, tiny: Any) -> Folder:
    return Folder(tiny.write(folder, {f"m.{name}": tensor for name, tensor in layer.tensors.items()}))


def in_file_order(weight: Tensor, permutation: Tensor | None) -> Tensor:
    return weight if permutation is None else weight[:, permutation]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("bits, group", [(2, 16), (3, 32), (4, 32), (8, 32), (4, -1)])
def test_weights_are_exact(bits: int, group: int, shuffled: bool, version: str, tiny: Any, tmp_path: Path) -> None:
    layer = Layer(32, 96, bits, group, shuffled=shuffled, minus=1 if version == "gptq" else 0)
    reader = Gptq(module(tmp_path, layer, tiny), settings(bits, group, checkpoint_format=version))
    assert reader.holds("m")
    assert reader.shape("m") == (32, 96)
    linear = reader.read("m")
    assert isinstance(linear.weight, PackedTensor)
    assert linear.weight.scheme == reader.scheme_of("m")
    assert (linear.permutation is not None) == (shuffled and group != -1)
    assert torch.equal(linear.weight.dequantize(torch.float32), in_file_order(layer.weight, linear.permutation))
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ref.linear(x, (linear,)), x @ layer.weight.T, rtol=1e-5, atol=1e-5)


def test_version_1_zero_points_wrap(tiny: Any, tmp_path: Path) -> None:
    """A zero point of 0 is stored as 15, and comes back as 0 rather than 16."""
    layer = Layer(32, 64, 4, 32)
    assert int(layer.zero[0, 0]) == 0
    assert int(layer.tensors["qzeros"][0, 0]) & 15 == 15
    got = Gptq(module(tmp_path, layer, tiny), settings(4, 32)).read("m").weight
    assert isinstance(got, PackedTensor)
    assert torch.equal(got.dequantize(torch.float32)[0], layer.weight[0])


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_symmetric_ones_store_no_zero_points_any_more(version: str, tiny: Any, tmp_path: Path) -> None:
    layer = Layer(32, 64, 4, 32, sym=True, minus=1 if version == "gptq" else 0)
    got = Gptq(module(tmp_path, layer, tiny), settings(4, 32, sym=True, checkpoint_format=version)).read("m").weight
    assert isinstance(got, PackedTensor)
    assert got.scheme.name == "w4g32"
    assert torch.equal(got.dequantize(torch.float32), layer.weight)


def test_the_config_does_not_decide_the_order(tiny: Any, tmp_path: Path) -> None:
    """desc_act with groups in order needs no permutation; without g_idx there is none."""
    layer = Layer(32, 64, 4, 32)
    assert Gptq(module(tmp_path, layer, tiny), settings(4, 32, desc_act=True)).read("m").permutation is None
    del layer.tensors["g_idx"]
    assert Gptq(module(tmp_path, layer, tiny), settings(4, 32)).read("m").permutation is None


@pytest.mark.parametrize("beside", [None, "quantize_config.json", "quant_config.json"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_model_gives_the_logits_of_its_dense_twin(
    shuffled: bool, beside: str | None, tiny: Any, tmp_path: Path
) -> None:
    """Its settings stand in config.json or, as of 2023, in a file beside it."""
    tensors = tiny.tensors
    for seed, (name, linear) in enumerate(tiny.linears.items()):
        layer = Layer(*linear.weight.shape, 4, 32, shuffled=shuffled, seed=seed)
        linear.weight.data = layer.weight
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.tensors.items()}
    found = settings(4, 32, desc_act=shuffled)
    folder = tiny.write(tmp_path / "gptq", tensors, **{} if beside else {"quantization_config": found})
    if beside:
        older = {key: value for key, value in found.items() if key != "quant_method"}
        (folder / beside).write_text(json.dumps({**older, "damp_percent": 0.01, "model_file_base_name": None}))
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS


@pytest.mark.parametrize(
    "change, words",
    [
        ({"bits": 5}, "quantization_unsupported"),
        ({"checkpoint_format": "marlin"}, "quantization_unsupported"),
        ({"is_marlin_format": True}, "quantization_unsupported"),
        ({"group_size": 0}, "quantization_invalid"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "quantization_unsupported"),
    ],
)
def test_what_is_not_read_is_refused(change: dict[str, Any], words: str, tiny: Any, tmp_path: Path) -> None:
    folder = module(tmp_path, Layer(32, 64, 4, 32), tiny)
    with user_error(words):
        Gptq(folder, settings(4, 32) | change)


def test_modules_may_be_left_out_by_dynamic(tiny: Any, tmp_path: Path) -> None:
    folder = module(tmp_path, Layer(32, 64, 4, 32), tiny)
    assert Gptq(folder, settings(4, 32, dynamic={"-:.*lm_head.*": {}})).holds("m")


@pytest.mark.parametrize(
    "part, value, words",
    [
        ("scales", torch.ones(2, 31).half(), "quantization_invalid"),
        ("qzeros", torch.zeros(2, 5, dtype=torch.int32), "quantization_invalid"),
        ("qweight", torch.zeros(8, 32), "quantization_invalid"),
        ("g_idx", torch.zeros(64, dtype=torch.int32), "quantization_invalid"),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32), "quantization_invalid"),
        ("g_idx", torch.arange(64).int() // 32 + 1, "quantization_invalid"),
        ("g_idx", torch.full((64,), 2**31 - 1, dtype=torch.int32), "quantization_invalid"),
        ("g_idx", torch.full((64,), 1 << 62), "quantization_invalid"),
        ("scales", torch.ones(2, 32, dtype=torch.float64), "quantization_invalid"),
    ],
)
def test_arrays_that_do_not_fit_are_named(part: str, value: Tensor, words: str, tiny: Any, tmp_path: Path) -> None:
    layer = Layer(32, 64, 4, 32)
    layer.tensors[part] = value
    reader = Gptq(module(tmp_path, layer, tiny), settings(4, 32))
    with user_error(words):
        reader.read("m")
