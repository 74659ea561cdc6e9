"""Trees of drafts as lists of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attar.scheduling import draft_tree

TREES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6)), max_size=14).map(
    lambda nodes: (tuple(t for t, _ in nodes), tuple(at % (i + 1) for i, (_, at) in enumerate(nodes)))
)
"""Drafts, and the row that each follows."""


def texts(drafts: tuple[int, ...], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The tokens that lead to each row."""
    found: list[tuple[int, ...]] = [()]
    for draft, parent in zip(drafts, parents or range(len(drafts)), strict=True):
        found.append((*found[parent], draft))
    return found


@given(TREES)
def test_preorder_has_every_text_once(tree: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    drafts, parents = draft_tree.in_preorder(*tree)
    found = texts(drafts, parents)
    assert set(found) == set(texts(*tree))
    assert len(found) == len(set(found))
    assert draft_tree.is_tree(len(drafts), parents)
    rows = [row for branch in draft_tree.branches(parents) for row in branch]
    assert rows == list(range(len(parents) + 1))
    for branch in draft_tree.branches(parents)[1:]:
        assert all(parents[row - 1] == row - 1 for row in branch[1:])
        before = draft_tree.ancestors(parents, branch[0])
        assert [found[row] for row in before] == [found[branch[0]][:n] for n in range(len(before) - 1, -1, -1)]


@given(TREES, st.integers(-1, 16), st.integers(-1, 6))
def test_what_is_cut_is_the_beginning(tree: tuple[tuple[int, ...], tuple[int, ...]], count: int, depth: int) -> None:
    drafts, parents = draft_tree.in_preorder(*tree)
    kept = draft_tree.cut(drafts, parents, count, depth)
    fit = [text for text in texts(drafts, parents)[1:] if len(text) <= depth]
    assert texts(*kept)[1:] == fit[: max(0, count)]
    assert draft_tree.depth_of(*kept) == max(map(len, fit[: max(0, count)]), default=0)


@given(TREES, st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_the_path_of_an_outcome_is_that_of_its_tokens(
    tree: tuple[tuple[int, ...], tuple[int, ...]], tokens: list[int]
) -> None:
    drafts, parents = draft_tree.in_preorder(*tree)
    known = texts(drafts, parents)
    while tuple(tokens[:-1]) not in known:
        tokens.pop()
    rows = draft_tree.path(drafts, parents, tokens)
    assert [known[row] for row in rows] == [tuple(tokens[:n]) for n in range(len(tokens))]


def test_what_is_no_tree_is_told() -> None:
    assert draft_tree.is_tree(3, (0, 0, 2))
    assert not draft_tree.is_tree(3, (0, 0))
    assert not draft_tree.is_tree(2, (1, 0))
    assert not draft_tree.is_tree(2, (0, -1))
