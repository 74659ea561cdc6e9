"""On a busy machine nothing is said that a quiet one does not say: commands report progress every half minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attar.cli.terminal import Progress


@pytest.fixture(scope="session", autouse=True)
def _told_of_no_progress() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "LINE_SECONDS", float("inf"))
        yield
