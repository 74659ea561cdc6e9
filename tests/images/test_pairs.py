"""Folders of images with texts: prompts as transformers' processors have them, and files that must not be read."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from attar.images.pairs import LISTED, METADATA, PairPrompts, read_pairs, spread
from attar.images.settings import ImageSettings, read_settings
from attar.text.tokenizer import Tokenizer
from tests.errors import user_error
from tests.images import oracle

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from tests.images import hostile
from tests.images.test_decoding import ANSWERED, file, picture
from tests.images.test_placeholders import backend

LONGEST = 4096
IMAGE = 5  # the id of <image>


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(backend(), "<s>", "</s>")


def settings(case: str, tmp_path: Path) -> ImageSettings:
    found = read_settings(oracle.write(case, tmp_path))
    assert found is not None
    return found


def write(folder: Path, pairs: Sequence[tuple[str, str]], images: dict[str, bytes] | None = None) -> Path:
    """Write a folder of pairs; each has the same picture unless `images` says otherwise."""
    folder.mkdir(exist_ok=True)
    own = {name: file(picture(40, 30)) for name, _ in pairs} if images is None else images
    for name, data in own.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    lines = [json.dumps({"file_name": name, "text": text, "label": 3}) for name, text in pairs]
    (folder / METADATA).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("case", ["smolvlm", "llava", "llava_next", "qwen2_vl", "gemma3"])
def test_the_text_stands_behind_its_image(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    given = settings(case, tmp_path / "model")
    folder = write(tmp_path / "set", [("a.png", "a cat. what?"), ("in/b.png", "what is this?")])
    pairs = PairPrompts(folder, given, tokenizer, LONGEST)
    found = list(pairs)
    assert [each.name for each in found] == ["a.png", "in/b.png"]
    assert pairs.warnings == ()
    for each, text in zip(found, ("a cat. what?", "what is this?"), strict=True):
        rows = [at for at, token in enumerate(each.ids) if token == IMAGE]
        assert rows == list(range(rows[0], rows[0] + len(rows))) or case in ("smolvlm", "llava_next")
        assert len(rows) == each.image.rows
        assert rows[-1] < each.behind
        assert tokenizer.decode(each.ids[each.behind :]).strip() == text


def test_many_pairs_are_taken_evenly(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    given = settings("llava", tmp_path / "model")
    folder = write(tmp_path / "set", [(f"{number}.png", "a cat") for number in range(10)])
    assert [each.name for each in PairPrompts(folder, given, tokenizer, LONGEST, 3)] == ["0.png", "3.png", "6.png"]
    assert len(spread(read_pairs(folder), None)) == 10


def test_a_million_other_files_cost_nothing(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is never listed, so it may have any number of files."""
    (tmp_path / "model").mkdir()
    given = settings("llava", tmp_path / "model")
    folder = write(tmp_path / "set", [("a.png", "a cat")])
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("the folder was listed"))
    assert len(list(PairPrompts(folder, given, tokenizer, LONGEST))) == 1


def test_a_million_pairs_are_read_and_few_are_opened(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    given = settings("llava", tmp_path / "model")
    folder = write(tmp_path / "set", [(f"{number}.png", "a cat") for number in range(200_000)], {})
    pairs = PairPrompts(folder, given, tokenizer, LONGEST, 40)
    with user_error("image_invalid", f"and {40 - LISTED} more"):
        list(pairs)


def hostile_folder(folder: Path) -> dict[str, str]:
    """Write files that must not be read beside one that may; return a word of the reason for each name."""
    write(folder, [], {"good.png": file(picture(40, 30))})
    (folder.parent / "outside.png").write_bytes(file(picture(40, 30)))
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "linked").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    (folder / "zero.png").symlink_to("/dev/zero")
    with (folder / "huge.png").open("wb") as sparse:
        sparse.truncate(1 << 40)
    (folder / "bomb.png").write_bytes(hostile.png(65_000, 65_000, rows=b""))
    (folder / "text.png").write_text("no image")
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(folder)  # names of sockets are short
        try:
            bound.bind("socket.png")
        finally:
            os.chdir(here)
    return {
        "link.png": "symbolic link", "linked/outside.png": "symbolic link", "pipe.png": "no regular file",
        "folder.png": "no regular file", "zero.png": "symbolic link", "huge.png": "MiB", "bomb.png": "pixels",
        "text.png": "PNG", "socket.png": "cannot be read", "none.png": "no such file", "../outside.png": "leads out",
        "/etc/passwd": "leads out", "a\0.png": "leads out", "": "leads out", "x" * 300: "cannot be read",
    }  # fmt: skip


def test_hostile_files_are_left_out_by_name(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    (tmp_path / "model").mkdir()
    given = settings("llava", tmp_path / "model")
    reasons = hostile_folder(tmp_path / "set")
    monkeypatch.setattr("attar.images.pairs.LISTED", len(reasons))
    lines = [{"file_name": name, "text": "a cat"} for name in [*reasons, "good.png"]]
    (tmp_path / "set" / METADATA).write_text("\n".join(map(json.dumps, lines)))
    pairs = PairPrompts(tmp_path / "set", given, tokenizer, LONGEST)
    began = time.monotonic()
    assert [each.name for each in pairs] == ["good.png"]
    assert time.monotonic() - began < ANSWERED * len(lines)
    (warning,) = pairs.warnings
    assert f"{len(reasons)} pairs of {len(lines)} left out" in warning
    said = warning.partition("left out: ")[2].split("; ")
    for name, reason in reasons.items():
        assert any(each.startswith(repr(name)) and reason in each for each in said), (name, reason, said)


def test_texts_that_cannot_be_used_are_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    given = settings("llava", tmp_path / "model")
    texts = ["a cat", "  ", "<image> twice", "</s></s>", "a cat " * 60]
    folder = write(tmp_path / "set", [(f"{number}.png", text) for number, text in enumerate(texts)])
    pairs = PairPrompts(folder, given, tokenizer, 60)
    assert [each.name for each in pairs] == ["0.png"]
    (warning,) = pairs.warnings
    for words in ("'1.png' (its text is empty)", "'2.png' (its text spells", "'3.png' (its text has special", "60 fit"):
        assert words in warning


@pytest.mark.parametrize(
    ("content", "code", "word"),
    [
        (None, "file_not_found", "has no metadata.jsonl"),
        (b"", "text_empty", "is empty"),
        (b"\n\n", "text_empty", "is empty"),
        (b"[1]", "file_malformed", "line 1"),
        (b'{"file_name": "a.png", "text": "a"}\n{"file_name": "a.png"}', "file_malformed", "line 2"),
        (b'{"file_name": 3, "text": "a"}', "file_malformed", "file_name"),
        (b'{"file_name": "a.png", "text": "\\ud800"}', "file_malformed", "line 1"),
        (b'{"file_name": "a.png", "text": "' + b"[" * 100_000, "file_malformed", "line 1"),
        (b"[" * 100_000, "file_malformed", "line 1"),
        (b"\xff\xfe", "file_malformed", "line 1"),
    ],
)
def test_metadata_that_is_none_is_refused(content: bytes | None, code: str, word: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / METADATA).write_bytes(content)
    with user_error(code, word):
        read_pairs(tmp_path)


def test_metadata_is_a_regular_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / METADATA)
    with user_error("file_wrong_kind", METADATA):
        read_pairs(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / METADATA).symlink_to("/dev/zero")
    with user_error("file_unsafe", "symbolic link"):
        read_pairs(tmp_path / "b")
    with user_error("file_not_found", "no such folder"):
        read_pairs(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with user_error("file_wrong_kind", "is a file"):
        read_pairs(tmp_path / "file")


def test_without_pillow_the_extra_is_named(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attar.text import limited_child

    (tmp_path / "model").mkdir()
    pairs = PairPrompts(
        write(tmp_path / "set", [("a.png", "a")]), settings("llava", tmp_path / "model"), tokenizer, LONGEST
    )
    find: Any = limited_child.importlib.util.find_spec
    monkeypatch.setattr(
        limited_child.importlib.util, "find_spec", lambda name, *more: None if name == "PIL" else find(name, *more)
    )
    with user_error("package_missing", "attar[vision]"):
        list(pairs)
