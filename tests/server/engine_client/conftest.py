"""A server whose engine a test may end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.server.conftest import Running


@pytest.fixture
def fragile(start: Callable[..., Running]) -> Iterator[Running]:
    """A server whose engine may be ended; it is up again after the test."""
    server = start()
    yield server
    server.engine.held = False
    server.engine.fail = None
    server.engine.beats, server.engine.busy = True, 0.0
    server.wait(lambda: server.server.engine.ready is not None)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    assert server.engine.open == 0
    assert not server.server.engine.open
