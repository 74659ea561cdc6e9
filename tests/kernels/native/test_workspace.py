"""Memory for results: what is let go is taken again, what is in use is not, and little lies idle."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar.kernels.native import workspace
from attar.kernels.native.workspace import Workspace

MB = 1 << 20


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_returns_with_the_last_view_of_it() -> None:
    space = Workspace()
    whole = space.empty((MB, 1), torch.float32)
    at, view = address(whole), whole[5:]
    del whole
    assert space.free == []
    del view
    assert [len(piece) for piece in space.free] == [4 * MB]
    assert address(space.empty((MB - 7,), torch.float32)) == at, "a piece a little larger will do"


def test_small_results_are_left_to_torch() -> None:
    space = Workspace()
    del (small := [space.empty((10,), torch.float32)])[0]
    assert small == space.free == []


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(MB // 4, 3 * MB)), max_size=30))
def test_no_two_results_share_memory_and_idle_memory_is_bounded(events: list[tuple[bool, int]]) -> None:
    most, workspace.MOST_FREE = workspace.MOST_FREE, 24 * MB
    try:
        space = Workspace()
        live: list[tuple[Tensor, int]] = []
        for i, (drop, count) in enumerate(events):
            if drop and live:
                tensor, value = live.pop(0)
                assert bool((tensor == value).all())
                del tensor
            else:
                live.append((space.empty((count,), torch.float32).fill_(i), i))
            assert sum(map(len, space.free)) <= workspace.MOST_FREE
        assert all(bool((tensor == value).all()) for tensor, value in live)
    finally:
        workspace.MOST_FREE = most
