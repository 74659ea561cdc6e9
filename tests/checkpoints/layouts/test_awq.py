"""AWQ: files packed by naive loops over AutoAWQ's gemm layout come back as the numbers that went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts.awq import Awq
from attar.formats.packed import PackedTensor
from attar.kernels import ref
from tests.errors import user_error

LOGITS = 1e-5  # of the logit range, float32 against float32
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_across(values: Tensor) -> Tensor:
    """Unsigned nibbles [R, C] to words [R, C / 8]: nibble i of a word holds column NIBBLES[i] of its eight."""
    rows, columns = values.shape
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for r in range(rows):
        for w in range(columns // 8):
            for i, column in enumerate(NIBBLES):
                words[r, w] |= int(values[r, 8 * w + column]) << (4 * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


class Layer:
    """Random codes, scales and zero points, as an AWQ module of `outputs` x `inputs` stores them."""

    def __init__(self, outputs: int, inputs: int, group: int = -1, *, sym: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = inputs if group == -1 else group
        codes = torch.randint(0, 16, (inputs, outputs), generator=generator)
        zero = torch.randint(0, 16, (inputs // size, outputs), generator=generator)
        if sym:
            zero.fill_(8)
        scales = (torch.rand(inputs // size, outputs, generator=generator) * 0.02 + 0.01).half()
        self.tensors = {"qweight": pack_across(codes), "qzeros": pack_across(zero), "scales": scales}
        group_of = torch.arange(inputs) // size
        self.weight = ((codes - zero[group_of]).double() * scales.double()[group_of]).t().float()  # [O, I]


def settings(group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}


def module(folder: Path, layer: Layer, tiny: Any) -> Folder:
    return Folder(tiny.write(folder, {f"m.{name}": tensor for name, tensor in layer.tensors.items()}))


def test_the_word_order_by_hand() -> None:
    """Columns 0 to 7 hold 0 to 7: nibbles from the lowest are 0, 2, 4, 6, 1, 3, 5, 7."""
    assert int(pack_across(torch.arange(8)[None])[0, 0]) == 0x75316420


@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("group", [32, 16, -1])
def test_weights_are_exact(group: int, sym: bool, tiny: Any, tmp_path: Path) -> None:
    layer = Layer(24, 96, group, sym=sym)
    reader = Awq(module(tmp_path, layer, tiny), settings(group))
    assert reader.holds("m")
    assert reader.shape("m") == (24, 96)
    linear = reader.read("m")
    assert isinstance(linear.weight, PackedTensor)
    assert linear.weight.scheme == reader.scheme_of("m")
    assert linear.weight.scheme.weight.symmetric == sym
    assert linear.permutation is None
    assert torch.equal(linear.weight.dequantize(torch.float32), layer.weight)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ref.linear(x, (linear,)), x @ layer.weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beside", [None, "quant_config.json", "quantize_config.json"])
def test_a_model_gives_the_logits_of_its_dense_twin(beside: str | None, tiny: Any, tmp_path: Path) -> None:
    """One linear is left dense, as modules_to_not_convert does."""
    tensors, kept = tiny.tensors, "model.layers.1.mlp.down_proj"
    for seed, (name, linear) in enumerate(tiny.linears.items()):
        if name == kept:
            continue
        layer = Layer(*linear.weight.shape, 32, seed=seed)
        linear.weight.data = layer.weight
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.tensors.items()}
    config = settings(32, modules_to_not_convert=[kept])
    folder = tiny.write(tmp_path / "awq", tensors, **{} if beside else {"quantization_config": config})
    if beside:
        older = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
        (folder / beside).write_text(json.dumps(older))
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": "gemv"}, "quantization_unsupported"),
        ({"version": "GEMV_FAST"}, "quantization_unsupported"),
        ({"bits": 8}, "quantization_unsupported"),
        ({"zero_point": False}, "quantization_unsupported"),
        ({"group_size": None}, "quantization_invalid"),
    ],
)
def test_what_is_not_read_is_refused(change: dict[str, Any], words: str, tiny: Any, tmp_path: Path) -> None:
    folder = module(tmp_path, Layer(24, 64, 32), tiny)
    with user_error(words):
        Awq(folder, settings(32) | change)


def test_the_names_of_autoawqs_own_config_are_read(tiny: Any, tmp_path: Path) -> None:
    folder = module(tmp_path, Layer(24, 64, 32), tiny)
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    assert Awq(folder, config).scheme_of("m").name == "w4g32-asym"


@pytest.mark.parametrize(
    "part, value, words",
    [
        ("scales", torch.ones(2, 23).half(), "quantization_invalid"),
        ("qzeros", torch.zeros(1, 3, dtype=torch.int32), "quantization_invalid"),
        ("qweight", torch.zeros(64, 3), "quantization_invalid"),
        ("qzeros", torch.zeros(2, 3), "quantization_invalid"),
    ],
)
def test_arrays_that_do_not_fit_are_named(part: str, value: Tensor, words: str, tiny: Any, tmp_path: Path) -> None:
    layer = Layer(24, 64, 32)
    layer.tensors[part] = value
    with user_error(words):
        Awq(module(tmp_path, layer, tiny), settings(32)).read("m")
