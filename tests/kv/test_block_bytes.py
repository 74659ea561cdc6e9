"""Blocks as bytes: of every scheme, as they lie in every layer, to any other block; and what is refused."""

from __future__ import annotations

import pytest
import torch

from attar.kv.block_bytes import BlockBytes, layout_id
from attar.kv.pages import PagedKV
from attar.kv.schemes import SCHEMES, KvScheme
from tests.errors import user_error

BLOCKS, BLOCK, HEADS, DIM = 5, 32, 2, 32
PLAIN = [each for each in SCHEMES.values() if not each.calibrated]


def pages(scheme: KvScheme, blocks: int = BLOCKS, block: int = BLOCK) -> PagedKV:
    made = PagedKV.zeros(blocks, block, HEADS, DIM, scheme, tails=1 if scheme.recent else 0)
    numbers = torch.Generator().manual_seed(blocks)
    for part in made.parts():
        part.view(torch.uint8).random_(0, 256, generator=numbers)
    return made


@pytest.mark.parametrize("scheme", PLAIN, ids=lambda each: each.name)
def test_a_block_becomes_any_other(scheme: KvScheme) -> None:
    source, target = [pages(scheme), pages(scheme)], [pages(scheme, 4), pages(scheme, 4)]
    ours, theirs = BlockBytes(source), BlockBytes(target)
    assert ours.layout_id == theirs.layout_id
    assert ours.nbytes == 2 * scheme.bytes(HEADS, DIM, BLOCK)
    before = [[part.clone() for part in each.parts()] for each in target]
    data = bytearray(ours.nbytes)
    ours.read(3, data)
    theirs.write(1, data)
    for one, other, old in zip(source, target, before, strict=True):
        for a, b, was in zip(one.parts(), other.parts(), old, strict=True):
            assert torch.equal(a[3].view(torch.uint8), b[1].view(torch.uint8))
            others = [0, 2, 3]
            assert torch.equal(b[others].view(torch.uint8), was[others].view(torch.uint8)), "another block changed"
    assert b"".join(ours.views(3)) == data
    for view in theirs.views(2):
        view[:] = bytes(len(view))
    assert b"".join(theirs.views(2)) == bytes(len(data))
    assert b"".join(theirs.views(1)) == data


def test_other_sizes_are_refused_before_anything_is_written() -> None:
    made = pages(SCHEMES["int8"])
    moved, before = BlockBytes([made]), made.keys.clone()
    for size in (0, moved.nbytes - 1, moved.nbytes + 1):
        with pytest.raises(ValueError):
            moved.write(0, bytes(size))
    assert torch.equal(made.keys, before)


def test_layouts_differ_where_bytes_mean_something_else() -> None:
    different = [[pages(scheme)] for scheme in PLAIN]
    different += [[pages(PLAIN[0], block=64)], [pages(PLAIN[0])] * 2]
    rotated = pages(PLAIN[0])
    rotated.keys_rotated = False
    different.append([rotated])
    assert len({layout_id(each) for each in different}) == len(different)
    assert layout_id([pages(PLAIN[0], 3)]) == layout_id([pages(PLAIN[0], 7)])  # the number of blocks does not count


def test_layers_with_blocks_of_their_own_are_refused() -> None:
    with user_error("kv_unsupported"):
        BlockBytes([pages(PLAIN[0], 3), pages(PLAIN[0], 4)])
    meta = pages(PLAIN[0])
    meta.keys = meta.keys.to("meta")
    with user_error("kv_unsupported", "meta"):
        BlockBytes([meta])
