"""`ops.paged_attention` in Triton: one kernel for decoding, for prompts in pieces, and for anything between.

A program takes one key-value head and a tile of queries: some rows of one sequence with all the H / G query heads that
read this head, so that a key is read once for all of them. It walks over the slots with a running maximum and sum
(Flash-attention; Dao et al. 2022), keeps its sums unnormalised and divides once. A tile has room for the queries of one
sequence, as many as a call has on average, from 16 to 128. Where there are fewer tiles than the GPU runs at once, the
slots of a sequence are split among programs (Flash-decoding), and the last to arrive merges their parts
(`language.py`). This happens for one token of a few sequences, a tree of draft tokens for them, and the last piece of a
prompt.

The launch never waits for the host: the kernel reads row starts, lengths and tables itself, so a recorded graph replays
with new ones. The grid counts tiles from above: sequence b begins at tile row_starts[b] // TILE + b, which leaves room
for each sequence's last, partly filled tile; tiles in excess return at once. The shapes of a call decide the size of
tiles and the programs that share a sequence. So on this device a row's bits may depend on the rows and sequences beside
it.

Slots past a sequence's length may hold anything, even an earlier sequence's NaN: their values are not read.

Pages of 8 and 4 bits have a scale for each slot, which multiplies scores and weights, not numbers. They are read as
words of 16 bits, which is what shared memory turns over for the tensor cores, and a word holds two or four columns. So
a tile is two or four matrices of every other column, or of every fourth, that multiply as many parts of the queries and
make as many parts of the sums: numbers never change places (`words.py`).

Visibility is that of `ops.attention`. A tile of keys lies within one block, since it divides it. In a tree of draft
tokens only a sequence's own rows need its mask. They are walked over separately, in narrow tiles, so that the mask's
registers are not taken from the walk over the thousands of slots before them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.kernels.operands import AttentionForm
from attar.kernels.triton import nibbles
from attar.kernels.triton.backend import same_device
from attar.kernels.triton.language import ACCUMULATE, arrive_last, counters, kernel, next_power, nothing, processors, tl
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.kernels.triton.words import FLOAT8, INT4, INT8, column, four, pair
from attar.kv.pages import AttentionMetadata

LOG2_E = tl.constexpr(1.4426950408889634)
FEW, MANY = 16, 128  # queries of a tile: the tensor cores' least, and as many as registers hold
SLOTS = 64  # keys of a tile
NARROW = tl.constexpr(16)  # keys of a tile with a mask, whose numbers are each read by themselves
PROGRAMS = 8  # for each multiprocessor: measured on an H200, where 2 leave a third of the bandwidth unused
MOST_SPLITS = 32  # parts of a sequence: with 64, a tree of 8 over 32,768 slots took a third longer
LEAST = 256  # slots that are worth a split to 16 queries, whose part is written and read again: a guess, not measured


@kernel
def _tile(
    starts: tl.tensor, sequences: tl.tensor, ROWS: tl.constexpr, BLOCK_B: tl.constexpr, TREE: tl.constexpr
) -> tl.tensor:
    """Return this program's sequence, first row, the sequence's rows [first, end), and where its tree mask begins."""
    each = tl.arange(0, BLOCK_B)
    known = each < sequences
    first = tl.load(starts + each, mask=known, other=0)
    b = tl.sum(tl.where(known & (first // ROWS + each <= tl.program_id(0)), 1, 0), 0) - 1
    own = tl.load(starts + b)
    mask_at = 0
    if TREE:
        count = tl.load(starts + each + 1, mask=known, other=0) - first
        mask_at = tl.sum(tl.where(each < b, count * count, 0), 0)
    return b, own + (tl.program_id(0) - own // ROWS - b) * ROWS, own, tl.load(starts + b + 1), mask_at


@kernel
def _see(
    queries: tl.tensor, at: tl.tensor, asked: tl.tensor, rows: tl.tensor, top: tl.tensor, mass: tl.tensor,
    sums: tl.tensor, slot: tl.tensor, end: tl.tensor, own: tl.tensor, first: tl.tensor, last: tl.tensor,
    branches: tl.tensor, table: tl.tensor, g: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor,
    value_scales: tl.tensor, positions: tl.tensor, key_positions: tl.tensor, levels: tl.tensor, scale: tl.tensor,
    cap: tl.tensor, window: tl.tensor, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, CODES: tl.constexpr,
    PLACED: tl.constexpr, BRANCHES: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return maximum, mass and sums of a tile of queries, with BLOCK_S slots from `slot` on taken in. Queries and sums
    are tuples of PARTS.

    From slot `own` on they are the sequence's own rows, which with BRANCHES see one another as the masks at `branches`
    say.
    """
    NONE: tl.constexpr = 0 if CODES else 0.0
    WIDTH: tl.constexpr = D // PARTS
    dtype: tl.constexpr = queries[0].dtype
    j, s = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_S)
    block = tl.load(table + slot // BLOCK).to(tl.int64)
    place = (block * G + g) * BLOCK + slot % BLOCK + s
    held = slot + s < end
    k = tl.load(keys + place[None, :] * WIDTH + j[:, None], mask=held[None, :] & (j < WIDTH)[:, None], other=NONE)
    if PARTS == 1:
        scores = tl.dot(queries[0], k.to(dtype), input_precision=PRECISION)
    elif PARTS == 2:
        k0, k1 = pair(k, dtype, CODES)
        scores = tl.dot(queries[0], k0, input_precision=PRECISION)
        scores = tl.dot(queries[1], k1, scores, input_precision=PRECISION)
    else:
        k0, k1, k2, k3 = four(k, levels, dtype)
        scores = tl.dot(queries[0], k0, input_precision=PRECISION)
        scores = tl.dot(queries[1], k1, scores, input_precision=PRECISION)
        scores = tl.dot(queries[2], k2, scores, input_precision=PRECISION)
        scores = tl.dot(queries[3], k3, scores, input_precision=PRECISION)
    scores *= scale
    if CODES:
        scores *= tl.load(key_scales + place, mask=held, other=0.0)[None, :]
    if CAP:  # tanh(y) = 1 - 2 / (exp(2 y) + 1)
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / cap)) + 1.0))
    key_at, row = slot + s, slot + s - own
    if PLACED:
        key_at = tl.load(key_positions + block * BLOCK + slot % BLOCK + s, mask=held, other=-1)
    if BRANCHES:
        key_at = tl.where(row >= 0, tl.load(positions + first + row, mask=held & (row >= 0), other=0), key_at)
    sees = (held & (key_at >= 0))[None, :] & (key_at[None, :] <= at[:, None])
    if WINDOW:
        sees = sees & (at[:, None] - key_at[None, :] < window)
    if BRANCHES:
        among = branches + (rows - first)[:, None] * (last - first) + row[None, :]
        branch = asked[:, None] & (held & (row >= 0))[None, :]
        sees = sees & ((row < 0)[None, :] | (tl.load(among, mask=branch, other=0) != 0))
    scores = tl.where(sees, scores * LOG2_E, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    ground = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: no infinity less infinity
    weights = tl.exp2(scores - ground[:, None])
    fade = tl.exp2(top - ground)
    mass = mass * fade + tl.sum(weights, 1)
    if CODES:
        weights = weights * tl.load(value_scales + place, mask=held, other=0.0)[None, :]
    v = tl.load(values + place[:, None] * WIDTH + j[None, :], mask=held[:, None] & (j < WIDTH)[None, :], other=NONE)
    weights, fade = weights.to(dtype), fade[:, None]
    if PARTS == 1:
        return higher, mass, (tl.dot(weights, v.to(dtype), sums[0] * fade, input_precision=PRECISION),)
    elif PARTS == 2:
        v0, v1 = pair(v, dtype, CODES)
        return higher, mass, (
            tl.dot(weights, v0, sums[0] * fade, input_precision=PRECISION),
            tl.dot(weights, v1, sums[1] * fade, input_precision=PRECISION),
        )  # fmt: skip
    else:
        v0, v1, v2, v3 = four(v, levels, dtype)
        return higher, mass, (
            tl.dot(weights, v0, sums[0] * fade, input_precision=PRECISION),
            tl.dot(weights, v1, sums[1] * fade, input_precision=PRECISION),
            tl.dot(weights, v2, sums[2] * fade, input_precision=PRECISION),
            tl.dot(weights, v3, sums[3] * fade, input_precision=PRECISION),
        )  # fmt: skip


@kernel
def _part(
    q: tl.tensor, row: tl.tensor, asked: tl.tensor, D: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr,
    part: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a part of the queries at `row`, in numbers from `q`."""
    j = tl.arange(0, BLOCK_W)
    mask = asked[:, None] & (j < D // PARTS)[None, :]
    return tl.load(q + row[:, None] + column(j, part, D, PARTS)[None, :], mask=mask, other=0.0)


@kernel
def _queries(
    q: tl.tensor, row: tl.tensor, asked: tl.tensor, D: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr
) -> tl.tensor:
    """Return all parts of the queries at `row`, a tuple."""
    if PARTS == 1:
        return (_part(q, row, asked, D, BLOCK_W, PARTS, 0),)
    elif PARTS == 2:
        return _part(q, row, asked, D, BLOCK_W, PARTS, 0), _part(q, row, asked, D, BLOCK_W, PARTS, 1)
    else:
        return (
            _part(q, row, asked, D, BLOCK_W, PARTS, 0), _part(q, row, asked, D, BLOCK_W, PARTS, 1),
            _part(q, row, asked, D, BLOCK_W, PARTS, 2), _part(q, row, asked, D, BLOCK_W, PARTS, 3),
        )  # fmt: skip


@kernel
def _times(each: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Return a tuple that has `each` as every part."""
    if PARTS == 1:
        return (each,)
    elif PARTS == 2:
        return each, each
    else:
        return each, each, each, each


@kernel
def _put(
    out: tl.tensor, total: tl.tensor, mass: tl.tensor, row: tl.tensor, asked: tl.tensor, D: tl.constexpr,
    BLOCK_W: tl.constexpr, PARTS: tl.constexpr, part: tl.constexpr,
) -> None:  # fmt: skip
    """Divide a part of the sums by their mass, and store it at `row`, in numbers from `out`."""
    j = tl.arange(0, BLOCK_W)
    mask = asked[:, None] & (j < D // PARTS)[None, :]
    mean = total / tl.where(mass == 0, 1.0, mass)[:, None]
    tl.store(out + row[:, None] + column(j, part, D, PARTS)[None, :], mean.to(out.dtype.element_ty), mask=mask)


@kernel
def _attend(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor, out: tl.tensor,
    stored: tl.tensor, extremes: tl.tensor, arrived: tl.tensor, starts: tl.tensor, lengths: tl.tensor,
    tables: tl.tensor, positions: tl.tensor, key_positions: tl.tensor, tree: tl.tensor, sequences: tl.tensor,
    width: tl.tensor, levels: tl.tensor, scale: tl.tensor, cap: tl.tensor, window: tl.tensor, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr, BLOCK_B: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, CODES: tl.constexpr, PLACED: tl.constexpr, TREE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    SHARE: tl.constexpr = H // G
    g, split = tl.program_id(1), tl.program_id(2)
    b, row, first, last, mask_at = _tile(starts, sequences, ROWS, BLOCK_B, TREE)
    if row >= last:
        return
    length = tl.load(lengths + b)
    m, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_W)
    rows = row + m // SHARE
    asked = (m < ROWS * SHARE) & (rows < last)
    at = tl.load(positions + rows, mask=asked, other=-1)
    q_row = (rows.to(tl.int64) * H + g * SHARE + m % SHARE) * D
    queries = _queries(q, q_row, asked, D, BLOCK_W, PARTS)
    zeros = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    sums = _times(zeros, PARTS)
    low, high = 0, length
    if not PLACED and not TREE:
        high = tl.minimum(length, tl.max(at, 0) + 1)
        if WINDOW:
            low = tl.maximum(tl.min(tl.where(asked, at, 2147483647), 0) - window + 1, 0) // BLOCK_S * BLOCK_S
    share = tl.cdiv(tl.cdiv(high - low, BLOCK_S), SPLITS) * BLOCK_S
    begin = low + split * share
    end = tl.minimum(begin + share, high)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    table, own, branches, edge = tables + b * width, length - (last - first), tree + mask_at, end
    if TREE:  # tiles of whole numbers of slots without branches
        edge = tl.maximum(tl.minimum(own // BLOCK_S * BLOCK_S, end), begin)
    for slot in range(begin, edge, BLOCK_S):
        top, mass, sums = _see(
            queries, at, asked, rows, top, mass, sums, slot, end, own, first, last, branches, table, g, keys, values,
            key_scales, value_scales, positions, key_positions, levels, scale, cap, window, G, D, BLOCK, BLOCK_S,
            BLOCK_W, PARTS, WINDOW, CAP, CODES, PLACED, False, PRECISION,
        )  # fmt: skip
    if TREE:
        for slot in range(edge, end, NARROW):
            top, mass, sums = _see(
                queries, at, asked, rows, top, mass, sums, slot, end, own, first, last, branches, table, g, keys,
                values, key_scales, value_scales, positions, key_positions, levels, scale, cap, window, G, D, BLOCK,
                NARROW, BLOCK_W, PARTS, WINDOW, CAP, CODES, PLACED, True, PRECISION,
            )  # fmt: skip

    if SPLITS > 1:
        number = (tl.program_id(0) * G + g).to(tl.int64)
        SIZE: tl.constexpr = BLOCK_M * PARTS * BLOCK_W
        shared = stored + number * SPLITS * SIZE + m[:, None] * (PARTS * BLOCK_W) + j[None, :]
        extreme = extremes + number * SPLITS * 2 * BLOCK_M + m
        for part in tl.static_range(PARTS):
            tl.store(shared + split * SIZE + part * BLOCK_W, sums[part])
        tl.store(extreme + split * (2 * BLOCK_M), top)
        tl.store(extreme + split * (2 * BLOCK_M) + BLOCK_M, mass)
        if not arrive_last(arrived, number, SPLITS):
            return
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for each in range(SPLITS):
            top = tl.maximum(top, tl.load(extreme + each * (2 * BLOCK_M), cache_modifier=".cg"))
        ground = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.zeros([BLOCK_M], tl.float32)
        for each in range(SPLITS):
            fade = tl.exp2(tl.load(extreme + each * (2 * BLOCK_M), cache_modifier=".cg") - ground)
            mass += tl.load(extreme + each * (2 * BLOCK_M) + BLOCK_M, cache_modifier=".cg") * fade
        for part in tl.static_range(PARTS):
            total = zeros
            for each in range(SPLITS):
                fade = tl.exp2(tl.load(extreme + each * (2 * BLOCK_M), cache_modifier=".cg") - ground)
                theirs = tl.load(shared + each * SIZE + part * BLOCK_W, cache_modifier=".cg")
                total += theirs * fade[:, None]
            _put(out, total, mass, q_row, asked, D, BLOCK_W, PARTS, part)
    else:
        for part in tl.static_range(PARTS):
            _put(out, sums[part], mass, q_row, asked, D, BLOCK_W, PARTS, part)


def paged_attention(q: Tensor, pages: PlainPages, place: AttentionMetadata, form: AttentionForm) -> Tensor:
    """Run `ops.paged_attention` on queries [N, H, D] over plain pages, without the mass: [N, H * D].

    Over pages in 4 bits, queries and results are coordinates. Raises ValueError where shapes or devices do not fit.
    Lengths and tables are read by the kernel and not checked.
    """
    if (pages.kv_heads, pages.head_dim) != (form.kv_heads, form.head_dim):
        raise ValueError(
            f"the pages hold {pages.kv_heads} heads of {pages.head_dim} columns, not {form.kv_heads} of {form.head_dim}"
        )
    rows, sequences, width = len(q), len(place.lengths), place.block_tables.shape[1]
    if q.shape[1:] != (form.heads, form.head_dim) or place.positions.shape != (rows,):
        raise ValueError(f"queries are {list(q.shape)}, not [rows, {form.heads}, {form.head_dim}] with a position each")
    if place.row_starts.shape != (sequences + 1,) or len(place.block_tables) != sequences:
        raise ValueError(f"{sequences} sequences need as many block tables, and a start of rows each, and the end")
    if (form.window is not None and form.window < 1) or (form.soft_cap is not None and not form.soft_cap > 0):
        raise ValueError("a window and a soft cap are greater than zero")
    same_device(q, pages.keys, place.positions, place.block_tables, place.lengths, place.key_positions, place.tree)
    q, none = q.contiguous(), nothing(q.device)
    out = q.new_empty((rows, form.heads * form.head_dim))
    if not rows:
        return out
    share, block_d = form.heads // form.kv_heads, max(16, next_power(form.head_dim))
    many = MANY if block_d <= 128 and place.tree is None else MANY // 2  # a mask takes registers
    own = -(-rows // sequences)  # rows of a sequence, were all alike
    queries = max(FEW, min(many, next_power(own * share)), next_power(share))
    tile = queries // share
    codes, parts = _codes(pages)
    keys, values = (held.view(torch.int16) if codes else held for held in (pages.keys, pages.values))
    words = max(16, block_d // parts)
    slots = min(SLOTS, pages.block & -pages.block)  # a power of two that divides the block
    tiles = sequences * -(-own // tile) * form.kv_heads
    splits = _splits(tiles, width * pages.block * FEW // queries, processors(q.device))
    grid = (rows // tile + sequences, form.kv_heads, splits)
    sums = extremes = none
    if splits > 1:
        shared = (grid[0] * grid[1], splits)
        sums = torch.empty((*shared, queries, parts * words), dtype=torch.float32, device=q.device)
        extremes = torch.empty((*shared, 2, queries), dtype=torch.float32, device=q.device)
    _attend[grid](
        q, keys, values, pages.key_scales if codes else none, pages.value_scales if codes else none, out, sums,
        extremes, counters(q.device), place.row_starts, place.lengths, place.block_tables, place.positions,
        none if place.key_positions is None else place.key_positions,
        none if place.tree is None else place.tree.view(torch.uint8), sequences, width,
        nibbles.tables(q.device)[0] if codes == INT4.value else none, form.scale, form.soft_cap or 1.0,
        form.window or 0, H=form.heads, G=form.kv_heads, D=form.head_dim, BLOCK=pages.block, ROWS=tile,
        BLOCK_M=queries, BLOCK_S=slots, BLOCK_W=words, PARTS=parts, BLOCK_B=next_power(sequences), SPLITS=splits,
        WINDOW=form.window is not None, CAP=form.soft_cap is not None, CODES=codes,
        PLACED=place.key_positions is not None, TREE=place.tree is not None, PRECISION=ACCUMULATE,
        num_warps=8 if queries >= (MANY if block_d <= 128 else 2 * FEW) else 4, num_stages=3 if block_d <= 128 else 2,
    )  # fmt: skip
    return out


def _codes(pages: PlainPages) -> tuple[int, int]:
    """Return the kind of codes that pages hold, 0 for plain numbers, and the columns of a word."""
    if isinstance(pages, NibblePages):
        return INT4.value, 4
    if pages.key_scales is None:
        return 0, 1
    return INT8.value if pages.keys.dtype == torch.int8 else FLOAT8.value, 2


def _splits(tiles: int, slots: int, processors: int) -> int:
    """Return the programs for each tile of queries: a power of two, at most `PROGRAMS` a multiprocessor in all.

    `slots` is the number whose work for 16 queries equals that of a tile.
    """
    splits = 1
    while splits < MOST_SPLITS and tiles * splits * 2 <= PROGRAMS * processors and slots >= 2 * LEAST * splits:
        splits *= 2
    return splits
