"""A fleet of replicas: answers are those of one engine, whatever happens to the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attar.integrations.ray.scorer import digests_of
from attar.integrations.ray.wire import Told
from attar.protocol import block_digests
from attar.protocol.messages import CachedBlocks, Failed
from tests.integrations.ray.conftest import Local, read, submit, until

Make = Callable[..., Local]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


async def alone(local: Make, tokens: int = 40, n: int = 1) -> dict[int, list[int]]:
    async with local() as handle:
        await handle.add("alone")
        return await read(handle.fleet.ask([submit("a", tokens=tokens, n=n)], n))


def held(handle: Local) -> str:
    """The replica that has a request."""
    return next(each.replica for each in handle.fleet._clients if each.open)


def test_an_answer_is_that_of_one_engine(local: Make) -> None:
    async def main() -> None:
        expected = await alone(local, n=2)
        assert [len(each) for each in expected.values()] == [40, 40]
        async with local() as handle:
            await handle.add("one")
            await handle.add("two")
            assert await read(handle.fleet.ask([submit("b", n=2)], 2)) == expected
            assert not handle.fleet.open
            assert not any(each._requests for each in handle.replicas.values())

    run(main)


@pytest.mark.parametrize("how", ["replica", "engine"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_goes_on_elsewhere_with_the_same_tokens(local: Make, how: str, n: int) -> None:
    async def main() -> None:
        expected = await alone(local, 60, n)
        async with local(step=0.005) as handle:
            await handle.add("one")
            await handle.add("two")
            stream = handle.fleet.ask([submit("b", tokens=60, n=n)], n)
            found = await read(stream, 10)
            first = held(handle)
            if how == "replica":
                handle.kill(first)
            else:
                handle.replicas[first].fake.die()
            for choice, tokens in (await read(stream)).items():
                found.setdefault(choice, []).extend(tokens)
            assert found == expected
            assert stream.replays == 1
            assert handle.fleet.replays == {"continued": 1}
            assert sum(each.deaths for each in handle.fleet.replicas) == 1

    run(main)


@pytest.mark.parametrize("dies", [False, True])
def test_one_token_comes_in_one_call(local: Make, dies: bool) -> None:
    async def main() -> None:
        expected = await alone(local, 1)
        async with local() as handle:
            await handle.add("one")
            await handle.add("two")
            for each in handle.replicas.values():
                each.fake.held = dies
            stream = handle.fleet.ask([submit("b", tokens=1)], 1)
            if dies:
                await until(lambda: handle.wholes == 1)
                for each in handle.replicas.values():
                    each.fake.held = False
                handle.kill(held(handle))
            assert await read(stream) == expected
            assert handle.wholes == 1 + dies

    run(main)


def test_a_replica_that_is_taken_away_ends_its_answers_first(local: Make) -> None:
    async def main() -> None:
        async with local(2, step=0.005) as handle:
            await handle.add("one")
            await handle.add("two")
            stream = handle.fleet.ask([submit("b", tokens=60)], 1)
            await read(stream, 10)
            first = held(handle)
            handle.publish(first)
            later = handle.fleet.ask([submit("c")], 1)
            await read(later)
            assert handle.replicas[first].fake.commands[-1].id == "b"
            await read(stream)
            assert stream.replays == 0
            await until(lambda: all(each.replica != first for each in handle.fleet._clients))
            assert handle.watches[first].cancelled() or handle.watches[first].cancelling()
            await handle.add("three")  # in the place that came free
            assert not any(each.deaths for each in handle.fleet.replicas)

    run(main)


def test_a_request_that_its_reader_leaves_is_cancelled_in_the_engine(local: Make) -> None:
    async def main() -> None:
        async with local(step=0.005) as handle:
            one = await handle.add("one")
            stream = handle.fleet.ask([submit("b", tokens=400)], 1)
            await read(stream, 3)
            stream.close()
            await until(lambda: one.fake.cancelled and not one.fake.open and not one._requests)

    run(main)


def test_prompts_go_where_they_are_cached(local: Make) -> None:
    async def main() -> None:
        async with local() as handle:
            await handle.add("one")
            await handle.add("two")
            told = CachedBlocks(block_digests.packed(digests_of(submit("d", prompt=range(64)), handle.fleet.ready)))
            handle.fleet.told("two", Told((told,)))
            for at in range(6):
                await read(handle.fleet.ask([submit(f"r{at}", prompt=range(64))], 1))
            assert [each.routed for each in handle.fleet.replicas if each.routed] == [6]
            assert handle.replicas["two"].fake.commands

    run(main)


def test_progress_is_told(local: Make) -> None:
    async def main() -> None:
        async with local(step=0.005) as handle:
            await handle.add("one")
            stream = handle.fleet.ask([submit("b", tokens=200)], 1)
            await read(stream, 3)
            assert set(await handle.fleet.reports(["b", "unknown"])) == {"b"}
            stream.close()

    run(main)


def test_a_refused_request_is_refused(local: Make) -> None:
    async def main() -> None:
        async with local(queue=0) as handle:
            await handle.add("one")
            stream = handle.fleet.ask([submit("b")], 1)
            handle.fleet.places.size = 0
            events = await stream.take()
            assert isinstance(events[-1], Failed)
            assert events[-1].code == "full"

    run(main)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["ask", "kill", "engine", "away", "wait"]), min_size=4, max_size=12))
def test_no_token_is_lost_or_doubled(local: Make, acts: list[str]) -> None:
    """Replicas come and go at random; those that are left or added always suffice."""

    async def main() -> None:
        expected = await alone(local, 30)
        async with local(12, step=0.002) as handle:
            names = ["r0", "r1"]
            for name in names:
                await handle.add(name)
            streams = []
            for at, act in enumerate(acts):
                if act == "ask":
                    streams.append(handle.fleet.ask([submit(f"q{at}", tokens=30)], 1))
                elif act == "wait":
                    await asyncio.sleep(0.02)
                elif act == "engine":
                    handle.replicas[names[0]].fake.die()
                else:
                    gone = names.pop(0)
                    names.append(f"n{at}")
                    await handle.add(names[-1])
                    if act == "kill":
                        handle.kill(gone)
                    else:
                        handle.publish(gone)
            for stream in streams:
                found = await read_some(stream)
                assert found is None or found == expected[0]
            assert not handle.fleet.open

    run(main)


async def read_some(stream: Any) -> list[int] | None:
    """The tokens of an answer; None where it was given up after as many replays as are allowed."""
    found: list[int] = []
    while events := await stream.take():
        for event in events:
            if isinstance(event, Failed):
                assert event.code == "shutdown"
                assert stream.replays == 2
                return None
            found.extend(getattr(event, "token_ids", ()))
    return found
