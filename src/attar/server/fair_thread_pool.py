"""Thread pools for work that would block the event loop, with fair turns by key.

Jobs wait in one queue, which a flooding key would fill. So each key has only some jobs queued or at work, and its next
one joins when one of them has ended. A job that is given up before it began never begins, and releases what it holds at
once, though its place in the queue passes only in time. A thread cannot be stopped: a job that has begun goes on, and
keeps its key's turn.

Threads that work on texts are few, since the tokenizer releases Python's lock and templates are another process's work.
Conversations have threads of their own: a template that takes all the time it may delays other conversations, which
wait for the same process, and no smaller texts. Large texts have threads of their own too, since a tokenizer does about
a megabyte a second: a small text does not wait for them. Where several keys share the server, each has one large text
at a time. The number of jobs that wait is bounded by the number of requests that the server holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = 2
LARGE = 64 << 10  # characters

Value = TypeVar("Value")


class FairThreadPool:
    """A pool of `threads` threads called `name`; each key has at most `each` jobs queued or at work at a time."""

    def __init__(self, name: str, threads: int, each: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._each = each
        self._turns: dict[bytes, asyncio.Semaphore] = {}  # one for each key of the server

    def close(self) -> None:
        """Release the threads; queued jobs are not done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, key: bytes, work: Callable[[], Value]) -> Value:
        """Return what `work` returns, and raise what it raises."""
        loop, turn = asyncio.get_running_loop(), self._turns.setdefault(key, asyncio.Semaphore(self._each))
        todo = [work]  # the job may hold a text of megabytes

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


class TextThreads:
    """The threads that work on texts, by kind of text.

    `keys` API keys share them; with one, or none, a caller may take all of them.
    """

    def __init__(self, keys: int = 0) -> None:
        self._texts = FairThreadPool("prompts", THREADS, THREADS)
        self._chats = FairThreadPool("renders", THREADS, THREADS)
        self._large = FairThreadPool("large", THREADS, THREADS if keys < 2 else 1)

    def close(self) -> None:
        """Release the threads."""
        for pool in (self._texts, self._chats, self._large):
            pool.close()

    async def run(self, key: bytes, size: int, work: Callable[[], Value], chat: bool = False) -> Value:
        """Run `work` on `size` characters of a request of `key`: a text, or a conversation (`chat`)."""
        pool = self._large if size > LARGE else self._chats if chat else self._texts
        return await pool.run(key, work)
