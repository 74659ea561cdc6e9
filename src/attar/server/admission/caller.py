"""The caller of one request, as admission let it in."""

from __future__ import annotations

from dataclasses import dataclass

from attar.server.admission.rate_limits import Account


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what for: the request's id, when it came, the salt of its key, and that key's share."""

    id: str
    arrived: float  # monotonic
    cache_salt: bytes
    account: Account | None = None  # of those that can cost tokens

    def allowance(self, prompt: int, n: int) -> int | None:
        """Tokens for each of n answers that its key's share has room for; None: any number."""
        return None if self.account is None else self.account.allowance(prompt, n)

    def take(self, prompt: int, asked: int) -> None:
        """Take tokens out of the key's share. Raises Refusal."""
        if self.account is not None:
            self.account.take(prompt, asked)
