"""Turns of keys at a few threads, and what a large text holds up."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from attar.checkpoints.sources import hub
from attar.server.fair_thread_pool import LARGE, THREADS, FairThreadPool, TextThreads
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from attar.server.prompt_room import Room
from attar.server.prompts import Prompts
from attar.server.serve import Server
from attar.text.tokenizer import Tokenizer

SECONDS = 20.0
CONTEXT = 10**9

Pools = Callable[[int, int], FairThreadPool]


class Job:
    """Work that says when it has begun, and ends when it is let."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(SECONDS)
        return "done"


@pytest.fixture
def workers() -> Iterator[Pools]:
    made: list[FairThreadPool] = []

    def make(threads: int, each: int) -> FairThreadPool:
        made.append(FairThreadPool("test", threads, each))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def began(job: Job) -> bool:
    return await asyncio.to_thread(job.begun.wait, SECONDS)


async def settled(*waiting: Awaitable[object]) -> None:
    """Let what waits get as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert waiting


def test_a_key_that_floods_leaves_the_next_thread_to_another(workers: Pools) -> None:
    async def main() -> None:
        made, flood, other = workers(2, 1), [Job() for _ in range(5)], Job()
        theirs = [asyncio.create_task(made.run(b"a", job)) for job in flood]
        assert await began(flood[0])
        mine = asyncio.create_task(made.run(b"b", other))
        assert await began(other), "before the others of the first key"
        assert not flood[1].begun.is_set()
        for job in (other, *flood):
            job.go_on.set()
        assert await asyncio.gather(mine, *theirs) == ["done"] * 6

    asyncio.run(main())


def test_what_was_given_up_keeps_its_turn_until_its_thread_is_free(
    workers: Pools,
) -> None:
    async def main() -> None:
        made, first, second = workers(2, 1), Job(), Job()
        gone = asyncio.create_task(made.run(b"a", first))
        assert await began(first)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        after = asyncio.create_task(made.run(b"a", second))
        await settled(after)
        assert not second.begun.is_set()
        first.go_on.set()
        assert await began(second)
        second.go_on.set()
        assert await after == "done"

    asyncio.run(main())


def test_who_gives_up_while_waiting_and_who_raises_hold_up_nobody(
    workers: Pools,
) -> None:
    async def main() -> None:
        made, first = workers(1, 1), Job()
        running = asyncio.create_task(made.run(b"a", first))
        assert await began(first)
        waiting = [asyncio.create_task(made.run(key, Job())) for key in (b"a", b"b")]  # for its turn, for a thread
        await settled(*waiting)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        first.go_on.set()
        assert await running == "done"
        for key in (b"a", b"b"):
            with pytest.raises(ZeroDivisionError):
                await made.run(key, lambda: 1 // 0)
            assert await made.run(key, lambda: 7) == 7
        made.close()
        for _ in range(2):  # no turn is lost
            with pytest.raises(RuntimeError, match="after shutdown"):
                await made.run(b"a", lambda: 7)

    asyncio.run(asyncio.wait_for(main(), SECONDS))


def test_what_is_given_up_before_it_began_never_begins_and_holds_nothing(
    workers: Pools,
) -> None:
    class Text:
        def __call__(self) -> None:
            raise AssertionError("nobody waits for it")

    async def main() -> None:
        made, first = workers(1, 1), Job()
        running = asyncio.create_task(made.run(b"a", first))
        assert await began(first)
        held = []
        for _ in range(20):  # in the line, one after the other: the turn of who is gone is free
            text = Text()
            held.append(weakref.ref(text))
            waiting = asyncio.create_task(made.run(b"b", text))
            del text
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            del waiting
        await settled(running)
        gc.collect()
        assert not [each for each in held if each() is not None]
        first.go_on.set()
        assert await running == "done"
        assert await made.run(b"b", lambda: 7) == 7

    asyncio.run(asyncio.wait_for(main(), SECONDS))


@pytest.mark.parametrize(("keys", "together"), [("", THREADS), ("a", THREADS), ("aa", THREADS), ("ab", 1)])
def test_large_texts_have_all_threads_where_no_keys_share_them(
    keys: str, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who come without one go by the same salt."""
    tokenizer = Tokenizer.load(hub.resolve("demo"))
    server = Server(tmp_path / "engine", tokenizer, ServerOptions(keys=Keys.of(keys)))
    prompts = server.prompts
    jobs = [Job() for _ in range(THREADS + 1)]
    rest = iter(jobs)
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: [len(next(rest)())])

    async def main() -> None:
        waiting = [asyncio.create_task(prompts.ids(b"", ["a " * LARGE], Room("prompt", 10, CONTEXT, 0))) for _ in jobs]
        for job in jobs[:together]:
            assert await began(job)
        await settled(*waiting)
        assert not jobs[together].begun.is_set()
        for job in jobs:
            job.go_on.set()
        await asyncio.gather(*waiting)

    try:
        asyncio.run(asyncio.wait_for(main(), SECONDS))
    finally:
        for job in jobs:
            job.go_on.set()
        server.threads.close()


def test_large_texts_hold_up_no_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(hub.resolve("demo"))
    threads = TextThreads(keys=2)
    prompts, job, encode = Prompts(tokenizer, threads), Job(), tokenizer.encode

    def slow(text: str, **options: bool) -> list[int]:
        if len(text) > LARGE:
            job()
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    large = "a " * LARGE

    async def main() -> None:
        room = Room("prompt", 10**6, CONTEXT, 0)
        held = [asyncio.create_task(prompts.ids(b"a", [large], room)) for _ in range(THREADS + 1)]
        held += [asyncio.create_task(prompts.ids(b"b", [large], room))]
        held += [asyncio.create_task(prompts.chat_ids(b"b", [{"role": "user", "content": large}]))]
        assert await began(job)
        assert await prompts.ids(b"a", ["Once upon"], room) == [tuple(encode("Once upon"))]
        assert await prompts.text_ids(b"b", "Once", add_special_tokens=False)
        assert await prompts.chat_ids(b"a", [{"role": "user", "content": "Hello"}])
        assert await prompts.text(b"a", encode("Once upon"))
        assert not any(each.done() for each in held)
        job.go_on.set()
        await asyncio.gather(*held)

    try:
        asyncio.run(asyncio.wait_for(main(), SECONDS))
    finally:
        job.go_on.set()
        threads.close()
