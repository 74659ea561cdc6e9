"""Turns of those who are refused: rates on a clock that the test moves."""

from __future__ import annotations

from attar.server.crowd import LONGEST, RETURNS, SHORTEST, WINDOW, Crowd


def test_without_a_past_the_answer_is_the_shortest() -> None:
    crowd = Crowd()
    assert {crowd.retry_after(100.0) for _ in range(1000)} == {SHORTEST}


def test_a_crowd_comes_back_at_a_multiple_of_the_rate_of_service() -> None:
    crowd = Crowd()
    rate = 20
    for i in range(10 * rate):
        crowd.served(i / rate)
    told = [crowd.retry_after(10.0) for _ in range(200)]
    assert told == sorted(told)
    for second in range(2, told[-1]):
        assert abs(told.count(second) - RETURNS * rate) <= 1


def test_nobody_is_sent_away_for_longer_than_a_minute() -> None:
    crowd = Crowd()
    for i in range(10):
        crowd.served(float(i))
    told = [crowd.retry_after(9.0) for _ in range(5000)]
    assert max(told) == LONGEST


def test_turns_pass_and_old_rates_are_forgotten() -> None:
    crowd = Crowd()
    for i in range(10):
        crowd.served(float(i))
    assert crowd.retry_after(9.0) == SHORTEST
    assert max(crowd.retry_after(9.0) for _ in range(50)) > 10
    assert crowd.retry_after(100.0 + WINDOW) == SHORTEST
