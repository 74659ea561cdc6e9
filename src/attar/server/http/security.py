"""Access: API keys, the salts that keep their caches apart, and hosts and origins that browsers may come from.

Keys come from a file or the environment, never from the command line, where every user of the machine can read them.
Only their SHA-256 is kept, and hashes are compared in constant time. Without a key the server binds to loopback only,
and the Host header must name loopback: a web page whose name was made to resolve to 127.0.0.1 (DNS rebinding) still
sends its own name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from attar.errors import UserError

MIN_KEY = 32  # characters
KEY_VARIABLE = "ATTAR_API_KEY"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]+")
NO_PAGES = ("*", "null", "file://")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # left out by browsers


def find_keys(file: Path | None, environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """Read keys of a file, else of KEY_VARIABLE, removed so that no child inherits it. Raises as `read_keys`."""
    key = environ.pop(KEY_VARIABLE, None)
    if file is not None:
        return read_keys(file)
    return () if key is None else checked_keys([key], KEY_VARIABLE)


def read_keys(file: Path) -> tuple[str, ...]:
    """Read keys of a file, one a line. Raises ValueError for short keys, an empty file, or one that others may read."""
    with open(file, encoding="utf-8", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as stream:
        if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
            raise UserError("file_unsafe", f"{file} can be read by other users: chmod 600 it")
        return checked_keys(stream.read().split("\n"), str(file))


def checked_keys(lines: Iterable[str], source: str) -> tuple[str, ...]:
    """Return the keys among `lines`, stripped. Raises ValueError for short ones, and where there are none."""
    keys = tuple(key for line in lines if (key := line.strip()))
    if not keys:
        raise UserError("key_invalid", f"{source} holds no key")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY or not (key.isascii() and key.isprintable()) or " " in key:
            message = f"key {number} of {source}: keys are at least {MIN_KEY} printable ASCII characters"
            raise UserError("key_invalid", message)
    return keys


@dataclass(frozen=True)
class Keys:
    """API keys, kept as hashes; with none the server is open. `secret` makes salts that no client can compute.

    Another process with the same `secret` has the same salts.
    """

    hashes: tuple[bytes, ...] = ()
    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """Hash keys given in plain text."""
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    @property
    def owners(self) -> tuple[str, ...]:
        """The cache salts of all keys, in hexadecimal; the empty one where there are none."""
        return tuple(self._salt(each).hex() for each in self.hashes) or ("",)

    @staticmethod
    def given(headers: Mapping[bytes, bytes]) -> bytes:
        """Return the key in these headers, valid or not; empty where there is none."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")

    def cache_salt(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the cache salt of the key in these headers: empty where no keys are set, None for an invalid key."""
        if not self.hashes:
            return b""
        digest = hashlib.sha256(self.given(headers)).digest()
        return self._salt(digest) if is_among(digest, self.hashes) else None

    def _salt(self, digest: bytes) -> bytes:
        return hmac.digest(self.secret, digest, "sha256")


def is_among(digest: bytes, hashes: Iterable[bytes]) -> bool:
    """Return whether a key's hash is one of some, in constant time."""
    known = False
    for each in hashes:
        known |= hmac.compare_digest(digest, each)
    return known


def is_loopback(host: str) -> bool:
    """Return whether an address to bind to is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: bytes) -> str:
    """Return the name in a Host header, without its port."""
    text = header.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def parse_origin(text: str) -> str:
    """Spell an origin as browsers do: in small letters, without a path, not even `/`, and without a default port.

    Raises ValueError for what no page's origin can be. `*` passes: the server's options decide about it.
    """
    if text in NO_PAGES:
        return text
    origin = text.lower().removesuffix("/")
    scheme, _, rest = origin.partition("://")
    if not ORIGIN.fullmatch(origin) or set(rest) & set("/?#@"):
        message = f"--origin {text!r} is no page's: write scheme, host and port, such as https://chat.example:8443"
        raise UserError("address_invalid", message)
    return origin.removesuffix(DEFAULT_PORTS.get(scheme, ""))


def check_host(host: str) -> None:
    """Raise ValueError for an invalid host name, which a socket refuses with an error of another kind.

    An empty name is refused too: to a socket it means every address there is.
    """
    try:
        sound = bool(host.encode("idna"))
    except UnicodeError:
        sound = False
    if not sound:
        raise UserError("address_invalid", f"--host {host!r} is neither an address nor a name") from None
