"""Limits of one API key: requests at a time, and tokens a minute.

Tokens come out of a token bucket, which holds a minute's worth and fills evenly. A request reserves its prompt's tokens
and the output tokens that it asks for until it ends. An output token is charged when it is generated. The prompt is
charged at the end, unless the engine had no room for the request at all, and the rest is released. So a key uses within
any t seconds at most a minute's worth and t seconds' worth more, however its requests overlap. (A bucket that is
charged for everything at the start and given refunds can fill up while a request holds its tokens, and be emptied twice
at once.) The price: a request that asks for far more than it uses blocks its key's other requests while it runs, and
Retry-After is then the shortest time. A request without a number of tokens gets what the bucket has. Where that is less
than 1/PART of a minute's worth, it asks for that part, and waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from attar.server.errors import APIError
from attar.server.http.limits import MAX_BODY

MINUTE = 60.0  # seconds
PART = 4  # 1/PART of a minute's worth is a fair answer where no length was asked for


@dataclass(frozen=True)
class KeyLimits:
    """Limits of each key; None: no limit."""

    requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass
class _Key:
    open: int = 0  # requests
    level: float = 0.0  # tokens in the bucket, reserved ones included
    aside: int = 0
    filled: float = 0.0  # when `level` was right


class Quotas:
    """The state of every key that has sent a request. Keys are valid ones, so there are few."""

    def __init__(
        self, limits: KeyLimits, refused: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Call `refused` with the limit, `requests` or `tokens`, each time that one rejects a request."""
        self.limits, self.refused, self._clock = limits, refused, clock
        self._keys: dict[bytes, _Key] = {}

    def enter(self, key: bytes) -> Account:
        """Begin a request of `key`. Raises APIError where the key has too many open."""
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _Key(level=float(self.limits.tokens_per_minute or 0), filled=self._clock())
        most = self.limits.requests
        if most is not None and state.open >= most:
            self.refused("requests")
            raise APIError("rate_limit_exceeded", f"this key has {most} requests open, as many as it may")
        state.open += 1
        return Account(self, state)

    def fill(self, state: _Key) -> float:
        """Refill a key's bucket; return its tokens that are not reserved."""
        now, most = self._clock(), self.limits.tokens_per_minute
        assert most is not None
        state.level = min(float(most), state.level + max(0.0, now - state.filled) * most / MINUTE)
        state.filled = now
        return state.level - state.aside


@dataclass
class Account:
    """Tokens that one request holds of its key's share. `close` must follow."""

    quotas: Quotas
    state: _Key
    aside: int = 0
    owed: int = 0  # the prompt's part of `aside`

    def allowance(self, prompt: int, n: int) -> int | None:
        """Return the tokens for each of n answers where a request names no number, at least one; None: any number."""
        most = self.quotas.limits.tokens_per_minute
        if most is None:
            return None
        fair = min(most // PART, most - prompt)
        return max(1, max(int(self.quotas.fill(self.state)) - prompt, fair) // n)

    def take(self, prompt: int, asked: int) -> None:
        """Reserve tokens, for a prompt and for the `asked` output. Raises APIError where the bucket has too few."""
        most = self.quotas.limits.tokens_per_minute
        if most is None:
            return
        if prompt + asked > most:
            message = f"{prompt} tokens of prompt and {asked} to come are more than the {most} a minute of this key"
            field = "max_tokens" if asked else "input"
            raise APIError("out_of_range", f"{field}: {message}", field)
        missing = prompt + asked - self.quotas.fill(self.state)
        if missing > 0:
            seconds = max(1, math.ceil(missing * MINUTE / most))
            self.quotas.refused("tokens")
            message = f"this key's {most} tokens a minute are used up, or set aside for what runs: retry in {seconds} s"
            raise APIError("rate_limit_exceeded", message, retry_after=seconds)
        self.state.aside += prompt + asked
        self.aside += prompt + asked
        self.owed += prompt

    def forgive(self, prompt: int) -> None:
        """Do not charge for prompts of `prompt` tokens, which were not even begun."""
        self.owed -= min(prompt, self.owed)

    def use(self, tokens: int) -> None:
        """Charge for `tokens` reserved tokens, which were generated."""
        used = min(tokens, self.aside)
        self.aside -= used
        self.state.aside -= used
        self.state.level -= used

    def close(self) -> None:
        """End the request and release the tokens that it has not used."""
        self.use(self.owed)
        self.state.aside -= self.aside
        self.aside = 0
        self.state.open -= 1


@dataclass(frozen=True, slots=True)
class Caller:
    """A request's id, its arrival time, the cache salt of its API key, the account of that key, the client's own id
    of the request, and the bytes that its body may have."""

    id: str
    arrived: float  # monotonic
    cache_salt: bytes
    account: Account | None = None  # set for requests that can cost tokens
    given: str = ""
    body_limit: int = MAX_BODY

    def allowance(self, prompt: int, n: int) -> int | None:
        """Return the tokens for each of n answers that its key's share has room for; None: any number."""
        return None if self.account is None else self.account.allowance(prompt, n)

    def take(self, prompt: int, asked: int) -> None:
        """Take tokens out of the key's share. Raises APIError where it has too few."""
        if self.account is not None:
            self.account.take(prompt, asked)
