"""What proves who is at the other end of a connection over a network: TLS certificates and a shared key, both.

TLS 1.3 with a certificate authority of the operator's own, and the peer's name checked on both sides, keeps others
from reading and from answering. On top of it each side proves that it knows a key. It answers the other's challenge,
which is new for each connection, with an HMAC over both challenges and its own role. So no proof can be played back,
nor sent back to its maker. Two keys may be valid while they are changed: proofs are made with the first, and either is
accepted.

Keys lie in files of this user alone, of mode 600. They are never in arguments, in the environment, or in a log.
"""

from __future__ import annotations

import errno
import hmac
import os
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attar.errors import UserError

MIN_KEY, MAX_KEY = 32, 4096  # bytes
MAX_KEYS = 2
CHALLENGE = 32  # bytes


@dataclass(frozen=True, eq=False)
class Credentials:
    """Keys, of which the first makes proofs, and TLS contexts of both roles.

    `name` is what the certificate of the other side must say.
    """

    keys: tuple[bytes, ...]
    asks: ssl.SSLContext
    answers: ssl.SSLContext
    name: str

    def proof(self, role: str, mine: bytes, theirs: bytes) -> bytes:
        """Return the proof that this side knows the key: `mine` and `theirs` are both sides' challenges."""
        return _proof(self.keys[0], role, mine, theirs)

    def accepts(self, proof: bytes, role: str, theirs: bytes, mine: bytes) -> bool:
        """Return whether the other side, of this role, knows one of the keys."""
        found = False
        for key in self.keys:  # all of them, in constant time
            found |= hmac.compare_digest(proof, _proof(key, role, theirs, mine))
        return found

    def check_client(self, certificate: object) -> None:
        """Raise PermissionError where a client's certificate has another name."""
        names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
        if self.name not in [value for kind, value in names if kind in ("DNS", "IP Address")]:
            raise PermissionError("the certificate has another name")


def load(keys: Sequence[Path], authority: Path, certificate: Path, name: str) -> Credentials:
    """Read keys, the authority's certificate, and this side's own with its private key, in PEM.

    Raises UserError for a file that is no file of this user alone, for short keys and too many, and for certificates
    that cannot be read; OSError for a file that is not there.
    """
    if not 1 <= len(keys) <= MAX_KEYS:
        raise UserError("option_out_of_range", f"{len(keys)} keys of peers: give one, or {MAX_KEYS} while they change")
    private(certificate)
    contexts = []
    for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if purpose == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no session is resumed: each connection proves everything
        try:
            context.load_verify_locations(authority)
            context.load_cert_chain(certificate)
        except ssl.SSLError as error:
            message = f"{authority} and {certificate} must hold PEM: an authority, and a certificate with its key"
            raise UserError("key_invalid", f"{message} ({error.reason})") from None
        contexts.append(context)
    return Credentials(tuple(map(read_key, keys)), contexts[0], contexts[1], name)


def read_key(file: Path) -> bytes:
    """Return the key in a file: its bytes, without a newline at its end. Raises UserError for a short one, and as
    `private`."""
    content = private(file)
    key = content.removesuffix(b"\n")
    if len(key) < MIN_KEY:
        raise UserError("key_invalid", f"{file} must hold at least {MIN_KEY} random bytes")
    return key


def private(file: Path) -> bytes:
    """Return the first bytes of a file. Raises UserError where it is a link or no file, belongs to another user, or may
    be read by others; OSError where it is not there."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError("file_unsafe", f"{file} is a symbolic link: name the file itself") from None
        raise
    try:
        status = os.fstat(descriptor)
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not own or stat.S_IMODE(status.st_mode) & 0o077:
            raise UserError("file_unsafe", f"{file} must be a file of this user alone: chmod 600 it")
        return os.read(descriptor, MAX_KEY)
    finally:
        os.close(descriptor)


def _proof(key: bytes, role: str, own: bytes, other: bytes) -> bytes:
    return hmac.digest(key, b"attar peer\0" + role.encode() + b"\0" + own + other, "sha256")
