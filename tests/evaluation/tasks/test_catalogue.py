"""Names of tasks and their paths, as a user writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.evaluation.tasks.catalogue import MEMBERS, TaskSource
from attar.evaluation.tasks.run import task_manager
from tests.errors import user_error


def test_names_and_paths() -> None:
    assert TaskSource.parse("hellaswag") == TaskSource("hellaswag")
    assert TaskSource.parse("lambada=a=b.jsonl") == TaskSource("lambada", Path("a=b.jsonl"))


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "name_unknown"), ("=x", "name_unknown"), ("boolq", "name_unknown"), ("piqa=", "option_malformed"),
     ("arc=items", "option_malformed")],
)  # fmt: skip
def test_refused(text: str, code: str) -> None:
    with user_error(code):
        TaskSource.parse(text)


def test_the_harness_knows_every_member() -> None:
    known = set(task_manager().all_tasks)
    assert {member for members in MEMBERS.values() for member in members} <= known
