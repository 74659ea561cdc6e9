from __future__ import annotations

import pytest
import torch

from attar.compression.solvers.rounding import rtn
from attar.formats.observers import NORM
from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from tests.errors import user_error


@pytest.mark.parametrize("name", ["w4g32", "w3g32-asym", "w8a8", "w4-tensor", "fp8", "fp8-e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minmax_is_the_codec(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    scheme = Scheme.parse(name)
    packed = rtn.solve(weight, scheme)
    expected = codec(scheme.weight.kind).quantize(weight, scheme)
    for part, tensor in expected.parts.items():
        assert torch.equal(packed.parts[part], tensor)


@pytest.mark.parametrize("name", ["w2g32", "w3g32-asym", "w4", "w4-tensor"])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_mse_lowers_the_error_it_searches(name: str, scale_dtype: str) -> None:
    weight = torch.distributions.StudentT(4.0).sample((24, 64))
    scheme = Scheme.parse(name).with_scale_dtype(scale_dtype)

    def error(search: str) -> float:
        found = rtn.solve(weight, scheme, scale_search=search)  # type: ignore[arg-type]
        return float((found.dequantize() - weight).abs().pow(NORM).sum())

    assert error("mse") < error("minmax")


def test_float8_ranges_are_minmax_under_either_search() -> None:
    weight = torch.randn(8, 64)
    a, b = (rtn.solve(weight, Scheme.parse("fp8"), scale_search=s) for s in ("minmax", "mse"))  # type: ignore[arg-type]
    assert all(torch.equal(a.parts[part], b.parts[part]) for part in a.parts if part != "codes")
    assert torch.equal(a.dequantize(), b.dequantize())


@pytest.mark.parametrize("search", ["minmax", "mse"])
def test_bad_weights_are_refused(search: str) -> None:
    with user_error("group_size_indivisible"):
        rtn.solve(torch.randn(4, 48), Scheme.parse("w4g32"), scale_search=search)  # type: ignore[arg-type]
    with user_error("not_finite"):
        rtn.solve(torch.full((4, 32), torch.nan), Scheme.parse("w4g32"), scale_search=search)  # type: ignore[arg-type]
