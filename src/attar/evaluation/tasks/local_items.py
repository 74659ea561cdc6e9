"""Items of a task from local files, in the form that the Hub has them.

A folder holds a file for each split, such as `train.jsonl` and `test.jsonl`, or parquet files as a Hub's repository
does, such as `test-00000-of-00001.parquet`. A single file holds the items that are asked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar import strict_json
from attar.errors import UserError

if TYPE_CHECKING:
    import datasets

SPLITS = ("train", "validation", "test", "dev", "auxiliary_train")
MAX_BYTES = 2_000_000_000  # of all files of a task
_FILE = re.compile(rf"(?P<split>{'|'.join(SPLITS)})(-\d+-of-\d+)?\.(jsonl|parquet)")


def read(path: Path, asked: str) -> dict[str, datasets.Dataset]:
    """Return the items by split; those of a single file are of the split `asked`.

    Raises UserError where there is no such file, none of its name says a split, or one cannot be read.
    """
    import datasets

    splits: dict[str, list[Path]] = {}
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if (found := _FILE.fullmatch(file.name)) is not None:
                splits.setdefault(found["split"], []).append(file)
        if not splits:
            names = "a file for each split, such as test.jsonl or test-00000-of-00001.parquet"
            raise UserError("file_not_found", f"{path} has no items of a task: it needs {names}")
    elif path.is_file():
        splits = {asked: [path]}
    else:
        raise UserError("file_not_found", f"{path}: there is no such file or folder")
    if (size := sum(file.stat().st_size for files in splits.values() for file in files)) > MAX_BYTES:
        raise UserError("file_too_large", f"{path} has {size:,} bytes of items: at most {MAX_BYTES:,} are read")
    return {split: datasets.concatenate_datasets([_items(file) for file in files]) for split, files in splits.items()}


def _items(path: Path) -> datasets.Dataset:
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            table = pyarrow.parquet.read_table(path)
        else:
            table = pyarrow.Table.from_pylist(_lines(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError("task_malformed", f"{path}: its items cannot be read: {error}") from error
    if not table.num_rows:
        raise UserError("task_malformed", f"{path} has no items")
    items = datasets.Dataset(table)
    for name, feature in items.features.items():
        if isinstance(feature, datasets.Image):  # decoded by a limited process, and not by the library
            items = items.cast_column(name, datasets.Image(decode=False))
    return items


def _lines(path: Path) -> list[dict[str, Any]]:
    items = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = strict_json.parse(line)
        except ValueError as error:
            raise UserError("task_malformed", f"{path}, line {number}: {error}") from error
        if not isinstance(item, dict):
            raise UserError("task_malformed", f"{path}, line {number}: an item is a JSON object")
        items.append(item)
    return items
