"""Products with weights in kernel layout. The oracle is float64 on the numbers that the kernels are given: the
dequantized weight, and the rows as `ref` rounds them.

What is asserted of every form of weight and rows: it is as close to the oracle as its arithmetic allows, and every way
to compute it gives the same bits: every level of the machine, the path for few rows and the one for many, any threads,
any rows beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar import _native
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Grid, Scheme
from attar.kernels import ops, ref
from attar.kernels.native import extension
from attar.kernels.native import linear as native
from attar.kernels.native.rows import activate
from attar.kernels.operands import Linear
from tests.errors import user_error

TOLERANCE = {  # of an output, relative to the sum of the magnitudes of its terms
    "int8": 2e-7,  # sums of a group are exact: one rounding to float and two of the scales are left
    "int8g128": 2e-7,
    "int8g32": 2e-7,
    "exact": 1e-6,  # a chain of float32 multiply-adds as long as a group
    "dense": 1e-6,  # or as the row
}
ACTIVATIONS = ("exact", "int8", "int8g128", "int8g32")
GROUPS = (32, 64, 128, None)
SCALES = ("float16", "bfloat16", "float32")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = _native.levels()
NEVER = 1 << 40  # rows from which the path for many is taken


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scheme_of(bits: int, group: int | None, symmetric: bool, scales: str, plain: bool = False) -> Scheme:
    grid = Grid("int", bits, symmetric, "group" if group else "channel", group)
    return Scheme(grid, layout="plain" if plain else "packed").with_scale_dtype(scales)


def stored(scheme: Scheme | torch.dtype, outputs: int, inputs: int, bias: bool = True, seed: int = 0) -> Linear:
    weight = randn(outputs, inputs, seed=seed)
    made: Tensor | PackedTensor = (
        codec("int").quantize(weight, scheme) if isinstance(scheme, Scheme) else weight.to(scheme)
    )
    return Linear(f"linear{seed}", made, randn(outputs, seed=seed + 1) if bias else None)


def prepared(each: Linear, activations: native.Activations = "int8") -> Linear:
    each = copy.copy(each)
    native.prepare(each, _native.Arena(), activations)
    return each


def rounded_widely(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, I] of groups, those of the four columns of the largest magnitude of 15 bits, and scales [N, 1]."""
    four = groups.abs().view(len(groups), -1, 4).amax(-1)
    wide = torch.zeros_like(four, dtype=torch.bool).scatter_(1, four.argmax(1, keepdim=True), True)
    wide = wide.repeat_interleave(4, 1)
    rest, top = groups.abs().where(~wide, torch.zeros(())), groups.abs().amax(1, keepdim=True)
    scale = torch.maximum(rest.amax(1, keepdim=True) / 127, top / (127 * 128))
    scale = scale.where(scale > 0, torch.tensor(torch.finfo(torch.float32).eps))
    return (groups / scale).round(), scale


def oracle(x: Tensor, each: Linear, ready: Linear) -> tuple[Tensor, Tensor]:
    """The product [N, O] in float64, and the sum of the magnitudes of its terms."""
    assert isinstance(ready.weight, native.PackedWeight)
    if ref.activation_grid(each) is None:
        x = ref.rounded_input(x, each)
        if ready.weight.integer:
            groups = x.reshape(-1, ready.weight.activation_group or x.shape[1])
            codes, scale = (rounded_widely if ready.weight.wide else ref.quantize_rows_int8)(groups)
            x = (codes.double() * scale.double()).view(x.shape)
    else:
        x = ref.rounded_input(x, each)
    weight = each.weight.dequantize(torch.float64) if isinstance(each.weight, PackedTensor) else each.weight
    assert isinstance(weight, Tensor)
    bias = torch.zeros(each.shape[0]) if each.bias is None else each.bias
    weight, x, bias = weight.double(), x.double(), bias.double()
    return x @ weight.T + bias, x.abs() @ weight.T.abs() + bias.abs()


def check(got: Tensor, x: Tensor, each: Linear, ready: Linear, tolerance: float) -> None:
    want, size = oracle(x, each, ready)
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert ((got.double() - want).abs() <= tolerance * size + 1e-30).all(), float(
        ((got.double() - want).abs() / size).max()
    )


@contextmanager
def many_from(rows: int, levels: Sequence[str] = LEVELS) -> Iterator[None]:
    before = [_native.many_rows(level) for level in levels]
    for level in levels:
        _native.set_many_rows(level, rows)
    try:
        yield
    finally:
        for level, value in zip(levels, before, strict=True):
            _native.set_many_rows(level, value)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def every_way(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """The products at every level by both paths, which must agree to the bit."""
    results = []
    for level, rows in itertools.product(LEVELS, (NEVER, 0)):
        with many_from(rows):
            results.append(native.linear(x, linears, level))
        assert torch.equal(results[-1], results[0]), (level, "few" if rows else "many")
    return results[0]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN before they are written: what is not written makes every comparison fail."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    monkeypatch.setattr(extension, "empty", empty)


# ---- every form


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_packed_form_is_what_float64_gives(bits: int, activations: native.Activations) -> None:
    x = randn(9, 256, seed=5) * torch.logspace(-4, 4, 9)[:, None]
    for i, (group, symmetric, scales) in enumerate(itertools.product(GROUPS, (True, False), SCALES)):
        each = stored(scheme_of(bits, group, symmetric, scales), outputs=(33, 16, 100)[i % 3], inputs=256, seed=i)
        ready = prepared(each, activations)
        rows = x[: (9, 5, 1, 4)[i % 4]]
        check(every_way(rows, [ready]), rows, each, ready, TOLERANCE[activations])


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (3, 31), (17, 33), (16, 100), (65, 63), (130, 1000)])
def test_odd_sizes(outputs: int, inputs: int, activations: native.Activations) -> None:
    x = randn(7, inputs, seed=3)
    for bits, symmetric in itertools.product((3, 4, 8), (True, False)):
        each = stored(scheme_of(bits, None, symmetric, "float16"), outputs, inputs, bias=bits != 4, seed=bits)
        ready = prepared(each, activations)
        check(every_way(x, [ready]), x, each, ready, TOLERANCE[activations])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (17, 33), (64, 128), (100, 300)])
def test_dense_weights(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    each = stored(dtype, outputs, inputs)
    ready, x = prepared(each), randn(7, inputs, seed=3)
    check(every_way(x, [ready]), x, each, ready, TOLERANCE["dense"])


def test_plain_codes_and_one_scale_for_the_whole_tensor() -> None:
    x = randn(6, 192, seed=1)
    for bits, symmetric, granularity in itertools.product((8, 4, 3), (True, False), ("tensor", "channel", "group")):
        grid = Grid("int", bits, symmetric, granularity, 64 if granularity == "group" else None)  # type: ignore[arg-type]
        each = stored(Scheme(grid, layout="plain"), 40, 192)
        ready = prepared(each)
        check(every_way(x, [ready]), x, each, ready, TOLERANCE["int8"])


DAMAGED = {  # schemes whose zero points are stored a byte each, with the bits of a code
    Scheme(Grid("int", 4, False, "group", 32), layout="plain"): 4,
    Scheme(Grid("int", 3, False), layout="plain"): 3,
    Scheme.parse("w4-tensor-asym"): 4,
    Scheme.parse("sparse24-w4-tensor-asym"): 4,
}


@pytest.mark.parametrize("scheme", DAMAGED, ids=lambda scheme: f"{scheme.name}-{scheme.layout}")
def test_a_zero_point_that_is_no_code_is_damage(scheme: Scheme) -> None:
    """In a byte it may be anything. What is in the range of the codes is read, and what lies beyond it refused."""
    middle = 1 << DAMAGED[scheme] - 1
    dense = torch.where(torch.arange(192) % 4 < 2, randn(40, 192), 0.0)
    packed, x = codec(scheme.weight.kind).quantize(dense, scheme), randn(3, 192, seed=1)
    for zero in (-middle, middle - 1):
        packed.parts["zero"].flatten()[-1] = zero
        each = Linear("good", packed)
        check(every_way(x, [ready := prepared(each)]), x, each, ready, TOLERANCE["int8"])
    for zero in (-middle - 1, middle, -128, 127):
        packed.parts["zero"].flatten()[-1] = zero
        with user_error("quantization_invalid"):
            prepared(Linear("bad", packed))


def test_a_plain_code_with_more_bits_than_its_scheme_is_damage() -> None:
    for bits in range(2, 8):
        each = stored(Scheme(Grid("int", bits), layout="plain"), 20, 64)
        assert isinstance(each.weight, PackedTensor)
        for code in (-(1 << bits - 1) - 1, 1 << bits - 1):
            each.weight.parts["codes"][19, 63] = code
            with user_error("quantization_invalid"):
                prepared(each)


@pytest.mark.parametrize("name", ["w8a8", "w4a8g32", "w8a8-static"])
def test_schemes_that_round_activations_round_them_as_the_reference_does(name: str) -> None:
    each = stored(Scheme.parse(name), 50, 160)
    if "static" in name:
        each.activation_scale = torch.tensor([0.013])  # below what the rows span: the rest is clipped
    ready, x = prepared(each, "exact"), randn(6, 160, seed=2)
    got = every_way(x, [ready])
    check(got, x, each, ready, TOLERANCE["int8"])
    torch.testing.assert_close(got, ref.linear(x, [each]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_columns_in_another_order_and_divided(activations: native.Activations) -> None:
    x = randn(6, 128, seed=2)
    for order, divisor, scheme in itertools.product((False, True), (False, True), ("w4g32", "w8-asym", "dense")):
        each = stored(torch.bfloat16 if scheme == "dense" else Scheme.parse(scheme), 50, 128)
        each.permutation = torch.randperm(128, generator=torch.Generator().manual_seed(1)) if order else None
        each.input_scale = torch.rand(128, generator=torch.Generator().manual_seed(2)) + 0.5 if divisor else None
        ready = prepared(each, activations)
        check(every_way(x, [ready]), x, each, ready, TOLERANCE["dense" if scheme == "dense" else activations])


def test_rows_of_zeros_and_of_very_small_and_large_numbers() -> None:
    each = stored(Scheme.parse("w4g32"), 20, 64, bias=False)
    x = torch.cat([torch.zeros(1, 64), torch.full((1, 64), 1e-38), torch.full((1, 64), 1e30), randn(1, 64)])
    for activations in ACTIVATIONS:
        ready = prepared(each, activations)
        got = every_way(x, [ready])
        check(got, x, each, ready, TOLERANCE[activations])
        assert got[0].eq(0).all()


@pytest.mark.parametrize("name", ["w4g128", "w4g32-asym", "w3g64", "w8"])
def test_one_large_number_leaves_the_others_of_its_group_their_resolution(name: str) -> None:
    """A massive activation, as trained models have, among ordinary ones: each is off by half a step of its own."""
    each = stored(Scheme.parse(name), 24, 256, bias=False)
    x = randn(5, 256, seed=4)
    x[:, 77] = 300.0
    exact, size = oracle(x, each, prepared(each, "exact"))
    ready = prepared(each, "int8g128")
    weight = prepared(each, "int8").weight
    assert isinstance(weight, native.PackedWeight)
    assert not weight.wide
    lost = (every_way(x, [ready]).double() - exact).abs().amax()
    whole = (every_way(x, [prepared(each, "int8")]).double() - exact).abs().amax()
    assert lost < whole / 20
    assert lost < 1e-3 * size.amax()


# ---- one result, however it is computed

FORMS: dict[str, tuple[str, native.Activations]] = {
    "w4g128": ("w4g128", "int8"),
    "w4g32-asym": ("w4g32-asym", "int8g32"),
    "w3g64": ("w3g64", "int8g128"),
    "w8a8": ("w8a8", "int8"),
    "w6": ("w6-asym", "int8g32"),
    "exact": ("w4g128-asym", "exact"),
    "dense": ("", "exact"),
}


@dataclasses.dataclass
class Projection:
    """Three linears of odd sizes that are multiplied in one call, large enough to be shared out among threads."""

    stored: list[Linear]
    linears: list[Linear]
    tolerance: float


@pytest.fixture(scope="module")
def projections() -> dict[str, Projection]:
    out = {}
    for form, (name, activations) in FORMS.items():
        scheme = Scheme.parse(name) if name else torch.bfloat16
        each = [stored(scheme, rows, 384, bias=rows != 50, seed=rows) for rows in (150, 50, 37)]
        ready = [prepared(one, activations) for one in each]
        out[form] = Projection(each, ready, TOLERANCE[activations if name else "dense"])
    return out


@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_rows_gives_each_the_same_bits(form: str, projections: dict[str, Projection]) -> None:
    linears, x = projections[form].linears, randn(40, 384, seed=7)
    whole = every_way(x, linears)
    at = 0
    for each, ready in zip(projections[form].stored, linears, strict=True):
        check(whole[:, at : at + each.shape[0]], x, each, ready, projections[form].tolerance)
        alone = native.linear(x, [ready])
        assert torch.equal(alone, whole[:, at : at + each.shape[0]])
        at += each.shape[0]
    for rows, level in itertools.product(range(1, 41), LEVELS[-3:]):
        with many_from((NEVER, 0, 5)[rows % 3]):
            assert torch.equal(native.linear(x[:rows], linears, level), whole[:rows])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_same_bits(data: st.DataObject, projections: dict[str, Projection]) -> None:
    linears, x = projections[data.draw(st.sampled_from(list(FORMS)))].linears, randn(64, 384, seed=8)
    whole = native.linear(x, linears)
    calls = data.draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 63), min_size=1, max_size=70),  # which rows stand together, in any order
                st.sampled_from(LEVELS),
                st.sampled_from((NEVER, 0, 3, 20)),
                st.sampled_from((1, 2, 3)),
            ),
            min_size=1,
            max_size=5,
        )
    )
    for rows, level, many, count in calls:
        with many_from(many), threads(count):
            assert torch.equal(native.linear(x[rows], linears, level), whole[rows])


@pytest.mark.parametrize("form", ["w4g128", "w8a8", "w4g32-asym", "exact", "dense"])
def test_two_thousand_rows(form: str, projections: dict[str, Projection]) -> None:
    each, ready = projections[form].stored[1], projections[form].linears[1]
    x = randn(2000, 384, seed=9)
    with threads(2):
        whole = native.linear(x, [ready])
    check(whole, x, each, ready, projections[form].tolerance)
    with threads(1):
        parts = torch.cat([native.linear(part, [ready]) for part in x.split((1, 511, 513, 2, 600, 373))])
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("form", FORMS)
def test_three_runs_on_the_same_buffers_and_nothing_written_beside(
    form: str, projections: dict[str, Projection], monkeypatch: pytest.MonkeyPatch
) -> None:
    linears, guard, width = projections[form].linears, 64, 237
    for level, many, rows in itertools.product(LEVELS, (NEVER, 0), (1, 6, 33)):
        x = torch.empty(rows * 384 + 1)[1:].view(rows, 384).copy_(randn(rows, 384))  # four bytes off any alignment
        memory = torch.empty(guard + rows * width + guard + 1)[1:]
        monkeypatch.setattr(extension, "empty", lambda shape, m=memory: m[guard:-guard].view(shape))
        results = []
        for _ in range(3):
            memory.fill_(torch.nan)
            with many_from(many):
                results.append(native.linear(x, linears, level).clone())
            assert memory[:guard].isnan().all()
            assert memory[-guard:].isnan().all()
        assert results[0].isfinite().all()
        assert all(torch.equal(again, results[0]) for again in results)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outputs", [16, 37, 150])
def test_gated_products_are_activations_of_products_to_the_bit(form: str, outputs: int) -> None:
    name, activations = FORMS[form]
    scheme, x = Scheme.parse(name) if name else torch.bfloat16, randn(34, 384)
    x[5, 3] = torch.nan
    pair = [prepared(stored(scheme, outputs, 384, bias=seed == 0, seed=seed), activations) for seed in (0, 1)]
    assert native.gateable(pair)
    for level, many in itertools.product(LEVELS, (NEVER, 0)):
        with many_from(many):
            want = activate(native.linear(x, pair, level), "silu", True, level)
            for rows in (1, 5, 34):
                got = native.gated_linear(x[:rows], pair, "silu", level)
                assert torch.equal(got.nan_to_num(7.0), want[:rows].nan_to_num(7.0))
            assert got.isnan().any(1).nonzero().flatten().tolist() == [5]


def test_weights_of_two_forms_are_not_gated_in_one_call(projections: dict[str, Projection]) -> None:
    a, b = (projections[form].linears[0] for form in ("w4g128", "w8a8"))
    assert not native.gateable([a, b])
    assert not native.gateable([a, projections["w4g128"].linears[1]])  # of another size
    assert not native.gateable([a])
    assert isinstance(a.weight, native.PackedWeight)
    assert isinstance(b.weight, native.PackedWeight)
    for matrices in ([a.weight.matrix], [a.weight.matrix, b.weight.matrix]):
        with pytest.raises(ValueError, match=r"gated products take two|of the same groups"):
            _native.factors([(each, 0) for each in matrices], 0, 150, True, 0, 0.0, 0, 0, "silu")


def test_mixed_forms_and_weights_without_a_kernel_in_one_call(projections: dict[str, Projection]) -> None:
    forms, x = ("dense", "w4g128", "w8a8", "exact", "w4g32-asym"), randn(5, 384)
    linears = [projections[form].linears[0] for form in forms]
    apart = torch.cat([native.linear(x, [each]) for each in linears], 1)
    assert torch.equal(native.linear(x, linears), apart)
    eight = Linear("fp8", codec("e4m3").quantize(randn(8, 384), Scheme.parse("fp8-weight")))
    assert torch.equal(ops.linear(x, [*linears, eight]), torch.cat([apart, ref.linear(x, [eight])], 1))


def test_a_linear_that_is_gone_leaves_its_products_to_nobody() -> None:
    """Another may lie where it lay."""
    first, one, other = (prepared(stored(Scheme.parse("w4g32"), 16, 64, seed=seed)) for seed in range(3))
    x, second = randn(2, 64), copy.copy(one)
    native.linear(x, [first, second])
    place, known = id(second), weakref.ref(second)
    del second
    assert known() is None, "it was held"
    made = [copy.copy(other)]
    while id(made[-1]) != place and len(made) < 1000:
        made.append(copy.copy(other))
    if id(made[-1]) != place:
        pytest.skip("no place in memory was used again")
    assert torch.equal(native.linear(x, [first, made[-1]])[:, 16:], native.linear(x, [other]))
    weight = weakref.ref(first.weight)
    del first
    assert weight() is None, "it holds itself"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(
    form: str, value: float, projections: dict[str, Projection]
) -> None:
    linears, x = projections[form].linears, randn(20, 384)
    spoiled = x.clone()
    spoiled[3, 200], spoiled[17, 383] = value, value
    good = [row for row in range(20) if row not in (3, 17)]
    for level, many in itertools.product(LEVELS, (NEVER, 0)):
        with many_from(many):
            got = native.linear(spoiled, linears, level)
            assert torch.equal(got[good], native.linear(x, linears, level)[good])
        assert not got[[3, 17]].isfinite().any()


def test_no_rows(projections: dict[str, Projection]) -> None:
    assert native.linear(torch.empty(0, 384), projections["w4g128"].linears).shape == (0, 237)


def test_indices_beyond_two_to_the_31(projections: dict[str, Projection], tmp_path: Path) -> None:
    """Rows of an output 2^31 + 100 columns wide, in a file with holes: only the pages written to exist."""
    linears, x, width, first = projections["w4g128"].linears[:1], randn(3, 384), (1 << 31) + 100, (1 << 31) - 50
    weight = linears[0].weight
    assert isinstance(weight, native.PackedWeight)
    with (tmp_path / "holes").open("w+b") as file:
        file.truncate(3 * width * 4)
        space = mmap.mmap(file.fileno(), 3 * width * 4)
    out = torch.frombuffer(space, dtype=torch.float32)
    plain = copy.copy(linears[0])
    plain.bias = None
    factors = _native.factors([(weight.matrix, 0)], first, width, True, 0, 0.0, 0, 0)
    for level, many in itertools.product(LEVELS, (NEVER, 0)):
        with many_from(many):
            _native.linear(factors, x.data_ptr(), 3, out.data_ptr(), level)
            want = native.linear(x, [plain], level)
        for row in range(3):
            found = out[row * width + first : row * width + first + 150]
            assert torch.equal(found, want[row])
            found.zero_()
