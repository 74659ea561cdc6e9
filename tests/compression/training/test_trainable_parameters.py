"""What tuning trains, form by form: it begins at what is stored, and a changed number does what the file would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attar.checkpoints.layouts.export_layouts import library_for
from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.runs.pipeline import compress
from attar.compression.training import trainable_parameters
from attar.formats.codecs import ggml_blocks
from attar.formats.codecs.ggml import TYPES
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import GgmlBlocks
from attar.kernels.operands import Linear, Norm
from attar.model.assembly import build_block

PARTS = {
    **dict.fromkeys(("w4g32", "w3g32-asym", "w8", "w8-tensor", "fp8-weight", "w8a8", "qserve-g32"), "scale"),
    **dict.fromkeys(("lut3", "lut4-s45"), "table"),
    "fp8-block": "scale",
    "llm-int8": "absmax",
    "nf4": "nested_absmax",
    "nf4-single": "absmax",
    "nvfp4-weight": "global",
    "sparse24": "values",
    "sparse24-w4g32": "scale",
}


def packed_as(name: str) -> PackedTensor:
    """A weight whose blocks of 128 by 128 end within it, half of it zeros."""
    weight = torch.randn(160, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, 1::4] = weight[:, 2::4] = 0
    scheme = Scheme.parse(name).with_scale_dtype("bfloat16")
    return codec(scheme.weight.kind).quantize(weight, scheme)


def stand_in(packed: PackedTensor) -> Checkpoint:
    config = {"quantization_config": {"quant_method": library_for({packed.scheme}).METHOD}}
    return SimpleNamespace(stored_name=lambda name: name, folder=SimpleNamespace(config=config))  # type: ignore[return-value]


def learn(knob: trainable_parameters.Knob, linear: Linear) -> None:
    """Check that a gradient reaches the knob from what its linear computes with, and move it."""
    assert linear.dense is not None
    linear.dense.sum().backward()
    assert knob.learned.grad is not None
    assert knob.learned.grad.any()
    with torch.no_grad():
        knob.learned.copy_(0.2 * torch.rand(knob.base.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("name", PARTS)
def test_a_weight_begins_as_stored_and_changes_as_the_file_would(name: str) -> None:
    packed, part = packed_as(name), PARTS[name]
    assert trainable_parameters.part_of(packed.scheme.weight) == part
    linear = Linear("a", packed)
    knob = trainable_parameters.of_weight(stand_in(packed), linear)
    assert knob is not None
    assert knob.base is packed.parts[part]
    assert torch.equal(knob.stored(), knob.base)
    knob.put()
    assert linear.dense is not None
    assert torch.equal(linear.dense.detach(), packed.dequantize())
    learn(knob, linear)
    assert not torch.equal(knob.stored(), knob.base)
    knob.put()
    changed = PackedTensor(packed.scheme, packed.shape, {**packed.parts, part: knob.stored()})
    assert torch.equal(linear.dense.detach(), changed.dequantize())


def test_norms_and_biases_begin_as_stored_zeros_among_them() -> None:
    row: Tensor = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored = stand_in(packed_as("w8"))
    linear = Linear("a", torch.zeros(64, 64), row.half())
    norms = (Norm("rms", row * 0, offset=1.0, name="b"), Norm("layer", row, row * 0, name="c"))
    found = [
        *trainable_parameters._of_bias(stored, linear),
        *(knob for norm in norms for knob in trainable_parameters.of_norm(stored, norm)),
    ]
    assert [knob.name for knob in found] == ["a.bias", "b.weight", "c.weight", "c.bias"]
    for knob in found:
        assert torch.equal(knob.stored(), knob.base)
        knob.put()
    assert linear.bias is not None
    assert linear.bias.dtype == norms[0].weight.dtype == torch.float32


@pytest.mark.parametrize("name", sorted(ggml_blocks.CODED))
def test_of_blocks_their_float16_numbers_are_trained(name: str) -> None:
    """Whatever else the blocks hold stays, and what is computed with is what they decode to."""
    kind = TYPES[name]
    form = GgmlBlocks(kind)
    weight = torch.randn(6, 2 * kind.elements, generator=torch.Generator().manual_seed(0))
    packed = codec(form.kind).quantize(weight, Scheme(form, layout="plain"))
    linear = Linear("a", packed)
    knob = trainable_parameters.of_blocks(linear)
    assert knob is not None
    assert knob.name == "a.weight"
    assert knob.base.shape[:2] == (6, 2)
    assert torch.equal(ggml_blocks.with_numbers(kind, packed.parts["blocks"], knob.stored()), packed.parts["blocks"])
    knob.put()
    assert linear.dense is not None
    assert torch.equal(linear.dense.detach(), packed.dequantize())
    learn(knob, linear)
    knob.put()
    raw = ggml_blocks.with_numbers(kind, packed.parts["blocks"], knob.stored())
    assert torch.equal(linear.dense.detach(), ggml_blocks.decode(kind, raw))
    old, new = (ggml_blocks.unpack(kind, each.view(-1, kind.block_bytes)) for each in (packed.parts["blocks"], raw))
    assert not torch.equal(old.d, new.d)
    for part in ("codes", "scales", "mins"):
        before, after = getattr(old, part), getattr(new, part)
        assert (before is None and after is None) or torch.equal(before, after)


def test_what_stores_nothing_but_codes_is_named() -> None:
    schemes = [Scheme.parse(name) for name in ("mxfp4", "q4_0", "iq4_xs", "q4_0", *PARTS)]
    assert trainable_parameters.untrained([*schemes, None]) == ("iq4_xs", "mxfp4", "q4_0")
    for scheme in schemes[:3]:
        linear = Linear("a", packed_as(scheme.name) if scheme.name != "iq4_xs" else torch.zeros(1, 1))
        assert trainable_parameters.of_weight(stand_in(packed_as("w8")), linear) is None
    kinds = [Scheme(GgmlBlocks(TYPES[name]), layout="plain") for name in ("Q4_K", "MXFP4", "F16", "Q8_0")]
    assert trainable_parameters.untrained_in_file([*kinds, None]) == ("mxfp4",)
    blocks = torch.zeros((4, 2 * TYPES["MXFP4"].block_bytes), dtype=torch.uint8)
    assert trainable_parameters.of_blocks(Linear("a", PackedTensor(kinds[1], (4, 64), {"blocks": blocks}))) is None


def test_linears_that_engines_fuse_keep_one_number(tiny: Path, calibration: list[list[int]], tmp_path: Path) -> None:
    compress(tiny, tmp_path / "out", recipe="rtn+tune-nvfp4-weight", calibration=calibration)
    made = Checkpoint.open(tmp_path / "out")
    found = [
        knob for knob in trainable_parameters.of_block(made, build_block(made.config, made, 0)) if "global" in knob.name
    ]
    assert [len(knob.names) for knob in found] == [3, 1, 2, 1]
    stored = [{float(made.folder.read(name)) for name in knob.names} for knob in found]
    assert [len(values) for values in stored] == [1] * 4
