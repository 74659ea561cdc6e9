"""Our own storage and the choice of a library: what is written is read back, and what does not fit is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.checkpoints.layouts import bitsandbytes, compressed_tensors, own_format
from attar.checkpoints.layouts.export_layouts import declared, library_for, parts_of
from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Part, Scheme
from tests.errors import user_error

SAME = 1e-5  # of the logit range: the same values, multiplied by the same products


def test_the_first_library_with_a_place_for_all() -> None:
    def chosen(*names: str) -> object:
        return library_for([Scheme.parse(name) for name in names])

    assert chosen("w4g128") is chosen("w4g128", "fp8", "nvfp4") is chosen() is compressed_tensors
    assert chosen("fp8-block", "mxfp4-weight") is compressed_tensors
    assert chosen("nf4") is chosen("llm-int8") is bitsandbytes
    for names in (
        ("lut4",),
        ("q4_k", "w8"),
        ("nf4", "llm-int8"),
        ("nf4", "w4g128"),
        ("llm-int8-weight",),
        ("sparse24",),
        ("fp8-e5m2",),
        ("fp8-e5m2-weight", "w4g128"),
    ):
        assert chosen(*names) is own_format, names


@pytest.mark.parametrize("scheme", ["fp8-e5m2", "fp8-e5m2-weight"])
def test_e5m2_is_compressed_and_runs(scheme: str, tiny: Any, tmp_path: Path) -> None:
    """Which no library has a place for: the folder's logits are those of the weights rounded to nearest here."""
    folder = compress(tiny.write(tmp_path / "dense", tiny.tensors), tmp_path / "out", recipe=f"rtn-{scheme}").path
    checkpoint = hf.Checkpoint.open(folder)
    name = "model.layers.0.mlp.down_proj"
    linear, original = checkpoint.linear(name), tiny.tensors[f"{name}.weight"].float()
    assert isinstance(linear.weight, PackedTensor)
    assert (linear.weight.scheme.name, linear.weight.parts["codes"].dtype) == (scheme, torch.float8_e5m2)
    scale = original.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e5m2).max
    rounded = (original / scale).to(torch.float8_e5m2).float() * scale
    torch.testing.assert_close(linear.weight.dequantize(), rounded, rtol=SAME, atol=0)
    assert tiny.our_logits(folder).isfinite().all()


MIXED = ["lut3-s45", "q8_0", "w4g32-asym", "nf4", "lut2", "w8a8-static", "llm-int8"]


def write(tiny: Any, folder: Path) -> tuple[Path, dict[str, PackedTensor]]:
    """A checkpoint as the pipeline would write it, in as many schemes as there are."""
    tensors, stored, packed = tiny.tensors, {}, {}
    wide = [name for name in tiny.linears if tensors[f"{name}.weight"].shape[1] == 64]
    for i, name in enumerate(wide):
        scheme = Scheme.parse(MIXED[i % len(MIXED)])
        packed[name] = codec(scheme.weight.kind).quantize(tensors.pop(f"{name}.weight"), scheme)
        parts = parts_of(own_format, name, packed[name], torch.tensor([0.02]) if scheme.static else None)
        found = {key: Part(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in parts.items()}
        assert found == declared(own_format, name, scheme, packed[name].shape)
        stored |= parts
    schemes = {name: each.scheme for name, each in packed.items()}
    shapes = {name: each.shape for name, each in packed.items()}
    config = own_format.quantization_config(schemes, [], (), shapes)
    return tiny.write(folder, {**tensors, **stored}, quantization_config=config), packed


def test_all_kinds_in_one_folder(tiny: Any, tmp_path: Path) -> None:
    folder, packed = write(tiny, tmp_path / "ours")
    checkpoint = hf.Checkpoint.open(folder)
    assert {each.scheme.name for each in packed.values()} == set(MIXED)
    for name, written in packed.items():
        linear = checkpoint.linear(name)
        assert isinstance(linear.weight, PackedTensor)
        assert (linear.weight.scheme, linear.weight.shape) == (written.scheme, written.shape)
        assert checkpoint.scheme_of(name) == written.scheme
        assert all(linear.weight.parts[part].equal(tensor) for part, tensor in written.parts.items())
        assert (linear.activation_scale is not None) == written.scheme.static
    logits = tiny.our_logits(folder)
    assert logits.isfinite().all()
    dense = {f"{n}.weight": p.dequantize() for n, p in packed.items() if p.scheme.activation is None}
    rounding = {n for n, p in packed.items() if p.scheme.activation is not None}
    kept = {n: t for n, t in hf_tensors(folder).items() if any(n.startswith(f"{m}.") for m in rounding)}
    again = {**tiny.tensors, **dense}
    again = {n: t for n, t in again.items() if n.removesuffix(".weight") not in rounding} | kept
    config = copy.deepcopy(checkpoint.folder.config["quantization_config"])
    config["modules"] = {name: said for name, said in config["modules"].items() if name in rounding}
    same = tiny.our_logits(tiny.write(tmp_path / "dense", again, quantization_config=config))
    assert tiny.difference(same, logits) <= SAME


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda config, said: config.update(version=2), "quantization_unsupported"),
        (lambda config, said: config.update(modules={}), "quantization_invalid"),
        (lambda config, said: config.update(modules=[1]), "quantization_invalid"),
        (lambda config, said: config["modules"].update({"model.layers.0.mlp.nowhere": said}), "checkpoint_incomplete"),
        (lambda config, said: said.update(scheme="w99"), "quantization_invalid"),
        (lambda config, said: said.update(scheme=4), "quantization_invalid"),
        (lambda config, said: said.update(scheme="sparse24-" * 9999 + "w4"), "quantization_invalid"),
        (lambda config, said: said.update(scale_dtype="float64"), "quantization_invalid"),
        (lambda config, said: said.update(shape=[64]), "quantization_invalid"),
        (lambda config, said: said.update(shape=[True, 64]), "quantization_invalid"),
        (lambda config, said: said.update(shape=[0, 64]), "quantization_invalid"),
        (lambda config, said: said.update(shape=[1 << 62, 1 << 62]), "quantization_invalid"),
        (lambda config, said: said.update(shape=[(1 << 31) - 1, 1 << 30]), "quantization_invalid"),
        (lambda config, said: said.update(shape=[64, 96]), "quantization_invalid"),
        (lambda config, said: said.update(scheme="lut3-s5"), "quantization_invalid"),
        (lambda config, said: said.update(scheme="q4_k"), "quantization_invalid"),
        (lambda config, said: config["modules"].update({"model.layers.0.self_attn.q_proj": 5}), "quantization_invalid"),
    ],
)
def test_configs_that_do_not_describe_the_files(change: Any, words: str, tiny: Any, tmp_path: Path) -> None:
    folder, packed = write(tiny, tmp_path / "ours")
    config = copy.deepcopy(hf.Checkpoint.open(folder).folder.config["quantization_config"])
    change(config, config["modules"][next(iter(packed))])
    tiny.write(folder, hf_tensors(folder), quantization_config=config)
    with user_error(words):
        hf.Checkpoint.open(folder)


@pytest.mark.parametrize(
    "scale, words",
    [
        (torch.tensor([torch.nan]), "quantization_invalid"),
        (torch.tensor([torch.inf]), "quantization_invalid"),
        (torch.tensor(0.0), "quantization_invalid"),
        (torch.tensor([-0.5]), "quantization_invalid"),
        (torch.ones(2), "quantization_invalid"),
        (torch.tensor([1]), "quantization_invalid"),
        (None, "checkpoint_incomplete"),
    ],
)
def test_fixed_scales_that_no_calibration_finds(
    scale: torch.Tensor | None, words: str, tiny: Any, tmp_path: Path
) -> None:
    folder, packed = write(tiny, tmp_path / "ours")
    (name,) = (f"{module}.input_scale" for module, each in packed.items() if each.scheme.static)
    tensors, config = hf_tensors(folder), hf.Checkpoint.open(folder).folder.config["quantization_config"]
    changed = {key: tensor for key, tensor in tensors.items() if key != name} | ({} if scale is None else {name: scale})
    tiny.write(folder, changed, quantization_config=config)
    with user_error(words):
        hf.Checkpoint.open(folder)
