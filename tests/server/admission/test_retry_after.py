"""Turns of those who are refused: rates on a clock that the test moves."""

from __future__ import annotations

from attar.server.admission.retry_after import KEPT, LONGEST, PLACES, SHORTEST, WINDOW, RetryAfter


def serving(rate: float) -> RetryAfter:
    """One that has served so many a second for the 10 s before 10."""
    backoff = RetryAfter()
    for i in range(int(10 * rate)):
        backoff.served(i / rate)
    return backoff


def test_without_a_past_the_answer_is_the_shortest() -> None:
    backoff = RetryAfter()
    assert {backoff.retry_after(100.0, 200) for _ in range(1000)} == {SHORTEST}


def test_a_crowd_comes_back_at_half_the_rate_of_service_once_half_of_the_queue_is_served() -> None:
    rate, waiting = 20, 200
    backoff = serving(rate)
    told = [backoff.retry_after(10.0, waiting) for _ in range(200)]
    assert told == sorted(told)
    assert told[0] == KEPT * waiting / rate
    for second in range(told[0] + 1, told[-1]):
        assert abs(told.count(second) - rate / PLACES) <= 1


def test_whose_turn_has_passed_is_waited_for_no_more() -> None:
    """In a crowd that always comes back, as many are refused as leave the queue room for those before them."""
    backoff = serving(20)
    first = [backoff.retry_after(10.0, 0) for _ in range(100)]
    for i in range(100):
        backoff.served(10.0 + i / 20)
    assert first[-1] == 10
    assert backoff.retry_after(15.0, 0) == 5  # half of the turns are still to come
    assert backoff.retry_after(21.0, 0) == SHORTEST


def test_nobody_is_sent_away_for_longer_than_a_minute() -> None:
    backoff = RetryAfter()
    for i in range(10):
        backoff.served(float(i))
    told = [backoff.retry_after(9.0, 0) for _ in range(5000)]
    assert max(told) == LONGEST
    assert backoff.retry_after(9.0 + LONGEST, 10**9) == SHORTEST  # nothing is known of the rate any more
    assert len(backoff._turns) <= 60 * 10 / 9 + 1


def test_turns_pass_and_old_rates_are_forgotten() -> None:
    backoff = RetryAfter()
    for i in range(10):
        backoff.served(float(i))
    assert backoff.retry_after(9.0, 0) == SHORTEST
    assert max(backoff.retry_after(9.0, 0) for _ in range(50)) > 10
    assert backoff.retry_after(100.0 + WINDOW, 0) == SHORTEST
