"""Ids of images: as many holders as there are, never more images than the limit, and nothing is left."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.protocol.image_limits import MAX_ROWS
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.image_ids import (
    MAX_IMAGES,
    ImageIds,
    ImagesExhausted,
    number_of,
    row_ids,
    row_of,
)
from attar.scheduling.prefix_cache import PrefixCache


@given(st.integers(1, MAX_IMAGES), st.integers(0, MAX_ROWS - 1))
def test_an_id_says_image_and_row(number: int, row: int) -> None:
    id = row_ids(number, MAX_ROWS)[row]
    assert id < -3  # small numbers mark other things
    assert (number_of(id), row_of(id)) == (number, row)
    assert array("i", [id])[0] == id


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_numbers_are_held_and_come_back(moves: list[tuple[bool, int]]) -> None:
    ids, held = ImageIds(most=4), Counter[bytes]()
    for takes, which in moves:
        key = bytes([which])
        if takes:
            if len(+held) == 4 and not held[key]:
                with pytest.raises(ImagesExhausted):
                    ids.hold(key)
                continue
            number = ids.hold(key)
            assert ids.key_of(number) == key
            held[key] += 1
        elif held[key]:
            ids.drop(ids.hold(key), 2)
            held[key] -= 1
        ids.check(Counter({ids.hold(key): count + 1 for key, count in (+held).items()}) if held else Counter())
        for each in +held:
            ids.drop(ids.hold(each), 2)


def test_a_hundred_thousand_images_leave_nothing() -> None:
    """Prompts with images, some seen before, pass through a small tree; sequences come and go as they like."""
    draw, size = random.Random(30), 4
    ids = ImageIds(most=64)
    pool = BlockPool(48, size)
    cache = PrefixCache(pool, images=ids)
    open_: list[tuple[list[int], list[int]]] = []
    seen, images = 0, 0
    while images < 100_000:
        images += 1
        key = draw.randrange(images).to_bytes(4, "little") if draw.random() < 0.3 else images.to_bytes(4, "little")
        try:
            number = ids.hold(key)
        except ImagesExhausted:
            cache.flush()
            number = ids.hold(key)
        rows = row_ids(number, draw.choice([1, 3, 6]))
        tokens = array("i", [*[1] * draw.randrange(4), *rows, *[2] * draw.randrange(5)])
        match = cache.match(b"", tokens)
        blocks = match.blocks
        pool.hold(blocks)
        needed = pool.needed(len(tokens)) - len(blocks)
        if needed > pool.free:
            cache.evict(needed - pool.free)
        blocks = [*blocks, *pool.allocate(needed)]
        seen += match.length > 0
        cache.insert(b"", tokens, blocks)
        open_.append((blocks, [number]))
        if len(open_) > 4:
            blocks, numbers = open_.pop(draw.randrange(5))
            pool.drop(blocks)
            for number in numbers:
                ids.drop(number)
        if images % 5000 == 0:
            within = [token for _, _, node in cache.nodes() for token in node.tokens if token < 0]
            holders = Counter(map(number_of, within))
            holders.update(number for _, numbers in open_ for number in numbers)
            ids.check(holders)
            cache.check()
    for blocks, numbers in open_:
        pool.drop(blocks)
        for number in numbers:
            ids.drop(number)
    cache.flush()
    ids.check(Counter())
    assert not len(ids)
    assert pool.free == pool.total
    assert seen > 10_000
