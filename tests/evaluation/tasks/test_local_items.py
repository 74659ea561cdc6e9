"""Items from local files: splits by name, both forms, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from attar.evaluation.tasks import local_items
from tests.errors import user_error


def test_a_file_is_the_split_that_is_asked(tmp_path: Path) -> None:
    (tmp_path / "any.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    found = local_items.read(tmp_path / "any.jsonl", "validation")
    assert {split: items.to_list() for split, items in found.items()} == {"validation": [{"a": 1}, {"a": 2}]}


def test_a_folder_has_splits_in_parts(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 0}\n')
    for i in (0, 1):
        table = pyarrow.Table.from_pylist([{"a": i + 1}])
        pyarrow.parquet.write_table(table, tmp_path / f"test-0000{i}-of-00002.parquet")
    (tmp_path / "README.md").write_text("not of the items")
    found = local_items.read(tmp_path, "test")
    assert {split: items["a"][:] for split, items in found.items()} == {"train": [0], "test": [1, 2]}


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [("x.jsonl", b"", "task_malformed"), ("x.jsonl", b'{"a": NaN}', "task_malformed"),
     ("x.jsonl", b"[1]", "task_malformed"), ("x.jsonl", b'{"a": 1}\n{"a": "b"}', "task_malformed"),
     ("x.jsonl", b"\xff", "task_malformed"), ("x.parquet", b"PAR1", "task_malformed")],
)  # fmt: skip
def test_refused(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(content)
    with user_error(code):
        local_items.read(tmp_path / name, "test")


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with user_error("file_not_found"):
            local_items.read(path, "test")
    (tmp_path / "test.jsonl").write_text('{"a": 1}')
    monkeypatch.setattr(local_items, "MAX_BYTES", 7)
    with user_error("file_too_large"):
        local_items.read(tmp_path, "test")
