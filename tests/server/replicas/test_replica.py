"""From whom a new engine takes over cached blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attar.protocol.messages import Ready
from attar.server.replicas.replica import Replica, handed_by


def ready(at: int, bits: str = "equal", blocks_at: str | None = None) -> Ready:
    return Ready("model", 64, 100, 8, 4, 9, (), bits=bits, blocks_at=f"/{at}" if blocks_at is None else blocks_at)


@dataclass
class Client:
    """What a replica asks of its connection."""

    ready: Ready | None
    draining: bool = False
    heartbeat: Any = field(default_factory=lambda: SimpleNamespace(trouble=None))


def replicas(*each: Ready | None) -> list[Replica]:
    return [Replica(at, cast(Any, Client(told))) for at, told in enumerate(each)]


HELD = [9, 3, 5, 4]  # blocks by engine


def test_the_fullest_of_equal_bits_hands_over() -> None:
    made = replicas(*map(ready, range(4)))
    assert [handed_by(made, each, HELD.__getitem__) for each in made] == ["/2", "/0", "/0", "/0"]


@pytest.mark.parametrize(
    "other",
    [None, ready(0, bits="others"), ready(0, blocks_at="")],
    ids=["not ready", "other bits", "none can take over its blocks"],
)
def test_others_hand_nothing_over(other: Ready | None) -> None:
    made = replicas(other, ready(1), ready(2))
    assert handed_by(made, made[1], HELD.__getitem__) == "/2"
    assert handed_by(made[:2], made[1], HELD.__getitem__) == ""


@pytest.mark.parametrize("state", ["draining", "strange", "stuck", "client draining"])
def test_an_engine_that_takes_no_requests_hands_nothing_over(state: str) -> None:
    made = replicas(ready(0), ready(1))
    if state == "client draining":
        made[0].client.draining = True
    elif state == "stuck":
        cast(Any, made[0].client).heartbeat.trouble = "it is stopped"
    else:
        setattr(made[0], state, True)
    assert handed_by(made, made[1], HELD.__getitem__) == ""


def test_where_nothing_is_cached_nothing_is_taken_over() -> None:
    made = replicas(ready(0), ready(1))
    assert handed_by(made, made[1], lambda at: 0) == ""


def test_an_engine_that_cannot_or_that_serves_something_else_takes_nothing_over() -> None:
    made = replicas(ready(0), ready(1, blocks_at=""))
    assert handed_by(made, made[1], HELD.__getitem__) == ""
    made = replicas(ready(0), ready(1))
    made[1].strange = True
    assert handed_by(made, made[1], HELD.__getitem__) == ""
