"""Attention over pages and the writing of them. The oracle is `ref_attention` in float64, of the stored numbers.

Every level of the machine must give the same bits; so must every way to cut the same work into calls.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar import _native
from attar.kernels import ref, ref_attention
from attar.kernels.native import attention as native
from attar.kernels.native import extension
from attar.kernels.operands import AttentionForm, Norm
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.schemes import Layout, scheme

TOLERANCE = {  # of outputs, relative to the largest: what the arithmetic adds, for the oracle reads what is stored
    "float32": 2e-6,
    "bfloat16": 2e-6,
    "int8": 4e-4,  # queries and softmax weights of 15 bits
    "fp8": 2e-6,
}
MASS = {"float32": 2e-6, "bfloat16": 2e-6, "int8": 4e-4, "fp8": 2e-6}  # of a slot, relative to the largest
ROTATED = 1e-6  # a float32 norm and rotation of values around 1

LEVELS = _native.levels()
at_every_level = pytest.mark.parametrize("level", LEVELS)
NATIVE = ("float32", "bfloat16", "int8", "fp8")  # those in planes and KIVI's have a test of their own
for_every_scheme = pytest.mark.parametrize("kv", NATIVE)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    assert ours.shape == expected.shape
    assert (ours.double() - expected).abs().max() <= tolerance * max(1e-6, float(expected.abs().max()))


@dataclasses.dataclass
class Case:
    q: Tensor
    pages: PagedKV
    place: AttentionMetadata
    form: AttentionForm

    def run(self, level: str | None = None, want_mass: bool = False) -> tuple[Tensor, Tensor | None]:
        """Three runs into one poisoned output."""
        out, results = torch.empty(len(self.q), self.form.heads * self.form.head_dim), []
        for _ in range(3):
            out.fill_(torch.nan)
            _, mass = native.paged_attention(self.q, self.pages, self.place, self.form, want_mass, out, level)
            results.append((out.clone(), mass))
        assert all(torch.equal(results[0][0], again) for again, _ in results)
        return results[0]

    def oracle(self) -> tuple[Tensor, Tensor]:
        out, mass = ref_attention.paged_attention(self.q.double(), self.pages, self.place, self.form, want_mass=True)
        assert mass is not None
        return out, mass


def case(
    counts: list[int], lengths: list[int], kv: str = "float32", block: int = 32, seed: int = 0,
    **form: object,
) -> Case:  # fmt: skip
    """Sequences of `lengths` slots with their last `counts` rows as queries, their blocks scattered."""
    wanted = AttentionForm(**{"heads": 4, "kv_heads": 2, "head_dim": 40, "scale": 0.3} | form)  # type: ignore[arg-type]
    width = max(1, *(-(-length // block) for length in lengths))
    pages = PagedKV.zeros(len(counts) * width + 1, block, wanted.kv_heads, wanted.head_dim, scheme(kv))
    order = torch.randperm(pages.blocks, generator=torch.Generator().manual_seed(seed))[:-1]
    tables = order.view(len(counts), width)
    for b, length in enumerate(lengths):
        at = torch.arange(length)
        k, v = (randn(length, wanted.kv_heads, wanted.head_dim, seed=seed + 10 * b + i) for i in (1, 2))
        ref_attention.write_pages(k, v, pages, tables[b, at // block] * block + at % block)
    positions = [torch.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
    place = AttentionMetadata(
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.tensor(lengths).int(),
        tables.int().contiguous(),
        torch.cat(positions).int(),
        torch.zeros(sum(counts), dtype=torch.int64),
    )
    return Case(randn(sum(counts), wanted.heads, wanted.head_dim, seed=seed), pages, place, wanted)


FORMS = [
    {},
    {"heads": 2},
    {"heads": 7, "kv_heads": 1},
    {"heads": 22, "kv_heads": 2},
    {"window": 1},
    {"window": 37},
    {"window": 600, "soft_cap": 3.0},
    {"soft_cap": 0.5},
]


@for_every_scheme
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_against_the_oracle(form: dict[str, object], kv: str) -> None:
    """Decode, a prompt, the rest of one, a sequence that sits out, one that has only begun; lengths around a split."""
    one = case([1, 70, 130, 0, 1], [1100, 70, 513, 20, 1], kv, **form)
    expected, mass = one.oracle()
    results = {level: one.run(level, want_mass=True) for level in LEVELS}
    ours, our_mass = results[LEVELS[-1]]
    assert our_mass is not None
    close(ours, expected, TOLERANCE[kv])
    close(our_mass, mass, MASS[kv])
    for level, (other, other_mass) in results.items():
        assert other_mass is not None
        assert torch.equal(other, ours), level
        assert torch.equal(other_mass, our_mass), level


@for_every_scheme
@pytest.mark.parametrize("size", [1, 3, 16, 33, 64, 80, 96, 128, 256])
def test_every_head_size(size: int, kv: str) -> None:
    one = case([3, 1, 19], [50, 33, 19], kv, head_dim=size, scale=size**-0.5)
    ours, _ = one.run()
    close(ours, one.oracle()[0], TOLERANCE[kv])
    assert all(torch.equal(ours, one.run(level)[0]) for level in LEVELS)


@for_every_scheme
@pytest.mark.parametrize("block", [16, 48, 64, 1024])
def test_every_block_size(block: int, kv: str) -> None:
    """The blocks of a cache change where numbers lie and nothing else."""
    ours, _ = case([5, 1], [700, 1030], kv, block).run()
    assert torch.equal(ours, case([5, 1], [700, 1030], kv, 32, seed=0).run()[0])


@for_every_scheme
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 47, 48, 49, 512, 1000, 2000])
def test_one_to_two_thousand_rows(rows: int, kv: str) -> None:
    one = case([rows], [rows], kv, heads=2, kv_heads=1, head_dim=24)
    close(one.run()[0], one.oracle()[0], TOLERANCE[kv])


@for_every_scheme
@pytest.mark.parametrize("window", [None, 9])
def test_tree_of_guesses(kv: str, window: int | None) -> None:
    counts, lengths = [7, 1, 20, 3], [530, 40, 20, 18]
    one = case(counts, lengths, kv, window=window)
    generator, masks, at = torch.Generator().manual_seed(3), [], []
    for count, length in zip(counts, lengths, strict=True):
        parents = [-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, count)]
        mask, depth = torch.eye(count, dtype=torch.bool), [0] * count
        for i, parent in enumerate(parents[1:], 1):
            mask[i] |= mask[parent]
            depth[i] = depth[parent] + 1
        masks.append(mask.flatten())
        at.append(length - count + torch.tensor(depth))
    one.place = dataclasses.replace(one.place, tree=torch.cat(masks), positions=torch.cat(at).int())
    expected, mass = one.oracle()
    ours, our_mass = one.run(want_mass=True)
    assert our_mass is not None
    close(ours, expected, TOLERANCE[kv])
    close(our_mass, mass, MASS[kv])
    assert all(torch.equal(ours, one.run(level)[0]) for level in LEVELS)


@for_every_scheme
@pytest.mark.parametrize("window", [None, 200])
def test_explicit_positions_with_empty_slots(kv: str, window: int | None) -> None:
    one = case([2, 30], [900, 60], kv, window=window)
    positions = torch.full((one.pages.blocks, one.pages.block), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(5)
    for b, length in enumerate(one.place.lengths.tolist()):
        at = torch.randperm(length, generator=generator).int()
        at[torch.rand(length, generator=generator) < 0.4] = -1
        flat = torch.full((one.place.block_tables.shape[1] * 32,), -1, dtype=torch.int32)
        flat[:length] = at
        positions[one.place.block_tables[b].long()] = flat.view(-1, 32)
    one.place = dataclasses.replace(one.place, key_positions=positions)
    expected, mass = one.oracle()
    ours, our_mass = one.run(want_mass=True)
    assert our_mass is not None
    close(ours, expected, TOLERANCE[kv])
    close(our_mass, mass, MASS[kv])
    assert all(torch.equal(ours, one.run(level)[0]) for level in LEVELS)


@for_every_scheme
def test_a_query_that_sees_nothing_gives_zeros(kv: str) -> None:
    one = case([1], [20], kv)
    nowhere = torch.full((one.pages.blocks, one.pages.block), 100, dtype=torch.int32)
    one.place = dataclasses.replace(one.place, key_positions=nowhere)
    ours, mass = one.run(want_mass=True)
    assert mass is not None
    assert not ours.any()
    assert not mass.any()
    assert not one.oracle()[0].any()


@for_every_scheme
@at_every_level
def test_what_is_not_a_number_comes_out_where_it_is_seen_and_nowhere_else(kv: str, level: str) -> None:
    one = case([1, 1], [600, 40], kv)
    clean, _ = one.run(level)
    slot = int(one.place.block_tables[0, 17]) * 32 + 3
    for broken in (float("nan"), float("inf")):
        for side in (0, 1):
            kv = torch.zeros(2, 1, 2, 40)
            kv[side, 0, 1, 5] = broken  # key-value head 1, which query heads 2 and 3 read
            copy = dataclasses.replace(one.pages, keys=one.pages.keys.clone(), values=one.pages.values.clone())
            if one.pages.key_scales is not None and one.pages.value_scales is not None:
                copy.key_scales, copy.value_scales = one.pages.key_scales.clone(), one.pages.value_scales.clone()
            ref_attention.write_pages(kv[0], kv[1], copy, torch.tensor([slot]))
            ours, _ = native.paged_attention(one.q, copy, one.place, one.form, level=level)
            assert not ours[0, 80:].isfinite().all()
            assert torch.equal(ours[0, :80].isfinite(), torch.ones(80, dtype=torch.bool))
            assert torch.equal(ours[1], clean[1])
    one.q[1] = torch.nan
    ours, _ = native.paged_attention(one.q, one.pages, one.place, one.form, level=level)
    assert ours[1].isnan().all()
    assert torch.equal(ours[0], clean[0])


# Batch invariance


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Lengths of sequences, how many rows of each every call has until all are done, and a seed."""
    lengths = draw(st.lists(st.integers(1, 600), min_size=1, max_size=4))
    left, calls = list(lengths), []
    while any(left):
        rows = [min(n, draw(st.sampled_from([0, 1, 2, 7, 33, 48, 300, 600]))) for n in left]
        rows = rows if any(rows) else list(left)
        left = [n - m for n, m in zip(left, rows, strict=True)]
        calls.append(rows)
    return lengths, calls, draw(st.integers(0, 1000))


def generate(
    lengths: list[int], calls: list[list[int]], kv: str, block: int, seed: int, form: AttentionForm
) -> list[Tensor]:
    """Run sequences through `write_kv` and `paged_attention` in the given calls: the outputs of each sequence."""
    inputs = [randn(length, form.heads + 2 * form.kv_heads, form.head_dim, seed=i) for i, length in enumerate(lengths)]
    width = max(-(-length // block) for length in lengths)
    pages = PagedKV.zeros(len(lengths) * width, block, form.kv_heads, form.head_dim, scheme(kv))
    tables = torch.randperm(pages.blocks, generator=torch.Generator().manual_seed(seed)).view(len(lengths), width)
    angle = torch.arange(600)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    norms = Norm("rms", randn(form.head_dim, seed=90)), Norm("rms", randn(form.head_dim, seed=91))
    filled, out = [0] * len(lengths), [[] for _ in lengths]  # type: list[int], list[list[Tensor]]
    for rows in calls:
        ends = [first + n for first, n in zip(filled, rows, strict=True)]
        at = [torch.arange(first, end) for first, end in zip(filled, ends, strict=True)]
        slots = [tables[b, t // block] * block + t % block for b, t in enumerate(at)]
        x = torch.cat([one[first:end] for one, first, end in zip(inputs, filled, ends, strict=True)])
        positions = torch.cat(at).int()
        place = AttentionMetadata(
            torch.tensor([0, *rows]).cumsum(0).int(),
            torch.tensor(ends).int(),
            tables.int(),
            positions,
            torch.cat(slots),
        )
        q, k, v = x.split((form.heads, form.kv_heads, form.kv_heads), 1)
        q = native.write_kv(q, k, v, pages, place, Rotation(angle.cos(), angle.sin(), positions), *norms)
        mixed, _ = native.paged_attention(q, pages, place, form)
        for b, part in enumerate(mixed.split(rows)):
            out[b].append(part)
        filled = ends
    return [torch.cat(parts) for parts in out]


@settings(deadline=None, max_examples=60)
@given(schedules(), st.sampled_from(NATIVE), st.sampled_from([16, 32, 64]), st.sampled_from([None, 100]))
def test_a_row_does_not_depend_on_what_else_is_computed(
    schedule: tuple[list[int], list[list[int]], int], kv: str, block: int, window: int | None
) -> None:
    lengths, calls, seed = schedule
    form = AttentionForm(6, 2, 20, 0.3, window)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 + seed % 3)
        ours = generate(lengths, calls, kv, block, seed, form)
        torch.set_num_threads(1)
        for b in range(len(lengths)):
            alone = [n if i == b else 0 for i, n in enumerate(lengths)]
            expected = generate(lengths, [alone], kv, 32, 0, form)[b]
            assert torch.equal(ours[b], expected)
    finally:
        torch.set_num_threads(before)


@for_every_scheme
def test_long_decode_on_threads(kv: str) -> None:
    """Few tiles and many slots: the splits of one tile are computed by several threads and merged."""
    one = case([1, 2], [20000, 9000], kv, head_dim=16)
    expected, before = one.run()[0], torch.get_num_threads()
    close(expected, one.oracle()[0], TOLERANCE[kv])
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            assert torch.equal(one.run()[0], expected)
    finally:
        torch.set_num_threads(before)


# Writing


@for_every_scheme
@pytest.mark.parametrize("turned", [0, 2, 20, 40])
@pytest.mark.parametrize("normed", [None, 0.0, 1.0])
def test_write_kv(kv: str, turned: int, normed: float | None) -> None:
    """q, k and v as columns of one matrix, to pages whose other slots stay as they are."""
    rows, heads, kv_heads, size = 9, 4, 2, 40
    x = randn(rows, heads + 2 * kv_heads, size) * 2
    q, k, v = x.split((heads, kv_heads, kv_heads), 1)
    angle = randn(30, turned // 2, seed=1) * 5
    at = torch.randperm(30, generator=torch.Generator().manual_seed(2))[:rows].int()
    rotation = Rotation(angle.cos(), angle.sin(), at) if turned else None
    norms = (
        [Norm("rms", randn(size, seed=s) * 0.1 + 1, eps=1e-5, offset=normed) for s in (3, 4)]
        if normed is not None
        else []
    )
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:rows]
    nothing = torch.zeros(0, dtype=torch.int32)
    place = AttentionMetadata(nothing, nothing, nothing, nothing, slots)
    theirs = PagedKV.zeros(3, 32, kv_heads, size, scheme(kv))
    normed_q, normed_k = (ref.norm(t, None, n)[1] for t, n in zip((q, k), norms, strict=True)) if norms else (q, k)
    expected = ref_attention.write_kv(normed_q, normed_k, v, theirs, place, rotation)
    first = None
    for level in LEVELS:
        pages, out = PagedKV.zeros(3, 32, kv_heads, size, scheme(kv)), torch.full((rows, heads, size), torch.nan)
        native.write_kv(q, k, v, pages, place, rotation, *norms, out=out, level=level)
        close(out, expected.double(), ROTATED)
        assert torch.equal(pages.values, theirs.values) or size % 16
        for ours, wanted in zip(
            ref_attention.read_pages(pages, torch.arange(3), torch.float32),
            ref_attention.read_pages(theirs, torch.arange(3), torch.float32),
            strict=True,
        ):
            step = {"float32": ROTATED, "bfloat16": 2**-7, "int8": 1 / 100, "fp8": 1 / 8}[kv]
            close(ours, wanted.double(), step if norms or turned else 1e-9)
        everything = [out, *(t for t in (pages.keys, pages.key_scales, pages.value_scales) if t is not None)]
        first = first or [t.clone() for t in everything]
        assert all(torch.equal(a, b) for a, b in zip(everything, first, strict=True)), level


def test_rotation_is_that_of_the_reference_to_the_bit() -> None:
    x, angle = randn(5, 3, 32), randn(5, 12, seed=1)
    rotation = Rotation(angle.cos(), angle.sin(), torch.arange(5, dtype=torch.int32))
    nothing = torch.zeros(0, dtype=torch.int32)
    place = AttentionMetadata(nothing, nothing, nothing, nothing, torch.arange(5))
    q = native.write_kv(x, x, x, PagedKV.zeros(1, 16, 3, 32, scheme("float32")), place, rotation)
    assert torch.equal(q, ref_attention.rope(x, angle.cos(), angle.sin()))


# What is refused


def test_bad_numbers_are_refused_before_anything_is_touched() -> None:
    good = case([2, 3], [40, 70])

    def refused(match: str, **changed: Tensor) -> None:
        place = dataclasses.replace(good.place, **changed)
        with pytest.raises(ValueError, match=match):
            native.paged_attention(good.q, good.pages, place, good.form)

    def i32(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    tables = good.place.block_tables
    refused("do not cover the rows", row_starts=i32(0, 2, 4))
    refused("do not cover the rows", row_starts=i32(1, 2, 5))
    refused("decrease", row_starts=i32(0, 6, 5))
    refused("more rows than filled slots", lengths=i32(1, 70))
    refused("beyond its block table", lengths=i32(40, 97))
    refused("does not exist", block_tables=torch.where(tables == tables[1, 2], good.pages.blocks, tables))
    refused("does not exist", block_tables=torch.where(tables == tables[1, 2], -1, tables))
    refused("outside 0", positions=i32(38, 39, 67, 68, -1))
    refused("tree masks", tree=torch.ones(12, dtype=torch.bool))
    refused("must be torch.int32", lengths=good.place.lengths.long())
    refused(r"must be torch.int32 \[5\]", positions=i32(1))
    refused("contiguous", block_tables=tables.T.contiguous().T)
    refused("must be torch.bool", tree=torch.ones(13))
    refused("must be torch.int32", key_positions=torch.zeros(2, 2, dtype=torch.int32))
    table = torch.where(torch.arange(3) == 2, -1, tables[0])  # past the length: not looked at
    place = dataclasses.replace(good.place, block_tables=torch.stack([table, tables[1]]).int())
    assert torch.equal(native.paged_attention(good.q, good.pages, place, good.form)[0], good.run()[0])


def test_bad_forms_and_pages_are_refused() -> None:
    good = case([2], [40])
    for form, match in [
        ({"heads": 3}, r"q is .* must be torch.float32 \[2, 3, 40\]"),
        ({"kv_heads": 4}, "the pages hold 2 heads of 40 columns, not 4 of 40"),
        ({"head_dim": 41}, "not 2 of 41"),
        ({"window": 0}, "greater than zero"),
        ({"soft_cap": -1.0}, "greater than zero"),
    ]:
        with pytest.raises(ValueError, match=match):
            native.paged_attention(good.q, good.pages, good.place, dataclasses.replace(good.form, **form))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be torch\.float32"):
        native.paged_attention(good.q.bfloat16(), good.pages, good.place, good.form)
    short = dataclasses.replace(good.pages, values=good.pages.values[1:])
    scaled = dataclasses.replace(good.pages, key_scales=torch.ones(good.pages.blocks, 2, 32))
    with pytest.raises(ValueError, match="values is"):
        native.paged_attention(good.q, short, good.place, good.form)
    with pytest.raises(ValueError, match="float32 pages have keys, values"):
        native.paged_attention(good.q, scaled, good.place, good.form)
    with pytest.raises(ValueError, match="unknown kernel level sse"):
        native.paged_attention(good.q, good.pages, good.place, good.form, level="sse")
    wide = case([1], [1], head_dim=520)
    with pytest.raises(ValueError, match="1 to 512 columns"):
        wide.run()


def test_bad_writes_are_refused() -> None:
    q, k, v = randn(2, 4, 8), randn(2, 2, 8), randn(2, 2, 8)
    pages = PagedKV.zeros(3, 16, 2, 8, scheme("float32"))
    nothing = torch.zeros(0, dtype=torch.int32)
    place = AttentionMetadata(nothing, nothing, nothing, nothing, torch.tensor([0, 47]))
    angle = torch.zeros(5, 4)
    norm = Norm("rms", torch.ones(8))

    def refused(match: str, *args: object, slots: list[int] | None = None, k: Tensor = k) -> None:
        there = dataclasses.replace(place, slot_mapping=torch.tensor(slots)) if slots else place
        with pytest.raises(ValueError, match=match):
            native.write_kv(q, k, v, pages, there, *args)  # type: ignore[arg-type]

    native.write_kv(q, k, v, pages, place)
    before = pages.keys.clone()
    refused("outside the pages", slots=[0, 48])
    refused("outside the pages", slots=[-1, 0])
    refused("outside the table of angles", Rotation(angle, angle, torch.tensor([0, 5]).int()))
    refused("outside the table of angles", Rotation(angle, angle, torch.tensor([0, -1]).int()))
    refused("sin is", Rotation(angle, angle[:4], torch.tensor([0, 1]).int()))
    refused("no more than a head has", Rotation(torch.zeros(5, 5), torch.zeros(5, 5), torch.tensor([0, 1]).int()))
    refused("both or neither", None, norm)
    refused("one epsilon", None, norm, Norm("rms", torch.ones(8), eps=1e-3))
    refused("k is", k=k[:1])
    refused("strides", k=randn(2, 8, 2).transpose(1, 2))
    refused("rows of heads overlap", k=k[:1].expand(2, 2, 8))
    assert torch.equal(pages.keys, before)


# Size


def test_beyond_two_to_the_31_elements() -> None:
    """Only the pages that are touched take memory."""
    blocks = (2**31) // (16 * 16) + 64
    shapes = ((blocks, 1, 1, 16, 16, 1), (blocks, 1, 16, 16, 1))
    made = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    pages = PagedKV(16, *made, scheme=scheme("bfloat16"))
    assert pages.keys.numel() > 2**31
    q, k, v = randn(20, 2, 16), randn(20, 1, 16, seed=1), randn(20, 1, 16, seed=2)
    form, at = AttentionForm(2, 1, 16, 0.25), torch.arange(20)
    results = []
    for table, where in [((blocks - 1, blocks - 7), pages), ((1, 0), PagedKV.zeros(2, 16, 1, 16, scheme("bfloat16")))]:
        tables = torch.tensor([table], dtype=torch.int32)
        slots = tables[0].long()[at // 16] * 16 + at % 16
        place = AttentionMetadata(torch.tensor([0, 20]).int(), torch.tensor([20]).int(), tables, at.int(), slots)
        where.keys[list(table)], where.values[list(table)] = 0, 0
        native.write_kv(q, k, v, where, place)
        results.append(native.paged_attention(q, where, place, form)[0])
    assert torch.equal(*results)


MEMORY = """
import torch
from attar.kv.schemes import scheme
from attar.kernels.native import attention
from attar.kernels.operands import AttentionForm
from attar.kv.pages import AttentionMetadata, PagedKV
torch.set_num_threads(2)
def peak():
    with open("/proc/self/status") as status:  # getrusage begins with what the parent had
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
def run(n):
    pages = PagedKV.zeros(n // 64, 64, 1, 16, scheme("{kv}"))
    batch = (torch.tensor(t).int() for t in ([0, n], [n], [list(range(n // 64))]))
    place = AttentionMetadata(*batch, torch.arange(n).int(), None)
    q, out = torch.zeros(n, 2, 16), torch.zeros(n, 32)
    before = peak()
    attention.paged_attention(q, pages, place, AttentionForm(2, 1, 16, 1.0), out=out)
    return peak() - before
run(64)
print(run({n}))
"""


@for_every_scheme
def test_memory_does_not_grow_with_the_square(kv: str) -> None:
    """A score for each of 4096 x 4096 pairs and head would be 128 MiB."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the peak of a process's memory is read from /proc")
    code = MEMORY.format(n=4096, kv=kv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) << 10 < 8 << 20


def test_layouts_have_the_names_of_the_extension() -> None:
    assert {each.value for each in Layout} == {each.name for each in extension.library.KvLayout}
