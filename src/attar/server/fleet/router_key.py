"""The key that a router and its hosts share, apart from API keys, and the API keys that a router passes on.

A host with a router key makes the salts of its cache from that key. So all hosts of one router, and the router, know an
API key's blocks by the same digests, and no client can compute them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from attar.server.http.security import Keys, is_among

MAX_CREDENTIAL = 1 << 10  # bytes of a header with an API key
CREDENTIALS = 4096  # API keys that a router remembers
API_KEYS = (b"authorization", b"x-api-key")


@dataclass(frozen=True)
class RouterKeys:
    """Router keys that a host accepts, by their hashes, and the secret of its salts; none where it serves no router."""

    hashes: tuple[bytes, ...] = ()
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> RouterKeys:
        """Hash keys given in plain text. The first one makes the secret."""
        keys = tuple(keys)
        return cls(Keys.of(keys).hashes, salt_secret(keys[0]) if keys else b"")

    def accept(self, given: bytes) -> bool:
        """Return whether a header's key is one of them, in constant time."""
        return is_among(hashlib.sha256(given).digest(), self.hashes)


def salt_secret(key: str) -> bytes:
    """Return the secret of the salts of all hosts with a router key."""
    return hmac.digest(key.encode(), b"attar cache salts", "sha256")


class Credentials:
    """The headers with the API keys of the latest requests, by salt, in which a router passes them on."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[tuple[bytes, bytes], ...]] = OrderedDict()

    def keep(self, salt: bytes, headers: Mapping[bytes, bytes]) -> None:
        """Remember the headers of a salt; the one that was not used for longest is forgotten."""
        self._known[salt] = tuple((name, headers[name]) for name in API_KEYS if name in headers)
        self._known.move_to_end(salt)
        if len(self._known) > CREDENTIALS:
            self._known.popitem(last=False)

    def of(self, salt: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers of a salt; none where there were none."""
        return self._known.get(salt, ())


@dataclass(frozen=True)
class PassedKeys(Keys):
    """API keys in a router. Where it has none of its own, hosts check what requests bring. Hosts that are not `keyed`
    ignore keys, and have one cache for all."""

    keyed: bool = False
    credentials: Credentials = field(default_factory=Credentials, repr=False)

    def cache_salt(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the salt that hosts give the key in these headers, and remember it; None for an invalid key."""
        if self.hashes and super().cache_salt(headers) is None:
            return None
        given = self.given(headers)
        if not self.keyed or not given or any(len(headers.get(name, b"")) > MAX_CREDENTIAL for name in API_KEYS):
            return b""
        salt = hmac.digest(self.secret, hashlib.sha256(given).digest(), "sha256")
        self.credentials.keep(salt, headers)
        return salt
