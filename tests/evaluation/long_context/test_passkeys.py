"""Passkeys: asked at every depth, of the full cache and with few keys read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attar.evaluation.long_context import passkeys
from attar.evaluation.long_context.passkeys import DEPTHS, measure
from attar.evaluation.long_context.report import measure as measure_all
from attar.evaluation.long_context.windows import Reading
from attar.kernels import dispatch
from attar.kv.eviction import Eviction
from attar.kv.sparse import SparseAttention
from attar.kv.sparse_prefill import SparsePrefill
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


def test_settings_that_read_all_find_what_the_full_cache_finds(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model finds none by itself: an answer that begins like the question's key counts instead."""
    said = list[tuple[bool, list[int]]]()
    plain = passkeys._Text.answer

    def answer(self: passkeys._Text, more: list[int], count: int, few: bool) -> list[int]:
        found = plain(self, more, count, few)
        said.append((few, found))
        return found

    monkeypatch.setattr(passkeys._Text, "answer", answer)
    whole = SparsePrefill(sinks=4, window=CONTEXT)
    report = measure("demo", text, Reading(SparseAttention(topk=CONTEXT), whole), context=CONTEXT)
    assert len(said) == 4 * len(DEPTHS)
    assert [found for few, found in said if few] == [found for few, found in said if not few]
    assert (report.few_known, report.few_unknown) == (report.full_known, report.full_unknown)
    assert report.keys_read == report.keys_seen
    assert report.prompt_keys_read == report.prompt_keys_seen
    assert report.more_bytes * 8 < report.cache_bytes


def test_one_command_prints_all(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, of_prompts = SparseAttention(topk=32, dense_below=0), SparsePrefill(sinks=4, window=32, last=8)
    report = measure_all("demo", text, Reading(few, of_prompts), context=CONTEXT, max_tokens=400)
    assert report.to_dict().keys() == {"sparse_attention", "sparse_prefill", "passkeys"}
    assert report.passkeys is not None
    assert report.passkeys.keys_read < report.passkeys.keys_seen
    assert report.passkeys.prompt_keys_read < report.passkeys.prompt_keys_seen
    assert "question known" in report.table()
    assert str(of_prompts) in report.table()
    assert measure_all("demo", text, Reading(few), context=CONTEXT, max_tokens=400, prompts=0).passkeys is None


def test_too_short_a_window_is_refused(text: Path) -> None:
    with user_error("option_out_of_range"):
        measure("demo", text, Reading(SparseAttention(topk=32)), context=64)


def test_dropped_keys_are_measured_by_the_same_command(text: Path) -> None:
    policy = Eviction.parse("sink:0+128")
    report = measure_all("demo", text, Reading(eviction=policy), context=CONTEXT, max_tokens=400)
    assert report.to_dict().keys() == {"kv_eviction", "passkeys"}
    assert report.passkeys is not None
    assert report.passkeys.kept_bytes < report.passkeys.cache_bytes
    assert "kept" in report.passkeys.table()
    with user_error("option_conflict"):
        measure_all("demo", text, Reading(SparseAttention(topk=32), None, policy))


def test_a_policy_that_drops_nothing_answers_as_the_full_cache(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, list[list[int]]] = {"_Text": [], "_Evicting": []}
    kinds: tuple[Any, ...] = (passkeys._Text, passkeys._Evicting)
    for kind in kinds:

        def answer(self: object, *how: object, plain: Any = kind.answer, of: str = kind.__name__) -> list[int]:
            found: list[int] = plain(self, *how)
            said[of].append(found)
            return found

        monkeypatch.setattr(kind, "answer", answer)
    measure("demo", text, Reading(eviction=Eviction.parse("sink:0+448")), context=CONTEXT)
    assert len(said["_Text"]) == 2 * len(DEPTHS)
    assert said["_Evicting"] == said["_Text"]
