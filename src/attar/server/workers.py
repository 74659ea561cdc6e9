"""Threads for what would hold up the event loop, in turns by key.

Jobs stand in one line, which a key that floods would fill: so of each key only some jobs are in it or at work, and its
next one joins when one of those has ended. A job that is given up before it began never begins, and lets go of what it
holds at once, though its place in the line is passed only in time. A thread cannot be stopped: a job that has begun
goes on, and so does its key's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Value = TypeVar("Value")


class Workers:
    """`threads` of them, called `name`; of one key at most `each` jobs at a time."""

    def __init__(self, name: str, threads: int, each: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._each = each
        self._turns: dict[bytes, asyncio.Semaphore] = {}  # one for each key that the server knows

    def close(self) -> None:
        """Let the threads go; what waits is not done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, key: bytes, work: Callable[[], Value]) -> Value:
        """What `work` gives. Raises what it raises."""
        loop, turn = asyncio.get_running_loop(), self._turns.setdefault(key, asyncio.Semaphore(self._each))

        todo = [work]  # a text of megabytes may hang on it

        def release(_: Future[Value]) -> None:
            todo.clear()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(turn.release)

        await turn.acquire()
        try:
            job = self._threads.submit(lambda: todo.pop()())
        except BaseException:
            turn.release()
            raise
        job.add_done_callback(release)
        return await asyncio.wrap_future(job)
