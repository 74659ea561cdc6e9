"""Keys, salts, hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.server.door import Options
from attar.server.security import KEY_VARIABLE, Keys, checked_keys, find_keys, host_name, is_loopback, read_keys

KEY, OTHER = "k" * 32, "o" * 40


def test_keys_are_lines_of_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n  {OTHER}  \n")
    with pytest.raises(ValueError, match="chmod 600"):
        read_keys(file)
    file.chmod(0o600)
    assert read_keys(file) == (KEY, OTHER)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        read_keys(tmp_path / "link")
    environ = {KEY_VARIABLE: "x" * 32, "other": "y"}
    assert find_keys(None, dict(environ)) == ("x" * 32,)
    assert find_keys(file, environ) == (KEY, OTHER)
    assert environ == {"other": "y"}
    assert find_keys(None, {}) == ()


@pytest.mark.parametrize("lines", [[], [""], ["short"], ["k" * 31], ["k" * 20 + " " + "k" * 20], ["é" * 32]])
def test_keys_that_are_none(lines: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        checked_keys(lines, "the file")
    assert "é" not in str(error.value)
    assert "kkkk" not in str(error.value)


def test_salts_belong_to_keys_and_servers() -> None:
    keys = Keys.of([KEY, OTHER])
    one = keys.salt({b"authorization": b"Bearer " + KEY.encode()})
    assert one == keys.salt({b"x-api-key": KEY.encode()})
    assert one
    assert one != keys.salt({b"authorization": b"bearer " + OTHER.encode()})
    assert one != Keys.of([KEY]).salt({b"x-api-key": KEY.encode()})
    for wrong in (
        {},
        {b"x-api-key": b""},
        {b"authorization": KEY.encode()},
        {b"authorization": b"Basic " + KEY.encode()},
    ):
        assert keys.salt(wrong) is None
    assert Keys().salt({}) == b""
    assert KEY not in repr(keys)
    assert repr(keys.secret) not in repr(keys)


def test_addresses_that_others_reach_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(ValueError, match="key"):
            Options(host=host)
        assert Options(host=host, keys=Keys.of([KEY])).names == frozenset()
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert is_loopback(host)
        assert "localhost" in Options(host=host).names
    with pytest.raises(ValueError, match="every web page"):
        Options(origins=frozenset({"*"}))


def test_host_names_have_no_port() -> None:
    found = [host_name(host) for host in (b"LocalHost:80", b"[::1]:80", b"[::1]", b"a.b", b"", b"127.0.0.1.evil:1")]
    assert found == ["localhost", "::1", "::1", "a.b", "", "127.0.0.1.evil"]
