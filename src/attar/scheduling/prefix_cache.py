"""The prefix tree: the tokens of cached blocks, so that a prompt is computed only from its first new token.

It is a radix tree over token ids, one per salt (requests of different salts never meet). An edge is a segment of tokens
with the blocks of their keys and values. Segments begin, and are split, at block boundaries, and only a leaf may end
inside a block; so every block belongs to exactly one node. Matching is still exact to the token. Children of a node may
begin with the same tokens, as long as their first blocks differ somewhere; as children are sorted, the one with the
longest common prefix stands next to the prompt's place. A match is a run of whole blocks, to be shared unchanged, and
part of one more, to be copied. Token ids are compared, never a hash of them.

There is no lock. A user of the tree's blocks holds them in the pool, always from the root on (`insert` gives a sequence
the tree's own blocks for tokens that the tree has already). So holders never increase along a path, a block without
holders has none below it, and *cached* in the pool's counts means evictable, exactly.

Eviction takes blocks from the end of the least recently used leaf. All nodes stand in one list in order of use, and a
node's ancestors are moved to its end after the node; hence the first of the list is a leaf, and nothing is searched. A
leaf in use when its turn comes moves to the end. The tree never has more nodes than the pool has blocks. It also
remembers the tokens of the last `REMEMBERED` blocks it evicted (the first block of several), only to tell users why a
match ended. They are listed by the node that they followed, sorted, so that there, too, the one with the longest common
prefix stands next to a prompt's place.

Not done: merging nodes that a split left with one child.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple, Protocol

from attar.faults import point
from attar.protocol import block_digests
from attar.scheduling.block_journal import BlockJournal
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.image_ids import ImageIds

REMEMBERED = 4096
MAX_TOLD = 1 << 21  # tokens of `last_used`
_tokens = attrgetter("tokens")


class Match(NamedTuple):
    """The part of a prompt that the tree has. The blocks are not held yet: an eviction would invalidate them."""

    length: int  # tokens
    blocks: list[int]  # all of whose tokens match
    source: int | None  # and the block with the remaining length % size tokens, in its first slots
    ended: str  # the reason why it ends: one of `messages.REUSE_ENDS`
    differs_at: int | None  # index of the first token that no cached prompt has


NOTHING = Match(0, [], None, "bypassed", None)  # the match of requests that must not reuse anything


class OtherBlocks(Protocol):
    """Blocks of another group of layers, beside those of the tree (`sliding.py`)."""

    def reach(self, blocks: list[int], length: int) -> int:
        """Return how many of the first `length` tokens in the tree's blocks can be matched."""

    def forget(self, blocks: list[int]) -> None:
        """Forget what lies beside blocks that the tree forgets."""


class Node:
    """A segment of tokens and their blocks. A root has neither, and no parent."""

    __slots__ = ("blocks", "children", "digests", "key", "name", "parent", "tokens")

    def __init__(self, name: bytes | int, parent: Node | None, tokens: array[int], blocks: list[int]) -> None:
        self.name = name  # the salt of a root; a number that no other node ever has
        self.parent, self.tokens, self.blocks = parent, tokens, blocks
        self.children: list[Node] = []  # sorted by tokens
        self.digests = array("Q")  # of its whole blocks, where there is a journal
        self.key: bytes = b"" if parent is None else parent.key  # of the digests


class PrefixCache:
    """The tree over the blocks of `pool`.

    With `round_to`, matches end at multiples of so many tokens: caches that quantize tokens in groups cannot share part
    of one. With `beside`, matches end where those blocks' do. A `journal` is told of the whole blocks that the tree
    gains and loses. The tree holds the `images` whose rows it has. Raises ValueError where blocks do not consist of
    such groups.
    """

    def __init__(
        self, pool: BlockPool, round_to: int = 1, beside: OtherBlocks | None = None,
        journal: BlockJournal | None = None, images: ImageIds | None = None,
    ) -> None:  # fmt: skip
        if round_to < 1 or pool.size % round_to:
            raise ValueError(f"blocks of {pool.size} tokens do not consist of groups of {round_to}")
        self.pool, self.round_to, self.beside, self.journal, self.images = pool, round_to, beside, journal, images
        self.asked = 0
        """Prompt tokens looked up by requests that went on to run, once a request, whatever its number of choices."""
        self.reused = 0  # tokens of `asked` that did not have to be computed
        self._roots: dict[bytes, Node] = {}
        self._order: OrderedDict[Node, None] = OrderedDict()  # all nodes but roots, least recently used first
        self._names = itertools.count()
        self._evicted: OrderedDict[tuple[bytes | int, bytes], array[int]] = OrderedDict()
        self._behind: dict[bytes | int, list[array[int]]] = {}  # `_evicted` by name, sorted by tokens

    def match(self, cache_salt: bytes, tokens: array[int], use: bool = True) -> Match:
        """Return the longest run of first tokens that the tree has. The caller omits tokens that it must compute
        anyway. Without `use` they do not count as used."""
        point("radix.match")
        size = self.pool.size
        node, blocks, branch, shared = self._descend(self._root(cache_salt), tokens)
        part = self._use(node, branch) if use else branch or node
        at = len(blocks) * size
        found = at + shared
        length = found - found % self.round_to
        ended = "complete"
        if length < found:
            ended = "rounded"
        elif found < len(tokens):
            ended = self._why(node.name, tokens[at : at + size], shared)
        source = part.blocks[0] if length > at else None
        if self.beside is not None and length:
            reached = self.beside.reach(blocks if source is None else [*blocks, source], length)
            if reached < length:  # it ends with a block
                length, blocks, source, ended = reached, blocks[: reached // size], None, "evicted"
        return Match(length, blocks, source, ended, found if found < len(tokens) else None)

    def insert(
        self, cache_salt: bytes, tokens: array[int], blocks: list[int], drop: Callable[[list[int]], None] | None = None
    ) -> None:
        """Remember that `blocks` contain the keys and values of `tokens`, all of them computed and verified.

        The caller holds the blocks (there may be more of them than the tokens fill) and goes on holding as many. Where
        the tree has a block of the same tokens already, it replaces the caller's, in `blocks` too, and the caller's is
        passed to `drop`, by default the pool's own. The caller may go on writing behind the last token.
        """
        if not tokens:
            return
        size = self.pool.size
        root = self._root(cache_salt)
        node, known, branch, shared = self._descend(root, tokens)
        for i, block in enumerate(known):
            if blocks[i] != block:
                self.pool.hold([block])
                (drop or self.pool.drop)([blocks[i]])
                blocks[i] = block
        rest = tokens[len(known) * size :]
        if shared == len(rest):
            self._use(node, branch)
            return
        leaf = Node(next(self._names), node, rest, blocks[len(known) : self.pool.needed(len(tokens))])
        if self.journal is not None:
            leaf.digests = block_digests.chain(leaf.key, rest, size, node.digests[-1] if node.digests else 0)
        point("radix.insert")  # nothing after this raises: the tree gains all of the leaf, or nothing
        if self.images is not None:
            self.images.hold_tokens(rest)
        if branch is not None and shared == len(branch.tokens):
            self._remove(branch)  # it ended inside this block; the new one continues it
            if self.images is not None:
                self.images.drop_tokens(branch.tokens)
        self._roots[cache_salt] = root
        self.pool.keep(leaf.blocks)
        insort(node.children, leaf, key=_tokens)
        self._order[leaf] = None
        self._touch(leaf)
        if self.journal is not None:
            self.journal.store(leaf.digests)

    def evict(self, n: int) -> None:
        """Free n blocks. At least n must be cached."""
        pool, size = self.pool, self.pool.size
        assert n <= pool.cached, f"{n} blocks to be evicted, {pool.cached} cached"
        goal, in_use = pool.free + n, 0
        while pool.free < goal:
            point("radix.evict")
            leaf = next(iter(self._order))
            left = len(leaf.blocks)
            while left and pool.free < goal and not pool.holders(leaf.blocks[left - 1]):
                left -= 1
                self._forget([leaf.blocks[left]])
            if left == len(leaf.blocks):
                in_use += 1
                assert in_use <= len(self._order), "cached blocks that no leaf leads to"
                self._touch(leaf)
                continue
            if self.journal is not None:
                self.journal.evict(leaf.digests[left:])
                del leaf.digests[left:]
            if self.images is not None:
                self.images.drop_tokens(leaf.tokens[left * size :])
            lost = leaf.tokens[left * size : (left + 1) * size]
            if left:
                leaf.name = next(self._names)  # nothing follows its old end now
                self._remember(leaf.name, lost)
                del leaf.tokens[left * size :], leaf.blocks[left:]
                continue
            parent = leaf.parent
            assert parent is not None
            self._remember(parent.name, lost)
            leaf.blocks = []
            self._remove(leaf)
            if isinstance(parent.name, bytes) and not parent.children:
                del self._roots[parent.name]

    def flush(self) -> None:
        """Free all cached blocks."""
        self.evict(self.pool.cached)

    def count(self, tokens: int, match: Match) -> None:
        """Count a request that goes on to run with this match; its prompt has `tokens` tokens."""
        if match.ended != "bypassed":
            self.asked += tokens
            self.reused += match.length

    def digests(self) -> Iterator[int]:
        """Yield the digest of every whole block in the tree, those of a prompt's beginning first; nothing without a
        journal."""
        for _, _, node in self.nodes():
            yield from node.digests

    def last_used(self, most: int) -> list[tuple[bytes, array[int]]]:
        """Return salt and tokens of the beginnings that were used last, of at most `most` blocks together, all whole.
        The last used is the first. They have at most `MAX_TOLD` tokens, those that they share counted each time."""
        chosen, size = dict[Node, int](), self.pool.size
        for node in reversed(self._order):  # parents first
            if (whole := min(len(node.tokens) // size, most)) > 0:
                chosen[node] = whole
                most -= whole
            if not most:
                break
        inner = {node.parent for node in chosen}
        found: list[tuple[bytes, array[int]]] = []
        left = MAX_TOLD
        for node, blocks in chosen.items():
            if node not in inner:
                found.append(self._beginning(node, blocks * size))
                left -= len(found[-1][1])
                if left < 0:
                    return found[:-1]
        return found

    def nodes(self) -> Iterator[tuple[bytes, array[int], Node]]:
        """Yield every node, parents first, with its salt and the tokens from the root to its own first."""
        stack = [(cache_salt, array("i"), child) for cache_salt, root in self._roots.items() for child in root.children]
        while stack:
            cache_salt, before, node = stack.pop()
            yield cache_salt, before, node
            stack += [(cache_salt, before + node.tokens, child) for child in node.children]

    def _beginning(self, node: Node, length: int) -> tuple[bytes, array[int]]:
        """Return the salt of a node, and the tokens from its root to the first `length` of its own."""
        tokens, parent = node.tokens[:length], node.parent
        while parent is not None and parent.parent is not None:
            tokens, parent = parent.tokens + tokens, parent.parent
        assert parent is not None
        assert isinstance(parent.name, bytes)
        return parent.name, tokens

    def _root(self, cache_salt: bytes) -> Node:
        """Return the root of a salt; it is in the tree only once it has tokens."""
        if (root := self._roots.get(cache_salt)) is None:
            root = Node(cache_salt, None, array("i"), [])
            if self.journal is not None:
                root.key = block_digests.key_of(cache_salt)
        return root

    def _descend(self, node: Node, tokens: array[int]) -> tuple[Node, list[int], Node | None, int]:
        """Follow the tokens from the root, and split the edge on which the path ends.

        Returns the last node that matches wholly, the blocks up to its end, the child that shares most of the remaining
        tokens, less than a block's, and their number.
        """
        size = self.pool.size
        blocks: list[int] = []
        while True:
            at = len(blocks) * size
            branch, shared = self._closest(node, tokens[at : at + size])
            if branch is None or shared < size:
                return node, blocks, branch, shared
            whole = common(branch.tokens, tokens[at : at + len(branch.tokens)]) // size
            node = branch if whole == len(branch.blocks) else self._split(branch, whole)
            blocks += node.blocks

    def _closest(self, node: Node, tokens: array[int]) -> tuple[Node | None, int]:
        """Return the child that begins with most of the tokens, and how many: one of the two next to their place."""
        at = bisect_left(node.children, tokens, key=_tokens)
        best, shared = None, 0
        for child in node.children[max(at - 1, 0) : at + 1]:
            length = common(child.tokens, tokens)
            if length > shared:
                best, shared = child, length
        return best, shared

    def _split(self, node: Node, blocks: int) -> Node:
        """Move the first `blocks` blocks of the node to a new parent, and return that."""
        point("radix.split")
        assert node.parent is not None
        cut = blocks * self.pool.size
        upper = Node(next(self._names), node.parent, node.tokens[:cut], node.blocks[:blocks])
        lower = node.tokens[cut:], node.blocks[blocks:]
        upper.digests, node.digests = node.digests[:blocks], node.digests[blocks:]
        upper.children.append(node)
        siblings = node.parent.children
        siblings[bisect_left(siblings, node.tokens, key=_tokens)] = upper
        node.parent, (node.tokens, node.blocks) = upper, lower
        self._order[upper] = None
        self._touch(upper)  # at once: the caller that asked for the split may raise before it
        return upper

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        self._forget(leaf.blocks)
        siblings = leaf.parent.children
        del siblings[bisect_left(siblings, leaf.tokens, key=_tokens)]
        del self._order[leaf]

    def _forget(self, blocks: list[int]) -> None:
        self.pool.forget(blocks)
        if self.beside is not None:
            self.beside.forget(blocks)

    def _use(self, node: Node, branch: Node | None) -> Node:
        """Note the use of the path to `node` and of the first block of the branch behind it; return the last node."""
        if branch is not None:
            node = branch if len(branch.blocks) == 1 else self._split(branch, 1)
        self._touch(node)
        return node

    def _touch(self, node: Node) -> None:
        while node.parent is not None:
            self._order.move_to_end(node)
            node = node.parent

    def _remember(self, name: bytes | int, lost: array[int]) -> None:
        key = name, lost.tobytes()
        if key in self._evicted:
            self._evicted.move_to_end(key)
            return
        self._evicted[key] = lost
        insort(self._behind.setdefault(name, []), lost)
        if len(self._evicted) > REMEMBERED:
            (name, _), lost = self._evicted.popitem(last=False)
            behind = self._behind[name]
            del behind[bisect_left(behind, lost)]
            if not behind:
                del self._behind[name]

    def _why(self, name: bytes | int, tokens: array[int], shared: int) -> str:
        """Return why only the first `shared` of these tokens, a block's at most, were found behind the named node.
        Either a longer match was evicted, or no remembered block ever matched more."""
        behind = self._behind.get(name, [])
        at = bisect_left(behind, tokens)
        beside = behind[max(at - 1, 0) : at + 1]
        return "evicted" if any(common(lost, tokens) > shared for lost in beside) else "differs"

    def check(self) -> None:
        """Assert every invariant of this module. Linear in the tree: for tests."""
        pool, size = self.pool, self.pool.size
        seen: dict[Node, int] = {node: i for i, node in enumerate(self._order)}
        blocks, count = list[int](), 0
        for _, before, node in self.nodes():
            count += 1
            blocks += node.blocks
            parent = node.parent
            assert parent is not None
            assert node.tokens, "an empty edge"
            assert len(before) % size == 0, "an edge begins inside a block"
            assert len(node.blocks) == pool.needed(len(node.tokens)), "blocks and tokens of a node do not fit"
            assert not node.children or len(node.tokens) % size == 0, "an edge goes on behind part of a block"
            if self.journal is not None:
                last = parent.digests[-1] if parent.digests else 0
                assert node.digests == block_digests.chain(node.key, node.tokens, size, last), "other digests"
            holders = [pool.holders(block) for block in [*parent.blocks[-1:], *node.blocks]]
            assert holders == sorted(holders, reverse=True), "a block has holders that do not hold the one before"
            assert not parent.blocks or seen[node] < seen[parent], "a node was used after its parent"
            assert parent.children == sorted(parent.children, key=_tokens), "children out of order"
            for other in parent.children:
                first = min(size, len(node.tokens), len(other.tokens))
                assert other is node or node.tokens[:first] != other.tokens[:first], "two edges for the same tokens"
        assert count == len(seen), "nodes in the list of use that are not in the tree"
        assert all(root.children for root in self._roots.values()), "a root of nothing"
        kept = [block for block in range(pool.total) if pool.kept(block)]
        assert sorted(blocks) == kept, "the tree's blocks are not those that the pool counts as kept"


def common(a: array[int], b: array[int]) -> int:
    """Return the length of the common prefix. Slices are compared in C, so this halves rather than loops over
    tokens."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:  # equal up to low, not up to high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
