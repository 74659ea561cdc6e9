import ast
import copy
import errno
import re
from pathlib import Path

import pytest

from attar.errors import CODES, UserError, code_of

ROOT = Path(__file__).parents[1]
SOURCES = {path: ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")}


def test_every_code_is_raised_somewhere_and_documented() -> None:
    used = {
        node.value
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and path.name != "errors.py"
    } | {"disk_full", "file_failed", "file_not_permitted", "value_invalid"}  # by `code_of`
    assert set(CODES) - used == set()
    page = (ROOT / "docs" / "errors.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == list(CODES)


@pytest.mark.parametrize(
    "error, code",
    [
        (UserError("output_exists", "it exists"), "output_exists"),
        (ValueError("x has no rows"), "value_invalid"),
        (FileNotFoundError(errno.ENOENT, "no such file"), "file_not_found"),
        (PermissionError(errno.EACCES, "not permitted"), "file_not_permitted"),
        (OSError(errno.ENOSPC, "no space left"), "disk_full"),
        (OSError(errno.EIO, "an error"), "file_failed"),
    ],
)
def test_an_error_has_a_code_by_its_kind(error: ValueError | OSError, code: str) -> None:
    assert code_of(error) == code


def test_a_user_error_reads_as_its_sentence_and_survives_a_copy() -> None:
    error = UserError("output_exists", "out exists")
    assert str(error) == "out exists"
    assert isinstance(error, ValueError)
    copied = copy.copy(error)
    assert (copied.code, str(copied)) == (error.code, str(error))
