"""Every form of weights through the whole of `compress`: stored is what its codec gives, counted to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import attar
from attar.checkpoints.inspect import inspect
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources import hf
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from tests.errors import user_error

HIDDEN, VOCAB = 256, 64

FOLDERS = {
    "fp8-block": "compressed-tensors",
    "nvfp4": "compressed-tensors",
    "mxfp4": "compressed-tensors",
    "nf4": "bitsandbytes",
    "llm-int8": "bitsandbytes",
    "lut3-s45": "attar",
    "q4_0": "attar",
    "iq4_nl": "attar",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of a random Llama whose rows every form can hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    tensors = {n: t.bfloat16() for n, t in LlamaForCausalLM(config).state_dict().items() if n != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_rounded_to_nearest(name: str, source: Path, tmp_path: Path) -> None:
    scheme = Scheme.parse(name).with_scale_dtype("bfloat16")
    calibration = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1)).tolist()
    made = attar.compress(
        source, tmp_path / "out", recipe=f"rtn-{name}", calibration=calibration if scheme.static else None
    )
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == FOLDERS[name]
    before, after = hf.Checkpoint.open(source), hf.Checkpoint.open(tmp_path / "out")
    for module in ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"):
        weight = after.linear(module).weight
        assert isinstance(weight, PackedTensor)
        assert weight.scheme.name == name
        dense = before.linear(module).weight
        assert isinstance(dense, torch.Tensor)
        expected = codec(scheme.weight.kind).quantize(dense, scheme)
        assert weight.dequantize().equal(expected.dequantize())
        assert weight.bits_per_weight == scheme.bits_per_weight(weight.shape)
    looked = inspect(tmp_path / "out")
    assert looked.schemes == {name: 7}
    fixed = 7 * 32 / sum(shape[0] * shape[1] for shape in map(after.linear_shape, modules())) if scheme.static else 0
    assert looked.bits_per_weight == pytest.approx(made.bits_per_weight + fixed)
    verdict = receipt.verify(tmp_path / "out", hf.load(tmp_path / "out", torch.float32))
    assert verdict.ok, verdict.sentence


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_fused_linears_share_nvfp4s_number(method: str, source: Path, tmp_path: Path) -> None:
    """vLLM makes one matrix of q, k and v, and of gate and up, and takes one number for it."""
    calibration = torch.randint(0, VOCAB, (8, 32), generator=torch.Generator().manual_seed(1)).tolist()
    attar.compress(source, tmp_path / "out", recipe=f"{method}-nvfp4-weight", calibration=calibration)
    made, before = hf.Checkpoint.open(tmp_path / "out"), hf.Checkpoint.open(source)
    attention, mlp = modules()[:3], modules()[4:6]
    for fused in (attention, mlp):
        largest = max(float(before.tensor(f"{module}.weight").abs().max()) for module in fused)
        for module in fused:
            weight = made.linear(module).weight
            assert isinstance(weight, PackedTensor)
            assert float(weight.parts["global"]) == pytest.approx(448 * 6 / largest)


def modules() -> list[str]:
    at = "model.layers.0"
    attention = [f"{at}.self_attn.{each}_proj" for each in "qkvo"]
    return attention + [f"{at}.mlp.{each}_proj" for each in ("gate", "up", "down")]


@pytest.mark.parametrize("name", ["mxfp4-weight", "q4_0", "lut4"])
def test_an_output_matrix_in_a_form_of_rows(name: str, source: Path, tmp_path: Path) -> None:
    attar.compress(source, tmp_path / "out", recipe="rtn-w8", head=name)
    weight = hf.Checkpoint.open(tmp_path / "out").linear("lm_head").weight
    assert isinstance(weight, PackedTensor)
    scheme = Scheme.parse(name).with_scale_dtype("bfloat16")
    table = hf.Checkpoint.open(source).tensor("model.embed_tokens.weight")
    assert isinstance(table, torch.Tensor)
    assert weight.dequantize().equal(codec(scheme.weight.kind).quantize(table, scheme).dequantize())


@pytest.mark.parametrize("name", ["nf4", "nvfp4-weight", "lut4-s5", "fp8-block-weight", "llm-int8-weight"])
def test_forms_that_rows_share_are_not_for_the_output_matrix(name: str, source: Path, tmp_path: Path) -> None:
    with user_error("scheme_unsupported"):
        attar.compress(source, tmp_path / "out", recipe="rtn-w8", head=name)
