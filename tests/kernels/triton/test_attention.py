"""Paged attention and the writing of pages, interpreted.

The oracle is `ref_attention` in float64, over pages of the CPU kernels' layout that hold the same numbers.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels: `make test-triton` sets it", allow_module_level=True)

from attar.kernels import ops, ref_attention
from attar.kernels.operands import AttentionForm, Norm
from attar.kernels.triton import attention, kv_write, nibbles
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.kv import bit_planes, eight_bits
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.schemes import scheme

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # of outputs, relative to the largest: what the arithmetic adds
ROTATED = {torch.float32: 1e-6, torch.float16: 2e-3}  # a norm and a rotation of values around 1
SCALES = 1e-3  # of a head's scale: its largest number is rounded to float16 on the way
FOUR_BITS = 5e-3  # of outputs, where a code or two of thousands are the neighbours
NEIGHBOUR = 2.0**-7  # of a scale that is rounded to bfloat16, from a sum in another order

SCHEMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}  # of pages with scales

FORMS = [
    {},
    {"heads": 7, "kv_heads": 1},
    {"heads": 22, "kv_heads": 2, "head_dim": 16},
    {"window": 21},
    {"window": 600, "soft_cap": 3.0},
    {"soft_cap": 0.5},
]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences of a hundred slots are split."""
    monkeypatch.setattr(attention, "LEAST", 16)
    monkeypatch.setattr(attention, "processors", lambda device: 16)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Sequences of `lengths` slots with their last `counts` rows as queries, their blocks scattered; what lies past a
    length is NaN."""

    def __init__(
        self,
        counts: list[int],
        lengths: list[int],
        kv: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        block: int = 32,
        **form: object,
    ) -> None:
        given = {"heads": 4, "kv_heads": 2, "head_dim": 24, "scale": 0.3} | form
        self.form = form_ = AttentionForm(**given)  # type: ignore[arg-type]
        width = max(1, *(-(-length // block) for length in lengths))
        sizes = (len(counts) * width + 1, block, form_.kv_heads, form_.head_dim)
        self.theirs = PagedKV.zeros(*sizes, scheme(SCHEMES.get(kv, "float32")))
        self.ours = PlainPages.make(*sizes, kv)
        if kv not in SCHEMES:
            self.ours.keys.fill_(torch.nan)
            self.ours.values.fill_(torch.nan)
        tables = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(0))[:-1].view(len(counts), width)
        for b, length in enumerate(lengths):
            at = torch.arange(length)
            k, v = (randn(length, form_.kv_heads, form_.head_dim, seed=10 * b + i).to(dtype) for i in (1, 2))
            ref_attention.write_pages(k.float(), v.float(), self.theirs, tables[b, at // block] * block + at % block)
            for numbers, held, scales in (
                (k, self.ours.keys, self.ours.key_scales),
                (v, self.ours.values, self.ours.value_scales),
            ):
                if scales is None:
                    held[tables[b, at // block], :, at % block] = numbers.to(kv)
                else:
                    codes, scale = eight_bits.quantize_head(numbers, kv != torch.int8)
                    held[tables[b, at // block], :, at % block] = codes.view(kv)
                    scales[tables[b, at // block], :, at % block] = scale
        positions = [torch.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
        self.place = AttentionMetadata(
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor(lengths).int(),
            tables.int().contiguous(),
            torch.cat(positions).int(),
            torch.zeros(sum(counts), dtype=torch.int64),
        )
        self.q = randn(sum(counts), form_.heads, form_.head_dim).to(dtype)

    def check(self) -> None:
        ours, _ = ops.paged_attention(self.q, self.ours, self.place, self.form)
        expected, _ = ref_attention.paged_attention(self.q.double(), self.theirs, self.place, self.form)
        assert (ours.shape, ours.dtype) == (expected.shape, self.q.dtype)
        tolerance = TOLERANCE[self.q.dtype] * max(1e-6, float(expected.abs().max()))
        assert (ours.double() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_against_the_oracle(form: dict[str, object]) -> None:
    """Decoding, split among programs; then a prompt, the rest of one, a sequence that sits out, one that has begun."""
    Case([1, 1], [130, 1], **form).check()  # type: ignore[arg-type]
    Case([1, 20, 0, 9], [40, 20, 20, 70], **form).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", [torch.float16, *SCHEMES], ids=str)
def test_other_dtypes(kv: torch.dtype) -> None:
    Case([1, 1], [130, 7], kv, torch.float16).check()
    Case([20, 1], [50, 7], kv, torch.float16, window=30).check()
    if kv in SCHEMES:
        Case([1, 1], [130, 7], kv).check()


@pytest.mark.parametrize(("size", "block"), [(3, 16), (64, 48), (128, 64), (160, 32)])
def test_head_and_block_sizes(size: int, block: int) -> None:
    Case([3, 1, 19], [50, 33, 19], head_dim=size, scale=size**-0.5, block=block).check()


@pytest.mark.parametrize(
    ("counts", "lengths", "heads", "window"),
    [
        ([7, 1, 5], [70, 40, 5], 4, None),
        ([7, 1, 5], [70, 40, 5], 4, 9),
        ([8, 8], [70, 40], 8, None),
        ([40, 3], [150, 40], 4, None),
    ],
)
def test_tree_of_guesses(
    counts: list[int], lengths: list[int], heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of 16 queries, of 32 and of 64, each split among programs."""
    splits, real = [], attention._splits

    def counted(*given: int) -> int:
        splits.append(real(*given))
        return splits[-1]

    monkeypatch.setattr(attention, "_splits", counted)
    one = Case(counts, lengths, window=window, heads=heads)
    masks = [torch.rand(n, n, generator=torch.Generator().manual_seed(n)) < 0.5 for n in counts]
    one.place.tree = torch.cat([(mask | torch.eye(len(mask)).bool()).flatten() for mask in masks])
    for first, end in itertools.pairwise(one.place.row_starts.tolist()):
        depths = torch.randint(0, 3, (end - first,), generator=torch.Generator().manual_seed(first))
        one.place.positions[first:end] = one.place.positions[first] + depths.sort().values.int()
    one.check()
    assert splits[0] > 1


def test_positions_of_an_evicting_cache() -> None:
    """Keys are where they say, and empty slots are not seen; a query that sees nothing gives zeros."""
    one = Case([1, 9, 2], [70, 40, 5])
    numbers = torch.Generator().manual_seed(0)
    one.place.key_positions = torch.randint(-1, 60, (one.ours.blocks, one.ours.block), generator=numbers).int()
    one.place.positions[0] = 0
    one.place.key_positions[one.place.block_tables[0].long()] = 5
    one.check()
    assert not ops.paged_attention(one.q, one.ours, one.place, one.form)[0][0].any()


@pytest.mark.parametrize("dtype", ROTATED, ids=str)
@pytest.mark.parametrize("turned", [0, 10, 24])
@pytest.mark.parametrize("normed", [None, 0.0, 1.0])
def test_write_kv(normed: float | None, turned: int, dtype: torch.dtype) -> None:
    """Columns of one matrix, into scattered slots, with and without norms and rotation."""
    rows, heads, kv_heads, size, block = 5, 4, 2, 24, 16
    matrix = randn(rows, heads + 2 * kv_heads, size).to(dtype)
    q, k, v = matrix.split((heads, kv_heads, kv_heads), 1)
    slots = torch.tensor([3, 40, 17, 0, 31])
    place = AttentionMetadata(slots, slots, slots, slots, slots)
    rotation = None
    if turned:
        angles = randn(9, turned // 2, seed=1)
        rotation = Rotation(angles.cos(), angles.sin(), torch.tensor([0, 8, 3, 3, 1], dtype=torch.int32))
    norms: list[Norm | None] = [None, None]
    if normed is not None:
        norms = [Norm("rms", randn(size, seed=i).to(dtype), offset=normed, eps=1e-5) for i in (2, 3)]
    for kv in (dtype, torch.int8):
        theirs = PagedKV.zeros(3, block, kv_heads, size, scheme("int8" if kv == torch.int8 else "float32"))
        ours = PlainPages.make(3, block, kv_heads, size, kv)
        turned_q = ops.write_kv(q, k, v, ours, place, rotation, *norms)
        normed_q, normed_k = (
            x if norm is None else ops.norm(x, None, norm)[1] for x, norm in zip((q, k), norms, strict=True)
        )
        expected = ref_attention.write_kv(normed_q, normed_k, v, theirs, place, rotation)
        assert (turned_q.shape, turned_q.dtype) == (expected.shape, dtype)
        assert (turned_q.float() - expected.float()).abs().max() <= ROTATED[dtype] * expected.float().abs().max()
        step = 0.0
        if ours.key_scales is not None and theirs.key_scales is not None:
            assert torch.allclose(ours.key_scales, theirs.key_scales, rtol=SCALES)
            step = float(theirs.key_scales.max())  # a code may fall to either side
        stored = ref_attention.read_pages(theirs, torch.arange(3), torch.float32)
        for held, scales, expected_held in zip(
            (ours.keys, ours.values), (ours.key_scales, ours.value_scales), stored, strict=True
        ):
            numbers = held.float() if scales is None else held.float() * scales[..., None]
            difference = numbers.transpose(1, 2).flatten(0, 1) - expected_held
            assert difference.abs().max() <= ROTATED[dtype] * expected_held.abs().max() + step


@pytest.mark.parametrize(
    ("dtype", "window", "cap"), [(torch.float32, None, None), (torch.float16, None, None), (torch.float16, 6, 0.5)]
)
def test_four_bits(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    """Written, rotated, by both, with numbers of a past below, and read: a step of tokens and a prompt's last rows. A
    code may fall to the neighbour where a scale's candidates leave nearly equal errors."""
    size, kv_heads, heads, block, lengths, counts = 32, 2, 4, 16, [20, 9], [1, 3]
    int4, form = scheme("int4"), AttentionForm(heads, kv_heads, size, size**-0.5, window, cap)
    ours = NibblePages.rotated(5, block, kv_heads, size, int4)
    ours.keys.fill_(255)
    theirs = PagedKV.zeros(5, block, kv_heads, size, int4)
    tables = torch.tensor([[3, 0], [4, 2]])
    angles = randn(80, 10, seed=3)
    for b, length in enumerate(lengths):
        at = torch.arange(length)
        slots = tables[b, at // block] * block + at % block
        starts, rotation = torch.tensor([0, length]).int(), Rotation(angles.cos(), angles.sin(), at.int())
        place = AttentionMetadata(starts, starts[1:], tables[b : b + 1].int(), at.int(), slots)
        q, k, v = (randn(length, n, size, seed=10 * b + n).to(dtype) for n in (heads, kv_heads, kv_heads))
        found = ops.write_kv(q, k, v, ours, place, rotation)
        expected = ref_attention.write_kv(q, k, v, theirs, place, rotation)
        assert torch.allclose(found, expected, atol=ROTATED[dtype])
    ends = zip(counts, lengths, strict=True)
    positions = torch.cat([torch.arange(length - count, length) for count, length in ends]).int()
    place = AttentionMetadata(torch.tensor([0, 1, 4]).int(), torch.tensor(lengths).int(), tables.int().contiguous(),
    positions,
                      torch.zeros(4).long())  # fmt: skip
    q = ours.bases.keys.turn_queries(randn(4, heads, size).to(dtype))  # type: ignore[union-attr]
    found, _ = ops.paged_attention(q, ours, place, form)
    expected, _ = ref_attention.paged_attention(q.double(), theirs, place, form)
    assert (found.double() - expected).abs().max() <= FOUR_BITS * expected.abs().max()


def test_four_bits_are_chosen_by_the_references_arithmetic() -> None:
    """Of heads whose coordinates are exact in any order: whole numbers, in heads of 64, become whole eighths."""
    rows, kv_heads, size, block = 24, 2, 64, 16
    numbers = torch.Generator().manual_seed(0)
    k, v = (torch.randint(-40, 41, (rows, kv_heads, size), generator=numbers).float() for _ in range(2))
    k[..., 3] *= 50
    k[1, 0] = v[2] = 0
    ours = NibblePages.rotated(2, block, kv_heads, size, scheme("int4"))
    slots = torch.randperm(2 * block, generator=numbers)[:rows]
    ops.write_kv(k, k, v, ours, AttentionMetadata(slots, slots, slots, slots, slots))
    for x, basis, held, scales in (
        (k, ours.bases.keys, ours.keys, ours.key_scales),  # type: ignore[union-attr]
        (v, ours.bases.values, ours.values, ours.value_scales),  # type: ignore[union-attr]
    ):
        assert scales is not None
        packed, scale = (part[slots // block, :, slots % block] for part in (held, scales))
        y = basis.turn(x)
        assert torch.allclose(scale, bit_planes.quantize(y, basis)[1].float(), rtol=NEIGHBOUR, atol=0)
        s = torch.where(scale < bit_planes.SMALLEST, 1.0, scale)[..., None]
        level = (y * (1 / s)).clamp(-bit_planes.LAST, bit_planes.LAST).round().long()
        codes = bit_planes.tables()[1][4, level + bit_planes.LAST]
        assert torch.equal(torch.cat((packed & 15, packed >> 4), -1), codes)


@pytest.mark.parametrize("dtype", ROTATED, ids=str)
@pytest.mark.parametrize("size", [32, 128])
def test_heads_become_coordinates_and_back(size: int, dtype: torch.dtype) -> None:
    ours = NibblePages.rotated(1, 16, 2, size, scheme("int4"))
    q, slots = randn(3, 4, size).to(dtype), torch.tensor([1, 5, 9])
    turned = ops.write_kv(q, q[:, :2], q[:, :2], ours, AttentionMetadata(slots, slots, slots, slots, slots))
    assert torch.allclose(turned, ours.bases.keys.turn_queries(q), atol=ROTATED[dtype])  # type: ignore[union-attr]
    back = nibbles.turn_back(turned.flatten(1).clone(), ours).view(q.shape)
    assert torch.allclose(back, q, atol=2 * ROTATED[dtype])


def test_four_bits_of_what_is_not_finite() -> None:
    pages = NibblePages.rotated(1, 16, 1, 32, scheme("int4"))
    k = randn(2, 1, 32)
    k[1, 0, 5] = torch.nan
    slots = torch.tensor([4, 9])
    ops.write_kv(k, k, k, pages, AttentionMetadata(slots, slots, slots, slots, slots))
    assert pages.key_scales is not None
    assert pages.key_scales.isnan().nonzero().tolist() == [[0, 0, 9]]
    with pytest.raises(ValueError, match="heads of 32, 64, 128"):
        NibblePages.rotated(1, 16, 1, 48, scheme("int4"))


def test_write_float8() -> None:
    """Numbers that float8 holds: the interpreter halves those that it rounds up to a power of two."""
    codes = torch.randint(0, 127, (2, 3, 2, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    k, v = codes.view(torch.float8_e4m3fn).float() * torch.tensor([1.0, -1.0]).repeat(12) * 2.0**-6
    k[..., 0] = v[..., 0] = 7.0  # 448 / 64
    k[1, 1] = 0
    slots = torch.tensor([3, 30, 17])
    place, ours = (
        AttentionMetadata(slots, slots, slots, slots, slots),
        PlainPages.make(2, 16, 2, 24, torch.float8_e4m3fn),
    )
    theirs = PagedKV.zeros(2, 16, 2, 24, scheme("fp8"))
    ops.write_kv(k, k, v, ours, place)
    ref_attention.write_pages(k, v, theirs, slots)
    assert ours.key_scales is not None
    assert theirs.key_scales is not None
    assert torch.equal(ours.key_scales, theirs.key_scales)
    held = (ours.keys.float() * ours.key_scales[..., None]).transpose(1, 2).flatten(0, 1)
    assert torch.equal(held, ref_attention.read_pages(theirs, torch.arange(2), torch.float32)[0])


@pytest.mark.parametrize("kv", SCHEMES, ids=str)
def test_what_is_not_finite_makes_a_scale_nan(kv: torch.dtype) -> None:
    pages = PlainPages.make(1, 16, 1, 24, kv)
    k = randn(2, 1, 24)
    k[1, 0, 5] = torch.inf
    slots = torch.tensor([4, 9])
    kv_write.write_kv(k, k, k, pages, AttentionMetadata(slots, slots, slots, slots, slots))
    for scales in (pages.key_scales, pages.value_scales):
        assert scales is not None
        assert scales.isnan().nonzero().tolist() == [[0, 0, 9]]


def test_what_does_not_fit() -> None:
    one = Case([1], [5])
    with pytest.raises(ValueError, match="not 4 of 24"):
        ops.paged_attention(one.q, one.ours, one.place, AttentionForm(4, 4, 24, 1.0))
    with pytest.raises(ValueError, match="greater than zero"):
        ops.paged_attention(one.q, one.ours, one.place, AttentionForm(4, 2, 24, 1.0, window=0))
    with pytest.raises(ValueError, match="the mass of a softmax"):
        ops.paged_attention(one.q, one.ours, one.place, one.form, want_mass=True)
    with pytest.raises(ValueError, match="both or neither"):
        kv_write.write_kv(one.q, one.q[:, :2], one.q[:, :2], one.ours, one.place, None, Norm("rms", randn(24)))
    with pytest.raises(ValueError, match="multiple of 16"):
        PlainPages.make(1, 8, 1, 24, torch.float32)
