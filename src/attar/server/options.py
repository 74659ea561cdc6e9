"""Options of a server: its address, access, and limits of each key."""

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
    """Options of the HTTP server. Raises ValueError for a public address without a key.

    hosts: names allowed in the Host header besides loopback's; with none, a loopback server allows no others, and a
    public one any. origins: web pages of other servers that may call this one from a browser. max_requests: open at a
    time; more get 429. limits: of each key; with several keys and no limit of requests each has half of max_requests.
    So none can keep the others out of the server; the engine's queue has shares of its own (`fair_queue.py`). The same
    holds of `middleware.MAX_BODIES`. deadline, drain_seconds: seconds for one request, and for all when the
    server ends.
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
        """Limits of each key."""
        if self.limits.requests is None and len(self.keys.hashes) > 1:
            return replace(self.limits, requests=max(1, self.max_requests // 2))
        return self.limits

    @cached_property
    def names(self) -> frozenset[str]:
        """Names allowed in the Host header; empty for any."""
        return self.hosts | LOOPBACK_NAMES if self.hosts or is_loopback(self.host) else frozenset()


def _in_header(name: str) -> str:
    """Spell a host's name as in a Host header: addresses with colons have brackets."""
    try:
        return f"[{IPv6Address(name)}]"
    except ValueError:
        return name
