"""2:4 storages of compressed-tensors: packed by naive loops, and read back exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.inspect import inspect
from attar.checkpoints.layouts.compressed_tensors import CompressedTensors, quantization_config
from attar.checkpoints.sources import hf
from attar.formats import affine
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from attar.kernels import dispatch, ref
from attar.model.cache import ForwardBatch
from tests.errors import user_error
from tests.model.random_model import together

LOGITS = 1e-5  # of the logit range, float32 against float32
KERNELS = 1e-4  # the same, by kernels that sum in another order
METHOD = {"quant_method": "compressed-tensors"}
MASKS = {**METHOD, "format": "dense", "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}}


def sparse(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Two of four kept, at random places; some groups with one or none."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns // 4, 4, generator=generator)
    dropped = torch.rand(weight.shape, generator=generator).argsort(dim=-1)[..., :2]
    weight = 0.15 * weight.scatter(-1, dropped, 0)
    weight[torch.rand(weight.shape, generator=generator) < 0.1] = 0
    return weight.flatten(1)


# sparse-24-bitmask


def masked(module: str, weight: Tensor) -> dict[str, Tensor]:
    """A matrix as compressed-tensors stored it: of each four the two largest magnitudes, whatever they are."""
    rows, columns = weight.shape
    mask, kept = torch.zeros(rows, columns // 8, dtype=torch.uint8), torch.zeros(rows, columns // 2).to(weight.dtype)
    sizes = weight.view(torch.int8).short().abs() if weight.element_size() == 1 else weight.abs()
    for r in range(rows):
        place = 0
        for group in range(0, columns, 4):
            four = sorted(range(4), key=lambda i: -float(sizes[r, group + i]))[:2]
            for i in sorted(four):
                mask[r, (group + i) // 8] |= 1 << (group + i) % 8
                kept[r, place] = weight[r, group + i]
                place += 1
    shape = torch.tensor([[rows], [columns]])
    return {f"{module}.compressed": kept, f"{module}.bitmask": mask, f"{module}.shape": shape}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masked_weights_are_exact(dtype: torch.dtype, tiny: Any, tmp_path: Path) -> None:
    weight = sparse(20, 96).to(dtype)
    reader = CompressedTensors(Folder(tiny.write(tmp_path, masked("m", weight))), MASKS)
    assert reader.holds("m")
    assert not reader.holds("n")
    assert reader.shape("m") == (20, 96)
    linear = reader.read("m")
    assert isinstance(linear.weight, PackedTensor)
    assert linear.weight.scheme == reader.scheme_of("m")
    assert linear.weight.scheme.name == "sparse24"
    assert linear.weight.dequantize(dtype).equal(weight)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ref.linear(x, (linear,)), x @ weight.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_masked_model_gives_the_logits_of_its_dense_twin(kernels: bool, tiny: Any, tmp_path: Path) -> None:
    tensors = tiny.tensors
    for seed, (name, linear) in enumerate(tiny.linears.items()):
        linear.weight.data = sparse(*linear.weight.shape, seed=seed)
        del tensors[f"{name}.weight"]
        tensors |= masked(name, linear.weight.data)
    folder = tiny.write(tmp_path / "masked", tensors, quantization_config=MASKS)
    assert inspect(folder).schemes == {"sparse24": len(tiny.linears)}
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS
    if kernels:
        if (store := dispatch.store()) is None:
            pytest.skip("the native kernels are off or do not load")
        logits = hf.load(folder, torch.float32, store=store).forward(
            tiny.ids, ForwardBatch((len(tiny.ids),), len(tiny.ids))
        )
        assert tiny.difference(logits, tiny.their_logits()) <= KERNELS


def test_a_masked_model_is_shared_by_processes(tiny: Any, tmp_path: Path) -> None:
    tensors = tiny.tensors
    for seed, (name, linear) in enumerate(tiny.linears.items()):
        del tensors[f"{name}.weight"]
        tensors |= masked(name, sparse(*linear.weight.shape, seed=seed))
    folder = tiny.write(tmp_path / "masked", tensors, quantization_config=MASKS)
    found = together(folder, 2, 1, lambda model: model.forward(tiny.ids, ForwardBatch((len(tiny.ids),), len(tiny.ids))))
    assert tiny.difference(found[0], tiny.our_logits(folder)) <= LOGITS


@pytest.mark.parametrize("name", ["w8a8", "w8", "fp8", "fp8-weight"])
def test_masked_codes_get_their_zeros_back(name: str, tiny: Any, tmp_path: Path) -> None:
    scheme = Scheme.parse(name)
    scheme = scheme if scheme.layout == "plain" else Scheme(scheme.weight, layout="plain")
    packed = codec(scheme.weight.kind).quantize(sparse(20, 96), scheme)
    codes = packed.parts["codes"]
    config = {**quantization_config({"m": scheme}, []), "sparsity_config": MASKS["sparsity_config"]}
    stored = {**masked("m", codes), "m.weight_scale": packed.parts["scale"]}
    reader = CompressedTensors(Folder(tiny.write(tmp_path, stored)), config)
    assert reader.scheme_of("m") == scheme
    linear = reader.read("m")
    assert isinstance(linear.weight, PackedTensor)
    assert linear.weight.parts["codes"].view(torch.uint8).equal(codes.view(torch.uint8))
    assert linear.weight.dequantize().equal(packed.dequantize())


def test_dense_tensors_of_a_pruned_model_need_no_groups(tiny: Any, tmp_path: Path) -> None:
    config = {**METHOD, "format": "dense", "sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}
    folder = tiny.write(tmp_path, quantization_config=config)
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS


@pytest.mark.parametrize(
    "change, words",
    [
        ({"m.bitmask": torch.full((16, 12), 0b0011_0111, dtype=torch.uint8)}, "quantization_invalid"),
        ({"m.bitmask": torch.zeros(16, 12, dtype=torch.uint8)}, "quantization_invalid"),
        ({"m.bitmask": torch.zeros(16, 11, dtype=torch.uint8)}, "quantization_invalid"),
        ({"m.bitmask": torch.zeros(16, 12, dtype=torch.int8)}, "quantization_invalid"),
        ({"m.shape": torch.tensor([1 << 40, 1 << 40])}, "quantization_invalid"),
        ({"m.shape": torch.tensor([96, 16])}, "quantization_invalid"),
        ({"m.shape": torch.tensor([16.0, 96.0])}, "quantization_invalid"),
        ({"m.shape": torch.tensor([16])}, "quantization_invalid"),
        ({"m.shape": None}, "checkpoint_incomplete"),
        ({"m.compressed": torch.zeros(16 * 48)}, "quantization_invalid"),
        ({"m.compressed": torch.zeros(16, 48, dtype=torch.float64)}, "quantization_invalid"),
        ({"m.compressed": torch.zeros(16, 48, dtype=torch.int8)}, "quantization_invalid"),
        ({"m.compressed": torch.zeros(16, 46), "m.bitmask": torch.zeros(16, 11, dtype=torch.uint8),
          "m.shape": torch.tensor([16, 92])}, "quantization_invalid"),
        ({"m.weight_scale": torch.ones(16, 1)}, "quantization_invalid"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit_are_named(
    change: dict[str, Tensor | None], words: str, tiny: Any, tmp_path: Path
) -> None:
    tensors = masked("m", sparse(16, 96)) | change
    folder = Folder(tiny.write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None}))
    with user_error(words):
        CompressedTensors(folder, MASKS).read("m")


@pytest.mark.parametrize(
    "scheme, changed, words",
    [
        ("w8a8", {}, "quantization_invalid"),
        ("w4g32", {}, "quantization_unsupported"),
        ("w8-asym", {"m.weight_zero_point": torch.zeros(16, 1, dtype=torch.int8)}, "quantization_unsupported"),
    ],
)
def test_masked_codes_that_are_not_read(
    scheme: str, changed: dict[str, Tensor], words: str, tiny: Any, tmp_path: Path
) -> None:
    config = {**quantization_config({"m": Scheme.parse(scheme)}, []), "sparsity_config": MASKS["sparsity_config"]}
    tensors = {**masked("m", sparse(16, 96)), "m.weight_scale": torch.ones(16, 1), **changed}
    with user_error(words):
        CompressedTensors(Folder(tiny.write(tmp_path, tensors)), config).read("m")


# marlin-24


def permutation(bits: int) -> list[int]:
    """Which of the 1024 codes of a tile (four squares of 16 by 16) comes at each place, as Marlin's kernel loads them:
    thread by thread, with the two halves of a column of eight, and the rows of a fragment of tensor cores."""
    order = []
    for thread in range(32):
        column = thread // 4
        for register in range(4):
            for half in (0, 1):
                for row in (0, 1, 8, 9):
                    k, n = row + 2 * (thread % 4), 8 * (column % 2) + 4 * half + register
                    order.append(column // 2 * 256 + 16 * k + n)
    within = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3)
    return [order[first + i] for first in range(0, 1024, len(within)) for i in within]


def halved(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Of codes [O, I] two of every four, [O, I/2], and their places as CUTLASS wants them, [I/32, 2 * O]: a word has
    four nibbles, of rows that are spread within 64, where blocks of two by two words are transposed."""
    rows, columns = codes.shape
    kept, words = (
        torch.zeros(rows, columns // 2, dtype=torch.long),
        torch.zeros(columns // 32 * 2 * rows, dtype=torch.long),
    )
    for r in range(rows):
        for c in range(columns // 16):
            word = 0
            for four in range(4):
                values = codes[r, 16 * c + 4 * four :][:4].tolist()
                places = sorted(sorted(range(4), key=lambda i: values[i] == 0)[:2])
                kept[r, 8 * c + 2 * four :][:2] = torch.tensor([values[i] for i in places])
                word |= (places[0] | places[1] << 2) << 4 * four
            to, at = 64 * (r // 64) + 2 * (r % 2) + r % 8 // 4 + 32 * (r % 4 // 2) + 4 * (r % 64 // 8), c
            if to % 2 != at % 2:
                to, at = (to + 1, at - 1) if at % 2 else (to - 1, at + 1)
            words[at // 2 * 2 * rows + 2 * to + at % 2] = word
    return kept, words.view(columns // 32, 2 * rows)


def marlin(module: str, packed: PackedTensor) -> dict[str, Tensor]:
    """A 2:4 sparse matrix of integers [O, I] as compressed-tensors 0.12 stored it for Marlin."""
    bits, (outputs, inputs) = packed.scheme.grid.bits, packed.shape
    codes, scale, _ = affine.decode(packed)
    kept, meta = halved(codes)
    down = kept.t() + (1 << bits - 1)
    squares = [down[k : k + 16, n : n + 16].flatten() for k in range(0, inputs // 2, 16) for n in range(0, outputs, 16)]
    tiles = torch.cat(squares).view(-1, 1024)[:, permutation(bits)].reshape(inputs // 32, -1)
    words = torch.zeros(inputs // 32, outputs * bits // 2, dtype=torch.int64)
    for i in range(32 // bits):
        words |= tiles[:, i :: 32 // bits] << bits * i
    scale = scale.t().half()
    if scale.shape[0] > 1 and inputs // 2 > 128:
        shuffle = [8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]
        scale = scale.reshape(-1, 64)[:, shuffle].reshape(scale.shape)
    return {
        f"{module}.weight_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).int(),
        f"{module}.scale_packed": scale.contiguous(),
        f"{module}.meta": torch.where(meta >= 1 << 15, meta - (1 << 16), meta).short(),
    }


def rounded(rows: int, columns: int, scheme: str, seed: int = 0) -> PackedTensor:
    return codec("int").quantize(sparse(rows, columns, seed).half(), Scheme.parse(scheme).with_scale_dtype("float16"))


def marlin_config(**weights: Any) -> dict[str, Any]:
    said = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, **weights}
    return {**METHOD, "format": "marlin-24", "config_groups": {"group_0": {"targets": ["Linear"], "weights": said}}}


CHANNEL = {"strategy": "channel", "group_size": None}
KINDS: list[tuple[str, int, dict[str, Any], str]] = [
    ("w4g128", 128, {}, "sparse24-w4g64"),
    ("w4g128", 256, {}, "sparse24-w4g64"),  # several groups, but no more kept codes than a group has columns
    ("w4g128", 384, {}, "sparse24-w4g64"),
    ("w8g128", 384, {"num_bits": 8}, "sparse24-w8g64"),
    ("w4", 96, CHANNEL, "sparse24-w4"),
    ("w8", 96, {"num_bits": 8, **CHANNEL}, "sparse24-w8"),
]


@pytest.mark.parametrize("outputs", [64, 192])
@pytest.mark.parametrize("stored, inputs, said, name", KINDS)
def test_marlins_weights_are_exact(
    stored: str, inputs: int, said: dict[str, Any], name: str, outputs: int, tiny: Any, tmp_path: Path
) -> None:
    packed = rounded(outputs, inputs, stored)
    reader = CompressedTensors(Folder(tiny.write(tmp_path, marlin("m", packed))), marlin_config(**said))
    assert reader.holds("m")
    assert reader.shape("m") == (outputs, inputs)
    linear = reader.read("m")
    assert isinstance(linear.weight, PackedTensor)
    assert linear.weight.scheme == reader.scheme_of("m")
    assert linear.weight.scheme.name == name
    assert linear.weight.scheme == Scheme.parse(name).with_scale_dtype("float16")
    assert linear.weight.dequantize().equal(packed.dequantize())


def test_a_marlin_model_gives_the_logits_of_its_dense_twin(tiny: Any, tmp_path: Path) -> None:
    """Matrices whose outputs are not whole tiles stay dense."""
    tensors, config = tiny.tensors, marlin_config(**CHANNEL)
    wide = [name for name, linear in tiny.linears.items() if linear.weight.shape[0] % 64 == 0]
    for seed, name in enumerate(wide):
        linear = tiny.linears[name]
        packed = rounded(*linear.weight.shape, "w4", seed)
        linear.weight.data = packed.dequantize()
        del tensors[f"{name}.weight"]
        tensors |= marlin(name, packed)
    folder = tiny.write(tmp_path / "marlin", tensors, quantization_config=config)
    assert inspect(folder).schemes == {"sparse24-w4": len(wide), "float32": len(tiny.linears) - len(wide)}
    assert tiny.difference(tiny.our_logits(folder), tiny.their_logits()) <= LOGITS
    assert load_file(folder / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    "said, change, words",
    [
        ({"num_bits": 3}, {}, "quantization_unsupported"),
        ({"symmetric": False}, {}, "quantization_unsupported"),
        ({"group_size": 64}, {}, "quantization_unsupported"),
        ({"strategy": "tensor", "group_size": None}, {}, "quantization_unsupported"),
        ({"type": "float", "num_bits": 8}, {}, "quantization_unsupported"),
        ({"num_bits": 8}, {}, "quantization_invalid"),
        ({}, {"meta": torch.full((8, 128), 0b0101 * 0x1111, dtype=torch.int16)}, "quantization_invalid"),
        ({}, {"meta": torch.zeros(8, 127, dtype=torch.int16)}, "quantization_invalid"),
        ({}, {"meta": torch.zeros(8, 128, dtype=torch.int32)}, "quantization_invalid"),
        ({}, {"meta": None}, "checkpoint_incomplete"),
        ({}, {"weight_packed": torch.zeros(8, 64, dtype=torch.int32)}, "quantization_invalid"),
        ({}, {"weight_packed": torch.zeros(1024, dtype=torch.int32)}, "quantization_invalid"),
        ({}, {"scale_packed": torch.ones(2, 64)}, "quantization_invalid"),
        ({}, {"scale_packed": torch.ones(3, 64).half()}, "quantization_invalid"),
        ({}, {"scale_packed": torch.ones(2, 32).half()}, "quantization_invalid"),
        ({}, {"weight_g_idx": torch.arange(256).flip(0).int() // 128}, "quantization_unsupported"),
        ({}, {"scale_packed": torch.ones(2, 0).half()}, "quantization_invalid"),
    ],
)
def test_what_is_not_marlins_is_refused(
    said: dict[str, Any], change: dict[str, Tensor | None], words: str, tiny: Any, tmp_path: Path
) -> None:
    tensors = marlin("m", rounded(64, 256, "w4g128")) | {f"m.{part}": tensor for part, tensor in change.items()}
    folder = Folder(tiny.write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None}))
    with user_error(words):
        CompressedTensors(folder, marlin_config(**said)).read("m")


def test_marlins_are_not_for_quantized_activations(tiny: Any, tmp_path: Path) -> None:
    config = marlin_config()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "strategy": "token", "dynamic": True}
    folder = Folder(tiny.write(tmp_path, marlin("m", rounded(64, 256, "w4g128"))))
    with user_error("quantization_unsupported"):
        CompressedTensors(folder, config).read("m")
