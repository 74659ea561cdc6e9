"""Parts of stored weights: the same numbers as the whole ones have there, read without the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attar.checkpoints.safetensors import TensorFile
from attar.checkpoints.sources import hf, shards
from attar.checkpoints.sources.opening import stored
from attar.compression.runs.pipeline import compress
from attar.formats.cuts import grain, units
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.kernels.operands import Linear, Prepared
from attar.model.parallel import Groups
from attar.model.split import Cut, Share, split
from attar.plan import costs, fit
from tests.errors import user_error
from tests.model.random_model import LLAMA, write

SHAPE = (256, 512)  # two blocks of fp8-block's
SCHEMES = (
    "w4g128", "w4g64-asym", "w3g32", "w3g32-asym", "w8", "w8a8", "w8a8-static", "w4-tensor", "w4-tensor-asym", "fp8",
    "fp8-block", "nvfp4", "mxfp4", "q4_k", "q8_0", "lut4", "sparse24", "sparse24-w4g64", "llm-int8",
    "qserve-g128",
)  # fmt: skip


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def pieces(scheme: Scheme, outputs: int) -> Iterator[Cut]:
    rows, columns = (max(unit, 32) for unit in grain(scheme))
    yield Cut(rows=((rows, 2 * rows),))
    if 3 * rows < outputs:  # fused parts, the last up to the end
        yield Cut(rows=((0, rows), (3 * rows, outputs)))
    yield Cut(columns=(columns, SHAPE[1]))
    yield Cut(columns=(0, columns), bias=False)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_piece_has_the_numbers_of_the_whole(name: str, weight: torch.Tensor) -> None:
    scheme = Scheme.parse(name)
    if name in ("q4_k", "lut4"):  # which search for their values, slowly
        weight = weight[:64]
    if name.startswith("sparse24"):
        weight = weight * torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(SHAPE[1] // 4)
    packed = codec(scheme.weight.kind).quantize(weight, scheme)
    whole = packed.dequantize()
    assert units(scheme).keys() == packed.parts.keys() - {"shape"}
    shape, numbers = packed.shape, torch.arange(float(len(weight)))
    for cut in pieces(scheme, len(weight)):
        found = shards.cut_linear(Linear("x", packed, numbers), cut)
        assert isinstance(found.weight, PackedTensor)
        assert found.shape == cut.shape(shape)
        wanted, bias = whole, numbers
        if cut.rows is not None:
            wanted, bias = (torch.cat([x[slice(*each)] for each in cut.rows]) for x in (whole, bias))
        if cut.columns is not None:
            wanted = whole[:, slice(*cut.columns)]
        assert torch.equal(found.weight.dequantize(), wanted)
        assert found.bias is not None
        assert torch.equal(found.bias, bias if cut.bias else torch.zeros_like(numbers))


def test_columns_in_another_order_cannot_be_cut(weight: torch.Tensor) -> None:
    linear = Linear(
        "model.layers.0.mlp.down_proj", weight, permutation=torch.randperm(512), input_scale=torch.ones(512)
    )
    assert shards.cut_linear(linear, Cut(rows=((0, 8),))).permutation is linear.permutation
    with user_error("parallel_unsupported"):
        shards.cut_linear(linear, Cut(columns=(0, 256)))
    linear.permutation = None
    linear.hadamard = 128
    found = shards.cut_linear(linear, Cut(columns=(0, 256)))
    assert found.input_scale is not None
    assert found.input_scale.shape == (256,)
    assert found.hadamard == 128
    linear.hadamard = 512
    with user_error("parallel_unsupported"):
        shards.cut_linear(linear, Cut(columns=(0, 256)))


@pytest.mark.parametrize("scheme", [None, "w4g32", "w4g32-asym", "w8a8-static", "fp8", "q8_0"])
def test_a_part_is_read_as_it_would_be_cut(scheme: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "model", {**LLAMA, "attention_bias": True}, scheme)
    checkpoint = hf.Checkpoint.open(path, torch.float32)
    part = split(checkpoint.config, Share(1, 2), shards.schemes(checkpoint, checkpoint.config))
    shard, at = shards.Shard(checkpoint, part), "model.layers.1."
    names = [at + name for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")]
    whole = {name: checkpoint.linear(name) for name in names}
    for name in names:
        found, wanted = shard.linear(name), shards.cut_linear(whole[name], part.cuts[name])
        if scheme is None:
            assert torch.equal(found.weight, wanted.weight)  # type: ignore[arg-type]
        else:
            assert isinstance(found.weight, PackedTensor)
            assert isinstance(wanted.weight, PackedTensor)
            assert found.weight.scheme == wanted.weight.scheme
            assert all(torch.equal(found.weight.parts[p], wanted.weight.parts[p]) for p in wanted.weight.parts)
        assert (found.bias is None) == (wanted.bias is None)
        assert found.bias is None or torch.equal(found.bias, wanted.bias)  # type: ignore[arg-type]
        assert found.activation_scale is None or found.activation_scale == wanted.activation_scale


def test_blocks_of_a_gguf_file_are_cut_and_counted_as_such(demo: Path, tmp_path: Path) -> None:
    """Of a type whose values are on no grid: kernels have its blocks, and `plan` counts them."""
    path, share, store = tmp_path / "model.gguf", Share(1, 2), dispatch.store()
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    compress(demo, path, recipe="iq4_nl")
    checkpoint = shards.open_checkpoint(path, torch.float32, as_stored=True, blocks=True)
    part = split(checkpoint.config, share, shards.schemes(checkpoint, checkpoint.config))
    shard = shards.Shard(checkpoint, part)
    for name, cut in part.cuts.items():
        whole, found = checkpoint.linear(name).weight, shard.linear(name).weight
        assert isinstance(whole, PackedTensor)
        assert isinstance(found, PackedTensor)
        wanted = whole.dequantize()
        for start, stop in cut.rows or ():
            wanted = wanted[start:stop]
        if cut.columns is not None:
            wanted = wanted[:, slice(*cut.columns)]
        assert torch.equal(found.dequantize(), wanted)
    made = shards.load(path, share, Groups(), torch.float32, None, store)
    config, storage = stored(path)
    weights = [linear.weight for block in made.blocks for linear in block.linears()]
    assert costs.weight_bytes(fit.shared(config, storage, share)[1], storage).linears == sum(
        weight.read_bytes for weight in weights if isinstance(weight, Prepared)
    )


def test_no_more_is_read_than_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = hf.Checkpoint.open(write(tmp_path / "model", LLAMA), torch.float32)
    shard = shards.Shard(checkpoint, split(checkpoint.config, Share(1, 2), {}))
    monkeypatch.setattr(shards, "AT_ONCE", 1024)
    read: list[int] = []
    fill = TensorFile.fill
    monkeypatch.setattr(TensorFile, "fill", lambda self, view, at: (read.append(len(view)), fill(self, view, at)))
    shard.linear("model.layers.1.mlp.gate_proj")
    assert sum(read) == 64 * 64 * 4, "rows of other processes are not read"
    read.clear()
    shard.linear("model.layers.1.mlp.down_proj")
    assert max(read) == 1024, "all rows pass through a small buffer"
