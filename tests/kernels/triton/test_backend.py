"""Who runs where, and what is said where nothing can. Needs neither a GPU nor Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attar.checkpoints.sources import hf
from attar.formats.packed import codec
from attar.formats.scheme import Scheme, multiplied_in
from attar.kernels import dispatch
from attar.kernels.operands import Linear
from attar.kernels.triton import backend, store, weights
from tests.errors import user_error

without = pytest.mark.skipif(torch.cuda.is_available() or backend.interpreted(), reason="the kernels can run here")


def against(scheme: str, columns: int = 128) -> str | None:
    parsed = Scheme.parse(scheme)
    numbers = torch.randn(64, columns, generator=torch.Generator().manual_seed(0))
    return weights.against(Linear("l", codec(parsed.weight.kind).quantize(numbers, parsed)))


@without
def test_asking_for_a_gpu_that_is_not_there_is_one_sentence() -> None:
    with user_error("device_unavailable"):
        dispatch.store(device="cuda", dtype=torch.bfloat16)
    with user_error("device_unsupported"):
        dispatch.store(device="mps")


@without
def test_candidates_of_a_gpu_are_shown_with_reasons() -> None:
    found = dispatch.candidates("linear", "cuda", torch.bfloat16)
    assert [name for name, _ in found] == ["triton", "native", "ref"]
    assert all(found[i][1] for i in range(2))
    assert dict(dispatch.candidates("rope", "cuda", torch.bfloat16))["triton"] == "has no Triton kernel"
    assert "float64" in str(dict(dispatch.candidates("norm", "cuda", torch.float64))["triton"])


def test_every_operation_of_the_backend_is_one_of_the_door() -> None:
    assert set(dispatch.OPS) >= backend.OPS


@pytest.mark.parametrize(
    "scheme",
    [
        "w4g128",
        "w4g32-asym",
        "w4",
        "w4-tensor",
        "w4a8g64",
        "qserve-g128",
        "qserve-g64",
        "w8",
        "fp8-weight",
        "w8a8",
        "w8a8-static",
        "fp8",
        "fp8-static",
    ],
)
def test_schemes_with_a_kernel(scheme: str) -> None:
    assert against(scheme) is None


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("w3g64", "w3g64 has no Triton kernel yet"),
        ("w8g128", "w8g128 has no Triton kernel yet"),
        ("w4g16", "groups of 16 are not a multiple of 32"),
        ("w4a8g32", "groups of 32 are not a multiple of 64"),
        ("qserve-g32", "groups of 32 are not a multiple of 64"),
        ("qserve-g128-weight", "for rows rounded to int8 alone"),
        ("w8a8-asym", "w8a8-asym has no Triton kernel yet"),
        ("fp8-e5m2", "fp8-e5m2 has no Triton kernel yet"),
        ("w8a8-atensor", "would tie them to each other"),
        ("q8_0", "q8_0 weights have no Triton kernel yet"),
    ],
)
def test_schemes_without_one_say_why(scheme: str, reason: str) -> None:
    assert reason in str(against(scheme))


@pytest.mark.parametrize("dtype", backend.DTYPES, ids=str)
def test_a_checkpoint_loads_in_the_dtype_of_the_store(dtype: torch.dtype, demo: Path) -> None:
    """As `--device cuda` loads it, but for the device."""
    where = store.GpuWeights("cpu", dtype)
    decoder = hf.load(demo, dtype, None, where)
    for each in (decoder.head, *decoder.blocks[0].linears()):
        assert isinstance(each.weight, weights.TritonWeight)
        if each.weight.form == "dense":
            assert each.weight.codes.dtype == dtype
    with pytest.raises(AssertionError, match="these kernels compute in"):
        hf.load(demo, torch.float64, None, where)


def test_rows_that_are_no_multiple_of_16_bytes() -> None:
    assert "multiple of 16" in str(against("w8a8", 72))


def test_rows_too_long_for_a_sum_of_32_bits() -> None:
    """A run of w4a8 has its own sum; the other two add up a whole row."""
    for scheme, bound in (("w8a8", True), ("qserve-g128", True), ("w4a8g128", False)):
        assert against(scheme, 1 << 16) is None
        assert ("overflow" in str(against(scheme, (1 << 16) + 128))) is bound


@pytest.mark.parametrize("scheme", ["w4g128", "w4g32-asym", "w4-asym", "w4-tensor"])
def test_the_layout_of_four_bits_holds_the_codes(scheme: str) -> None:
    """Element for element, as `weights.py` draws it."""
    parsed = Scheme.parse(scheme)
    source = codec("int").quantize(torch.randn(70, 256, generator=torch.Generator().manual_seed(0)), parsed)
    one = Linear("l", source)
    weights.prepare(one, torch.float32)
    laid = one.weight
    assert isinstance(laid, weights.TritonWeight)
    assert laid.scales is not None
    expected = source.dequantize()
    part = laid.codes.shape[3]
    assert (laid.codes.dtype, part) == ((torch.uint8, 16) if "g32" in scheme else (torch.int16, 32))
    for o, i in [(0, 0), (63, 255), (64, 31), (69, 100), (5, 200)]:
        run, j = divmod(i, laid.run)
        word = int(laid.codes[o // 64, run, o % 64, j % part])
        group = i // laid.group
        zero = weights.ZERO if laid.zeros is None else int(laid.zeros[o // 64, group, o % 64])
        nibble = word >> 4 * (j // part) & 15
        assert (nibble - zero) * laid.scales[o // 64, group, o % 64] == expected[o, i]
    assert laid.read_bytes == sum(p.nbytes for p in (laid.codes, laid.scales, laid.zeros) if p is not None)


def test_the_layout_of_progressive_levels_holds_the_codes() -> None:
    parsed = Scheme.parse("qserve-g64")
    source = codec("progressive").quantize(torch.randn(70, 256, generator=torch.Generator().manual_seed(0)), parsed)
    one = Linear("l", source)
    weights.prepare(one, torch.float32)
    laid = one.weight
    assert isinstance(laid, weights.TritonWeight)
    assert laid.scales is not None
    assert laid.zeros is not None
    expected = source.dequantize()
    half = laid.run // 2
    for o, i in [(0, 0), (63, 255), (64, 31), (69, 100), (5, 200)]:
        byte = int(laid.codes[o // 64, i // laid.run, o % 64, i % laid.run % half])
        levels = int(laid.zeros[o // 64, i // 64, o % 64]) & 0xFFFF
        nibble = byte >> 4 if i % laid.run >= half else byte & 15
        assert (nibble * (levels & 255) - (levels >> 8)) * laid.scales[o] == expected[o, i]
    source.parts["factor"].fill_(18)
    with user_error("checkpoint_malformed"):
        weights.prepare(Linear("l", source), torch.float32)


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [(None, "bf16"), ("w4g128", "bf16"), ("w4a8g128", "int8"), ("qserve-g128", "int8"), ("fp8-block", "fp8")],
)
def test_what_meets_in_the_tensor_cores(scheme: str | None, kind: str) -> None:
    assert multiplied_in(None if scheme is None else Scheme.parse(scheme)) == kind


def test_vectors_of_another_size_are_refused() -> None:
    one = Linear("l", torch.zeros(4, 8), bias=torch.zeros(5))
    with pytest.raises(ValueError, match=r"l: bias has shape \(5,\), not \(4,\)"):
        weights.prepare(one, torch.float32)
