"""The bit ledger: what a scheme declares, what a tensor holds and what a file stores are one number."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import FLOAT8, ITEM_BITS, ROUNDS, Grid, Kind, Scheme
from attar.formats.weight_formats import WEIGHT_FORMATS
from tests.errors import user_error

SHAPES = [(1, 1), (3, 5), (7, 33), (8, 64), (33, 96), (64, 256)]
NAMES = [
    *(f"w{bits}{group}{asym}" for bits, group, asym in product(range(2, 9), ("", "g32", "-tensor"), ("", "-asym"))),
    *("w8a8", "w8a8-asym", "w8a8-static", "w8a8-tensor-atensor", "w4a8g32", "w4a8g32-asym", "w8a8-tensor-asym"),
    *("fp8", "fp8-static", "fp8-atensor", "fp8-weight", "fp8-tensor-weight", "fp8g32", "fp8-e5m2", "fp8-e5m2-weight"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_back(name: str) -> None:
    assert Scheme.parse(name).name == name


FORM_NAMES = [*WEIGHT_FORMATS, *(f"{name}-weight" for name in ROUNDS), "sparse24-w4g64", "sparse24-w8-asym"]


@pytest.mark.parametrize("name", FORM_NAMES)
def test_names_and_ledger_of_forms(name: str, tmp_path: Path) -> None:
    scheme, shape = Scheme.parse(name).with_scale_dtype("bfloat16"), (5, 256)
    assert scheme.name == name
    assert scheme == Scheme.parse(name).with_scale_dtype("bfloat16")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    weight.view(5, 64, 4)[..., ::2] = 0  # for those that are 2:4
    packed = codec(scheme.weight.kind).quantize(weight, scheme)
    stored = save({part: tensor.contiguous() for part, tensor in packed.parts.items()})
    assert scheme.bytes(shape) == packed.bytes == len(stored) - 8 - int.from_bytes(stored[:8], "little")
    again = packed.dequantize()
    assert again.shape == shape
    out = torch.empty((2, 256), dtype=torch.bfloat16)
    assert packed.dequantize(torch.bfloat16, slice(3, 5), out) is out
    assert out.equal(again[3:5].bfloat16())


def test_forms_go_with_their_own_activations() -> None:
    token = Grid(granularity="token")
    with user_error("scheme_unsupported"):
        Scheme(WEIGHT_FORMATS["nf4"], token, layout="plain")
    with user_error("scheme_unsupported"):
        Scheme(Grid(), ROUNDS["nvfp4"])
    with user_error("scheme_unsupported"):
        Scheme(WEIGHT_FORMATS["mxfp4"], ROUNDS["mxfp4"], static=True, layout="plain")
    assert Scheme.parse("nvfp4").static
    for name in ("nf4-weight", "q4_k-weight", "lut4-s46-f64", "mxfp4-static"):
        with user_error("scheme_unknown"):
            Scheme.parse(name)


@pytest.mark.parametrize("name", NAMES)
def test_ledger_equals_the_bytes_on_disk(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape, dtype in product(SHAPES, ("float32", "bfloat16")):
        scheme = Scheme.parse(name).with_scale_dtype(dtype)
        size = scheme.weight.group_size
        if size is not None and shape[1] % size:
            with user_error("group_size_indivisible"):
                scheme.bytes(shape)
            continue
        packed = codec(scheme.weight.kind).quantize(torch.randn(shape, generator=generator), scheme)
        stored = save({part: tensor.contiguous() for part, tensor in packed.parts.items()})
        header = int.from_bytes(stored[:8], "little")
        assert {n: t["shape"] for n, t in json.loads(stored[8 : 8 + header]).items()} == {
            part: list(declared.shape) for part, declared in scheme.parts(shape).items()
        }
        assert scheme.bytes(shape) == packed.bytes == len(stored) - 8 - header
        assert packed.bits_per_weight == scheme.bits_per_weight(shape) == 8 * packed.bytes / (shape[0] * shape[1])


@pytest.mark.parametrize("name, bits", [("w4g128", 4.125), ("w4g128-asym", 4.15625), ("w3g128", 3.125), ("w8", 8.0)])
def test_effective_bits(name: str, bits: float) -> None:
    """Scale only 4 + 16/128, with a packed 4-bit zero 4 + 20/128; the shape part and channel scales add a little."""
    rows, columns = 4096, 4096
    scheme = Scheme.parse(name).with_scale_dtype("float16")
    channel_scales = 16 * rows if scheme.weight.group_size is None else 0
    assert scheme.bits_per_weight((rows, columns)) == bits + (channel_scales + 128) / (rows * columns)


def test_item_bits_are_torchs() -> None:
    for name, bits in ITEM_BITS.items():
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() * 8 == bits
    assert [ITEM_BITS[n] / 32 for n in ("float32", "float16", FLOAT8["e4m3"], "int8")] == [1, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_float_ranges_are_not_swapped(kind: Kind) -> None:
    """Trap: E4M3 is the precise one, E5M2 the wide one."""
    info = torch.finfo(getattr(torch, FLOAT8[kind]))
    assert (Grid(kind).qmin, Grid(kind).qmax) == (info.min, info.max)
    assert Grid(kind).qmax == {"e4m3": 448, "e5m2": 57344}[kind]
    assert info.eps == {"e4m3": 1 / 8, "e5m2": 1 / 4}[kind]


def test_refusals() -> None:
    with user_error("scheme_unsupported"):
        Grid(bits=9)
    with user_error("scheme_unsupported"):
        Scheme.parse("fp8-asym")
    with user_error("scheme_unknown"):
        Scheme.parse("int4")
    with user_error("group_size_indivisible"):
        Scheme.parse("w4g128").parts((4, 96))
    with user_error("scheme_unsupported"):
        Scheme(Grid(granularity="token"))
    with user_error("quantization_unsupported"):
        Scheme.parse("w4").with_scale_dtype("float64")


def test_a_packed_tensor_is_checked_against_its_scheme() -> None:
    scheme = Scheme.parse("w8a8")
    good = {"codes": torch.zeros(2, 4, dtype=torch.int8), "scale": torch.ones(2, 1)}
    PackedTensor(scheme, (2, 4), good)
    with user_error("checkpoint_malformed"):
        PackedTensor(scheme, (2, 4), {"codes": good["codes"]})
    with user_error("checkpoint_malformed"):
        PackedTensor(scheme, (2, 4), {**good, "scale": torch.ones(2)})
    with user_error("checkpoint_malformed"):
        PackedTensor(scheme, (2, 4), {**good, "codes": torch.zeros(2, 4)})
