"""Dense folders: the values of every format that is read, in one dtype, and what is refused on the way."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.checkpoints.convert.proof import proof
from attar.checkpoints.convert.run import convert
from attar.checkpoints.receipts.receipt import known, read_receipt
from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.writer import ShardWriter
from attar.compression.runs.pipeline import compress
from attar.formats.packed import PackedTensor
from attar.model.cache import ForwardBatch
from tests.errors import user_error
from tests.model.random_model import LLAMA
from tests.model.random_model import write as random_model

IDS = torch.arange(24) * 11 % 120
NEAR = 1e-5  # relative to the largest logit: transformers sums in another order
WIDE = {
    **LLAMA,
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
}


def logits(path: Path) -> Tensor:
    return opening.load(path, torch.float32).forward(IDS, ForwardBatch((len(IDS),), len(IDS)))


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def close_to_theirs(folder: Path) -> None:
    """Compare with transformers, which finds every tensor in the folder and none that it does not want."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = model.eval()(IDS[None]).logits[0]
    ours = logits(folder)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=NEAR * float(theirs.abs().max()))


@pytest.mark.parametrize("scheme", ["w4g32", "w3g64-asym", "w8", "nf4", "fp8-weight", "mxfp4-weight", "lut4", "q6_k"])
def test_a_dense_folder_computes_what_the_compressed_one_does(scheme: str, tmp_path: Path) -> None:
    wide = {**WIDE, "hidden_size": 256} if scheme == "q6_k" else WIDE
    source = random_model(tmp_path / "source", wide, scheme)
    made = convert(source, tmp_path / "out", to="dense", dtype="float32")
    assert (made.packed, made.rounded, made.dtype) == (14, 0, "float32")
    assert f"{made.tensors} are exact" in next(proof(made))
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    assert "quantization_config" not in config(tmp_path / "out")
    assert config(tmp_path / "out")["dtype"] == "float32"


@pytest.mark.parametrize("scheme", ["w8a8", "nvfp4", "fp8"])
def test_rounded_inputs_are_no_part_of_a_weight(scheme: str, tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", WIDE, scheme)
    convert(source, tmp_path / "out", to="dense", dtype="float32")
    ours, theirs = (hf.Checkpoint.open(tmp_path / name, torch.float32) for name in ("out", "source"))
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        weight = theirs.linear(name).weight
        assert isinstance(weight, PackedTensor)
        assert torch.equal(ours.matrix(f"{name}.weight"), weight.dequantize())


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model in float16, with files beside its weights, of which one speaks of weights that are compressed."""
    folder = random_model(tmp_path_factory.mktemp("models") / "half", {**WIDE, "tie_word_embeddings": True})
    tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config(folder), "torch_dtype": "float16"}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize("to", ["awq", "gptq", "compressed-tensors"])
def test_formats_of_libraries(to: str, half: Path, tmp_path: Path) -> None:
    """The dtype is the source's, the table stays one, and what is not a weight goes along."""
    source = compress(half, tmp_path / "ct", recipe="rtn-w4g32").path
    if to != "compressed-tensors":
        source = convert(source, tmp_path / to, to=to).path
    out = convert(source, tmp_path / "out", to="dense").path
    tensors = load_file(out / "model.safetensors")
    assert tensors.keys() == load_file(half / "model.safetensors").keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert config(out) == config(half)
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (half / name).read_bytes()
    checkpoint = hf.Checkpoint.open(source)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        weight = checkpoint.linear(name).weight
        assert isinstance(weight, PackedTensor)
        assert torch.equal(tensors[f"{name}.weight"], weight.dequantize().half())
    close_to_theirs(out)


def test_a_packed_table_becomes_one_table(half: Path, tmp_path: Path) -> None:
    source = compress(half, tmp_path / "in", recipe="rtn-w8", head="int8").path
    out = convert(source, tmp_path / "out", to="dense").path
    assert load_file(out / "model.safetensors").keys() == load_file(half / "model.safetensors").keys()
    assert config(out)["tie_word_embeddings"] is True
    close_to_theirs(out)


def test_rotations_are_undone(tmp_path: Path) -> None:
    """Of inputs, at run time: the other rotations are in the weights already."""
    source = random_model(tmp_path / "source", WIDE)
    rotated = compress(source, tmp_path / "in", recipe="quarot+rtn-w8").path
    assert "transform_config" in config(rotated)["quantization_config"]
    out = convert(rotated, tmp_path / "out", to="dense", dtype="float32").path
    torch.testing.assert_close(logits(out), logits(rotated), rtol=0, atol=1e-4)


def test_a_dense_folder_keeps_its_bytes(half: Path, tmp_path: Path) -> None:
    made = convert(half, tmp_path / "out", to="dense")
    assert (made.packed, made.rounded, made.dtype) == (0, 0, "float16")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", half))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == each.dtype and torch.equal(ours[name], each) for name, each in theirs.items())


def test_a_dtype_is_of_every_tensor_and_roundings_are_counted(half: Path, tmp_path: Path) -> None:
    made = convert(half, tmp_path / "out", to="dense", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert config(tmp_path / "out")["torch_dtype"] == "bfloat16"
    assert made.rounded == len(tensors) == made.to_dict()["rounded"]


def test_a_number_past_the_end_of_the_dtype_is_named(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", WIDE)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 1] = -7e4
    save_file(tensors, source / "model.safetensors")
    with user_error("not_finite", "model.layers.1.mlp.up_proj.weight", "70000", "65504", "float32 or bfloat16"):
        convert(source, tmp_path / "out", to="dense", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]  # nothing is left
    convert(source, tmp_path / "out", to="dense", dtype="bfloat16")


def test_the_receipt_says_what_it_was(half: Path, tmp_path: Path) -> None:
    source = convert(compress(half, tmp_path / "ct", recipe="rtn-w4g32").path, tmp_path / "awq", to="awq").path
    out = convert(source, tmp_path / "out", to="dense").path
    found = read_receipt(out)
    assert found is not None
    assert found.value["original"] == {"format": "awq", "schemes": {"w4g32": 14}, "receipts": known(source)}
    assert found.value["recipe"] == {"name": "dense", "dtype": "float16"}
    assert found.value["source"]["files"].keys() == {"config.json", "model.safetensors"}
    assert found.value["bits_per_weight"] == 16
    assert verify(out).ok


def test_there_must_be_room_and_nothing_is_begun_without(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    with user_error("disk_full", "GB are needed"):
        convert(half, tmp_path / "out", to="dense")
    assert not list(tmp_path.iterdir())


def test_a_half_written_folder_is_none(half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = ShardWriter.write, list[str]()

    def interrupted(self: ShardWriter, name: str, tensor: Tensor) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(name)
        write(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(half, tmp_path / "out", to="dense")
    assert not list(tmp_path.iterdir())


def test_modules_outside_the_decoder_are_not_left_as_codes(tmp_path: Path) -> None:
    """A vision tower, say: without its quantization config nothing could read it any more."""
    source = random_model(tmp_path / "source", WIDE, "w8")
    tensors = load_file(source / "model.safetensors")
    stem = "model.layers.0.mlp.up_proj."
    tensors |= {f"vision.{name.removeprefix(stem)}": t.clone() for name, t in tensors.items() if name.startswith(stem)}
    save_file(tensors, source / "model.safetensors")
    with user_error("quantization_unsupported", "vision"):
        convert(source, tmp_path / "out", to="dense")


def test_the_dtype_is_one_of_a_dense_output(half: Path, tmp_path: Path) -> None:
    with user_error("option_unused", "--to dense"):
        convert(half, tmp_path / "out", to="awq", dtype="float16")
    with user_error("name_unknown", "float16"):
        convert(half, tmp_path / "out", to="dense", dtype="flaot16")
    with user_error("output_invalid"):
        convert(half, tmp_path / "out.gguf", to="dense")
