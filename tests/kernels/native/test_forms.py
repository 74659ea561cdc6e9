"""Products with weights that are no plain grid: GGML's blocks, 4- and 8-bit floats, tables, groups that no run holds.

The oracle is the form's own codec. Of every form it is asserted that the layout holds exactly the values that the codec
gives, that products with them are what float64 gives within the arithmetic's rounding, and that every way to compute
them gives the same bits: levels, few rows or many, threads, rows beside each other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attar import _native
from attar.formats.codecs import ggml_blocks
from attar.formats.codecs.ggml import TYPES
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import GgmlBlocks
from attar.kernels import ref
from attar.kernels.native import linear as native
from attar.kernels.native.layouts import GGML, layout_of
from attar.kernels.native.rows import Table, embed
from attar.kernels.native.store import CpuWeights
from attar.kernels.operands import Linear
from tests.kernels.native.test_linear import LEVELS, NEVER, check, every_way, many_from, poisoned, prepared, threads

__all__ = ["poisoned"]  # a fixture: results hold NaN before they are written

TOLERANCE = 1e-6  # of an output, relative to the sum of the magnitudes of its terms
OFFSET_TOLERANCE = 4e-6  # where a weight is the small difference of two numbers
ROUNDED_TOLERANCE = 1e-6  # beside the reference, which rounds rows to the same numbers


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(name: str, outputs: int, inputs: int, seed: int = 0) -> PackedTensor:
    """Random blocks: every bit is used, and scales are numbers of about one hundredth."""
    kind = TYPES[name]
    numbers = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (outputs, inputs // kind.elements, kind.block_bytes), generator=numbers).byte()
    at = 0
    for field, size in kind.fields:
        if field in ("d", "m") and size == 2:
            halves = (torch.rand((*raw.shape[:2], 1), generator=numbers) * 0.02 - 0.01).half()
            raw[..., at : at + 2] = halves.view(torch.uint8)
        elif field == "d" and size == 1:
            raw[..., at] = torch.randint(118, 124, raw.shape[:2], generator=numbers).byte()
        at += size
    scheme = Scheme(GgmlBlocks(kind), layout="plain")
    return PackedTensor(scheme, (outputs, inputs), {"blocks": raw.flatten(1)})


def packed(name: str, outputs: int, inputs: int, seed: int = 0) -> PackedTensor:
    if name in TYPES:
        return blocks_of(name, outputs, inputs, seed)
    scheme, weight = Scheme.parse(name), randn(outputs, inputs, seed=seed)
    if name.startswith(("w", "sparse24")):
        scheme = dataclasses.replace(scheme, scale_dtype="float16")
    if name.startswith("sparse24"):
        groups = weight.unflatten(1, (-1, 4))
        groups.scatter_(-1, groups.abs().argsort(-1)[..., :2], 0.0)
        weight[1, :8] = 0
    return codec(scheme.weight.kind).quantize(weight, scheme)


def stored(name: str, outputs: int, inputs: int, bias: bool = True, seed: int = 0) -> Linear:
    each = Linear(f"{name}{seed}", packed(name, outputs, inputs, seed), randn(outputs, seed=seed + 1) if bias else None)
    if each.weight.scheme.activation is not None and name == "nvfp4":  # type: ignore[union-attr]
        each.activation_scale = torch.tensor([448 * 6 / 4.0])
    return each


WEIGHTS = (
    *sorted(GGML),
    *("fp8-weight", "fp8-e5m2-weight", "fp8g16-weight", "fp8-tensor-weight", "fp8-block-weight"),
    *("nvfp4-weight", "mxfp4-weight", "nf4", "nf4-single", "llm-int8-weight"),
    *("sparse24", "sparse24-w4g64", "sparse24-w4g24-asym", "sparse24-w3-asym"),
    *("w4g16", "w4g16-asym", "w8g16", "w3g16-asym", "w4g8", "w4g24-asym", "w8g24"),
)
"""Schemes that leave activations alone."""
ROUNDED = ("fp8", "fp8-e5m2", "fp8-static", "fp8-block", "nvfp4", "mxfp4", "llm-int8")
"""Schemes that round them to something other than int8."""


def columns_of(name: str) -> int:
    return 512 if name in GGML or "block" in name else 192 if "g24" in name else 384


def values(each: Linear) -> Tensor:
    assert isinstance(each.weight, native.PackedWeight)
    return embed(Table(each.weight), torch.arange(each.shape[0]), 1.0)


# ---- values


@pytest.mark.parametrize("name", [*WEIGHTS, *ROUNDED, "lut4", "lut3-s45"])
@pytest.mark.parametrize("outputs", [16, 37])
def test_the_layout_holds_the_values_of_the_codec(name: str, outputs: int) -> None:
    each = stored(name, outputs, columns_of(name))
    assert isinstance(each.weight, PackedTensor)
    assert torch.equal(values(prepared(each)), each.weight.dequantize())


def test_blocks_hold_what_their_type_says_for_all_bytes() -> None:
    """Scales of any bits too, but those that are no numbers."""
    for name in sorted(GGML):
        kind = TYPES[name]
        raw = torch.randint(0, 256, (48, 512 // kind.elements, kind.block_bytes), generator=torch.Generator()).byte()
        weight = PackedTensor(Scheme(GgmlBlocks(kind), layout="plain"), (48, 512), {"blocks": raw.flatten(1)})
        want = ggml_blocks.decode(kind, weight.parts["blocks"])
        got, finite = values(prepared(Linear("a", weight))), want.isfinite()
        assert finite.float().mean() > 0.5
        assert torch.equal(got[finite], want[finite]), name


# ---- products


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("activations", ["int8g128", "exact"])
def test_products_are_what_float64_gives_in_every_way(name: str, activations: native.Activations) -> None:
    each = stored(name, 37, columns_of(name))
    ready, x = prepared(each, activations), randn(7, columns_of(name), seed=3) * torch.logspace(-3, 3, 7)[:, None]
    layout = layout_of(each.weight.scheme)  # type: ignore[union-attr]
    assert layout is not None
    assert isinstance(ready.weight, native.PackedWeight)
    assert ready.weight.integer == (layout.whole and activations != "exact")
    check(every_way(x, [ready]), x, each, ready, OFFSET_TOLERANCE if layout.offsets else TOLERANCE)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_XS", "w4g16-asym"])
@pytest.mark.parametrize("activations", ["int8", "int8g32"])
def test_other_ways_to_round_rows(name: str, activations: native.Activations) -> None:
    each = stored(name, 16, 768, bias=False)
    ready, x = prepared(each, activations), randn(34, 768, seed=3)
    check(every_way(x, [ready]), x, each, ready, OFFSET_TOLERANCE if name == "Q4_K" else TOLERANCE)


@pytest.mark.parametrize("name", ["w4g16", "nvfp4-weight", "w4g16-asym"])
def test_the_last_run_may_be_half_a_run(name: str) -> None:
    for inputs, activations in itertools.product((16, 48, 80), ("int8", "int8g128", "exact")):
        each = stored(name, 20, inputs)
        ready, x = prepared(each, activations), randn(6, inputs, seed=3)  # type: ignore[arg-type]
        check(every_way(x, [ready]), x, each, ready, TOLERANCE)


@pytest.mark.parametrize("outputs, inputs", [(1, 1), (3, 31), (130, 200)])
def test_float8_of_any_shape(outputs: int, inputs: int) -> None:
    for name in ("fp8-weight", "fp8-block-weight", "llm-int8-weight"):
        each = stored(name, outputs, inputs)
        ready, x = prepared(each), randn(5, inputs, seed=3)
        check(every_way(x, [ready]), x, each, ready, TOLERANCE)


@pytest.mark.parametrize("name", ROUNDED)
def test_rows_are_rounded_as_the_reference_rounds_them(name: str) -> None:
    inputs = columns_of(name)
    each = stored(name, 50, inputs)
    if "static" in name:
        each.activation_scale = torch.tensor([0.004])  # what is past 1.8 is clipped
    x = randn(9, inputs, seed=4) * torch.logspace(-5, 3, 9)[:, None]
    x[2] = 0
    x[:, 5] *= 30
    ready = prepared(each)
    got, rounded = every_way(x, [ready]), ref.rounded_input(x, each).double()
    weight = each.weight.dequantize().double()  # type: ignore[union-attr]
    size = rounded.abs() @ weight.T.abs() + 1e-30
    assert each.bias is not None
    assert ((got.double() - rounded @ weight.T - each.bias).abs() <= ROUNDED_TOLERANCE * (size + each.bias.abs())).all()


def test_a_row_that_is_not_finite_is_nan_alone() -> None:
    for name in ("fp8", "mxfp4", "llm-int8", "Q4_K", "nf4"):
        x = randn(6, columns_of(name))
        clean = native.linear(x, [ready := prepared(stored(name, 20, columns_of(name)))])
        x[3, 7] = torch.nan if name != "mxfp4" else torch.inf
        got = every_way_but_nan(x, [ready])
        assert got[3].isnan().all()
        assert torch.equal(got[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


def every_way_but_nan(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    results = []
    for level, rows in itertools.product(LEVELS, (NEVER, 0)):
        with many_from(rows):
            results.append(native.linear(x, linears, level))
        assert torch.equal(results[-1].nan_to_num(7.0), results[0].nan_to_num(7.0))
    return results[0]


def test_a_weight_that_is_not_a_number_makes_its_output_one() -> None:
    weight = packed("fp8-weight", 20, 96)
    weight.parts["codes"].view(torch.uint8)[3, 40] = 0xFF
    got = every_way_but_nan(randn(5, 96), [prepared(Linear("a", weight))])
    assert got.isnan().any(0).nonzero().flatten().tolist() == [3]


# ---- one result, however it is computed

TOGETHER = {
    "k-quants": (("Q4_K", "Q6_K", "Q4_K"), "int8g128"),
    "tables": (("IQ4_XS", "IQ4_XS", "MXFP4"), "int8g128"),
    "float8": (("fp8-weight", "fp8-weight", "fp8-weight"), "int8g128"),
    "nf4": (("nf4", "nf4", "Q8_0"), "int8g32"),
}


@pytest.mark.parametrize("form", TOGETHER)
def test_any_number_of_rows_gives_each_the_same_bits(form: str) -> None:
    names, activations = TOGETHER[form]
    x = randn(40, 512, seed=7)
    linears = [
        prepared(stored(name, outputs, 512, seed=outputs), activations)  # type: ignore[arg-type]
        for name, outputs in zip(names, (150, 50, 37), strict=True)
    ]
    whole = every_way(x, linears)
    alone = torch.cat([native.linear(x, [each]) for each in linears], 1)
    assert torch.equal(whole, alone)
    for rows, count in itertools.product((1, 2, 3, 5, 17, 33), (1, 2)):
        with many_from((NEVER, 0, 5)[rows % 3]), threads(count):
            assert torch.equal(native.linear(x[-rows:].contiguous(), linears), whole[-rows:])


PROMPTS = {
    **{"Q4_K": 768, "Q6_K": 256, "Q3_K": 256, "IQ4_XS": 512, "Q8_0": 352, "w8g32-asym": 96},
    **{"w4g16-asym": 160, "w4g32": 352, "w3g64-asym": 448, "w4g128": 384},
}
"""Columns of which some make whole stretches of tiles, and some do not."""


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("activations", ["int8", "int8g128"])
def test_prompts_of_any_length_give_each_row_the_same_bits(name: str, activations: native.Activations) -> None:
    """Rows that fill tiles and that do not, more than share a panel, and a last panel that is not full."""
    inputs = PROMPTS[name]
    ready, x = prepared(stored(name, 70, inputs), activations), randn(150, inputs, seed=4)
    with many_from(NEVER):
        alone = native.linear(x, [ready])
    for rows, level in itertools.product((1, 6, 15, 16, 33, 128, 150), LEVELS[-2:]):
        with many_from(0):
            assert torch.equal(native.linear(x[:rows], [ready], level), alone[:rows]), (rows, level)


WIDE = {
    **{"Q4_K": 768, "Q6_K": 256, "Q3_K": 512, "IQ4_XS": 512, "Q8_0": 352, "Q5_0": 640, "Q4_1": 576},
    **{"w4g16-asym": 160, "w4g32": 512, "w3g64-asym": 448, "w4g128": 384, "w8g32-asym": 256, "w8": 256, "w5-asym": 384},
}
"""Columns, in groups of activations of 128, 96, 64 and 32, and groups of weights that are as long or shorter."""


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("activations", ["int8g128", "int8g32"])
def test_wide_columns_anywhere_give_each_row_the_same_bits(name: str, activations: native.Activations) -> None:
    """At every level, by both paths, alone and among others: large numbers lie in another four columns of each row."""
    inputs = WIDE[name]
    each = stored(name, 70, inputs)
    x, numbers = randn(20, inputs, seed=6), torch.Generator().manual_seed(7)
    for row, shift in itertools.product(range(18), (0, 32, 64)):
        column = (7 * row + shift + row // 4 * 128) % inputs
        x[row, column] = (50.0, -2000.0, 1e6)[row % 3] * (1 + float(torch.rand((), generator=numbers)))
    x[18], x[19, : inputs // 2] = 0.0, -3.0
    ready = prepared(each, activations)
    assert isinstance(ready.weight, native.PackedWeight)
    assert ready.weight.wide
    whole = every_way(x, [ready])
    check(whole, x, each, ready, OFFSET_TOLERANCE)
    for level, many, rows in itertools.product(LEVELS, (NEVER, 0), (1, 2, 3, 4, 5, 8, 15, 16, 17, 19)):
        with many_from(many):
            assert torch.equal(native.linear(x[-rows:].contiguous(), [ready], level), whole[-rows:]), (
                level,
                many,
                rows,
            )


def test_the_largest_sums_of_groups_that_are_joined_are_exact() -> None:
    """Codes of -32 times scales of -128 times rows of -128, which fill the integers most: their sum is a float. So do
    the wide columns of groups, of 15 bits."""
    raw = torch.zeros(16, 2, TYPES["Q6_K"].block_bytes, dtype=torch.uint8)
    raw[..., 192:208] = 128
    raw[..., 208:] = torch.tensor([1.0]).half().view(torch.uint8)
    weight = PackedTensor(Scheme(GgmlBlocks(TYPES["Q6_K"]), layout="plain"), (16, 512), {"blocks": raw.flatten(1)})
    got = every_way(torch.full((33, 512), -127.5), [prepared(Linear("a", weight), "int8")])
    assert torch.equal(got, torch.full((33, 16), -128.0 * 128 * 32 * 512))
    x = torch.full((33, 512), -127.0)
    for group, activations in ((128, "int8g128"), (32, "int8g32")):
        ready = prepared(Linear("a", weight), activations)  # type: ignore[arg-type]
        assert torch.equal(every_way(x, [ready]), torch.full((33, 16), -127.0 * 128 * 32 * 512))
        wide = x.clone()
        wide.view(33, -1, group)[:, :, 8:12] = 127.0 * 128
        total = (127.0 * 128 * 4 - 127.0 * (group - 4)) * 512 // group
        assert torch.equal(every_way(wide, [ready]), torch.full((33, 16), total * 128 * 32))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_NL"])
def test_gated_products(name: str) -> None:
    pair = [prepared(stored(name, 40, 512, seed=seed), "int8g128") for seed in (0, 1)]
    assert native.gateable(pair)
    x = randn(34, 512)
    for many in (NEVER, 0):
        with many_from(many):
            a, b = native.linear(x, pair).chunk(2, 1)
            got = native.gated_linear(x, pair, "relu")
        assert torch.equal(got, a.relu() * b)


# ---- what is read, and what is refused


@pytest.mark.parametrize("name", [*WEIGHTS, *ROUNDED])
def test_a_layout_says_what_is_read(name: str) -> None:
    for outputs, inputs in ((16, columns_of(name)), (37, 2 * columns_of(name))):
        each = stored(name, outputs, inputs)
        scheme = each.weight.scheme  # type: ignore[union-attr]
        layout = layout_of(scheme)
        assert layout is not None
        weight = prepared(each).weight
        assert isinstance(weight, native.PackedWeight)
        assert layout.bytes(outputs, inputs) == weight.read_bytes


def test_blocks_keep_about_their_size() -> None:
    sizes = {name: 8 * layout_of(blocks_of(name, 16, 512).scheme).bytes(16, 512) / 16 / 512 for name in GGML}  # type: ignore[union-attr]
    assert {name: sizes[name] for name in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q8_0")} == {
        "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_XS": 4.3125, "Q8_0": 8.5,
    }  # fmt: skip


def test_forms_that_no_kernel_has_are_refused_before_anything_is_read() -> None:
    def make(**wrong: Any) -> _native.Matrix:
        usual = {"columns": 64, "number": "codes", "bits": 4, "group": 32, "scale_number": "float16", "zeros": False,
                 "offsets": False, "fine": 0, "table": ()}  # fmt: skip
        return _native.make_matrix(_native.Arena(), 32, **(usual | wrong))  # type: ignore[arg-type]

    for wrong, arguments in [
        ("weights with scales are", {"number": "float16"}),
        ("numbers are float32", {"scale_number": "int8"}),
        ("codes have 2 to 8 bits", {"bits": 1}),
        ("codes have 2 to 8 bits", {"number": "int8", "bits": 4}),
        ("a group is a multiple of 32", {"group": 8}),
        ("a group is a multiple of 32", {"group": 48, "columns": 96}),
        ("a group is a multiple of 32", {"group": 24}),
        ("a table has 16 numbers", {"table": range(15)}),
        ("a table has 16 numbers", {"table": range(16), "bits": 3}),
        ("a table has 16 numbers", {"table": range(16), "offsets": True}),
        ("a form that has no kernel", {"zeros": True, "offsets": True}),
        ("a form that has no kernel", {"fine": 3}),
        ("a form that has no kernel", {"number": "float8_e5m2", "bits": 0, "zeros": True}),
    ]:
        with pytest.raises(ValueError, match=wrong):
            make(**arguments)
    matrix = make()
    for first, rows in ((0, 33), (8, 16), (0, 8), (16, 0), (-16, 16), (32, 16)):
        with pytest.raises(ValueError, match="sixteen at a time"):
            _native.fill_rows(matrix, first, rows, 0, 0)
    for kind, size, wrong in (("Q4_0", 16 * 2 * 18 - 1, "another form"), ("Q4_1", 640, "another form"),
                              ("Q4_K", 0, "another form"), ("Q8_K", 0, "have no kernel")):  # fmt: skip
        with pytest.raises(ValueError, match=wrong):
            _native.fill_ggml(matrix, 0, 16, kind, 0, size)


def test_rows_of_int8_go_with_whole_numbers_alone() -> None:
    for weight in (Grid("e4m3"), Grid(bits=4, granularity="group", group_size=24)):
        layout = layout_of(Scheme(weight, layout="plain"))
        assert layout is not None
        assert not layout.whole
    x = prepared(stored("fp8-weight", 16, 64)).weight
    assert isinstance(x, native.PackedWeight)
    with pytest.raises(ValueError, match="codes of small integers"):
        _native.factors([(x.matrix, 0)], 0, 16, True, 0, 0.0, 0, 0)
    with pytest.raises(ValueError, match="rows are rounded to"):
        _native.factors([(x.matrix, 0)], 0, 16, False, 0, 0.0, 0, 0, "", "int4")


def test_shapes_that_no_kernel_takes_are_left_to_the_reference() -> None:
    rows = Grid(bits=8, granularity="group", group_size=48)
    for scheme, columns, sentence in [
        (Scheme(GgmlBlocks(TYPES["Q4_0"]), layout="plain"), 32, "a single block"),
        (Scheme.parse("w8"), 65536 + 32, "65536 at most"),
        (Scheme(Grid(bits=4, granularity="group", group_size=96), rows), 192, "do not nest"),
        (Scheme(Grid(bits=8), dataclasses.replace(rows, group_size=96), layout="plain"), 288, "do not nest"),
    ]:
        assert sentence in (native._shape_against(scheme, columns) or "")
    fitting = Scheme(Grid(bits=8), dataclasses.replace(rows, group_size=64), layout="plain")
    assert native._shape_against(fitting, 256) is None


def test_a_single_block_runs_by_the_reference() -> None:
    weight = blocks_of("Q4_0", 16, 32)
    store = CpuWeights()
    linear = Linear("one", weight)
    store.take(linear)
    assert "a single block" in store.refused["one"]
    assert linear.weight is not weight, "it is in memory of its own"
