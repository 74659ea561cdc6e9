"""The planner's bytes of a checkpoint, from its headers, against its ledger on disk and the model in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attar.checkpoints.inspect import inspect
from attar.checkpoints.sources import hf
from attar.checkpoints.sources.opening import stored
from attar.compression.runs.pipeline import compress
from attar.kernels import dispatch
from attar.kernels.operands import Prepared
from attar.plan import costs

RECIPES = ("rtn-w4g32", "rtn-w8a8", "rtn-w3g64-asym", "rtn-fp8", "rtn-w4g32 int8")
"""With the scheme of the output matrix, where that is compressed too."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, as it is or compressed by a recipe, or another fixture's folder."""
    if request.param not in RECIPES:
        found: Path = request.getfixturevalue(request.param)
        return found
    out = tmp_path_factory.mktemp("stored") / "out"
    recipe, _, head = request.param.partition(" ")
    compress(demo, out, recipe=recipe, head=head or None)
    return out


@pytest.mark.parametrize("folder", RECIPES, indirect=True)
def test_the_ledger_of_a_compressed_checkpoint(folder: Path) -> None:
    config, storage = stored(folder)
    seen = inspect(folder)
    counted = [(each, storage.of(each)) for each in costs.matrices(config) if each.compressible]
    assert {storage.of(each) for each in costs.matrices(config) if not each.compressible} == {storage.head}
    planned = {each.name: scheme.bytes((each.rows, each.columns)) for each, scheme in counted if scheme is not None}
    on_disk = dict.fromkeys(planned, 0)
    for name, part in seen.tensors.items():
        module = name.rpartition(".")[0]
        if module in on_disk:
            on_disk[module] += part.bytes
    assert planned == on_disk
    assert len(planned) == 7 * config.layers
    bits, weights = 8 * sum(planned.values()), sum(each.rows * each.columns for each, _ in counted)
    if storage.head is not None:
        table, ends = (config.vocab_size, config.hidden), (config.names.embed, config.names.head)
        packed = storage.head.bytes(table)
        assert packed == sum(part.bytes for name, part in seen.tensors.items() if name.rpartition(".")[0] in ends)
        bits, weights = bits + 8 * packed, weights + table[0] * table[1]
    assert bits / weights == pytest.approx(seen.bits_per_weight, rel=1e-12)


@pytest.mark.skipif(dispatch.store() is None, reason="the native kernels are off or do not load")
@pytest.mark.parametrize("folder", ["demo", "stories", *RECIPES], indirect=True)
def test_the_model_in_memory(folder: Path) -> None:
    config, storage = stored(folder)
    decoder = hf.load(folder, torch.float32, store=dispatch.store())
    planned = costs.weight_bytes(config, storage)
    linears = [each for block in decoder.blocks for each in block.linears()]
    held = 0
    for each in linears:
        if isinstance(each.weight, Prepared):
            held += each.weight.read_bytes
        else:  # the reference keeps a float32 copy from its first use on
            held += sum(part.nbytes for part in each.weight.parts.values()) + 4 * each.shape[0] * each.shape[1]  # type: ignore[union-attr]
    assert planned.linears == held
    assert isinstance(decoder.head.weight, Prepared)
    assert planned.head == decoder.head.weight.read_bytes
    source = decoder.embedding.table.source  # type: ignore[union-attr]
    assert planned.embedding == (source.nbytes if isinstance(source, torch.Tensor) else 0)
    norms = [decoder.final_norm, *(norm for block in decoder.blocks for norm in block.norms())]
    assert planned.norms == sum(t.nbytes for norm in norms for t in (norm.weight, norm.bias) if t is not None)
    read = sum(
        each.weight.read_bytes if isinstance(each.weight, Prepared) else 4 * each.shape[0] * each.shape[1]
        for each in (*linears, decoder.head)
    )
    assert costs.step_bytes(config, storage) == read


def test_the_label_is_what_the_linears_are(demo: Path) -> None:
    assert stored(demo)[1].label == "bf16"
