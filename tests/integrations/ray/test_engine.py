"""A replica beside its fleet: what it tells, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from attar.errors import UserError
from attar.integrations.ray import engine, wire
from attar.integrations.ray.wire import Order
from attar.protocol import block_digests
from attar.protocol.messages import MAX_FRAME, Beat, CachedBlocks, Delta, Finished, Ready
from attar.server.engine_client.connection import AnswerEvent
from tests.errors import user_error
from tests.integrations.ray.conftest import submit, until


def tokens_of(events: Sequence[AnswerEvent]) -> dict[int, list[int]]:
    """The tokens of each choice."""
    found: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Delta):
            found.setdefault(event.choice, []).extend(event.token_ids)
    return found


def test_items_have_several_tokens_and_streams_share_a_rate(
    replica: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "ITEMS_PER_SECOND", 20)

    async def main() -> None:
        made = await replica(step=0.001)
        items = [wire.events(item) async for item in made.answer(wire.encode(Order(submit("a", tokens=60))))]
        assert len(items[0]) < len(items[1])
        assert len(items) <= 6
        assert sum(len(getattr(event, "token_ids", ())) for item in items for event in item) == 60
        await made.end()

    asyncio.run(main())


def test_the_last_events_come_to_a_reader_who_pauses(replica: Callable[..., Any]) -> None:
    """What ends a request may come while an item is read: the events before it were once lost then."""

    async def main() -> None:
        made = await replica(step=0.001)
        found = []
        async for item in made.answer(wire.encode(Order(submit("a", tokens=20)))):
            found += wire.events(item)
            await until(lambda: all(each.ended for each in made._requests.values()))
        assert sum(len(getattr(event, "token_ids", ())) for event in found) == 20
        assert isinstance(found[-1], Finished)
        await made.end()

    asyncio.run(main())


def test_a_whole_answer_has_all_events_of_a_stream(replica: Callable[..., Any]) -> None:
    async def main() -> None:
        made = await replica(step=0.001)
        asked = wire.encode(Order(submit("a", tokens=20, n=2)))
        streamed = [event async for item in made.answer(asked) for event in wire.events(item)]
        whole = wire.events(await made.whole(asked))
        for events in (streamed, whole):
            assert sum(isinstance(event, Finished) for event in events) == 2
        assert tokens_of(whole) == tokens_of(streamed)
        assert not made._requests
        await made.end()

    asyncio.run(main())


def test_a_whole_answer_of_an_engine_that_dies_has_no_end(replica: Callable[..., Any]) -> None:
    async def main() -> None:
        made = await replica(step=0.001)
        made.fake.held = True
        asking = asyncio.ensure_future(made.whole(wire.encode(Order(submit("a", tokens=20)))))
        await until(lambda: made._requests)
        made.fake.die()
        assert not any(isinstance(event, Finished) for event in wire.events(await asking))
        assert not made._requests
        await made.end()

    asyncio.run(main())


def test_an_end_is_told_at_once(replica: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_PAUSE", 60.0)
    monkeypatch.setattr(engine, "ITEMS_PER_SECOND", 1 / 60)

    async def main() -> None:
        made = await replica(step=0.001)
        async with asyncio.timeout(30.0):
            items = [wire.events(item) async for item in made.answer(wire.encode(Order(submit("a", tokens=60))))]
        assert len(items) == 2
        await made.end()

    asyncio.run(main())


def test_other_bytes_and_ids_that_run_are_refused(replica: Callable[..., Any]) -> None:
    async def main() -> None:
        made = await replica(step=0.01)
        for data in (b"", b"\x80", msgspec.msgpack.encode({"command": {"type": "submit"}})):
            with pytest.raises(ValueError):
                await anext(made.answer(data))
        first = made.answer(wire.encode(Order(submit("a"))))
        await anext(first)
        with pytest.raises(ValueError, match="id"):
            await anext(made.answer(wire.encode(Order(submit("a")))))
        await first.aclose()
        await until(lambda: not made._requests)
        await made.end()

    asyncio.run(main())


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 100)
    assert MAX_FRAME > 100
    with pytest.raises(ValueError):
        wire.encode(Order(submit("a", prompt=range(200))))
    with pytest.raises(ValueError):
        wire.order(bytes(101))


def test_a_watcher_hears_the_whole_state_first_and_again_when_it_lags(
    replica: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MAX_TOLD", 3)

    async def main() -> None:
        made = await replica()
        made.fake.beats = False
        watch = made.watch("a")
        told = wire.told(await anext(watch))
        assert isinstance(told.events[0], Ready)
        made.client._arrived([CachedBlocks(block_digests.packed([1, 2, 3]))])
        await until(lambda: made.client.blocks == {1, 2, 3})
        assert CachedBlocks(block_digests.packed([1, 2, 3])) in wire.told(await anext(watch)).events
        made.client._arrived([CachedBlocks(b"", block_digests.packed([2])), *[Beat()] * 5])
        events = wire.told(await anext(watch)).events
        blocks = [each for each in events if isinstance(each, CachedBlocks)]
        assert blocks[-1].whole
        assert set(block_digests.unpacked(blocks[-1].stored)) == {1, 3}
        await watch.aclose()
        await made.end()

    asyncio.run(main())


def test_a_watch_is_a_lease_that_goes_on_under_its_name(
    replica: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(engine, "MAX_WATCHERS", 2)

    async def main() -> None:
        made = await replica()
        first = [wire.told(item) async for item in made.watch("a")]
        again = [wire.told(item) async for item in made.watch("a")]
        assert sum(isinstance(event, Ready) for told in first + again for event in told.events) == 1
        await anext(made.watch("b"))
        with pytest.raises(ValueError, match="watch"):
            await anext(made.watch("c"))
        await asyncio.sleep(0.5)
        await anext(made.watch("c"))  # nobody has called the others for long
        await made.end()

    asyncio.run(main())


def test_the_load_is_that_of_prompts_without_an_answer(replica: Callable[..., Any]) -> None:
    async def main() -> None:
        made = await replica()
        made.fake.held = True
        made.costs.prefill = 0.25
        asked = asyncio.ensure_future(anext(made.answer(wire.encode(Order(submit("a", prompt=range(8)))))))
        await until(lambda: made._requests)
        assert made.queued_seconds() == 2.0
        asked.cancel()
        await until(lambda: not made._requests)
        assert (await made.record_autoscaling_stats())["queued_prefill_seconds"] == 0.0
        assert 0.0 <= made.cache_use() <= 1.0
        await made.end()

    asyncio.run(main())


def test_a_replica_whose_engine_keeps_dying_is_unhealthy(replica: Callable[..., Any]) -> None:
    async def main() -> None:
        made = await replica()
        await made.check_health()
        made._process.gave_up(1)
        with user_error("worker_failed"):
            await made.check_health()
        await made.end()

    asyncio.run(main())
    assert issubclass(UserError, ValueError)
