"""bitsandbytes: what is written is read back, also by transformers where that is installed; what is not is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts import bitsandbytes
from attar.checkpoints.layouts.bitsandbytes import BitsAndBytes
from attar.checkpoints.layouts.export_layouts import declared, parts_of
from attar.checkpoints.sources import hf
from attar.formats.codecs import nf4
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Part, Scheme
from tests.errors import user_error

THEIR_WEIGHTS = 1e-6  # relative: their constant 1/127 has seven digits
THEIR_LOGITS = {
    "nf4": 1e-2,
    "nf4-single": 1e-2,
    "llm-int8": 5e-2,
}  # of the range; theirs compute in bfloat16, and activations in float16


def write(tiny: Any, folder: Path, name: str, **config: Any) -> tuple[Path, dict[str, PackedTensor]]:
    scheme = Scheme.parse(name).with_scale_dtype("bfloat16")
    tensors, stored, packed = tiny.tensors, {}, {}
    for module in tiny.linears:
        weight = tensors[f"{module}.weight"]
        if weight.shape[1] % 64:
            continue
        del tensors[f"{module}.weight"]
        packed[module] = codec(scheme.weight.kind).quantize(weight, scheme)
        parts = parts_of(bitsandbytes, module, packed[module])
        found = {key: Part(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in parts.items()}
        assert found == declared(bitsandbytes, module, scheme, packed[module].shape)
        stored |= parts
    ignored = ["lm_head", *(module for module in tiny.linears if module not in packed)]
    settings = bitsandbytes.quantization_config({m: p.scheme for m, p in packed.items()}, ignored) | config
    return tiny.write(folder, {**tensors, **stored}, quantization_config=settings), packed


@pytest.mark.parametrize("name", ["nf4", "nf4-single", "llm-int8"])
def test_round_trip(name: str, tiny: Any, tmp_path: Path) -> None:
    folder, packed = write(tiny, tmp_path / "ours", name)
    checkpoint = hf.Checkpoint.open(folder)
    assert packed
    for module, written in packed.items():
        weight = checkpoint.linear(module).weight
        assert isinstance(weight, PackedTensor)
        assert weight.scheme.name == checkpoint.scheme_of(module).name == name  # type: ignore[union-attr]
        assert all(weight.parts[part].equal(tensor) for part, tensor in written.parts.items())
    assert tiny.our_logits(folder).isfinite().all()


@pytest.mark.parametrize("name", ["nf4", "nf4-single", "llm-int8"])
def test_transformers_loads_them(name: str, tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
    from transformers import AutoModelForCausalLM

    folder, packed = write(tiny, tmp_path / "ours", name)
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for module, ours in packed.items():
        weight = theirs.get_submodule(module).weight
        if name != "llm-int8":
            state = weight.quant_state
            state.dtype = torch.float32
            dense = dequantize_4bit(weight.data, state)
        else:
            dense = int8_vectorwise_dequant(weight.data, weight.SCB)
        torch.testing.assert_close(ours.dequantize(), dense, rtol=THEIR_WEIGHTS, atol=1e-7)
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits(theirs.eval())) <= THEIR_LOGITS[name]


def test_states_of_any_length_are_read(tiny: Any, tmp_path: Path) -> None:
    """Theirs are as long as their digits, and their compute dtype is their own."""
    folder, packed = write(tiny, tmp_path / "ours", "nf4")
    tensors = read(folder)
    for module, ours in packed.items():
        said = nf4.read_state(ours.parts["state"]) | {"dtype": "float16"}
        line = json.dumps(said).encode()
        tensors[f"{module}.{bitsandbytes.STATE}"] = torch.tensor(list(line), dtype=torch.uint8)
    config = hf.Checkpoint.open(folder).folder.config["quantization_config"]
    checkpoint = hf.Checkpoint.open(tiny.write(folder, tensors, quantization_config=config))
    for module, ours in packed.items():
        weight = checkpoint.linear(module).weight
        assert isinstance(weight, PackedTensor)
        assert weight.scheme.scale_dtype == "float16"
        assert weight.dequantize().equal(ours.dequantize())


def read(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "name, changed, words",
    [
        ("nf4", {"load_in_8bit": True}, "quantization_invalid"),
        ("nf4", {"load_in_4bit": "yes"}, "quantization_invalid"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "quantization_unsupported"),
        ("llm-int8", {"llm_int8_threshold": 0.0}, "quantization_unsupported"),
    ],
)
def test_configs_that_are_not_read(name: str, changed: dict[str, Any], words: str, tiny: Any, tmp_path: Path) -> None:
    folder, _ = write(tiny, tmp_path / "ours", name, **changed)
    with user_error(words):
        hf.Checkpoint.open(folder)


def state(**changed: Any) -> Tensor:
    said = nf4.read_state(nf4.state((64, 64), Scheme.parse("nf4"), 0.25)) | changed
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "part, value, words",
    [
        (bitsandbytes.STATE, state(shape=[64]), "quantization_invalid"),
        (bitsandbytes.STATE, state(shape=[-64, -64]), "quantization_invalid"),
        (bitsandbytes.STATE, state(shape=[1 << 40, 64]), "quantization_invalid"),
        (bitsandbytes.STATE, state(shape=[64, 96]), "quantization_invalid"),
        (bitsandbytes.STATE, state(dtype="int3"), "quantization_invalid"),
        (bitsandbytes.STATE, state(blocksize=128), "quantization_invalid"),
        (bitsandbytes.STATE, torch.zeros(5000, dtype=torch.uint8), "quantization_invalid"),
        (bitsandbytes.STATE, torch.zeros(8), "quantization_invalid"),
        ("weight.absmax", torch.zeros(64), "quantization_invalid"),
        ("weight", torch.zeros((64, 32), dtype=torch.uint8), "quantization_invalid"),
        ("weight_format", torch.tensor(1, dtype=torch.uint8), "quantization_unsupported"),
        ("SCB", torch.zeros(63), "quantization_invalid"),
    ],
)
def test_tensors_that_do_not_fit(part: str, value: Tensor, words: str, tiny: Any, tmp_path: Path) -> None:
    scheme = Scheme.parse("llm-int8" if part in ("weight_format", "SCB") else "nf4")
    packed = codec(scheme.weight.kind).quantize(torch.randn(64, 64), scheme)
    tensors = parts_of(bitsandbytes, "m", packed) | {f"m.{part}": value}
    reader = BitsAndBytes(Folder(tiny.write(tmp_path, tensors)), bitsandbytes.quantization_config({"m": scheme}, []))
    with user_error(words):
        reader.read("m")
