"""Blocks on disk: they come back as they were or not at all, whatever became of their files; and a bound on bytes."""

from __future__ import annotations

import errno
import os
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.transfer.disk_cache import FILE, DiskCache
from attar.transfer.folder import KEY, PrivateFolder
from attar.transfer.header import MAX_HEADER, Origin
from tests.errors import user_error

SIZE, BYTES = 4, 4096
ORIGIN = Origin("model", "settings", "layout", SIZE, BYTES)
OWNER, SALT = b"key", b"\0\0\0\0key"
PROMPT = array("i", range(5 * SIZE))


def opened(path: Path, limit: int = 1 << 20, owners: Sequence[bytes] = (OWNER,), **origin: Any) -> DiskCache:
    folder = PrivateFolder(path)
    folder.lock()
    return DiskCache(folder, msgspec.structs.replace(ORIGIN, **origin), limit, owners)


def data(tokens: array[int], at: int) -> bytearray:
    """The bytes of a block: another pattern for each prompt."""
    return bytearray(random.Random(tokens[: (at + 1) * SIZE].tobytes()).randbytes(BYTES))


def save(cache: DiskCache, tokens: array[int] = PROMPT, owner: bytes = OWNER, salt: bytes = SALT) -> int:
    """Save every whole block; return how many were written."""
    names = cache.names.chain(salt, tokens, SIZE)
    own = [tokens[at * SIZE : (at + 1) * SIZE] for at in range(len(names))]
    return sum(cache.save(names, at, owner, salt, own[at], data(tokens, at)) for at in range(len(names)))


def load(cache: DiskCache, tokens: array[int] = PROMPT, salt: bytes = SALT) -> list[bool]:
    """Whether each block can be had; whatever is had is right."""
    found, names = [], cache.names.chain(salt, tokens, SIZE)
    for at in range(len(names)):
        got = cache.load(names, at, salt, tokens[at * SIZE : (at + 1) * SIZE])
        assert got is None or got == data(tokens, at), "other bytes than were saved"
        found.append(got is not None)
    return found


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if FILE.fullmatch(each.name))


def test_a_restarted_process_finds_what_was_saved(tmp_path: Path) -> None:
    first = opened(tmp_path / "cache")
    assert save(first) == 5
    assert save(first) == 0  # they are there
    first.close()
    second = opened(tmp_path / "cache")
    assert load(second) == [True] * 5
    names = second.names.chain(SALT, PROMPT, SIZE)
    assert (second.reach(names, 0), second.reach(names, 3), second.missing(names)) == (5, 2, [])
    assert second.stored == (5, sum(each.stat().st_size for each in files(tmp_path / "cache")))
    second.close()


def test_other_tokens_and_other_salts_find_nothing(tmp_path: Path) -> None:
    cache = opened(tmp_path / "cache")
    save(cache)
    other = array("i", [99, *PROMPT[1:]])
    assert load(cache, other) == [False] * 5
    assert load(cache, salt=b"\0\0\0\0other") == [False] * 5
    longer = array("i", [*PROMPT[: 3 * SIZE], 9, 9, 9, 9])
    assert load(cache, longer) == [True, True, True, False]
    cache.close()


@pytest.mark.parametrize(
    "changed",
    [{"model": "x"}, {"settings": "x"}, {"layout": "x"}, {"size": 2 * BYTES}],
    ids=lambda each: next(iter(each)),
)
def test_files_of_another_origin_are_deleted_at_the_start(changed: dict[str, Any], tmp_path: Path) -> None:
    first = opened(tmp_path / "cache")
    save(first)
    first.close()
    second = opened(tmp_path / "cache", **changed)
    assert not files(tmp_path / "cache")
    assert second.stored == (0, 0)
    second.close()


def test_a_key_that_is_gone_takes_its_files_with_it(tmp_path: Path) -> None:
    first = opened(tmp_path / "cache", owners=(OWNER, b"other"))
    save(first)
    save(first, owner=b"other", salt=b"\0\0\0\0other")
    first.close()
    second = opened(tmp_path / "cache")
    assert load(second) == [True] * 5
    assert load(second, salt=b"\0\0\0\0other") == [False] * 5
    assert len(files(tmp_path / "cache")) == 5
    second.close()


def test_what_was_being_written_is_deleted_and_other_files_stay(tmp_path: Path) -> None:
    opened(tmp_path / "cache").close()
    (tmp_path / "cache" / "writing-1").touch()
    (tmp_path / "cache" / "notes.txt").touch()
    opened(tmp_path / "cache").close()
    assert {each.name for each in (tmp_path / "cache").iterdir()} == {KEY, "notes.txt"}


def _flip(at: int) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return spoil


def _with(data: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data(path.read_bytes())) and None


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


SPOILT: dict[str, Callable[[Path], None]] = {
    "magic": _flip(0), "length": _flip(8), "header": _flip(40), "data": _flip(-100), "mac": _flip(-1),
    "truncated": _with(lambda old: old[:-1]), "longer": _with(lambda old: old + b"x"), "empty": _with(lambda old: b""),
    "huge": lambda path: os.truncate(path, 1 << 40), "huge header": _with(lambda old: old[:8] + b"\xff" * 4 + old[12:]),
    "open to others": lambda path: path.chmod(0o644), "gone": Path.unlink,
    "a folder": _folder, "a link": _link,
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_file_is_a_miss_and_is_deleted(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    cache = opened(tmp_path / "cache")
    save(cache)
    path = {each.name[-64:]: each for each in files(tmp_path / "cache")}
    names = cache.names.chain(SALT, PROMPT, SIZE)
    spoil(path[names[2].hex()])
    assert load(cache) == [True, True, False, True, True]
    assert cache.moved.refused + cache.moved.failed == 1
    assert cache.stored[0] == 4
    assert not path[names[2].hex()].is_file() or path[names[2].hex()].is_symlink()
    cache.close()


def test_a_block_in_anothers_place_is_refused(tmp_path: Path) -> None:
    cache = opened(tmp_path / "cache")
    save(cache)
    names = cache.names.chain(SALT, PROMPT, SIZE)
    path = {each.name[-64:]: each for each in files(tmp_path / "cache")}
    one, other = (path[names[at].hex()] for at in (1, 2))
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    assert load(cache) == [True, False, False, True, True]
    cache.close()


def test_the_key_of_another_folder_proves_nothing(tmp_path: Path) -> None:
    ours, theirs = opened(tmp_path / "ours"), opened(tmp_path / "theirs")
    save(ours)
    save(theirs)
    of = {each.name[-64:]: each for each in files(tmp_path / "theirs")}
    alien = of[theirs.names.chain(SALT, PROMPT, SIZE)[0].hex()].read_bytes()
    target = ours.names.chain(SALT, PROMPT, SIZE)[0].hex()
    (path,) = (each for each in files(tmp_path / "ours") if each.name.endswith(target))
    path.write_bytes(alien)
    assert load(ours)[0] is False
    ours.close()
    theirs.close()


@pytest.mark.parametrize("broken", ["write", "fsync", "rename"])
def test_a_full_disk_is_a_pause(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path / "cache")

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, full)
        assert save(cache) == 0
        assert cache.moved.failed == 1  # the others are not tried
        assert not cache.writable
    assert save(cache) == 0
    monkeypatch.setattr(cache, "_paused", 0.0)
    assert save(cache) == 5
    assert load(cache) == [True] * 5
    cache.close()


def test_a_cache_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with user_error("option_out_of_range"):
        opened(tmp_path / "cache", limit=BYTES)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 5)), max_size=25))
def test_bytes_stay_below_the_limit_and_no_block_without_those_before(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("folder") / "cache"
    limit = 20_000 + MAX_HEADER
    cache = opened(path, limit)
    cache.limit = 20_000  # four blocks
    prompts = [array("i", [first, *range(19)]) for first in range(4)]
    for saves, which, blocks in steps:
        tokens = prompts[which][: blocks * SIZE]
        save(cache, tokens) if saves else load(cache, tokens)
        assert cache.stored[1] <= 20_000
        assert cache.stored[1] == sum(each.stat().st_size for each in files(path))
        for prompt in prompts:
            names = cache.names.chain(SALT, prompt, SIZE)
            there = [cache.holds(name) for name in names]
            assert there == sorted(there, reverse=True), "a block stays whose predecessors are gone"
    cache.close()
    again = opened(path)
    for prompt in prompts:
        found = load(again, prompt)
        assert found == sorted(found, reverse=True)
    again.close()


def test_the_least_recently_used_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    one, two, three = (array("i", [first, *range(7)]) for first in range(3))
    cache = opened(tmp_path / "cache")
    for tokens in (one, two):
        save(cache, tokens)
    assert load(cache, one) == [True, True]
    cache.close()
    again = opened(tmp_path / "cache")
    again.limit = again.stored[1]  # no more than these four
    save(again, three)
    assert load(again, one) == [True, True]
    assert load(again, two) == [False, False]
    assert again.moved.dropped == 2
    again.close()
