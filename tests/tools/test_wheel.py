"""Wheels that are linked with an older system's libraries: which of its folders the compiler is told of."""

from pathlib import Path

import pytest
import wheel


def test_headers_and_libraries_are_of_the_newest_release(tmp_path: Path) -> None:
    for release in ("9", "10"):
        folder = tmp_path / "usr/lib/gcc/some-linux-gnu" / release
        folder.mkdir(parents=True)
        (folder / "libstdc++.so").touch()
    given = wheel.compile_with(tmp_path)
    for flags in given.values():
        assert f"--sysroot={tmp_path}" in flags.split()
    assert "-nostdinc++" in given["CXXFLAGS"].split(), "this system's headers ask for newer symbols"
    assert f"-isystem {tmp_path}/usr/include/some-linux-gnu/c++/10" in given["CXXFLAGS"]
    assert given["LDFLAGS"].split()[1] == f"-L{tmp_path}/usr/lib/gcc/some-linux-gnu/10"
    assert "/9" not in " ".join(given.values())


def test_a_folder_without_libraries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="sysroot"):
        wheel.compile_with(tmp_path)
