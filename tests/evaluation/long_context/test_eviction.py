"""The cost of KV eviction on a text: less with a larger budget, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.evaluation.long_context.eviction import ROWS, measure
from attar.kernels import dispatch
from attar.kv.eviction import Eviction
from tests.errors import user_error

CONTEXT = 384
STORY = "Once upon a time there was a little girl who liked to play in the garden. One day she found a red ball. "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    path = tmp_path / "story.txt"
    path.write_text(STORY * 90)
    return path


def test_a_larger_budget_costs_less(text: Path) -> None:
    few, many = (
        measure("demo", text, Eviction.parse(policy), context=CONTEXT, max_tokens=800)
        for policy in ("sink:4+124", "sink:4+300")
    )
    assert 0 <= many.kl.value < few.kl.value < 2
    assert few.rows == 2 * ROWS
    assert few.kept_bytes < many.kept_bytes < few.full_bytes + 2 * few.full_bytes // CONTEXT * 64
    assert few.worst >= few.kl.value
    assert few.perplexity > 0 < few.full_perplexity == many.full_perplexity
    assert f"{few.kl.value:.5f}" in few.table()
    assert few.to_dict()["kl"]["value"] == few.kl.value


def test_what_shows_nothing_is_refused(text: Path) -> None:
    with user_error("option_conflict", "320"):
        measure("demo", text, Eviction.parse("sink:4+380"), context=CONTEXT)
    with user_error("text_too_short"):
        measure("demo", text, Eviction.parse("sink:4+124"), context=4096)
    with user_error("option_conflict", "klt2"):
        measure("demo", text, Eviction.parse("sink:4+124"), context=CONTEXT, kv="klt2")
