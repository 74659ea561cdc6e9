"""What readers of strangers' files share: few names are looked at, and JSON is read strictly.

`test_safetensors.py`, `test_folder.py` and `hostile_files.py` have more, by way of whole files.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from attar.checkpoints.strict_io import MAX_NAME, MAX_WIDE, NEAR, WORD, check_name, near, parse_json
from tests.errors import user_error


def test_near_misses_are_looked_for_among_few_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are a stranger's, and twenty thousand that are permutations of ours would take seconds."""
    assert near("embed_token", ["embed_tokens", "head"]) == "; did you mean 'embed_tokens'?"
    known = ("x" * (WORD + i % 2) for i in range(10 * NEAR))
    seen: list[str] = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, names, **_: seen.extend(names) or [])
    assert near("x", known) == ""
    assert len(seen) == NEAR // 2
    assert len(list(known)) == 9 * NEAR
    seen.clear()
    assert near("x" * (WORD + 1), ["x"]) == ""
    assert seen == []


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("", "an empty name"),
        ("a\u202eb", "do not print"),
        ("x" * (MAX_NAME + 1), f"longer than {MAX_NAME} bytes"),
        ("\N{SNOWMAN}" * (MAX_NAME // 2), f"longer than {MAX_NAME} bytes"),
        ("/etc/passwd", "out of the folder"),
        ("a/../../b", "out of the folder"),
    ],
)
def test_names_that_may_not_be_shown_or_written(name: str, wrong: str) -> None:
    assert wrong in (check_name(name) or "")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "a..b", "x" * MAX_NAME, "\N{SNOWMAN}"])
def test_other_names_are_names(name: str) -> None:
    assert check_name(name) is None


@pytest.mark.parametrize(
    "text, wrong",
    [
        (b'{"a": 1, "a": 2}', "`a` is there twice"),
        (b'{"a": {"b": NaN}}', "NaN is not JSON"),
        (b"[1e999]", "1e999 is out of range"),
        (b"\xef\xbb\xbf{}", "not valid JSON: it starts with a byte order mark"),
        (b"{} x", "Extra data"),
        (b"\xff", "not valid JSON: it is not UTF-8 at byte 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 10_000, "not valid JSON: an integer has too many digits"),
        (b'"' + "\N{SNOWMAN}".encode() * MAX_WIDE + b'"', "plain ASCII alone"),
    ],
)
def test_json_that_is_refused(text: bytes, wrong: str) -> None:
    with user_error("file_malformed", "config.json") as found:
        parse_json(text, Path("config.json"))
    assert wrong in str(found.value)


def test_json_that_is_read() -> None:
    assert parse_json(b'{"a": [1, 2.5, null, "\\u2603"]}', "x") == {"a": [1, 2.5, None, "\N{SNOWMAN}"]}
