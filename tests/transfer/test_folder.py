"""A private folder: what it refuses, by code, and that it follows no link and leaves nothing half written."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attar.transfer.folder import KEY, PrivateFolder
from tests.errors import user_error


def test_it_is_made_for_this_user_alone_with_a_key_that_stays(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    folder.write("file", [b"one", memoryview(b"two")])
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "cache").iterdir()} == {0o600}
    assert (tmp_path / "cache" / "file").read_bytes() == b"onetwo"
    again = PrivateFolder(tmp_path / "cache")
    assert again.key == folder.key
    assert again.secret("a") == folder.secret("a") != again.secret("b")
    folder.close()
    again.close()


def _open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


def _link(path: Path) -> None:
    path.with_name("target").mkdir(0o700)
    path.symlink_to(path.with_name("target"))


def _another_key(path: Path) -> None:
    PrivateFolder(path).close()
    (path / KEY).write_bytes(b"short")


def _open_key(path: Path) -> None:
    PrivateFolder(path).close()
    (path / KEY).chmod(0o640)


def _linked_key(path: Path) -> None:
    PrivateFolder(path).close()
    (path / KEY).rename(path.with_name("key"))
    (path / KEY).symlink_to(path.with_name("key"))


@pytest.mark.parametrize(
    "spoil, code",
    [
        (_open_to_others, "file_unsafe"),
        (_link, "file_unsafe"),
        (Path.touch, "file_unsafe"),
        (_another_key, "key_invalid"),
        (_open_key, "file_unsafe"),
    ],
)
def test_others_are_refused(spoil: Callable[[Path], None], code: str, tmp_path: Path) -> None:
    spoil(tmp_path / "cache")
    with user_error(code):
        PrivateFolder(tmp_path / "cache")


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PrivateFolder(tmp_path / "cache").close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with user_error("file_unsafe"):
        PrivateFolder(tmp_path / "cache")


def test_no_link_is_followed(tmp_path: Path) -> None:
    PrivateFolder(tmp_path / "cache").close()
    _linked_key(tmp_path / "other")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        PrivateFolder(tmp_path / "other")
    folder = PrivateFolder(tmp_path / "cache")
    (tmp_path / "secret").write_bytes(b"untouched")
    (tmp_path / "cache" / "writing-file").symlink_to(tmp_path / "secret")
    folder.write("file", [b"data"])
    assert (tmp_path / "secret").read_bytes() == b"untouched"
    (tmp_path / "cache" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        folder.open("link")
    os.link(tmp_path / "cache" / "file", tmp_path / "elsewhere")
    with user_error("file_unsafe"):
        folder.open("file")
    folder.close()


def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    os.mkfifo(tmp_path / "cache" / "file", 0o600)
    with user_error("file_unsafe"):
        folder.open("file")
    folder.close()


def test_one_process_has_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom attar.transfer.folder import PrivateFolder\n"
        "folder = PrivateFolder(pathlib.Path(sys.argv[1])); folder.lock(); print('has it', flush=True); input()"
    )
    first = PrivateFolder(tmp_path / "cache")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "cache")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        with user_error("output_locked"):
            first.lock()
        other.kill()
        other.wait()
        first.lock()
    first.close()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateFolder(tmp_path / "cache")

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        folder.write("file", [b"data"])
    assert [name for name, _ in folder.files()] == [KEY]
    folder.close()
