"""The native scan of one-bit keys against the reference, and the levels against each other, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attar.kernels import ref_attention, ref_sparse
from attar.kernels.native import attention as native
from attar.kernels.native import extension
from attar.kernels.operands import AttentionForm
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.schemes import scheme
from attar.kv.signs import Signs
from attar.kv.sparse import SparseAttention

pytestmark = pytest.mark.skipif(not extension.loaded(), reason="the native kernels are off or do not load")

BLOCK, LENGTH = 32, 1200
SPEEDS = torch.tensor([1.0, 0.4, 0.15, 0.05, 0.01, 0.001])
ROUNDING = 2e-3  # of ranks: products of floats in another order, and weights in steps of 2^-11
SIXTEENTH = SparseAttention(share=16, dense_below=0)
KINDS = ("float32", "bfloat16", "int8", "fp8")


def case(
    seed: int, kv: str = "float32", heads: tuple[int, int] = (6, 2), size: int = 24, turned: bool = True,
    settings: SparseAttention = SIXTEENTH, cap: float | None = None,
) -> tuple[PagedKV, AttentionForm, Rotation | None, torch.Generator]:  # fmt: skip
    """Empty pages with one-bit keys, of which half the columns turn, or none."""
    numbers = torch.Generator().manual_seed(seed)
    blocks = -(-LENGTH // BLOCK) + 3
    pages = PagedKV.zeros(blocks, BLOCK, heads[1], size, scheme(kv))
    angle = torch.arange(2 * LENGTH)[:, None] * SPEEDS
    means = 2 * torch.randn((heads[1], size), generator=numbers)
    spreads = torch.rand((heads[1], size), generator=numbers) + 0.2
    angles = (angle.cos(), angle.sin()) if turned else None
    pages.signs = Signs.zeros(blocks, BLOCK, means, spreads, settings, angles)
    rotation = Rotation(angle.cos(), angle.sin(), torch.arange(LENGTH).int()) if turned else None
    return pages, AttentionForm(*heads, size, size**-0.5, soft_cap=cap), rotation, numbers


def place(pages: PagedKV, table: Tensor, first: int, rows: int, until: int | None) -> AttentionMetadata:
    at = torch.arange(first, first + rows)
    slots = table[at // BLOCK].long() * BLOCK + at % BLOCK
    starts, lengths = torch.tensor([0, rows]).int(), torch.tensor([first + rows]).int()
    dense = None if until is None else torch.tensor([until]).int()
    return AttentionMetadata(starts, lengths, table[None], at.int(), slots, dense_until=dense)


def filled(seed: int, level: str | None = None, length: int = LENGTH, **how: object) -> tuple[
    PagedKV, AttentionForm, Tensor, Tensor
]:  # fmt: skip
    """Pages with `length` slots, written in pieces; their table; and queries [length, H, D], which were turned."""
    pages, form, rotation, numbers = case(seed, **how)  # type: ignore[arg-type]
    table = torch.randperm(pages.blocks, generator=numbers).int()
    q, k, v = (
        torch.randn((length, n, form.head_dim), generator=numbers) for n in (form.heads, form.kv_heads, form.kv_heads)
    )
    k[torch.randint(0, length, (8,), generator=numbers)] *= 3  # some matter more
    k += 2 * torch.randn((form.kv_heads, form.head_dim), generator=numbers)
    out = []
    for at in torch.arange(length).split(177):
        of = None if rotation is None else replace(rotation, rows=rotation.rows[at])
        to = place(pages, table, int(at[0]), len(at), None)
        out.append(native.write_kv(q[at], k[at], v[at], pages, to, of, level=level))
    return pages, form, table, 2 * torch.cat(out)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("turned", [True, False])
def test_written_one_bit_keys_are_the_references(kv: str, turned: bool) -> None:
    for level in extension.library.levels():
        pages, _, table, _ = filled(0, level, kv=kv, turned=turned, size=20)
        assert pages.signs is not None
        exact, _, rotation, numbers = case(0, "float32", turned=turned, size=20)
        assert exact.signs is not None
        assert torch.equal(torch.randperm(exact.blocks, generator=numbers).int(), table)
        _, k, _ = (torch.randn((LENGTH, n, 20), generator=numbers) for n in (6, 2, 2))
        k[torch.randint(0, LENGTH, (8,), generator=numbers)] *= 3
        k += 2 * torch.randn((2, 20), generator=numbers)
        if rotation is not None:
            k = ref_attention.rope(k, rotation.cos[:LENGTH], rotation.sin[:LENGTH])
        to = place(exact, table, 0, LENGTH, None)
        exact.signs.write(k, to.slot_mapping, to.positions)
        assert torch.equal(pages.signs.bits, exact.signs.bits), level
        assert torch.equal(pages.signs.scales, exact.signs.scales), level


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_outputs_are_those_of_the_runs_that_the_reference_chooses(kv: str, cap: float | None) -> None:
    """Where two ranks are so near each other that rounding decides, the native choice counts."""
    pages, form, table, q = filled(1, kv=kv, cap=cap)
    assert pages.signs is not None
    first, rows = 900, 40
    to = place(pages, table, first, rows, first)
    full, _ = native.paged_attention(q[first : first + rows], pages, replace(to, dense_until=None), form)
    found, _ = native.paged_attention(q[first : first + rows], pages, to, form)
    expected = ref_sparse.replace_rows(full, q[first : first + rows], pages, to, form)
    sure = torch.tensor([clear(q[n], pages.signs, table, n + 1, form) for n in range(first, first + rows)])
    assert sure.float().mean() > 0.5
    error = (found - expected).abs().amax(1)
    assert error[sure].max() < 1e-2 * expected.abs().max()
    assert not torch.allclose(found, full, atol=1e-3)


def clear(q: Tensor, signs: Signs, table: Tensor, length: int, form: AttentionForm) -> bool:
    """Whether the last run that is read ranks above the first that is not, by more than rounding."""
    budget = signs.settings.runs(length)
    assert budget is not None
    ranks = ref_sparse.ranks(q, signs, table, length, form)[:, 1:-1].sort(-1, descending=True).values
    return bool((ranks[:, budget - 3] > (1 + ROUNDING) * ranks[:, budget - 2]).all())


@given(
    seed=st.integers(0, 1000), heads=st.sampled_from([(1, 1), (4, 1), (14, 2), (9, 1)]),
    size=st.sampled_from([12, 20, 64]), kv=st.sampled_from(KINDS), share=st.booleans(),
)  # fmt: skip
def test_levels_agree_to_the_bit(seed: int, heads: tuple[int, int], size: int, kv: str, share: bool) -> None:
    settings = SparseAttention(share=7, dense_below=100) if share else SparseAttention(topk=80, dense_below=0)
    found = []
    for level in extension.library.levels():
        pages, form, table, q = filled(seed, level, kv=kv, heads=heads, size=size, settings=settings, length=700)
        to = place(pages, table, 690, 10, 20)
        found.append(native.paged_attention(q[690:], pages, to, form, level=level)[0])
    for other in found[1:]:
        assert torch.equal(other, found[0])


@given(seed=st.integers(0, 1000), rows=st.integers(1, 60), until=st.integers(0, 800), kv=st.sampled_from(KINDS))
def test_rows_are_what_they_are_alone(seed: int, rows: int, until: int, kv: str) -> None:
    """Dense rows and rows that choose, in one call or one by one, and beside another sequence."""
    pages, form, table, q = filled(seed, kv=kv, length=720)
    first = 720 - rows
    together, _ = native.paged_attention(q[first:], pages, place(pages, table, first, rows, until), form)
    for n in range(rows):
        at = place(pages, table, first + n, 1, until)
        alone, _ = native.paged_attention(q[first + n : first + n + 1], pages, at, form)
        assert torch.equal(alone[0], together[n]), f"row {n}"
        if first + n + 1 <= max(until, 128):
            full, _ = native.paged_attention(q[first + n : first + n + 1], pages, replace(at, dense_until=None), form)
            assert torch.equal(full[0], together[n]), f"row {n}"


def test_two_sequences_of_one_call() -> None:
    pages, form, table, q = filled(5, length=800)
    one, other = place(pages, table, 700, 1, 10), place(pages, table, 300, 1, 10)
    both = AttentionMetadata(
        torch.tensor([0, 1, 2]).int(), torch.tensor([701, 301]).int(), table.expand(2, -1).contiguous(),
        torch.tensor([700, 300]).int(), torch.cat((one.slot_mapping, other.slot_mapping)),
        dense_until=torch.tensor([10, 10]).int(),
    )  # fmt: skip
    found, _ = native.paged_attention(q[[700, 300]], pages, both, form)
    for n, at in enumerate((one, other)):
        alone, _ = native.paged_attention(q[[int(at.positions[0])]], pages, at, form)
        assert torch.equal(found[n], alone[0])


def test_threads_change_no_bit() -> None:
    pages, form, table, q = filled(6, size=64, heads=(8, 2))
    to, found = place(pages, table, LENGTH - 2, 2, 10), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(native.paged_attention(q[LENGTH - 2 :], pages, to, form)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_broken_key_shows() -> None:
    pages, form, table, q = filled(7)
    assert pages.signs is not None
    pages.signs.scales[:, 1] = torch.nan
    pages.keys[table[20], 1, 0, 3] = torch.nan
    to = place(pages, table, LENGTH - 1, 1, 10)
    found = native.paged_attention(q[LENGTH - 1 :], pages, to, form)[0].view(form.heads, -1)
    assert found[:3].isfinite().all()
    expected = ref_sparse.choose(q[LENGTH - 1], pages.signs, table, LENGTH, form)
    assert expected is not None
    assert expected[1, : pages.signs.settings.runs(LENGTH) - 1].all()  # type: ignore[operator]


@pytest.mark.parametrize(
    "change", [{"positions": torch.tensor([5]).int()}, {"dense_until": torch.tensor([1, 2]).int()}]
)
def test_impossible_places_are_refused(change: dict[str, Tensor]) -> None:
    pages, form, table, q = filled(8)
    with pytest.raises(ValueError, match=r"slots|dense_until"):
        native.paged_attention(q[900:901], pages, replace(place(pages, table, 900, 1, 10), **change), form)
    with pytest.raises(ValueError, match="window"):
        native.paged_attention(q[900:901], pages, place(pages, table, 900, 1, 10), replace(form, window=64))
