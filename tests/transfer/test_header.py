"""Headers say what a block is, and a reader that wants another notices each difference; names tell nobody anything."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.protocol.framing import FrameTooLong
from attar.transfer.header import MAX_HEADER, NAME, BlockHeader, BlockMismatch, Names, Origin

ORIGIN = Origin("model", "settings", "layout", 4, 128)
TOKENS = (5, 6, 7, 8)


def test_a_header_comes_back_as_it_was() -> None:
    header = BlockHeader.of(ORIGIN, b"salt", b"before", TOKENS)
    found = BlockHeader.decode(header.encode())
    assert found == header
    found.check(ORIGIN, b"salt", b"before", TOKENS)


@pytest.mark.parametrize("field", BlockHeader.__struct_fields__)
def test_each_difference_is_noticed_and_named(field: str) -> None:
    header = BlockHeader.of(ORIGIN, b"salt", b"before", TOKENS)
    value = getattr(header, field)
    other = {int: lambda: value + 1, str: lambda: value + "x", bytes: lambda: value + b"x", tuple: lambda: value[:-1]}
    changed = msgspec.structs.replace(header, **{field: other[type(value)]()})
    with pytest.raises(BlockMismatch, match=field):
        changed.check(ORIGIN, b"salt", b"before", TOKENS)


@given(st.binary(max_size=200))
def test_no_bytes_but_a_header_are_read_as_one(data: bytes) -> None:
    with pytest.raises(BlockMismatch):
        BlockHeader.decode(data)


def test_headers_have_a_most() -> None:
    with pytest.raises(FrameTooLong):
        BlockHeader.of(ORIGIN, b"", b"", range(MAX_HEADER)).encode()
    with pytest.raises(BlockMismatch):
        BlockHeader.decode(bytes(MAX_HEADER + 1))


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_names_are_equal_exactly_where_all_tokens_up_to_the_block_are(a: list[int], b: list[int]) -> None:
    names = Names(bytes(32), ORIGIN)
    of_a, of_b = (names.chain(b"", array("i", each), 4) for each in (a, b))
    assert len(of_a) == len(a) // 4
    assert all(len(name) == NAME for name in of_a)
    for at, (one, other) in enumerate(zip(of_a, of_b, strict=False)):
        assert (one == other) == (a[: 4 * at + 4] == b[: 4 * at + 4])


def test_names_depend_on_secret_origin_and_salt() -> None:
    tokens = array("i", TOKENS)
    others = [msgspec.structs.replace(ORIGIN, **{name: "x"}) for name in ("model", "settings", "layout")]
    others += [msgspec.structs.replace(ORIGIN, size=129)]
    found = {Names(bytes(32), each).chain(b"", tokens, 4)[0] for each in (ORIGIN, *others)}
    found |= {Names(b"1" * 32, ORIGIN).chain(b"", tokens, 4)[0], Names(bytes(32), ORIGIN).chain(b"a", tokens, 4)[0]}
    assert len(found) == len(others) + 3
