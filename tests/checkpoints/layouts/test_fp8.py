"""Checkpoints of quant_method "fp8", as DeepSeek publishes them: read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from attar.checkpoints.sources import hf
from attar.formats.codecs import fp8_blocks
from attar.formats.packed import PackedTensor
from attar.kernels import dispatch, ref
from attar.model.cache import ForwardBatch
from tests.errors import user_error

SETTINGS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
WIDTH = 256
BFLOAT16 = 2**-8  # relative: theirs dequantize to bfloat16


def write(folder: Path, settings: dict[str, Any], **changed: Tensor) -> dict[str, Tensor]:
    config = LlamaConfig(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, tensor in LlamaForCausalLM(config).state_dict().items():
        if "proj" not in name:
            tensors[name] = tensor.bfloat16()
            continue
        scale = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) / 100
        tensors[name] = (10 * torch.randn(tensor.shape)).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    tensors |= {name: value for name, value in changed.items() if value is not None}
    save_file(tensors, folder / "model.safetensors")
    about = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(about))
    return tensors


def test_weights_are_theirs(tmp_path: Path) -> None:
    write(tmp_path, SETTINGS)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    checkpoint = hf.Checkpoint.open(tmp_path)
    found = 0
    for name, module in theirs.named_modules():
        if "proj" not in name:
            continue
        found += 1
        linear = checkpoint.linear(name)
        assert isinstance(linear.weight, PackedTensor)
        assert linear.weight.scheme.name == checkpoint.scheme_of(name).name == "fp8-block"  # type: ignore[union-attr]
        torch.testing.assert_close(linear.weight.dequantize(), module.weight.float(), rtol=BFLOAT16, atol=0)
    assert found == 7
    assert checkpoint.scheme_of("lm_head") is None


def test_inputs_are_rounded_in_groups(tmp_path: Path) -> None:
    write(tmp_path, SETTINGS)
    linear = hf.Checkpoint.open(tmp_path).linear("model.layers.0.mlp.up_proj")
    assert isinstance(linear.weight, PackedTensor)
    x = torch.randn(4, WIDTH)
    groups = x.view(4, 2, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    rounded = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view(4, WIDTH)
    torch.testing.assert_close(ref.linear(x, [linear]), rounded @ linear.weight.dequantize().T)


@pytest.mark.parametrize("width", [160, 136])
def test_the_last_block_may_be_smaller(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file, in the reference, in the native kernels and from our own rounding."""
    monkeypatch.setattr("tests.checkpoints.layouts.test_fp8.WIDTH", width)
    write(tmp_path, SETTINGS)
    linear = hf.Checkpoint.open(tmp_path).linear("model.layers.0.mlp.up_proj")
    assert isinstance(linear.weight, PackedTensor)
    x = torch.randn(4, width)
    rounded = torch.empty_like(x)
    for at in (slice(0, 128), slice(128, width)):
        scale = x[:, at].abs().amax(-1, keepdim=True) / 448
        rounded[:, at] = (x[:, at] / scale).to(torch.float8_e4m3fn).float() * scale
    expected = rounded @ linear.weight.dequantize().T
    torch.testing.assert_close(ref.linear(x, [linear]), expected)
    again = fp8_blocks.quantize(linear.weight.dequantize(), linear.weight.scheme)
    torch.testing.assert_close(again.dequantize(), linear.weight.dequantize(), rtol=0.1, atol=1e-3)
    again.scheme.check(width)
    if (store := dispatch.store("exact")) is not None:
        ids = torch.arange(9)
        native, plain = (hf.load(tmp_path, torch.float32, store=each) for each in (store, None))
        step = ForwardBatch((len(ids),), len(ids))
        torch.testing.assert_close(native.forward(ids, step), plain.forward(ids, step), rtol=1e-3, atol=1e-3)


BY_TENSOR = {"quant_method": "fp8", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]}


def by_tensor(folder: Path, settings: dict[str, Any], scale: str, input_scale: str | None = None) -> dict[str, Tensor]:
    """With one scale for each matrix, and for its inputs where `input_scale` says under which name."""
    tensors = write(folder, settings)
    for i, name in enumerate([each for each in tensors if each.endswith("_scale_inv")]):
        module = name.removesuffix(".weight_scale_inv")
        tensors[f"{module}.{scale}"] = tensors.pop(name).flatten()[:1].reshape(()) + 0.01
        if input_scale is not None:
            tensors[f"{module}.{input_scale}"] = torch.tensor(0.004 + 0.001 * i)
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_one_scale_for_a_tensor_is_read_as_they_do(scheme: str, tmp_path: Path) -> None:
    settings = BY_TENSOR | {"activation_scheme": scheme}
    by_tensor(tmp_path, settings, "weight_scale_inv", "activation_scale" if scheme == "static" else None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    checkpoint = hf.Checkpoint.open(tmp_path)
    for name in ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj"):
        linear = checkpoint.linear(name)
        assert isinstance(linear.weight, PackedTensor)
        wanted = theirs.get_submodule(name).weight.float()
        torch.testing.assert_close(linear.weight.dequantize(), wanted, rtol=2 * BFLOAT16, atol=0)
        assert linear.weight.scheme.name == ("fp8-tensor-static" if scheme == "static" else "fp8-tensor")


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_the_names_of_autofp8_are_read(scheme: str, tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
    stored = by_tensor(tmp_path, settings, "weight_scale", "input_scale" if scheme == "static" else None)
    name = "model.layers.0.mlp.up_proj"
    linear = hf.Checkpoint.open(tmp_path).linear(name)
    weight = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    scale = stored[f"{name}.input_scale"] if scheme == "static" else x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(ref.linear(x, [linear]), rounded @ weight.T)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("weight_scale", torch.ones(2, 2), "quantization_invalid"),
        ("input_scale", torch.tensor(0.0), "quantization_invalid"),
        ("input_scale", None, "checkpoint_incomplete"),
    ],
)
def test_scales_of_tensors_that_do_not_fit(name: str, value: Tensor | None, words: str, tmp_path: Path) -> None:
    module = "model.layers.0.mlp.up_proj"
    stored = by_tensor(tmp_path, BY_TENSOR | {"activation_scheme": "static"}, "weight_scale", "input_scale")
    stored.pop(f"{module}.{name}")
    save_file(stored if value is None else stored | {f"{module}.{name}": value}, tmp_path / "model.safetensors")
    with user_error(words):
        hf.Checkpoint.open(tmp_path).linear(module)


@pytest.mark.parametrize(
    "key, value",
    [("weight_block_size", [64, 64]), ("activation_scheme", "static"), ("activation_scheme", "both"), ("fmt", "e5m2"),
     ("scale_fmt", "ue8m0"), ("expert_dtype", "fp4")],
)  # fmt: skip
def test_settings_that_are_not_read(key: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, SETTINGS | {key: value})
    with user_error("quantization_unsupported"):
        hf.Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("weight_scale_inv", torch.ones(3, 2), "part 'scale' of fp8-block"),
        ("weight_scale_inv", torch.ones(2, 2, dtype=torch.float64), "scales are .* not float64"),
        ("weight", torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16), "part 'codes' of fp8-block"),
    ],
)
def test_tensors_that_do_not_fit(name: str, value: Tensor, words: str, tmp_path: Path) -> None:
    module = "model.layers.0.mlp.up_proj"
    write(tmp_path, SETTINGS, **{f"{module}.{name}": value})
    with user_error("quantization_invalid"):
        hf.Checkpoint.open(tmp_path).linear(module)
