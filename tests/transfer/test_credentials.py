"""Peers on a network: certificates and keys that are right let blocks through, and each that is not is refused.

The sides are a real listener and a real puller on loopback. `openssl` makes the certificates.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attar.transfer.credentials import Credentials, load, read_key
from attar.transfer.header import BlockMismatch, Origin
from attar.transfer.listener import LentBlocks, PrefillAsked, PrefillListener
from attar.transfer.puller import Puller
from attar.transfer.wire import DECODE, Address, Challenge, Greeting, Prefill, Proof, Wire, dial
from tests.errors import user_error

ORIGIN = Origin("model", "settings", "layout", 4, 512)
TOKENS = array("i", range(12))
ASK = Prefill(TOKENS.tobytes(), b"", b"", "", 0, 5.0)
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, and certificates of the first for two names; and two keys."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates")
    made = tmp_path_factory.mktemp("peers")
    made.chmod(0o700)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "stranger"):
        _openssl(made, "req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
                 "-days", "2")  # fmt: skip
    for name, authority in (("prefill", "ca"), ("decode", "ca"), ("forged", "stranger")):
        said = "decode" if name == "forged" else name
        (made / "names").write_text(f"subjectAltName=DNS:{said}")
        _openssl(made, "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={said}")
        _openssl(made, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
                 "-CAcreateserial", "-out", f"{name}.crt", "-days", "2", "-extfile", "names")  # fmt: skip
        (made / f"{name}.pem").write_bytes((made / f"{name}.crt").read_bytes() + (made / f"{name}.key").read_bytes())
        (made / f"{name}.pem").chmod(0o600)
    for name, key in (("key", KEY), ("other", OTHER)):
        (made / name).write_bytes(key)
        (made / name).chmod(0o600)
    return made


def credentials(folder: Path, own: str, name: str, keys: tuple[str, ...] = ("key",), ca: str = "ca") -> Credentials:
    return load([folder / each for each in keys], folder / f"{ca}.pem", folder / f"{own}.pem", name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def listening(known: Credentials) -> Iterator[tuple[PrefillListener, Address]]:
    def tell(what: Any) -> None:
        if isinstance(what, PrefillAsked):
            what.reply.put(LentBlocks([0, 1, 2], None))

    address = Address(None, "127.0.0.1", free_port())
    made = PrefillListener(address, ORIGIN, lambda block: [memoryview(bytes([block]) * 256)] * 2, tell, known)
    try:
        yield made, address
    finally:
        made.close()


def pulled(address: Address, known: Credentials) -> int:
    """How many blocks come; each is right."""
    puller = Puller(address, ORIGIN, known)
    found = [bytearray(512) for _ in range(3)]
    count = puller.pull(ASK, TOKENS, lambda at: [memoryview(found[at])], lambda: True)
    puller.close()
    assert found[:count] == [bytes([at]) * 512 for at in range(count)]
    assert count or puller.pulled.refused + puller.pulled.failed == 1
    return count


def test_blocks_come_where_certificates_names_and_keys_are_right(folder: Path) -> None:
    with listening(credentials(folder, "prefill", "decode")) as (made, address):
        assert pulled(address, credentials(folder, "decode", "prefill")) == 3
        assert made.sent.refused == 0


WRONG: dict[str, dict[str, Any]] = {
    "another key": {"keys": ("other",)},
    "a certificate of another authority": {"own": "forged"},
    "another authority is trusted": {"ca": "stranger"},
    "the server has another name": {"name": "elsewhere"},
    "the client has another name": {"own": "prefill"},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_nothing_comes_where_one_is_wrong(wrong: dict[str, Any], folder: Path) -> None:
    with listening(credentials(folder, "prefill", "decode")) as (made, address):
        assert pulled(address, credentials(folder, **{"own": "decode", "name": "prefill"} | wrong)) == 0
        assert made.sent.blocks == 0
        assert pulled(address, credentials(folder, "decode", "prefill")) == 3  # and it goes on


@pytest.mark.parametrize(
    "ours, theirs, count",
    [
        (("key", "other"), ("key",), 3), (("key",), ("key", "other"), 3), (("other", "key"), ("key", "other"), 3),
        (("key", "other"), ("other", "key"), 3), (("other",), ("other", "key"), 3), (("other", "key"), ("key",), 0),
    ],
)  # fmt: skip
def test_two_keys_are_valid_while_they_are_changed(
    ours: tuple[str, ...], theirs: tuple[str, ...], count: int, folder: Path
) -> None:
    """The first makes proofs: a side that does not know it yet refuses them."""
    with listening(credentials(folder, "prefill", "decode", theirs)) as (_, address):
        assert pulled(address, credentials(folder, "decode", "prefill", ours)) == count


def test_older_tls_and_plain_text_are_refused(folder: Path) -> None:
    known = credentials(folder, "decode", "prefill")
    assert known.asks.minimum_version == known.answers.minimum_version == ssl.TLSVersion.TLSv1_3
    with listening(credentials(folder, "prefill", "decode")) as (made, address):
        old = credentials(folder, "decode", "prefill")
        old.asks.minimum_version = ssl.TLSVersion.TLSv1_2
        old.asks.maximum_version = ssl.TLSVersion.TLSv1_2
        assert pulled(address, old) == 0
        with socket.create_connection((address.host, address.port)) as plain, contextlib.suppress(OSError):
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.settimeout(5)
            assert b"greeting" not in plain.recv(4096)
        assert made.sent.blocks == 0


def _secured(folder: Path, address: Address) -> Wire:
    """A connection with the right certificate, before any proof."""
    known = credentials(folder, "decode", "prefill")
    connected = socket.create_connection((address.host, address.port), 5)
    return Wire(known.asks.wrap_socket(connected, server_hostname="prefill"))


@pytest.mark.parametrize("attack", ["replay", "reflection", "the own challenge", "a short challenge", "silence"])
def test_no_proof_can_be_played_back(attack: str, folder: Path) -> None:
    known, until = credentials(folder, "decode", "prefill"), time.monotonic() + 5
    with listening(credentials(folder, "prefill", "decode")) as (made, address):
        first = _secured(folder, address)
        challenge = first.receive(until)
        assert isinstance(challenge, Challenge)
        mine = bytes(32)
        old = known.proof(DECODE, mine, challenge.random)
        second = _secured(folder, address)
        other = second.receive(until)
        assert isinstance(other, Challenge)
        assert other.random != challenge.random
        if attack == "replay":
            second.send(Challenge(mine), until)
            second.send(Proof(old), until)
        elif attack == "reflection":
            second.send(Challenge(bytes(range(32))), until)
            theirs = second.receive(until)
            assert isinstance(theirs, Proof)
            second.send(theirs, until)
        elif attack == "the own challenge":
            second.send(other, until)
        elif attack == "a short challenge":
            second.send(Challenge(b""), until)
        with contextlib.suppress(OSError):
            assert isinstance(second.receive(time.monotonic() + 5), Proof)
            assert not isinstance(second.receive(time.monotonic() + 5), Greeting)
        first.close()
        second.close()
        assert made.sent.blocks == 0


def test_a_decode_engine_trusts_no_server_without_the_key(folder: Path) -> None:
    with (
        listening(credentials(folder, "prefill", "decode", ("other",))) as (_, address),
        pytest.raises((BlockMismatch, OSError)),
    ):
        dial(address, credentials(folder, "decode", "prefill"), 5.0)


def test_files_that_others_can_read_are_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("key", "decode.pem"):
        shutil.copy(folder / name, tmp_path / name)
    (tmp_path / "key").chmod(0o640)
    with user_error("file_unsafe"):
        read_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    assert read_key(tmp_path / "key") == KEY
    (tmp_path / "link").symlink_to(tmp_path / "key")
    with user_error("file_unsafe"):
        read_key(tmp_path / "link")
    (tmp_path / "short").write_bytes(KEY[:31] + b"\n")
    (tmp_path / "short").chmod(0o600)
    with user_error("key_invalid"):
        read_key(tmp_path / "short")
    (tmp_path / "decode.pem").chmod(0o644)
    with user_error("file_unsafe"):
        load([folder / "key"], folder / "ca.pem", tmp_path / "decode.pem", "prefill")
    with user_error("key_invalid"):
        load([folder / "key"], folder / "key", folder / "decode.pem", "prefill")
    for count in (0, 3):
        with user_error("option_out_of_range"):
            load([folder / "key"] * count, folder / "ca.pem", folder / "decode.pem", "prefill")


def test_a_network_without_credentials_is_refused() -> None:
    for make in (lambda a: Puller(a, ORIGIN), lambda a: PrefillListener(a, ORIGIN, print, print)):
        with user_error("option_missing"):
            make(Address(None, "127.0.0.1", 9))


@pytest.mark.parametrize(
    "url",
    ["tcp://127.0.0.1:9", "https://host", "/run/prefill", "unix:" + "x" * 200, "tls://host", "tls://:9", "tls://h:0",
     "tls://h:70000", "tls://a b:9", "tls://h:9/path"],
)  # fmt: skip
def test_other_addresses_are_refused(url: str) -> None:
    with user_error("address_invalid"):
        Address.parse(url)


def test_addresses_are_read(tmp_path: Path) -> None:
    assert Address.parse(f"unix:{tmp_path}/socket") == Address(tmp_path / "socket")
    assert Address.parse("tls://host.example:9") == Address(None, "host.example", 9)
    assert Address.parse("tls://[::1]:9") == Address(None, "::1", 9)
