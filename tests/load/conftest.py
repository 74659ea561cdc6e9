"""A server on loopback for each test that wants one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.load.fake import Behave, Fake, well


@pytest.fixture
def serve() -> Iterator[Callable[[Behave], Fake]]:
    """Start servers: `serve(behave)`. They end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda behave: stack.enter_context(Fake(behave))


@pytest.fixture
def honest(serve: Callable[[Behave], Fake]) -> Fake:
    return serve(well)
