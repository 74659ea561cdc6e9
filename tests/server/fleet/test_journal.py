"""Numbered changes of a prefix cache: a reader who leaves and comes back at any time knows the same blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attar.protocol import block_digests
from attar.protocol.messages import CachedBlocks
from attar.server.fleet.journal import Journal

DIGESTS = st.sets(st.integers(0, 30), max_size=8)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("tell"), DIGESTS, DIGESTS, st.booleans()),
        st.tuples(st.just("read")),
        st.tuples(st.just("begin")),
    ),
    max_size=60,
)


def apply(known: set[int], told: CachedBlocks) -> None:
    if told.whole:
        known.clear()
    known.difference_update(block_digests.unpacked(told.evicted))
    known.update(block_digests.unpacked(told.stored))


@given(ACTS, st.integers(0, 20))
def test_a_reader_knows_the_present_blocks(acts: list[tuple[object, ...]], kept: int) -> None:
    journal, there, known = Journal(kept), set[int](), set[int]()
    epoch, seq = "", 0
    for act in acts:
        if act[0] == "tell":
            _, stored, evicted, whole = act
            told = CachedBlocks(block_digests.packed(stored), block_digests.packed(evicted), bool(whole))  # type: ignore[arg-type]
            apply(there, told)
            journal.take(told)
        elif act[0] == "begin":
            there.clear()
            journal.begin()
        else:
            changes = journal.since(epoch, seq)
            for told in [journal.whole()] if changes is None else changes:
                apply(known, told)
            epoch, seq = journal.epoch, journal.seq
            assert known == there == journal.blocks
        assert sum(len(each.stored) + len(each.evicted) for _, each in journal._past) <= 8 * kept


def test_numbers_that_never_were_get_all_blocks() -> None:
    journal = Journal()
    journal.take(CachedBlocks(block_digests.packed([1, 2])))
    assert journal.since(journal.epoch, 0) is not None
    assert journal.since(journal.epoch, 2) is None
    assert journal.since(journal.epoch, -1) is None
    assert journal.since("another", 1) is None
