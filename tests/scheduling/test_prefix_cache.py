"""The prefix tree against brute force: what it finds is the longest common prefix with anything it was told."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import attar.scheduling.prefix_cache
from attar.protocol import block_digests
from attar.scheduling.block_journal import BlockJournal
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import Match, PrefixCache


class Same(bytes):
    """Bytes that collide with all others of their kind: a tree that told them apart by their hash would mix them up."""

    def __hash__(self) -> int:
        return 0


TOKENS = st.lists(st.integers(0, 2), max_size=14)
SALTS = st.sampled_from([Same(b""), Same(b"key")])


def ids(tokens: Iterable[int]) -> array[int]:
    return array("i", tokens)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Tree(RuleBasedStateMachine):
    """Sequences that match, hold, insert and let go, against a list of all strings that were inserted.

    The model does not know how blocks are arranged. It knows which strings each block was written with, so that it can
    tell whether a match may use it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 3)
        self.journal = BlockJournal()
        self.cache = PrefixCache(self.pool, journal=self.journal)
        self.told: set[int] = set()
        self.known: list[tuple[bytes, list[int]]] = []
        self.ever: list[tuple[bytes, list[int]]] = []
        self.written: dict[int, tuple[bytes, list[int]]] = {}
        self.tables: list[list[int]] = []

    def longest(self, cache_salt: bytes, tokens: list[int]) -> int:
        return max((common(tokens, other) for own, other in self.known if own == cache_salt), default=0)

    def usable(self, cache_salt: bytes, tokens: list[int], match: Match) -> None:
        """Each block that was matched was written with these very tokens, up to where it is used."""
        size = self.pool.size
        used = [*match.blocks, *([] if match.source is None else [match.source])]
        for i, block in enumerate(used):
            end = min((i + 1) * size, match.length)
            own, text = self.written[block]
            assert own == cache_salt
            assert text[:end] == tokens[:end]

    @rule(most=st.integers(0, 14))
    def last_used(self, most: int) -> None:
        """Whole blocks of the tree, from the first token on, and none of a node while a newer one is left out."""
        before, size = list(self.cache._order), self.pool.size
        chosen = set[tuple[bytes, bytes]]()
        for cache_salt, tokens in self.cache.last_used(most):
            assert len(tokens) % size == 0
            assert self.longest(cache_salt, list(tokens)) == len(tokens) > 0
            chosen |= {(bytes(cache_salt), tokens[:end].tobytes()) for end in range(size, len(tokens) + 1, size)}
        assert list(self.cache._order) == before
        assert len(chosen) == min(most, sum(len(node.tokens) // size for node in before))
        first = {  # of each node that has a whole block: its first block's beginning
            node: (bytes(salt), (above + node.tokens[:size]).tobytes())
            for salt, above, node in self.cache.nodes() if len(node.tokens) >= size
        }  # fmt: skip
        taken = [first[node] in chosen for node in before if node in first]
        assert taken == sorted(taken)

    @rule(cache_salt=SALTS, tokens=TOKENS)
    def match(self, cache_salt: bytes, tokens: list[int]) -> None:
        match = self.cache.match(cache_salt, ids(tokens))
        assert match.length == self.longest(cache_salt, tokens)
        assert len(match.blocks) == match.length // self.pool.size
        assert (match.source is not None) == (match.length % self.pool.size > 0)
        assert match.differs_at == (match.length if match.length < len(tokens) else None)
        assert match.ended in (["complete"] if match.length == len(tokens) else ["differs", "evicted"])
        if match.ended == "evicted":
            assert any(own == cache_salt and common(tokens, text) > match.length for own, text in self.ever)
        self.usable(cache_salt, tokens, match)

    @rule(cache_salt=SALTS, tokens=TOKENS, keep=st.booleans())
    def run(self, cache_salt: bytes, tokens: list[int], keep: bool) -> None:
        """A sequence takes what it finds, computes the rest, is inserted, and ends at once or stays."""
        match = self.cache.match(cache_salt, ids(tokens))
        self.pool.hold(match.blocks)
        needed = self.pool.needed(len(tokens)) - len(match.blocks)
        if needed > self.pool.available:
            self.pool.drop(match.blocks)
            return
        self.make_room(needed)
        table = match.blocks + self.pool.allocate(needed)
        self.written.update((block, (cache_salt, tokens)) for block in table[len(match.blocks) :])
        self.cache.insert(cache_salt, ids(tokens), table)
        assert len(table) == len(set(table)) == self.pool.needed(len(tokens))
        self.usable(cache_salt, tokens, Match(len(tokens), table, None, "", None))
        self.known.append((cache_salt, tokens))
        self.ever.append((cache_salt, tokens))
        assert self.cache.match(cache_salt, ids(tokens)).length == len(tokens)
        if keep:
            self.tables.append(table)
        else:
            self.pool.drop(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.drop(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.make_room(self.pool.free + data.draw(st.integers(0, self.pool.cached)))

    def make_room(self, free: int) -> None:
        """As many free blocks; the model then knows what is left, which must be beginnings of what it knew."""
        n = max(free - self.pool.free, 0)
        before, in_use = self.pool.free, [block for table in self.tables for block in table if self.pool.kept(block)]
        self.cache.evict(n)
        assert self.pool.free == before + n
        assert all(self.pool.kept(block) for block in in_use), "a block in use was evicted"
        if n:
            left = [(cache_salt, [*path, *node.tokens]) for cache_salt, path, node in self.cache.nodes()]
            assert all(self.longest(cache_salt, text) == len(text) for cache_salt, text in left)
            self.known = left

    @rule()
    def flush(self) -> None:
        self.make_room(self.pool.free + self.pool.cached)
        assert self.pool.cached == 0

    @rule()
    def tell(self) -> None:
        """What was told adds up to the whole blocks that there are."""
        stored, evicted = self.journal.take()
        assert self.told.isdisjoint(stored)
        assert self.told.issuperset(evicted)
        self.told = self.told.union(stored).difference(evicted)
        size = self.pool.size
        whole = {
            digest
            for salt, path, node in self.cache.nodes()
            for digest in block_digests.chain(block_digests.key_of(salt), path + node.tokens, size)
        }
        assert self.told == whole == set(self.cache.digests())

    @invariant()
    def is_sound(self) -> None:
        self.pool.check()
        self.cache.check()


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_two_keys_whose_hashes_collide_share_nothing() -> None:
    cache = PrefixCache(BlockPool(8, 4))
    first, second = Same(b"a key"), Same(b"another")
    assert hash(first) == hash(second)
    put(cache, range(8), first)
    assert cache.match(second, ids(range(8))).length == 0
    mine = put(cache, range(8), second)
    assert cache.match(second, ids(range(8))).blocks == mine != cache.match(first, ids(range(8))).blocks
    cache.check()


class Tokens(array):  # type: ignore[type-arg]
    """Token ids of which whatever is made to be looked up has the same hash."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return Tokens("i", found) if isinstance(found, array) else found

    def tobytes(self) -> Same:
        return Same(super().tobytes())


def test_prompts_whose_hashes_collide_are_told_apart() -> None:
    cache = PrefixCache(BlockPool(8, 4))
    prompts = [Tokens("i", [1, 2, 3, 4, 5, 6, 7, last]) for last in range(3)]
    held = []
    for prompt in prompts:
        blocks = cache.pool.allocate(2)
        cache.insert(b"", prompt, blocks)
        cache.pool.drop(blocks)
        held.append(blocks)
    for prompt, blocks in zip(prompts, held, strict=True):
        assert cache.match(b"", prompt).blocks == blocks
    assert len({block for blocks in held for block in blocks}) == 4
    cache.flush()
    assert cache.match(b"", prompts[0]).ended == "evicted"
    assert cache.match(b"", Tokens("i", [2, 1, 3, 4])).ended == "differs"
    cache.check()


def put(cache: PrefixCache, tokens: Iterable[int], cache_salt: bytes = b"") -> list[int]:
    """Insert tokens as a sequence that ends at once; its blocks."""
    tokens = ids(tokens)
    blocks = cache.pool.allocate(cache.pool.needed(len(tokens)))
    cache.insert(cache_salt, tokens, blocks)
    cache.pool.drop(blocks)
    return blocks


class ByAge:
    """What the tree should do, as a plain list of blocks: the tokens up to the end of each, and when it was used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: dict[tuple[int, ...], int] = {}
        self.now = 0

    def use(self, tokens: tuple[int, ...]) -> int:
        """Length of the longest match; its blocks have been used now. Of equals the last before the tokens in order."""
        self.now += 1
        found = max((common(list(tokens), list(block)) for block in self.used), default=0)
        at = found - found % self.size
        best = {block[: at + self.size] for block in self.used if block[:found] == tokens[:found] and len(block) > at}
        self.used.update((tokens[:end], self.now) for end in range(self.size, at + 1, self.size))
        if found > at:
            before = [block for block in best if block < tokens[: at + self.size]]
            self.used[max(before) if before else min(best)] = self.now
        return found

    def insert(self, tokens: tuple[int, ...]) -> None:
        if any(block[: len(tokens)] == tokens for block in self.used):
            self.use(tokens)
            return
        self.now += 1
        for end in range(len(tokens)):
            if end % self.size:
                self.used.pop(tokens[:end], None)  # the new one goes on from there
        self.used.update((tokens[:end], self.now) for end in [*range(self.size, len(tokens), self.size), len(tokens)])

    def evict(self, n: int) -> None:
        for _ in range(n):
            followed = {block[: (len(block) - 1) // self.size * self.size] for block in self.used}
            del self.used[min(self.used.keys() - followed, key=self.used.__getitem__)]


def test_eviction_takes_what_a_list_of_all_blocks_by_age_would() -> None:
    """A trace of prompts over a small pool: every hit has the length, and the tree the contents, of brute force."""
    size, numbers = 4, random.Random(0)
    cache, model = PrefixCache(BlockPool(24, size)), ByAge(size)
    hits = 0
    for _ in range(1000):
        tokens = tuple(int(numbers.paretovariate(2.5)) for _ in range(numbers.randint(1, 40)))
        match = cache.match(b"", ids(tokens))
        assert match.length == model.use(tokens)
        hits += match.length
        cache.pool.hold(match.blocks)
        needed = cache.pool.needed(len(tokens)) - len(match.blocks)
        missing = max(needed - cache.pool.free, 0)
        cache.evict(missing)
        model.evict(missing)
        table = match.blocks + cache.pool.allocate(needed)
        cache.insert(b"", ids(tokens), table)
        model.insert(tokens)
        cache.pool.drop(table)
        ends = [(path + node.tokens, len(path)) for _, path, node in cache.nodes()]
        assert model.used.keys() == {
            tuple(text[: min(end + size, len(text))]) for text, start in ends for end in range(start, len(text), size)
        }
    assert hits > 1000


def test_a_followed_partial_block_is_copied_from_the_one_that_agrees_longest() -> None:
    cache = PrefixCache(BlockPool(8, 4))
    put(cache, [1, 2, 3, 4, 5, 6])
    (_, near) = put(cache, [1, 2, 3, 4, 5, 7, 7, 7])[:2]
    match = cache.match(b"", ids([1, 2, 3, 4, 5, 7, 7, 9, 9]))
    assert (match.length, match.source, match.ended, match.differs_at) == (7, near, "differs", 7)


def test_salts_do_not_meet() -> None:
    cache = PrefixCache(BlockPool(8, 4))
    put(cache, range(8), b"a")
    assert cache.match(b"b", ids(range(8))).length == 0
    assert cache.match(b"a", ids(range(8))).length == 8


def test_matches_of_grouped_caches_are_rounded_down() -> None:
    cache = PrefixCache(BlockPool(8, 4), round_to=2)
    put(cache, range(7))
    assert cache.match(b"", ids(range(7)))[::3] == (6, "rounded")
    match = cache.match(b"", ids([0, 1, 2, 3, 4, 9]))
    assert (match.length, match.source, match.ended, match.differs_at) == (4, None, "rounded", 5)
    with pytest.raises(ValueError, match="groups of 3"):
        PrefixCache(BlockPool(8, 4), round_to=3)


def test_why_a_match_ended() -> None:
    cache = PrefixCache(BlockPool(8, 4))
    put(cache, range(16))
    assert cache.match(b"", ids(range(16))).ended == "complete"
    assert cache.match(b"", ids([0, 1, 9]))[3:] == ("differs", 2)
    cache.evict(2)
    assert cache.match(b"", ids(range(16)))[3:] == ("evicted", 8)
    assert cache.match(b"", ids([*range(8), 7, 7, 7, 7]))[3:] == ("differs", 8)
    cache.flush()
    assert cache.match(b"", ids(range(16)))[3:] == ("evicted", 0)
    assert cache.match(b"", ids([]))[3:] == ("complete", None)


def test_part_of_a_block_is_told_to_be_evicted_where_it_was() -> None:
    """Its first tokens were to be had, and prompts end inside a block, or leave it there."""
    cache = PrefixCache(BlockPool(8, 4))
    put(cache, range(3))
    assert cache.match(b"", ids(range(2))).ended == "complete"
    cache.flush()
    for prompt in ([0], range(2), range(3), range(6), [0, 1, 2, 9], [0, 9, 9, 9, 9]):
        assert cache.match(b"", ids(prompt))[3:] == ("evicted", 0), prompt
    assert cache.match(b"", ids([9, 1, 2]))[3:] == ("differs", 0)
    put(cache, [0, 1, 7])  # which has the first two of them again
    assert cache.match(b"", ids([0, 1, 2]))[3:] == ("evicted", 2)
    assert cache.match(b"", ids([0, 1, 8]))[3:] == ("differs", 2)
    assert cache.match(b"own", ids(range(3)))[3:] == ("differs", 0)


def test_the_end_of_a_prompt_is_told_to_be_evicted_where_it_was() -> None:
    cache = PrefixCache(BlockPool(8, 4))
    put(cache, range(7))
    cache.evict(1)
    assert cache.match(b"", ids(range(6)))[3:] == ("evicted", 4)
    assert cache.match(b"", ids([*range(5), 9]))[3:] == ("evicted", 4)
    assert cache.match(b"", ids([*range(4), 9]))[3:] == ("differs", 4)


def test_what_is_remembered_of_an_end_is_not_told_of_another() -> None:
    """Where an edge is split its upper part is another node, and where it is shortened, too."""
    cache = PrefixCache(BlockPool(8, 4))
    put(cache, range(12))
    cache.evict(1)
    put(cache, [*range(4), 50, 51, 52, 53])
    assert cache.match(b"", ids(range(12)))[3:] == ("evicted", 8)
    assert cache.match(b"", ids([*range(4), *range(8, 12)]))[3:] == ("differs", 4)
    cache = PrefixCache(BlockPool(8, 4))
    put(cache, range(12))
    cache.evict(1)
    cache.evict(1)
    assert cache.match(b"", ids(range(12)))[3:] == ("evicted", 4)
    assert cache.match(b"", ids([*range(4), *range(8, 12)]))[3:] == ("differs", 4)


def test_what_was_evicted_is_remembered_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attar.scheduling.prefix_cache, "REMEMBERED", 2)
    cache = PrefixCache(BlockPool(8, 4))
    for first in (0, 10, 20):
        put(cache, range(first, first + 4))
    cache.flush()
    assert [cache.match(b"", ids(range(first, first + 4))).ended for first in (0, 10, 20)] == [
        "differs",
        "evicted",
        "evicted",
    ]
    for first in (10, 30):  # one of them again
        put(cache, range(first, first + 4))
        cache.flush()
    assert [cache.match(b"", ids(range(first, first + 4))).ended for first in (10, 20, 30)] == [
        "evicted",
        "differs",
        "evicted",
    ]
    assert len(cache._evicted) == sum(map(len, cache._behind.values())) == 2


def test_counters_tell_what_was_really_reused() -> None:
    cache = PrefixCache(BlockPool(8, 4))
    put(cache, range(8))
    cache.match(b"", ids(range(8)))  # looked up, and nothing came of it
    cache.count(10, cache.match(b"", ids([0, 1, 2, 3, 4, 9])))
    assert (cache.asked, cache.reused) == (10, 5)


def test_long_prompts_are_compared_and_not_walked() -> None:
    """A hundred thousand tokens, twice, that differ near the end: thousands of comparisons would show as a hang."""
    cache = PrefixCache(BlockPool(4096, 64))
    long = list(range(100_000))
    put(cache, long)
    long[99_990] = 7
    match = cache.match(b"", ids(long))
    assert (match.length, len(match.blocks)) == (99_990, 99_990 // 64)
