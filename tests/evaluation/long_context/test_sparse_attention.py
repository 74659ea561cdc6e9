"""The cost of sparse attention on a text: nothing where all keys are read, something where few are, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.evaluation.long_context.sparse_attention import ROWS, measure
from attar.kernels import dispatch
from attar.kv.sparse import SparseAttention
from tests.errors import user_error

CONTEXT = 256
STORY = "Once upon a time there was a little girl who liked to play in the garden. One day she found a red ball. "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    path = tmp_path / "story.txt"
    path.write_text(STORY * 90)
    return path


def test_reading_nearly_all_costs_less_than_reading_few(text: Path) -> None:
    few, many = (
        measure("demo", text, SparseAttention(topk=topk, dense_below=0), context=CONTEXT, max_tokens=600)
        for topk in (32, 176)
    )
    assert 0 <= many.kl.value < few.kl.value < 2
    assert few.rows == 2 * ROWS
    assert few.keys_read < many.keys_read < few.keys_seen
    assert few.worst >= few.kl.value
    assert few.sign_bytes * 8 < few.cache_bytes
    assert f"{few.kl.value:.5f}" in few.table()
    assert few.to_dict()["kl"]["value"] == few.kl.value


def test_what_shows_nothing_is_refused(text: Path) -> None:
    with user_error("option_conflict", "2,048"):
        measure("demo", text, SparseAttention(share=16), context=2048, max_tokens=2048)
    with user_error("text_too_short"):
        measure("demo", text, SparseAttention(share=16), context=4096)
    with user_error("option_conflict", "int4"):
        measure("demo", text, SparseAttention(topk=32, dense_below=0), context=CONTEXT, kv="int4")
