"""The cost of sparse prefill on a text: nothing where all keys are read, something where few are, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.evaluation.long_context import sparse_prefill
from attar.evaluation.long_context.sparse_prefill import measure
from attar.kernels import dispatch
from attar.kv.sparse_prefill import SparsePrefill
from tests.errors import user_error

CONTEXT = 320
STORY = "Once upon a time there was a little girl who liked to play in the garden. One day she found a red ball. "


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    monkeypatch.setattr(sparse_prefill, "ROWS", 64)
    path = tmp_path / "story.txt"
    path.write_text(STORY * 90)
    return path


def test_reading_nearly_all_costs_less_than_reading_few(text: Path) -> None:
    few, many = (
        measure("demo", text, SparsePrefill(sinks=4, window=window, last=8), context=CONTEXT, max_tokens=700)
        for window in (16, 200)
    )
    assert 0 <= many.kl.value < few.kl.value < 2
    assert few.rows == 2 * 64
    assert few.keys_read < many.keys_read < few.keys_seen
    assert few.worst >= few.kl.value
    assert f"{few.kl.value:.5f}" in few.table()
    assert few.to_dict()["kl"]["value"] == few.kl.value


def test_what_shows_nothing_is_refused(text: Path) -> None:
    with user_error("option_conflict", "256"):
        measure("demo", text, SparsePrefill(lost=0.1), context=CONTEXT)
    with user_error("text_too_short"):
        measure("demo", text, SparsePrefill(sinks=4, window=16), context=4096)
