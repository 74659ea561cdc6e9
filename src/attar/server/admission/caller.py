"""The caller of one request, as the middleware admitted it."""

from __future__ import annotations

from dataclasses import dataclass

from attar.server.admission.rate_limits import Account


@dataclass(frozen=True, slots=True)
class Caller:
    """A request's id, its arrival time, the cache salt of its API key, and the account of that key."""

    id: str
    arrived: float  # monotonic
    cache_salt: bytes
    account: Account | None = None  # set for requests that can cost tokens

    def allowance(self, prompt: int, n: int) -> int | None:
        """Return the tokens for each of n answers that its key's share has room for; None: any number."""
        return None if self.account is None else self.account.allowance(prompt, n)

    def take(self, prompt: int, asked: int) -> None:
        """Take tokens out of the key's share. Raises Refusal where it has too few."""
        if self.account is not None:
            self.account.take(prompt, asked)
