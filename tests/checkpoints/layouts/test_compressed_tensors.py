"""compressed-tensors: their files read by us, our files read by them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from attar.checkpoints.folder import Folder
from attar.checkpoints.layouts import compressed_tensors
from attar.checkpoints.layouts.compressed_tensors import CompressedTensors, quantization_config
from attar.checkpoints.layouts.export_layouts import declared, parts_of
from attar.checkpoints.sources import hf
from attar.formats import affine
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Grid, Part, Scheme
from attar.kernels import ref
from tests.errors import user_error

# transformers warns that dequantize=True overrides the file's setting, which is why it is given.
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

WEIGHT_ONLY = 1e-4  # of the logit range, both in float32
BFLOAT16 = 3e-2  # theirs are in bfloat16
ACTIVATIONS = 5e-3  # an input on the edge between two codes may fall either way, and then moves by a step

THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "w4a16": ({"num_bits": 4, "strategy": "group", "group_size": 32}, None, "w4g32"),
    "w4a16 asym": ({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, None, "w4g32-asym"),
    "w3a16": ({"num_bits": 3, "strategy": "group", "group_size": 16}, None, "w3g16"),
    "w8a16": ({"num_bits": 8, "strategy": "channel"}, None, "w8"),
    "w8a16 asym": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, None, "w8-asym"),
    "w8a8": ({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}, "w8a8"),
    "fp8": (
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        "fp8",
    ),
    "fp8 static": (
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        "fp8-tensor-static",
    ),
    "fp8 block": (
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        None,
        "fp8-block-weight",
    ),
    "nvfp4": (
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "float8_e4m3fn"},
        None,
        "nvfp4-weight",
    ),
    "mxfp4": (
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"},
        None,
        "mxfp4-weight",
    ),
}

FLOATS4 = ("nvfp4", "nvfp4-weight", "mxfp4", "mxfp4-weight")


def save_theirs(tiny: Any, folder: Path, groups: dict[str, QuantizationScheme], ignore: list[str]) -> Path:
    """Quantize, compress and save with compressed-tensors' own code, scales from minimum and maximum."""
    model = tiny.model
    config = QuantizationConfig(
        config_groups=groups, ignore=ignore, quantization_status=QuantizationStatus.FROZEN, format="pack-quantized"
    )
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        weight, args, divisor = module.weight.data, scheme.weights, None
        if args.strategy in ("tensor", "block"):  # matrices here are no larger than a block
            low, high = weight.min().reshape(1), weight.max().reshape(1)
        else:
            blocks = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
            low, high = blocks.amin(-1), blocks.amax(-1)
        if args.strategy == "tensor_group":
            divisor = generate_gparam(weight.min(), weight.max())
            module.weight_global_scale.data.copy_(divisor)
        scale, zero = calculate_qparams(low, high, args, divisor)
        module.weight_scale.data.copy_(scale)
        module.weight_zero_point.data.copy_(zero)
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            module.input_scale.data.fill_(0.01)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder


def load_theirs(folder: Path, scheme: str = "") -> Any:
    """Their model. Packed asymmetric files, their own too, only load with dequantize=True: otherwise compressed-tensors
    0.20 expects their zero points unpacked. Four-bit floats become bfloat16, whatever is asked for."""
    asymmetric = scheme.endswith("-asym")
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    dtype = torch.bfloat16 if scheme in FLOATS4 else torch.float32
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **how)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def weights_of(model: Any, modules: Iterable[str]) -> dict[str, Tensor]:
    """Their dense weights; a first forward pass decompresses them."""
    return {name: model.get_submodule(name).weight.data for name in modules}


@pytest.mark.parametrize("name", THEIRS)
def test_their_files_give_their_weights_and_logits(name: str, tiny: Any, tmp_path: Path) -> None:
    weights, inputs, ours_called = THEIRS[name]
    group = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    folder = save_theirs(tiny, tmp_path / "theirs", {"group_0": group}, ["lm_head"])
    theirs = load_theirs(folder, ours_called)
    logits = tiny.their_logits(theirs)
    checkpoint = hf.Checkpoint.open(folder)
    for module, weight in weights_of(theirs, tiny.linears).items():
        packed = checkpoint.linear(module).weight
        assert isinstance(packed, PackedTensor)
        assert packed.scheme.name == ours_called
        assert checkpoint.scheme_of(module) == packed.scheme
        assert torch.equal(packed.dequantize(weight.dtype), weight), module
    tolerance = BFLOAT16 if ours_called in FLOATS4 else WEIGHT_ONLY if inputs is None else ACTIVATIONS
    assert tiny.difference(tiny.our_logits(folder), logits) <= tolerance


def test_several_groups_and_ignored_modules(tiny: Any, tmp_path: Path) -> None:
    """Names win over patterns, and patterns over class names; formats may differ by group."""
    four = {"num_bits": 4, "strategy": "group", "group_size": 32}
    eight = {"num_bits": 8, "strategy": "channel"}
    dynamic = {"num_bits": 8, "strategy": "token", "dynamic": True}
    groups = {
        "group_0": QuantizationScheme(targets=["Linear"], weights=four),
        "group_1": QuantizationScheme(targets=["re:.*mlp.*"], weights=eight, input_activations=dynamic),
        "group_2": QuantizationScheme(targets=["model.layers.0.mlp.up_proj"], weights=eight),
    }
    folder = save_theirs(tiny, tmp_path / "theirs", groups, ["lm_head", "re:.*layers.1.*o_proj$"])
    checkpoint = hf.Checkpoint.open(folder)
    names = {module: checkpoint.scheme_of(module) for module in tiny.linears}
    found = {module: scheme.name if scheme else None for module, scheme in names.items()}
    assert found["model.layers.0.self_attn.q_proj"] == "w4g32"
    assert found["model.layers.1.self_attn.o_proj"] is None
    assert found["model.layers.0.mlp.up_proj"] == "w8"
    assert found["model.layers.1.mlp.up_proj"] == "w8a8"
    assert checkpoint.scheme_of("lm_head") is None
    theirs = load_theirs(folder)
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits(theirs)) <= ACTIVATIONS


def write_ours(tiny: Any, folder: Path, schemes: dict[str, Scheme]) -> tuple[Path, dict[str, PackedTensor]]:
    """A checkpoint as the pipeline would write it, plain rounding to nearest."""
    tensors, stored, packed = tiny.tensors, {}, {}
    for name, scheme in schemes.items():
        weight = tensors.pop(f"{name}.weight")
        packed[name] = codec(scheme.weight.kind).quantize(weight, scheme)
        fixed = torch.tensor([0.02 if isinstance(scheme.activation, Grid) else 448 * 6 / 4.0])
        parts = parts_of(compressed_tensors, name, packed[name], fixed if scheme.static else None)
        shapes = {key: Part(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in parts.items()}
        assert shapes == declared(compressed_tensors, name, scheme, packed[name].shape)
        stored |= parts
    ignored = ["lm_head", *(name for name in tiny.linears if name not in schemes)]
    config = quantization_config(schemes, ignored)
    return tiny.write(folder, {**tensors, **stored}, quantization_config=config), packed


OURS = [
    "w4g32", "w4g32-asym", "w3g32", "w3g16-asym", "w2g16", "w5g32", "w8", "w8-asym", "w4", "w4-tensor", "w8a8",
    "w8a8-tensor", "w8a8-atensor", "w8a8-static", "fp8", "fp8-static", "fp8-weight", "w4a8g32",
    "fp8-block-weight", *FLOATS4,
]  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_our_files_load_in_transformers(name: str, tiny: Any, tmp_path: Path) -> None:
    scheme = Scheme.parse(name)
    folder, packed = write_ours(tiny, tmp_path / "ours", dict.fromkeys(tiny.linears, scheme))
    theirs = load_theirs(folder, name)
    logits = tiny.their_logits(theirs)
    for module, weight in weights_of(theirs, packed).items():
        assert torch.equal(packed[module].dequantize(weight.dtype), weight), module
    again = hf.Checkpoint.open(folder)
    assert {again.scheme_of(module) for module in packed} == {scheme}
    if name in FLOATS4:  # one linear: over several, steps this large amplify what bfloat16 rounds
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
        for module in list(packed)[:3]:
            expected = theirs.get_submodule(module)(x.bfloat16()).detach().float()
            ours = ref.linear(x.bfloat16().float(), [again.linear(module)])
            assert (ours - expected).abs().max() <= BFLOAT16 * expected.abs().max()
        return
    tolerance = WEIGHT_ONLY if scheme.activation is None else ACTIVATIONS
    assert tiny.difference(tiny.our_logits(folder), logits) <= tolerance


def test_our_mixed_files_load_in_transformers(tiny: Any, tmp_path: Path) -> None:
    """Three schemes of two formats, and a linear left dense."""
    names = list(tiny.linears)
    schemes = {name: Scheme.parse(("w4g32", "w8", "w8a8")[i % 3]) for i, name in enumerate(names[:-1])}
    folder, packed = write_ours(tiny, tmp_path / "ours", schemes)
    theirs = load_theirs(folder)
    logits = tiny.their_logits(theirs)
    assert {name for name, m in theirs.named_modules() if hasattr(m, "quantization_scheme")} == packed.keys()
    for module, weight in weights_of(theirs, packed).items():
        assert torch.equal(packed[module].dequantize(torch.float32), weight), module
    again = hf.Checkpoint.open(folder)
    assert {module: again.scheme_of(module) for module in schemes} == schemes
    assert tiny.difference(tiny.our_logits(folder), logits) <= ACTIVATIONS


def test_one_scheme_targets_the_class_and_several_name_modules() -> None:
    four, eight = Scheme.parse("w4g128"), Scheme.parse("w8a8")
    one = quantization_config({"a": four, "b": four}, ["lm_head"])
    assert one["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert (one["format"], one["ignore"]) == ("pack-quantized", ["lm_head"])
    table = quantization_config({"a": four, "e": four}, ["lm_head"], ["e"])
    assert table["config_groups"]["group_0"]["targets"] == ["Linear", "e"], "an embedding is no Linear"
    two = quantization_config({"a": four, "b": eight, "c": four}, [])
    assert [g["targets"] for g in two["config_groups"].values()] == [["a", "c"], ["b"]]
    assert [g["format"] for g in two["config_groups"].values()] == ["pack-quantized", "int-quantized"]
    assert two["format"] == "mixed-precision"


def test_e5m2_has_no_place() -> None:
    with user_error("scheme_unsupported"):
        quantization_config({"a": Scheme.parse("fp8-e5m2")}, [])


# Reading one module


GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
}


BLOCK = {"num_bits": 8, "type": "float", "strategy": "block"}
MX_FIXED = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": False}


def config(group: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    groups = {"group_0": GROUP if group is None else {**GROUP, **group}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **more}


def module(tiny: Any, folder: Path, scheme: str = "w4g32", **extra: Tensor) -> tuple[Folder, PackedTensor]:
    generator = torch.Generator().manual_seed(3)
    packed = codec("int").quantize(torch.randn(16, 96, generator=generator), Scheme.parse(scheme))
    tensors = parts_of(compressed_tensors, "m", packed) | {f"m.{name}": tensor for name, tensor in extra.items()}
    return Folder(tiny.write(folder, tensors)), packed


def test_reordered_columns_are_sorted_by_group(tiny: Any, tmp_path: Path) -> None:
    """g_idx says the group of each stored column: dequantize column by column and compare what the linear computes."""
    g_idx = (torch.arange(96) // 32)[torch.randperm(96, generator=torch.Generator().manual_seed(5))]
    folder, packed = module(tiny, tmp_path, weight_g_idx=g_idx.int())
    linear = CompressedTensors(folder, config()).read("m")
    assert linear.permutation is not None
    codes, scale, _ = affine.decode(packed)
    expected = torch.stack([codes[:, i] * scale[:, g_idx[i]] for i in range(96)], 1)
    assert isinstance(linear.weight, PackedTensor)
    assert torch.equal(linear.weight.dequantize(torch.float32), expected[:, linear.permutation])


@pytest.mark.parametrize("g_idx", [torch.full((96,), -1), torch.arange(96) // 32])
def test_g_idx_that_says_nothing_new_is_dropped(g_idx: Tensor, tiny: Any, tmp_path: Path) -> None:
    folder, packed = module(tiny, tmp_path, weight_g_idx=g_idx.int())
    linear = CompressedTensors(folder, config()).read("m")
    assert linear.permutation is None
    assert isinstance(linear.weight, PackedTensor)
    assert torch.equal(linear.weight.dequantize(), packed.dequantize())


@pytest.mark.parametrize("group", [-2, 3, 1 << 40, 1 << 62])
def test_g_idx_of_a_group_that_is_not_there_is_refused(group: int, tiny: Any, tmp_path: Path) -> None:
    g_idx = torch.arange(96) // 32
    g_idx[5] = group
    folder, _ = module(tiny, tmp_path, weight_g_idx=g_idx)
    with user_error("quantization_invalid"):
        CompressedTensors(folder, config()).read("m")


def rotated(count: int = 1, **entry: Any) -> dict[str, Any]:
    """A transform_config of one group, whose entries are all this."""
    return {"config_groups": {"a": {"type": "hadamard", "apply": [{"location": "input", **entry}] * count}}}


@pytest.mark.parametrize(
    "changed, words",
    [
        (config(kv_cache_scheme={"num_bits": 8}), "quantization_unsupported"),
        (config(sparsity_config={"format": "sparse-bitmask"}), "quantization_unsupported"),
        (config(sparsity_config=["dense"]), "quantization_unsupported"),
        (config(transform_config={"config_groups": []}), "quantization_invalid"),
        (config(transform_config=rotated(targets=[f"re:{i}" for i in range(1001)])), "checkpoint_too_large"),
        (config(transform_config=rotated(count=1001, targets=["m"])), "checkpoint_too_large"),
        (config(transform_config=rotated(targets=5)), "quantization_invalid"),
        (config(transform_config=rotated(targets=["m"], ignore=None)), "quantization_invalid"),
        (config(format="mxfp6-pack-quantized"), "quantization_unsupported"),
        (config({"output_activations": {"num_bits": 8}}), "quantization_unsupported"),
        (config({"weights": None}), "quantization_invalid"),
        (config({"weights": {**GROUP["weights"], "strategy": "block"}}), "quantization_unsupported"),
        (config({"weights": {**GROUP["weights"], "num_bits": 9}}), "quantization_invalid"),
        (config({"weights": {**GROUP["weights"], "type": "float", "group_size": 64}}), "quantization_unsupported"),
        (config({"weights": {**GROUP["weights"], "type": "float", "num_bits": 6}}), "quantization_unsupported"),
        (config({"weights": {**BLOCK, "block_structure": [64, 64]}}), "quantization_unsupported"),
        (config({"weights": GROUP["weights"], "input_activations": MX_FIXED}), "quantization_unsupported"),
        (config({"weights": {**GROUP["weights"], "group_size": None}}), "quantization_invalid"),
        (config({"weights": {**GROUP["weights"], "dynamic": True}}), "quantization_unsupported"),
        (config({"input_activations": {"strategy": "tensor", "symmetric": False}}), "quantization_unsupported"),
        (config({"input_activations": {"strategy": "tensor_group", "dynamic": "local"}}), "quantization_invalid"),
        (config({"targets": "Linear"}), "quantization_invalid"),
        (config({"targets": [f"re:{i}" for i in range(1001)]}), "checkpoint_too_large"),
        (config(config_groups={}), "quantization_invalid"),
    ],
)
def test_what_is_not_read_is_refused(changed: dict[str, Any], words: str, tiny: Any, tmp_path: Path) -> None:
    folder, _ = module(tiny, tmp_path)
    with user_error(words):
        CompressedTensors(folder, changed)


@pytest.mark.parametrize("targets", [["dense"], ["re:den"]])
def test_inputs_of_a_dense_module_are_not_left_unrotated(targets: list[str], tiny: Any, tmp_path: Path) -> None:
    folder, _ = module(tiny, tmp_path)
    stored = CompressedTensors(folder, config(transform_config=rotated(targets=targets)))
    with user_error("quantization_unsupported"):
        stored.holds("dense")
    assert not CompressedTensors(folder, config(transform_config=rotated(targets=["Linear"]))).holds("dense")


def test_settings_that_say_nothing_are_accepted(tiny: Any, tmp_path: Path) -> None:
    folder, _ = module(tiny, tmp_path)
    empty = config(sparsity_config={}, transform_config={}, kv_cache_scheme=None, ignore=["lm_head"])
    assert CompressedTensors(folder, empty).scheme_of("m").name == "w4g32"


def test_a_module_that_no_group_covers(tiny: Any, tmp_path: Path) -> None:
    folder, _ = module(tiny, tmp_path)
    with user_error("quantization_invalid"):
        CompressedTensors(folder, config({"targets": ["re:.*mlp"]})).read("m")


@pytest.mark.parametrize(
    "part, value, words",
    [
        ("weight_scale", torch.ones(16, 2), "quantization_invalid"),
        ("weight_packed", torch.zeros(16, 11, dtype=torch.int32), "quantization_invalid"),
        ("weight_scale", torch.ones(16, 3, dtype=torch.float64), "quantization_invalid"),
        ("weight_shape", torch.tensor([16, 96, 1]), "quantization_invalid"),
    ],
)
def test_tensors_that_do_not_fit_are_named(part: str, value: Tensor, words: str, tiny: Any, tmp_path: Path) -> None:
    folder, _ = module(tiny, tmp_path, **{part: value})
    with user_error(words):
        CompressedTensors(folder, config()).read("m")


def test_a_missing_part_is_named(tiny: Any, tmp_path: Path) -> None:
    folder, _ = module(tiny, tmp_path)
    asymmetric = config({"weights": {**GROUP["weights"], "symmetric": False}})
    with user_error("checkpoint_incomplete"):
        CompressedTensors(folder, asymmetric).read("m")
