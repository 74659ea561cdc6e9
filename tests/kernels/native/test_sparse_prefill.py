"""Rows of prompts that read few keys: the native kernels against the reference, and the bound of what is skipped."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar.kernels import ops, ref_attention, ref_prefill
from attar.kernels.native import attention as native
from attar.kernels.native import extension
from attar.kernels.operands import AttentionForm
from attar.kv.pages import AttentionMetadata, PagedKV, PromptRows
from attar.kv.schemes import scheme
from attar.kv.sparse_prefill import SparsePrefill

pytestmark = pytest.mark.skipif(not extension.loaded(), reason="the native kernels are off or do not load")

BLOCK = 32
KINDS = ("float32", "bfloat16", "int8", "fp8")
TOLERANCE = 2e-5  # of float32 outputs, relative to values of about one
CODES = 2e-3  # of weights and queries in two bytes, and of values in a byte times those


def filled(
    seed: int, length: int, kv: str = "float32", heads: tuple[int, int] = (6, 2), size: int = 24, sharp: float = 3.0,
    cap: float | None = None,
) -> tuple[PagedKV, AttentionForm, Tensor, Tensor]:  # fmt: skip
    """Pages with `length` slots in any order of blocks, their form and table, and sharp queries [length, H, D]."""
    numbers = torch.Generator().manual_seed(seed)
    blocks = -(-length // BLOCK) + 2
    pages = PagedKV.zeros(blocks, BLOCK, heads[1], size, scheme(kv))
    form = AttentionForm(*heads, size, size**-0.5, soft_cap=cap)
    table = torch.randperm(blocks, generator=numbers).int()
    q, k, v = (torch.randn((length, n, size), generator=numbers) for n in (heads[0], heads[1], heads[1]))
    k[torch.randint(0, length, (length // 40 + 1,), generator=numbers)] *= sharp
    native.write_kv(q, k, v, pages, place(table, 0, length))
    return pages, form, table, sharp * q


def place(table: Tensor, first: int, rows: int, few: SparsePrefill | None = None, until: int = 0) -> AttentionMetadata:
    """Rows first .. first + rows of one sequence, of which those before `until` read few keys."""
    at = torch.arange(first, first + rows)
    slots = table[at // BLOCK].long() * BLOCK + at % BLOCK
    starts, lengths = torch.tensor([0, rows]).int(), torch.tensor([first + rows]).int()
    prompts = None
    if few is not None:
        prompts = PromptRows(few, torch.tensor([until]).int(), torch.zeros(1, dtype=torch.int64))
    return AttentionMetadata(starts, lengths, table[None], at.int(), slots, prompts=prompts)


def expected(q: Tensor, pages: PagedKV, to: AttentionMetadata, form: AttentionForm) -> Tensor:
    dense = ref_attention.paged_attention(q, pages, replace(to, prompts=None), form)[0]
    return ref_prefill.replace_rows(dense, q, pages, to, form)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("shape", [(0, 33), (5, 100), (64, 48), (700, 64)])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_tri_shape_is_the_references(kv: str, shape: tuple[int, int], cap: float | None) -> None:
    pages, form, table, q = filled(0, 1400, kv, cap=cap)
    few = SparsePrefill(sinks=shape[0], window=shape[1])
    to = place(table, 1100, 300, few, until=1350)
    found, _ = ops.paged_attention(q[1100:], pages, to, form)
    wanted = expected(q[1100:], pages, to, form)
    assert (found - wanted).abs().max() < (TOLERANCE if kv in ("float32", "bfloat16", "fp8") else CODES) * 4
    full, _ = ops.paged_attention(q[1100:], pages, replace(to, prompts=None), form)
    assert torch.equal(found[250:], full[250:])
    assert not torch.allclose(found[:250], full[:250], atol=0.1)


@pytest.mark.parametrize("kv", KINDS)
def test_skipped_keys_are_the_references(kv: str) -> None:
    """Where a greatest score is so near the limit that rounding decides, the native choice counts: rarely."""
    pages, form, table, q = filled(1, 1600, kv)
    few = SparsePrefill(lost=0.05)
    to, again = (place(table, 1100, 500, few, until=1500) for _ in range(2))
    found, _ = ops.paged_attention(q[1100:], pages, to, form)
    wanted = expected(q[1100:], pages, again, form)
    assert to.prompts is not None
    assert again.prompts is not None
    skipped, reference = int(to.prompts.skipped), int(again.prompts.skipped)
    assert skipped > 100_000
    assert abs(skipped - reference) < 0.01 * reference
    close = (found - wanted).abs().amax(1) < 1e-2
    assert close.float().mean() > 0.98


@pytest.mark.parametrize("few", [SparsePrefill(sinks=20, window=150), SparsePrefill(lost=0.1)])
@pytest.mark.parametrize("kv", [*KINDS, "int4"])
def test_levels_agree_to_the_bit(few: SparsePrefill, kv: str) -> None:
    pages, form, table, q = filled(2, 1300, kv, size=32)
    found = []
    for level in extension.library.levels():
        to = place(table, 1040, 260, few, until=1200)
        found.append((*native.paged_attention(q[1040:], pages, to, form, level=level)[:1], to))
    for other, _ in found[1:]:
        assert torch.equal(other, found[0][0])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000), cuts=st.lists(st.integers(1000, 1399), max_size=6), kv=st.sampled_from(KINDS),
    skips=st.booleans(), until=st.integers(1000, 1400),
)  # fmt: skip
def test_rows_are_the_same_in_any_chunks(seed: int, cuts: list[int], kv: str, skips: bool, until: int) -> None:
    few = SparsePrefill(lost=0.1) if skips else SparsePrefill(sinks=20, window=200)
    pages, form, table, q = filled(seed % 3, 1400, kv)
    to = place(table, 1000, 400, few, until)
    once, _ = ops.paged_attention(q[1000:], pages, to, form)
    ends = sorted({1000, *cuts, 1400})
    pieces = list[Tensor]()
    skipped = 0
    for first, end in itertools.pairwise(ends):
        part = place(table, first, end - first, few, until)
        pieces.append(ops.paged_attention(q[first:end], pages, part, form)[0])
        assert part.prompts is not None
        skipped += int(part.prompts.skipped)
    assert torch.equal(torch.cat(pieces), once)
    assert to.prompts is not None
    assert int(to.prompts.skipped) == skipped


@settings(max_examples=1000)
@given(
    seed=st.integers(0, 2**31), length=st.integers(1030, 1500), rows=st.integers(1, 6), lost=st.floats(1e-4, 0.5),
    sharp=st.floats(0.3, 8), heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]), size=st.sampled_from([8, 20, 32]),
    cap=st.sampled_from([None, 8.0]),
)  # fmt: skip
def test_no_row_loses_more_than_its_bound(
    seed: int, length: int, rows: int, lost: float, sharp: float, heads: tuple[int, int], size: int, cap: float | None
) -> None:
    """An output is off by no more than the lost share of the distance between the values that are mixed."""
    pages, form, table, q = filled(seed, length, "float32", heads, size, sharp, cap)
    to = place(table, length - rows, rows, SparsePrefill(lost=lost), until=length)
    full, _ = ops.paged_attention(q[-rows:], pages, replace(to, prompts=None), form)
    found, _ = ops.paged_attention(q[-rows:], pages, to, form)
    values = ref_attention.read_sequence(pages, table, length, None, torch.float32)[1]
    apart = (values.amax(0) - values.amin(0)).repeat_interleave(heads[0] // heads[1], 0).flatten()
    assert ((found - full).abs() <= lost * apart + TOLERANCE).all()


def test_positions_that_are_no_slots_are_refused() -> None:
    pages, form, table, q = filled(3, 1200)
    to = place(table, 1100, 100, SparsePrefill(lost=0.1), until=1200)
    for wrong in (
        replace(to, positions=to.positions - 1),
        replace(to, tree=torch.ones(100 * 100, dtype=torch.bool)),
        replace(to, key_positions=torch.zeros((pages.blocks, BLOCK), dtype=torch.int32)),
    ):
        with pytest.raises(ValueError):
            ops.paged_attention(q[1100:], pages, wrong, form)
    with pytest.raises(ValueError):
        ops.paged_attention(q[1100:], pages, to, form, want_mass=True)


def test_layers_with_a_window_read_as_ever() -> None:
    pages, form, table, q = filled(4, 1200)
    windowed = replace(form, window=300)
    to = place(table, 1100, 100, SparsePrefill(sinks=4, window=64), until=1200)
    full, _ = ops.paged_attention(q[1100:], pages, replace(to, prompts=None), windowed)
    assert torch.equal(ops.paged_attention(q[1100:], pages, to, windowed)[0], full)
