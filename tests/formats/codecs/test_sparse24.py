"""2:4 sparse storage: its layout by hand, round trips, and weights that are not 2:4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.formats.codecs.sparse24 import in_order, pack_24, unpack_24
from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from tests.errors import user_error


def sparse(rows: int = 20, columns: int = 256) -> Tensor:
    """Two of four kept, at random places; a row of zeros and groups with one or none."""
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(rows, columns // 4, 4, generator=generator)
    dropped = torch.rand(weight.shape, generator=generator).argsort(dim=-1)[..., :2]
    weight = weight.scatter(-1, dropped, 0).flatten(1)
    weight[3] = 0
    weight[4, :32] = 0
    weight[4, 7] = 1.0
    return weight


def test_layout() -> None:
    values, places = pack_24(torch.tensor([[5.0, 0, 0, 6, 0, 7, 8, 0]]))
    assert values.tolist() == [[5, 6, 7, 8]]
    assert places.tolist() == [[(0 | 3 << 2) | (1 | 2 << 2) << 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_round_trip(dtype: torch.dtype) -> None:
    weight = sparse().to(dtype)
    values, places = pack_24(weight)
    assert unpack_24(values, places).equal(weight)
    scheme = Scheme.parse("sparse24").with_scale_dtype(str(dtype).removeprefix("torch."))
    packed = codec("sparse24").quantize(weight, scheme)
    assert packed.dequantize(dtype).equal(weight)
    assert packed.dequantize(dtype, slice(2, 7)).equal(weight[2:7])
    assert packed.bits_per_weight == 8 * weight.element_size() / 2 + 1


@pytest.mark.parametrize("values", ["w4g64", "w8", "w4g32-asym"])
def test_values_on_a_grid(values: str) -> None:
    """The values are those of the inner scheme for the kept weights as a matrix of half the width; zeros stay zero."""
    weight, inner = sparse(), Scheme.parse(values)
    packed = codec("sparse24").quantize(weight, Scheme.parse(f"sparse24-{values}"))
    kept, places = pack_24(weight)
    expected = unpack_24(codec("int").quantize(kept, inner).dequantize(), places)
    assert packed.dequantize().equal(expected)
    assert packed.dequantize(rows=slice(5, 9)).equal(expected[5:9])
    assert (expected[weight == 0] == 0).all()


def test_bits() -> None:
    scheme = Scheme.parse("sparse24-w4g64").with_scale_dtype("float16")
    assert scheme.bits_per_weight((4096, 4096)) == pytest.approx(4 / 2 + 1 + 16 / 128, abs=1e-4)


def test_refusals() -> None:
    weight = sparse()
    weight[13, 100:103] = 1
    with user_error("sparsity_invalid"):
        codec("sparse24").quantize(weight, Scheme.parse("sparse24"))
    with user_error("group_size_indivisible"):
        pack_24(torch.zeros(1, 12))
    with user_error("group_size_indivisible"):
        Scheme.parse("sparse24-w4g128").check(128)
    for name in ("sparse24-w8a8", "sparse24-nf4", "sparse24-sparse24-w4", "sparse24-" * 2000):
        with user_error("scheme_unknown"):
            Scheme.parse(name)


def test_places_are_two_and_in_their_order() -> None:
    _, places = pack_24(torch.tensor([[1.0, 0, 0, 2, 0, 3, 4, 0]]))
    assert in_order(places)
    for wrong in (0x55, 0x10, 0x04 | 0x10):
        assert not in_order(torch.tensor([[wrong]], dtype=torch.uint8))
