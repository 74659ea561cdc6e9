"""What one API key may have of the server: so many requests at a time, and so many tokens a minute.

Tokens come out of a bucket that holds a minute's worth and fills evenly. A request has its prompt's tokens and those
that it asks for set aside until it ends. Each of the latter is taken when it is generated; at the end the prompt's are
taken, unless the engine had no room for the request at all, and the rest is let go. So what a key uses within any t
seconds is at most a minute's worth and t seconds' worth more, however its requests overlap. (A bucket that is charged
for everything at the start and given refunds can fill up while a request holds its tokens, and be emptied twice at
once.) The price: a request that asks for far more than it will use keeps its key's other requests out while it runs,
and the time after which to retry is then the shortest that it can take. Who names no number wants as much as there is:
that is what the bucket has, and where it has less than a part of a minute's worth, that part, for which to wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from attar.server.errors import Refusal

MINUTE = 60.0  # seconds
PART = 4  # of a minute's worth one is a fair answer, where no length was asked for


@dataclass(frozen=True)
class KeyLimits:
    """What each key may have; None: no limit."""

    requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass
class _Key:
    open: int = 0  # requests
    level: float = 0.0  # tokens in the bucket, those set aside among them
    aside: int = 0
    filled: float = 0.0  # when `level` was right


class Quotas:
    """The state of every key that has asked. Keys are known to be good ones, so there are few."""

    def __init__(
        self, limits: KeyLimits, refused: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`refused` is told which limit, `requests` or `tokens`, each time that one turns a request away."""
        self.limits, self.refused, self._clock = limits, refused, clock
        self._keys: dict[bytes, _Key] = {}

    def enter(self, key: bytes) -> Account:
        """A request of `key` begins. Raises Refusal when it has too many open."""
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _Key(level=float(self.limits.tokens_per_minute or 0), filled=self._clock())
        most = self.limits.requests
        if most is not None and state.open >= most:
            self.refused("requests")
            raise Refusal("rate_limit_exceeded", f"this key has {most} requests open, as many as it may")
        state.open += 1
        return Account(self, state)

    def fill(self, state: _Key) -> float:
        """Tokens of the bucket that nobody has set aside, now."""
        now, most = self._clock(), self.limits.tokens_per_minute
        assert most is not None
        state.level = min(float(most), state.level + max(0.0, now - state.filled) * most / MINUTE)
        state.filled = now
        return state.level - state.aside


@dataclass
class Account:
    """What one request takes of its key's share. `close` must follow."""

    quotas: Quotas
    state: _Key
    aside: int = 0
    owed: int = 0  # of those, the prompt's

    def allowance(self, prompt: int, n: int) -> int | None:
        """Tokens for each of n answers to a prompt of whoever names no number, one at least; None: any number."""
        most = self.quotas.limits.tokens_per_minute
        if most is None:
            return None
        fair = min(most // PART, most - prompt)
        return max(1, max(int(self.quotas.fill(self.state)) - prompt, fair) // n)

    def take(self, prompt: int, asked: int) -> None:
        """Set tokens aside, for a prompt and for what is asked. Raises Refusal when the bucket has not as many."""
        most = self.quotas.limits.tokens_per_minute
        if most is None:
            return
        if prompt + asked > most:
            message = f"{prompt} tokens of prompt and {asked} to come are more than the {most} a minute of this key"
            field = "max_tokens" if asked else "input"
            raise Refusal("out_of_range", f"{field}: {message}", field)
        missing = prompt + asked - self.quotas.fill(self.state)
        if missing > 0:
            seconds = max(1, math.ceil(missing * MINUTE / most))
            self.quotas.refused("tokens")
            message = f"this key's {most} tokens a minute are used up, or set aside for what runs: retry in {seconds} s"
            raise Refusal("rate_limit_exceeded", message, retry_after=seconds)
        self.state.aside += prompt + asked
        self.aside += prompt + asked
        self.owed += prompt

    def forgive(self, prompt: int) -> None:
        """So many tokens of prompts were not even begun."""
        self.owed -= min(prompt, self.owed)

    def use(self, tokens: int) -> None:
        """So many of those set aside were generated."""
        used = min(tokens, self.aside)
        self.aside -= used
        self.state.aside -= used
        self.state.level -= used

    def close(self) -> None:
        """The request has ended: what it has not used is free."""
        self.use(self.owed)
        self.state.aside -= self.aside
        self.aside = 0
        self.state.open -= 1


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what for: the request's id, when it came, the salt of its key, and its part of that key's share."""

    id: str
    arrived: float  # monotonic
    salt: bytes
    account: Account | None = None  # of those that can cost tokens

    def allowance(self, prompt: int, n: int) -> int | None:
        """Tokens for each of n answers that its key's share has room for; None: any number."""
        return None if self.account is None else self.account.allowance(prompt, n)

    def take(self, prompt: int, asked: int) -> None:
        """Take tokens out of the key's share. Raises Refusal."""
        if self.account is not None:
            self.account.take(prompt, asked)
