"""Weights on their way into kernel memory: what a store takes, what it leaves to the reference and why, and what the
extension refuses before it reads.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from attar import _native, env
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from attar.kernels import dispatch, ops, ref
from attar.kernels.native import linear as native
from attar.kernels.native.store import CpuWeights
from attar.kernels.operands import Linear, Norm
from tests.errors import user_error


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_of(scheme: str | torch.dtype, outputs: int = 16, inputs: int = 96, bias: Tensor | None = None) -> Linear:
    weight = randn(outputs, inputs)
    if isinstance(scheme, torch.dtype):
        return Linear("up_proj", weight.to(scheme), bias)
    read = Scheme.parse(scheme)
    return Linear("up_proj", codec(read.weight.kind).quantize(weight, read), bias)


def taken(each: Linear, activations: native.Activations = "int8") -> native.PackedWeight:
    native.prepare(each, _native.Arena(), activations)
    assert isinstance(each.weight, native.PackedWeight)
    return each.weight


# ---- the store


def test_a_store_takes_what_has_a_kernel_and_says_why_not_of_the_rest() -> None:
    store = CpuWeights()
    for scheme in ("w4g32", "w8a8", torch.bfloat16):
        each = linear_of(scheme)
        store.take(each)
        assert isinstance(each.weight, native.PackedWeight)
        assert each.shape == (16, 96)
    before = store.arena.bytes
    for name, scheme in (("tied", "w8a8-atensor"), ("four", "w4a4")):
        each = dataclasses.replace(linear_of(scheme), name=name)
        stored = each.weight
        store.take(each)
        assert isinstance(stored, PackedTensor)
        assert isinstance(each.weight, PackedTensor)
        for part, tensor in each.weight.parts.items():  # a copy: the stored one may lie on pages of a file
            assert torch.equal(tensor, stored.parts[part])
            assert tensor.data_ptr() != stored.parts[part].data_ptr()
    assert set(store.refused) == {"tied", "four"}
    assert "other than symmetric int8" in store.refused["four"]
    assert store.arena.bytes == before > 0


def test_a_weight_is_taken_once_and_the_stored_form_let_go() -> None:
    store, each = CpuWeights(), linear_of("w4g32")
    each.dense = ref.linear(torch.eye(96), [each])
    store.take(each)
    assert each.dense is None
    weight, used = each.weight, store.arena.bytes
    store.take(each)
    assert each.weight is weight
    assert store.arena.bytes == used


def test_what_a_product_reads_is_what_the_layout_holds() -> None:
    def read(scheme: str | torch.dtype, outputs: int, inputs: int) -> int:
        return taken(linear_of(scheme, outputs, inputs)).read_bytes

    assert read("w4g128", 64, 256) == 64 * 256 // 2 + 64 * 2 * 4  # float32 scales
    assert read("w3g32-asym", 32, 64) == 32 * 64 * 3 // 8 + 32 * 2 * (4 + 1)
    assert read("w8", 1, 1) == 16 * (64 + 4)  # outputs in sixteens, inputs of a channel in sixty-fours
    assert read(torch.bfloat16, 17, 33) == 32 * 33 * 2


def test_vectors_beside_the_weight_become_float32_and_norms_are_marked() -> None:
    store, each = CpuWeights(), linear_of("w4g32", bias=randn(16).bfloat16())
    each.input_scale = torch.rand(96).half() + 1
    each.permutation = torch.arange(96, dtype=torch.int32).flip(0)
    store.take(each)
    assert each.bias is not None
    assert (each.bias.dtype, each.input_scale.dtype) == (torch.float32, torch.float32)
    assert each.permutation.dtype == torch.int64
    norm = Norm("layer", torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.float16))
    store.take_norm(norm)
    assert norm.bias is not None
    assert norm.prepared
    assert (norm.weight.dtype, norm.bias.dtype) == (torch.float32, torch.float32)


def test_a_table_reads_the_rows_of_the_matrix_that_makes_logits() -> None:
    head = linear_of("w8g32", outputs=50)
    dense = ref.linear(torch.eye(96), [head]).T
    store, ids = CpuWeights(), torch.tensor([49, 0, 17, 17])
    store.take(head)
    rows = ops.embed(store.table(head.weight), ids, torch.float32)
    assert torch.equal(rows, dense[ids])


@pytest.mark.parametrize("scheme", ["w8g32", "w4g32", "w4a4", torch.bfloat16])
def test_a_table_of_its_own_has_the_values_of_its_packed_rows(scheme: str | torch.dtype) -> None:
    """Packed rows stay packed where a kernel knows them; four bits by four bits have none, and become numbers."""
    store, ids = CpuWeights(), torch.tensor([49, 0, 17, 17])
    source = linear_of(scheme, outputs=50).weight
    assert isinstance(source, Tensor | PackedTensor)
    wanted = source.dequantize() if isinstance(source, PackedTensor) else source.float()
    table = store.table(source)
    assert torch.equal(ops.embed(table, ids, torch.float32), wanted[ids])
    assert isinstance(table.source, native.PackedWeight) == (scheme in ("w8g32", "w4g32"))
    assert not store.refused, "a table is no linear, and keeps no step from being recorded"


def test_stores_round_rows_in_the_ways_there_are() -> None:
    with user_error("name_unknown"):
        CpuWeights("int4")
    each = linear_of("w4g32")
    CpuWeights("exact").take(each)
    assert isinstance(each.weight, native.PackedWeight)
    assert not each.weight.integer


def test_the_reference_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(dispatch.store(), CpuWeights)
    monkeypatch.setattr(env, "get", lambda: env.Env(kernels="ref"))
    assert dispatch.store() is None


# ---- how rows are rounded


def test_groups_of_activations_and_of_weights_nest() -> None:
    def chosen(scheme: str, inputs: int, activations: native.Activations) -> tuple[bool, int]:
        weight = taken(linear_of(scheme, 16, inputs), activations)
        return weight.integer, weight.activation_group

    assert chosen("w4g128", 256, "exact") == (False, 0)
    assert chosen("w4g128", 256, "int8") == (True, 0)
    assert chosen("w4g128", 256, "int8g32") == (True, 32)
    assert chosen("w4g32", 256, "int8g128") == (True, 128)
    assert chosen("w4g64", 192, "int8g128") == (True, 64)  # 128 does not divide 192
    assert chosen("w4g96", 192, "int8g128") == (True, 96)
    assert chosen("w4g32", 576, "int8g128") == (True, 96)
    assert chosen("w8", 576, "int8g128") == (True, 96)
    assert chosen("w4", 100, "int8g32") == (True, 0)  # whole rows
    assert chosen("w8a8", 256, "int8g32") == (True, 0)  # the scheme's own


# ---- what is refused


def test_weights_that_have_no_kernel_and_why() -> None:
    def reason(scheme: str) -> str:
        with pytest.raises(ValueError, match=r"^up_proj: ") as refused:
            taken(linear_of(scheme))
        return str(refused.value)

    assert "would tie them to each other" in reason("fp8-atensor")
    assert "would tie them to each other" in reason("w8a8-atensor")
    with pytest.raises(ValueError, match="float64 weights"):
        taken(linear_of(torch.float64))


def test_operands_of_the_wrong_size_are_refused() -> None:
    for wrong in ({"bias": torch.zeros(15)}, {"input_scale": torch.ones(31)}, {"permutation": torch.arange(33)}):
        each = dataclasses.replace(linear_of("w4", 16, 32), **wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=next(iter(wrong))):
            taken(each)
    ready = linear_of("w4", 16, 32)
    taken(ready)
    with pytest.raises(ValueError, match="rows of 32 columns, not 31"):
        native.linear(torch.zeros(2, 31), [ready])
    for at in (-1, 32):
        out_of_order = linear_of("w4", 16, 32)
        out_of_order.permutation = torch.arange(32).index_fill(0, torch.tensor([5]), at)
        taken(out_of_order)
        with pytest.raises(ValueError, match="the order of columns"):
            native.linear(torch.zeros(2, 32), [out_of_order])


def test_the_extension_refuses_shapes_before_it_reads() -> None:
    """Every address is zero: to read from one would end the process."""

    def pack(rows: int = 16, columns: int = 64, bits: int = 4, group: int = 32, number: str = "float16") -> None:
        _native.pack_codes(_native.Arena(), 0, False, rows, columns, bits, group, 0, number, 0)

    for rows, columns in [(0, 64), (-1, 64), (16, 0), (1 << 40, 1 << 40), (1 << 62, 64)]:
        with pytest.raises(ValueError, match="impossible shape"):
            pack(rows, columns)
        with pytest.raises(ValueError, match="impossible shape"):
            _native.pack_dense(_native.Arena(), 0, rows, columns, "float32")
    for bits in (1, 9, -4):
        with pytest.raises(ValueError, match="codes have 2 to 8 bits"):
            pack(bits=bits)
    for group in (0, -32, 48, 8, 128):
        with pytest.raises(ValueError, match="a group is a multiple of 32"):
            pack(group=group)
    with pytest.raises(ValueError, match="at most 65536"):
        pack(columns=1 << 17, group=1 << 17)
    with pytest.raises(ValueError, match="not int8"):
        pack(number="int8")
    with pytest.raises(ValueError, match="not float64"):
        _native.pack_dense(_native.Arena(), 0, 4, 4, "float64")


def test_the_extension_refuses_factors_that_do_not_go_together() -> None:
    def matrix(scheme: str | torch.dtype, inputs: int = 128) -> _native.Matrix:
        return taken(linear_of(scheme, 16, inputs)).matrix

    def factors(*matrices: _native.Matrix, first: int = 0, width: int = 32, integer: bool = True, group: int = 0,
                order: Tensor | None = None) -> _native.Factors:  # fmt: skip
        at = 0 if order is None else order.data_ptr()
        return _native.factors([(each, 0) for each in matrices], first, width, integer, group, 0.0, at, 0)

    four = matrix("w4g32")
    for wrong, arguments in [
        ("no weights", {}),
        ("the same input columns", {"matrices": (four, matrix("w4g32", 64))}),
        ("an output out of its row", {"matrices": (four,), "first": 17}),
        ("an output out of its row", {"matrices": (four,), "first": -1}),
        ("an output out of its row", {"matrices": (four, four, four)}),
        ("weights that are codes of small integers", {"matrices": (matrix(torch.float32),)}),
        ("weights of the same groups", {"matrices": (four, matrix("w4g64"))}),
        ("a group of activations", {"matrices": (four,), "group": 48}),
        ("a group of activations", {"matrices": (four,), "group": -32}),
        ("a group of activations", {"matrices": (four,), "group": 96}),
        ("a group of activations", {"matrices": (four,), "group": 32, "integer": False}),
        ("the order of columns", {"matrices": (four,), "order": torch.full((128,), 128)}),
    ]:
        with pytest.raises(ValueError, match=wrong):
            factors(*arguments.pop("matrices", ()), **arguments)  # type: ignore[attr-defined, arg-type]
    ready = factors(four)
    for rows in (-1, 1 << 60):
        with pytest.raises(ValueError, match="impossible number of rows"):
            _native.linear(ready, 0, rows, 0, "portable")
    with pytest.raises(ValueError, match="unknown kernel level sse"):
        _native.linear(ready, 0, 1, 0, "sse")
