"""Pages of few bits, natively: int4, bases of uneven bits with and without recent blocks, KIVI's and KVQuant's.

The oracle of attention is the reference in float64, of the stored numbers; of writing, the reference too. Every level
of the machine must give the same bits, and so must every way to cut a sequence into calls.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar import _native
from attar.kernels import ref_attention
from attar.kernels.native import attention as native
from attar.kernels.operands import AttentionForm, Norm
from attar.kv.bit_planes import Basis
from attar.kv.kvquant import Channels
from attar.kv.pages import AttentionMetadata, Bases, PagedKV, Rotation
from attar.kv.schemes import UNIT, KvScheme, Layout, divide, scheme

LEVELS = _native.levels()
HEADS, BLOCK = 2, 32
# Of outputs: queries and weights of 15 bits; recent blocks of 8; KIVI's and KVQuant's are floats.
TOLERANCE = {"int4": 1e-3, "klt4": 1e-3, "klt2": 1e-2, "kivi4": 1e-5, "kivi2": 1e-5, "nuq4": 1e-5, "nuq3": 1e-5}
MASS = {"int4": 1e-3, "klt4": 1e-3, "klt2": 2e-2, "kivi4": 1e-5, "kivi2": 1e-5, "nuq4": 1e-5, "nuq3": 1e-5}
SAME = 0.02  # share of codes that rounding in another order may move to a neighbour
ROTATED = 2e-6  # a float32 norm, rotation and product
for_every_scheme = pytest.mark.parametrize("kv", TOLERANCE)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def basis(size: int, kind: KvScheme, seed: int) -> Basis:
    """One whose axes vary unlike, so that bits are uneven and reach 6 and 0; numbers of its kind are `likely`."""
    axes = torch.stack([torch.linalg.qr(randn(size, size, seed=seed + g))[0] for g in range(HEADS)])
    spread = torch.logspace(0, -1.5, size)
    bits = divide(spread.square().view(-1, 8).mean(1).tolist(), kind.units(size))
    factor = spread / UNIT
    back = (factor[:, None] * axes.transpose(1, 2)).contiguous()
    mean, weights = randn(HEADS, size, seed=seed + 2) * 0.1, factor.square().expand(HEADS, -1).contiguous()
    return Basis(axes / factor, back, mean, weights, (tuple(bits),) * HEADS)


def channels(size: int, kind: KvScheme, scaled: bool, seed: int) -> Channels:
    """Those whose levels lie unevenly about zero."""
    levels = torch.linspace(-1.3, 1.5, 1 << round(kind.bits)).pow(3) + torch.linspace(-1, 1, 1 << round(kind.bits))
    spread = torch.logspace(*((-0.5, 0) if scaled else (0, -1.5)), size).expand(HEADS, -1).contiguous()
    return Channels(randn(HEADS, size, seed=seed) * 0.1, spread, levels, scaled)


def likely(rows: int, pages: PagedKV, seed: int, spiked: bool = False) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, G, D] that the pages' bases are made for. `spiked`: some values have a coordinate that is
    most of their size, for which more scales are tried."""
    unit = UNIT if pages.scheme.byte_scales else 1.0
    keys, values = (randn(rows, HEADS, pages.head_dim, seed=seed + i) * unit for i in (0, 1))
    if pages.bases is None:
        return keys, values
    if spiked:
        values[::7, :, 0] *= 20
    return pages.bases.keys.turn_back(keys).contiguous(), pages.bases.values.turn_back(values).contiguous()


def empty(kv: str, blocks: int, size: int = 64, tails: int = 8) -> PagedKV:
    kind = scheme(kv)
    bases = None
    if kind.layout == Layout.KVQUANT:
        bases = Bases(channels(size, kind, False, 1), channels(size, kind, True, 7))
    elif kind.calibrated:
        bases = Bases(basis(size, kind, 1), basis(size, kind, 7))
    return PagedKV.zeros(blocks, BLOCK, HEADS, size, kind, tails=tails, bases=bases)


def whole(kv: str, size: int) -> int:
    """A head's size, or the next that consists of groups."""
    return size if scheme(kv).layout != Layout.KIVI else -(-size // 32) * 32


@dataclasses.dataclass
class Case:
    q: Tensor
    pages: PagedKV
    place: AttentionMetadata
    form: AttentionForm

    def run(self, level: str | None = None) -> tuple[Tensor, Tensor]:
        out = torch.full((len(self.q), self.form.heads * self.form.head_dim), torch.nan)
        _, mass = native.paged_attention(self.q, self.pages, self.place, self.form, True, out, level)
        assert mass is not None
        return out, mass


def case(kv: str, lengths: list[int], counts: list[int], size: int = 64, **form: object) -> Case:
    """Sequences of `lengths` with their last `counts` rows as queries, on scattered blocks."""
    size = whole(kv, size)
    wanted = AttentionForm(**{"heads": 6, "kv_heads": HEADS, "head_dim": size, "scale": 0.2} | form)  # type: ignore[arg-type]
    width = max(-(-length // BLOCK) for length in lengths)
    pages = empty(kv, len(lengths) * width + 1, size)
    tables = torch.randperm(pages.blocks, generator=torch.Generator().manual_seed(3))[:-1].view(len(lengths), width)
    tails = torch.arange(len(lengths)).flip(0) if pages.recent is not None else None
    for b, length in enumerate(lengths):
        (k, v), at = likely(length, pages, 10 * b + 50), torch.arange(length)
        slots = tables[b, at // BLOCK] * BLOCK + at % BLOCK
        own = None if tails is None else tails[b].expand(length)
        for piece in at.split(BLOCK):
            ref_attention.write_pages(k[piece], v[piece], pages, slots[piece], None if own is None else own[piece])
    place = AttentionMetadata(
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.tensor(lengths).int(),
        tables.int(),
        torch.cat([torch.arange(n - m, n) for n, m in zip(lengths, counts, strict=True)]).int(),
        torch.zeros(sum(counts), dtype=torch.int64),
        tails=tails,
    )
    q = randn(sum(counts), wanted.heads, size, seed=5)
    return Case(q if pages.bases is None else pages.bases.keys.turn_queries(q), pages, place, wanted)


def close(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    assert ours.shape == expected.shape
    assert (ours.double() - expected).abs().max() <= tolerance * float(expected.abs().max())


@for_every_scheme
@pytest.mark.parametrize("size, form", [(64, {}), (16, {"heads": 2}), (80, {"window": 37}), (128, {"soft_cap": 2.0})])
def test_against_the_oracle(kv: str, size: int, form: dict[str, object]) -> None:
    """Decode and pieces of prompts, over more than a split; of klt2 all rows are of a sequence's last block."""
    one = case(kv, [600, 33, 96, 20], [1, 1, 20, 20], size, **form)
    expected, mass = ref_attention.paged_attention(one.q.double(), one.pages, one.place, one.form, want_mass=True)
    results = {level: one.run(level) for level in LEVELS}
    ours, our_mass = results[LEVELS[-1]]
    close(ours, expected, TOLERANCE[kv])
    assert mass is not None
    close(our_mass, mass, MASS[kv])
    for level, (other, other_mass) in results.items():
        assert torch.equal(other, ours), level
        assert torch.equal(other_mass, our_mass), level


@for_every_scheme
@pytest.mark.parametrize("size, turned, normed", [(64, 64, True), (80, 16, False)])
def test_write_kv(kv: str, size: int, turned: int, normed: bool) -> None:
    """Two calls that share a block: what is there already stays. Levels agree to the bit, and with the reference but
    for codes that lay between two."""
    rows, heads, size = 60, 4, whole(kv, size)
    both = likely(rows, empty(kv, 1, size), 40, spiked=True)
    x = torch.cat((randn(rows, heads, size) * 2, *both), 1)  # columns of one matrix
    angle = randn(rows, turned // 2, seed=1) * 5
    rotation = Rotation(angle.cos(), angle.sin(), torch.arange(rows).int())
    norms = (
        [Norm("rms", randn(size, seed=s) * 0.1 + 1, eps=1e-5, offset=0.0) for s in (3, 4)] if normed else [None, None]
    )
    q, k, v = x.split((heads, HEADS, HEADS), 1)
    results: list[list[Tensor]] = []
    for level in (None, *LEVELS):
        pages, queries = empty(kv, 3, size), torch.full((rows, heads, size), torch.nan)
        for first, end in ((0, 20), (20, 32), (32, 60)):
            slots = torch.arange(first, end) + 32
            part = slice(first, end)
            place = AttentionMetadata(
                torch.tensor([0, end - first]).int(), torch.tensor([end]).int(), torch.tensor([[1, 2]]).int(),
                torch.arange(first, end).int(), slots, tails=torch.tensor([6]) if pages.recent else None,
            )  # fmt: skip
            turn = Rotation(rotation.cos, rotation.sin, rotation.rows[part].contiguous())
            if level is None:
                from attar.kernels import ref

                pair = [
                    t if n is None else ref.norm(t, None, n)[1] for t, n in zip((q[part], k[part]), norms, strict=True)
                ]
                queries[part] = ref_attention.write_kv(*pair, v[part], pages, place, turn)
            else:
                native.write_kv(q[part], k[part], v[part], pages, place, turn, *norms, out=queries[part], level=level)
        recent = [] if pages.recent is None else [pages.recent.keys, pages.recent.values]
        results.append([queries, *pages.parts(), *recent])
    theirs, first, *others = results
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    close(first[0], theirs[0].double(), ROTATED * size)
    for ours, wanted in zip(first[1:3], theirs[1:3], strict=True):
        assert (ours != wanted).float().mean() <= SAME
    assert not first[1][0].any()
    for ours, wanted in zip(first[3:], theirs[3:], strict=True):
        if ours.dtype != torch.uint8 or not kv.startswith("nuq"):  # whose bytes are columns
            assert (ours.float() - wanted.float()).abs().max() <= 0.06 * wanted.float().abs().max()  # another candidate
        assert (ours != wanted).float().mean() <= SAME


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(list(TOLERANCE)),
    st.lists(st.integers(1, 130), min_size=1, max_size=3),
    st.data(),
)
def test_a_row_does_not_depend_on_what_else_is_computed(kv: str, lengths: list[int], data: st.DataObject) -> None:
    form = AttentionForm(4, HEADS, 32, 0.3)

    def generate(calls: list[list[int]], seed: int) -> list[Tensor]:
        width = max(-(-length // BLOCK) for length in lengths)
        pages = empty(kv, len(lengths) * width, 32)
        tables = torch.randperm(pages.blocks, generator=torch.Generator().manual_seed(seed)).view(len(lengths), width)
        filled: list[int] = [0] * len(lengths)
        out: list[list[Tensor]] = [[] for _ in lengths]
        inputs = [randn(length, 8, 32, seed=b) for b, length in enumerate(lengths)]
        for rows in calls:
            ends = [first + n for first, n in zip(filled, rows, strict=True)]
            at = [torch.arange(first, end) for first, end in zip(filled, ends, strict=True)]
            place = AttentionMetadata(
                torch.tensor([0, *rows]).cumsum(0).int(), torch.tensor(ends).int(), tables.int(), torch.cat(at).int(),
                torch.cat([tables[b, t // BLOCK] * BLOCK + t % BLOCK for b, t in enumerate(at)]),
                tails=torch.arange(len(lengths)) if pages.recent else None,
            )  # fmt: skip
            x = torch.cat([one[first:end] for one, first, end in zip(inputs, filled, ends, strict=True)])
            q = native.write_kv(*x.split((4, 2, 2), 1), pages, place)
            for b, part in enumerate(native.paged_attention(q, pages, place, form)[0].split(rows)):
                out[b].append(part)
            filled = ends
        return [torch.cat(parts) for parts in out]

    left, calls = list(lengths), []
    while any(left):
        rows = [min(n, data.draw(st.sampled_from([0, 1, 5, 31, 32, 130]))) for n in left]
        if scheme(kv).recent:  # such calls stay within a block
            rows = [min(n, BLOCK - (length - m) % BLOCK) for n, m, length in zip(rows, left, lengths, strict=True)]
        if not any(rows):
            rows = [min(n, 1) for n in left]
        left = [n - m for n, m in zip(left, rows, strict=True)]
        calls.append(rows)
    ours = generate(calls, data.draw(st.integers(0, 99)))
    for b, length in enumerate(lengths):
        alone = [[BLOCK if i == b else 0 for i in range(len(lengths))]] * (length // BLOCK)
        rest = [[length % BLOCK if i == b else 0 for i in range(len(lengths))]] if length % BLOCK else []
        assert torch.equal(ours[b], generate(alone + rest, 0)[b])


@for_every_scheme
def test_what_is_not_finite_shows_where_it_is_read(kv: str) -> None:
    one = case(kv, [70, 40], [1, 1])
    clean, _ = one.run()
    for broken in (math.nan, math.inf):
        for row in (3, 69):  # in a finished block, and in the last
            copy = case(kv, [70, 40], [1, 1])
            x = torch.zeros(1, HEADS, 64)
            x[0, 1, 5] = broken
            slot = copy.place.block_tables[0, row // BLOCK].long()[None] * BLOCK + row % BLOCK
            if copy.pages.recent is not None and row < 64:
                continue  # it would come there by way of a recent block
            tails = None if copy.place.tails is None else copy.place.tails[:1]
            ref_attention.write_pages(torch.zeros_like(x), x, copy.pages, slot, tails)
            ours, _ = copy.run()
            assert not ours[0, 3 * 64 :].isfinite().all()  # query heads 3 to 5 read head 1
            assert ours[0, : 3 * 64].isfinite().all()
            assert torch.equal(ours[1], clean[1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1e24, 1e30, math.inf, math.nan])
def test_what_is_too_large_makes_its_own_scale_nan(level: str, size: float) -> None:
    """And leaves the rest of the run, and of the call, as they would be without it."""
    k, v = (randn(20, HEADS, 64, seed=s) for s in (1, 2))
    found = []
    for poisoned in (False, True):
        pages = empty("int4", 1)
        place = AttentionMetadata(
            torch.tensor([0, 20]).int(), torch.tensor([20]).int(), torch.tensor([[0]]).int(), torch.arange(20).int(),
            torch.arange(20),
        )  # fmt: skip
        keys = k.clone()
        if poisoned:
            keys[3, 1, 5] = size
        native.write_kv(randn(20, 4, 64), keys, v, pages, place, level=level)
        found.append(pages)
    clean, broken = found
    assert broken.key_scales is not None
    assert clean.key_scales is not None
    assert broken.key_scales.isnan().nonzero().tolist() == [[0, 1, 3]]
    assert torch.equal(broken.value_scales, clean.value_scales)  # type: ignore[arg-type]
    old, new = (ref_attention.read_pages(pages, torch.tensor([0]), torch.float32) for pages in found)
    assert torch.equal(old[1], new[1])
    others = torch.ones(BLOCK, HEADS, dtype=torch.bool)
    others[3, 1] = False
    assert torch.equal(old[0][others], new[0][others])


def test_rows_out_of_order_are_written_all_the_same() -> None:
    """Two rows of one run with others between them: no two threads may write its bytes."""
    order = torch.tensor([0, 16, 1, 17, *range(2, 16), *range(18, 32)])
    k, v, q = randn(32, HEADS, 64, seed=1), randn(32, HEADS, 64, seed=2), randn(32, 4, 64)
    found = []
    for rows in (torch.arange(32), order):
        pages = empty("int4", 1)
        place = AttentionMetadata(
            torch.tensor([0, 32]).int(), torch.tensor([32]).int(), torch.tensor([[0]]).int(), rows.int(), rows
        )
        native.write_kv(q, k[rows].contiguous(), v[rows].contiguous(), pages, place)
        found.append(pages.parts())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_bad_planes_are_refused() -> None:
    one = case("klt2", [70, 40], [1, 1])
    place = one.place
    assert place.tails is not None

    def refused(match: str, changed: AttentionMetadata, pages: PagedKV = one.pages) -> None:
        with pytest.raises(ValueError, match=match):
            native.paged_attention(one.q, pages, changed, one.form)

    refused("a recent block does not exist", dataclasses.replace(place, tails=torch.tensor([0, 8])))
    refused("a recent block does not exist", dataclasses.replace(place, tails=torch.tensor([-1, 0])))
    refused("which is whose", dataclasses.replace(place, tails=None))
    refused("must be torch.int64", dataclasses.replace(place, tails=place.tails.int()))
    refused(r"keys is torch\.uint8", place, dataclasses.replace(one.pages, scheme=scheme("float32")))
    refused("klt2 pages have keys", place, dataclasses.replace(one.pages, key_scales=None))
    k = randn(2, HEADS, 64)
    crossing = dataclasses.replace(
        place,
        row_starts=torch.tensor([0, 2, 2]).int(),
        slot_mapping=torch.tensor([31, 32]),
        positions=torch.tensor([31, 32]).int(),
    )
    with pytest.raises(ValueError, match="a call's rows of a sequence are of one block"):
        native.write_kv(randn(2, 6, 64), k, k, one.pages, crossing)


def test_bad_channels_are_refused() -> None:
    one = case("nuq4", [70, 40], [1, 1])
    bases = one.pages.bases
    assert bases is not None
    assert isinstance(bases.keys, Channels)
    assert isinstance(bases.values, Channels)

    def refused(match: str, **changed: object) -> None:
        with pytest.raises(ValueError, match=match):
            native.paged_attention(one.q, dataclasses.replace(one.pages, **changed), one.place, one.form)  # type: ignore[arg-type]

    refused("those of keys have none", bases=Bases(bases.values, bases.values))
    refused("those of keys have none", bases=Bases(bases.keys, bases.keys))
    short = dataclasses.replace(bases.keys, levels=bases.keys.levels[:8])
    refused(r"levels of channels is .* \[8\].*: it must be .* \[16\]", bases=Bases(short, bases.values))
    double = dataclasses.replace(bases.keys, spread=bases.keys.spread.double())
    refused(r"spread of channels is torch\.float64", bases=Bases(double, bases.values))
    more = one.pages.more
    refused(r"value_firsts is .*: it must be", more=more | {"value_firsts": more["value_firsts"][:1]})
    refused(r"key_columns is torch\.int8", more=more | {"key_columns": more["key_columns"].to(torch.int8)})
    refused("nuq4 pages have key_columns", more={name: part for name, part in more.items() if name != "key_columns"})
    refused("nuq4 pages have keys", value_scales=None)


@pytest.mark.parametrize("kv, size", [("nuq4", 8), ("nuq3", 24), ("nuq4", 72), ("nuq3", 200), ("nuq4", 256)])
def test_channels_of_any_eight_columns(kv: str, size: int) -> None:
    """The last columns of a head are half a vector; heads of 200 and more have several outliers."""
    rows, heads = 70, 2 * HEADS
    k, v, q = randn(rows, HEADS, size, seed=1), randn(rows, HEADS, size, seed=2), randn(rows, heads, size, seed=3)
    at, table = torch.arange(rows), torch.tensor([2, 0, 1])
    place = AttentionMetadata(
        torch.tensor([0, rows]).int(), torch.tensor([rows]).int(), table[None].int(), at.int(),
        table[at // BLOCK] * BLOCK + at % BLOCK,
    )  # fmt: skip
    form = AttentionForm(heads, HEADS, size, 0.2)
    theirs = empty(kv, 3, size)
    turned = ref_attention.write_kv(q, k, v, theirs, place, None)
    expected, _ = ref_attention.paged_attention(turned.double(), theirs, place, form)
    for level in LEVELS:
        pages = empty(kv, 3, size)
        assert torch.equal(native.write_kv(q, k, v, pages, place, level=level), turned)
        for ours, wanted in zip(pages.parts(), theirs.parts(), strict=True):
            assert (ours != wanted).float().mean() <= SAME
        close(native.paged_attention(turned, theirs, place, form, level=level)[0], expected, TOLERANCE[kv])


@pytest.mark.parametrize("level", LEVELS)
def test_an_outlier_of_no_column_is_left_out(level: str) -> None:
    """As in a block that came damaged from elsewhere: nobody reads it."""
    one = case("nuq4", [70, 40], [1, 1])
    clean, _ = one.run(level)
    for side in ("key", "value"):
        one.pages.more[f"{side}_columns"].fill_(64)
    found, _ = one.run(level)
    assert found.isfinite().all()
    assert not torch.equal(found, clean)
    for side in ("key", "value"):
        one.pages.more[f"{side}_outliers"].fill_(math.nan)
    assert torch.equal(one.run(level)[0], found)
