"""The scorer of the request router, for orders that name no replica."""

from __future__ import annotations

from typing import Any

from attar.integrations.ray.scorer import MOST, Scorer, digests_of
from attar.integrations.ray.wire import Told
from attar.protocol import block_digests
from attar.protocol.messages import CachedBlocks, Ready
from tests.integrations.ray.conftest import submit


def ready(**given: Any) -> Ready:
    return Ready("demo", 512, 1000, 100, 16, 8, (), **({"max_running": 8} | given))


def two() -> Scorer:
    scorer = Scorer()
    for name in ("a", "b"):
        scorer.hear(name, Told((ready(),)))
    return scorer


def test_a_prompt_goes_where_it_is_cached_and_elsewhere_when_that_is_gone() -> None:
    scorer, asked = two(), submit("x", prompt=range(160))
    blocks = block_digests.packed(digests_of(asked, ready()))
    scorer.hear("b", Told((CachedBlocks(blocks),)))
    assert scorer.choose("1", asked, ["a", "b"], 0.0) == "b"
    scorer.hear("b", Told((CachedBlocks(b"", blocks),)))
    scorer.ended("1")
    assert scorer.choose("2", asked, ["a", "b"], 0.0) == "a"
    scorer.hear("a", Told(lost=True))
    assert scorer.choose("2", asked, ["a", "b"], 0.0) == "b"
    assert scorer.choose("3", asked, ["a"], 0.0) is None


def test_load_is_spread_and_full_replicas_are_passed_over() -> None:
    scorer = two()
    found = [scorer.choose(str(at), submit(str(at), prompt=[at] * 40), ["a", "b"], 0.0) for at in range(33)]
    assert found.count("a") == found.count("b") == 16
    assert found[-1] is None
    scorer.ended("0")
    assert scorer.choose("again", submit("again"), ["a", "b"], 0.0) == found[0]


def test_an_id_that_is_asked_again_counts_once() -> None:
    scorer = Scorer()
    scorer.hear("a", Told((ready(),)))
    for _ in range(100):
        assert scorer.choose("same", submit("same"), ["a"], 0.0) == "a"


def test_the_number_of_replicas_is_bounded_and_places_come_free() -> None:
    scorer = Scorer()
    for at in range(MOST + 1):
        scorer.hear(str(at), Told((ready(),)))
    assert scorer.choose("1", submit("1"), [str(MOST)], 0.0) is None
    scorer.lose("7")
    scorer.hear(str(MOST), Told((ready(),)))
    assert scorer.choose("1", submit("1"), [str(MOST)], 0.0) == str(MOST)


def test_replicas_of_another_block_size_get_nothing() -> None:
    scorer = two()
    other = Ready("demo", 512, 1000, 100, 32, 8, (), max_running=8)
    scorer.hear("c", Told((other,)))
    assert scorer.choose("1", submit("1"), ["c"], 0.0) is None
