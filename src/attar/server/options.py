"""Options of a server: how it is reached, by whom, and how much each may have."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from ipaddress import IPv6Address

from attar.server.admission.rate_limits import KeyLimits
from attar.server.http.security import KEY_VARIABLE, Keys, host_name, is_loopback

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SET_KEY = f"--api-key-file FILE, or {KEY_VARIABLE} in the environment"


@dataclass(frozen=True)
class ServerOptions:
    """How the server is reached. Raises ValueError for a public address without a key.

    hosts: names that the Host header may have besides loopback's own; none means those on loopback, and any elsewhere.
    origins: web pages of other servers that may call this one from a browser. max_requests: open at a time, beyond
    which 429 is the answer. limits: what each key may have; with several keys half of max_requests each, where no
    number of requests is given, so that one of them cannot keep the others out of the server (of the engine's queue
    each has its part anyhow, see `fair_queue.py`); the same holds of `middleware.MAX_BODIES`. deadline, drain_seconds:
    of one request, and of all when the server ends.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=Keys)
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    max_requests: int = 256
    limits: KeyLimits = field(default_factory=KeyLimits)
    deadline: float = 600.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.keys.hashes and not is_loopback(self.host):
            raise ValueError(
                f"{self.host!r} is no loopback address, so other machines may reach it: set an API key ({SET_KEY})"
            )
        if not self.keys.hashes and self.limits != KeyLimits():
            raise ValueError(f"limits of requests and tokens are for each API key: set one ({SET_KEY})")
        for name in self.hosts:
            if not name or "*" in name or host_name(_in_header(name).encode()) != name:
                raise ValueError(f"{name!r} is no host's name in small letters, without a port: list names one by one")
        if "*" in self.origins:
            raise ValueError("origins are listed one by one: `*` would let every web page in")

    @property
    def shares(self) -> KeyLimits:
        """What each key has."""
        if self.limits.requests is None and len(self.keys.hashes) > 1:
            return replace(self.limits, requests=max(1, self.max_requests // 2))
        return self.limits

    @cached_property
    def names(self) -> frozenset[str]:
        """What the Host header may be; empty for anything."""
        return self.hosts | LOOPBACK_NAMES if self.hosts or is_loopback(self.host) else frozenset()


def _in_header(name: str) -> str:
    """A host's name as a Host header has it: addresses with colons stand in brackets."""
    try:
        return f"[{IPv6Address(name)}]"
    except ValueError:
        return name
