"""A key's share: never more than it may have, in any stretch of time, and never less than it could have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from attar.server.admission.rate_limits import MINUTE, PART, Account, KeyLimits, Quotas
from attar.server.errors import APIError
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from tests.server.conftest import Running

REQUESTS, TOKENS = 3, 120
RATE = TOKENS / MINUTE
ROUNDING = 1e-6  # tokens


class Shares(RuleBasedStateMachine):
    """Two keys, a clock that jumps, and requests that ask for what they like and use what they like of it."""

    accounts = Bundle("accounts")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.turned_away: list[str] = []
        self.quotas = Quotas(KeyLimits(REQUESTS, TOKENS), self.turned_away.append, clock=lambda: self.now)
        self.open = {b"a": 0, b"b": 0}
        self.used: dict[bytes, list[tuple[float, int]]] = {b"a": [], b"b": []}
        self.aside: dict[int, int] = {}  # of what was asked, by account
        self.owed: dict[int, int] = {}  # for prompts
        self.keys: dict[int, bytes] = {}

    @rule(seconds=st.floats(0, 200))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=accounts, key=st.sampled_from([b"a", b"b"]))
    def enter(self, key: bytes) -> object:
        if self.open[key] == REQUESTS:
            with pytest.raises(APIError, match="rate_limit_exceeded"):
                self.quotas.enter(key)
            return multiple()
        account = self.quotas.enter(key)
        self.open[key] += 1
        self.aside[id(account)] = self.owed[id(account)] = 0
        self.keys[id(account)] = key
        return account

    @rule(account=accounts, prompt=st.integers(0, TOKENS), asked=st.integers(0, TOKENS))
    def take(self, account: Account, prompt: int, asked: int) -> None:
        free = self.quotas.fill(account.state)
        if prompt + asked > TOKENS:  # no waiting would help
            with pytest.raises(APIError, match="out_of_range"):
                account.take(prompt, asked)
        elif prompt + asked > free:
            with pytest.raises(APIError, match="rate_limit_exceeded") as caught:
                account.take(prompt, asked)
            seconds = caught.value.retry_after
            assert seconds is not None
            assert seconds * RATE >= prompt + asked - free - ROUNDING
            assert seconds == 1 or (seconds - 1) * RATE < prompt + asked - free + ROUNDING
            assert self.turned_away[-1] == "tokens"
        else:
            account.take(prompt, asked)
            self.owed[id(account)] += prompt
            self.aside[id(account)] += asked

    @rule(account=accounts, share=st.floats(0, 1))
    def use(self, account: Account, share: float) -> None:
        tokens = int(share * self.aside[id(account)])
        account.use(tokens)
        self.aside[id(account)] -= tokens
        self.used[self.keys[id(account)]].append((self.now, tokens))

    @rule(account=consumes(accounts), begun=st.booleans())
    def close(self, account: Account, begun: bool) -> None:
        if not begun:
            account.forgive(account.owed)
        account.close()
        key = self.keys.pop(id(account))
        self.open[key] -= 1
        del self.aside[id(account)]
        self.used[key].append((self.now, self.owed.pop(id(account)) if begun else 0))

    def held(self, key: bytes) -> int:
        return sum(self.aside[at] + self.owed[at] for at, owner in self.keys.items() if owner == key)

    @invariant()
    def no_stretch_of_time_holds_too_much(self) -> None:
        for used in self.used.values():
            for first, (start, _) in enumerate(used):
                total = 0
                for end, tokens in used[first:]:
                    total += tokens
                    assert total <= TOKENS + RATE * (end - start) + ROUNDING

    @invariant()
    def what_is_aside_is_what_open_requests_have(self) -> None:
        for key, state in self.quotas._keys.items():
            assert state.open == self.open[key]
            assert state.aside == self.held(key)
            assert state.aside <= state.level + ROUNDING
            assert state.level <= TOKENS

    def teardown(self) -> None:
        self.now += MINUTE
        for key, state in self.quotas._keys.items():
            assert abs(self.quotas.fill(state) - (TOKENS - self.held(key))) < ROUNDING


Shares.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShares = Shares.TestCase


def test_the_time_to_wait_is_enough_and_no_second_too_long() -> None:
    now = [0.0]
    quotas = Quotas(KeyLimits(None, TOKENS), lambda _: None, clock=lambda: now[0])
    first = quotas.enter(b"key")
    first.take(TOKENS, 0)
    first.close()
    account = quotas.enter(b"key")
    with pytest.raises(APIError) as caught:
        account.take(33, 0)
    seconds = caught.value.retry_after
    assert seconds == 17  # 33 at 2 a second
    now[0] = seconds - 1
    with pytest.raises(APIError):
        account.take(33, 0)
    now[0] = seconds
    account.take(33, 0)


def test_without_limits_nothing_is_refused() -> None:
    quotas = Quotas(KeyLimits(), lambda _: None)
    for _ in range(100):
        quotas.enter(b"key").take(10**9, 10**9)


def test_who_names_no_number_has_what_is_there_and_no_less_than_a_fair_part() -> None:
    now = [0.0]
    quotas = Quotas(KeyLimits(None, TOKENS), lambda _: None, clock=lambda: now[0])
    first, second = quotas.enter(b"key"), quotas.enter(b"key")
    assert (first.allowance(20, 1), first.allowance(20, 3)) == (TOKENS - 20, (TOKENS - 20) // 3)
    first.take(20, 60)
    assert second.allowance(5, 1) == 35
    assert second.allowance(20, 1) == TOKENS // PART  # more than there is: it is told when there will be
    with pytest.raises(APIError, match="rate_limit_exceeded"):
        second.take(20, TOKENS // PART)
    assert second.allowance(TOKENS - 7, 1) == 7
    assert second.allowance(TOKENS, 16) == 1
    first.close()
    now[0] += MINUTE
    assert second.allowance(TOKENS - 7, 2) == 3
    assert Quotas(KeyLimits(1, None), lambda _: None).enter(b"key").allowance(5, 1) is None


def test_a_chat_that_names_no_number_is_served_within_its_keys_minute(start: Callable[..., Running]) -> None:
    key = "a-key-of-the-test-" + "c" * 20
    server = start(ServerOptions(port=0, keys=Keys.of([key]), limits=KeyLimits(tokens_per_minute=TOKENS)))
    said = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    for stream in (False, True):
        headers = {"Authorization": f"Bearer {key}"}
        reply = server.post("/v1/chat/completions", said | {"stream": stream}, headers)
        if not stream:
            assert reply.status == 200, reply
            assert reply.json["usage"]["total_tokens"] == TOKENS
            assert reply.json["choices"][0]["finish_reason"] == "length"
    assert reply.status == 429, "the minute is used up"
    assert 0 < int(reply.headers["retry-after"]) <= MINUTE
    reply = server.post("/v1/chat/completions", said | {"max_tokens": TOKENS}, headers)
    assert (reply.status, reply.code) == (400, "out_of_range")  # who names one is told that it is too much
