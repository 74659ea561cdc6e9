"""Threads for what would hold up the event loop, in turns by key.

Jobs stand in one line, which a key that floods would fill: so of each key only some jobs are in it or at work, and its
next one joins when one of those has ended. A job that is given up before it began never begins, and lets go of what it
holds at once, though its place in the line is passed only in time. A thread cannot be stopped: a job that has begun
goes on, and so does its key's turn.

Threads that work on texts are few, since the tokenizer releases Python's lock and templates are another process's work.
Conversations have threads of their own: a template that takes all the time it may holds up other conversations, which
wait for the same process, and no smaller texts. So have large texts, of which a tokenizer does about a megabyte a
second: whoever asks little does not wait for them, and where several keys share the server, of each there is one at a
time. How many jobs may wait is bounded by how many requests the server holds at all.
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
    """So many `threads`, called `name`; of one key at most `each` jobs are in line or at work at a time."""

    def __init__(self, name: str, threads: int, each: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._each = each
        self._turns: dict[bytes, asyncio.Semaphore] = {}  # one for each key that the server knows

    def close(self) -> None:
        """Let the threads go; what waits is not done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, key: bytes, work: Callable[[], Value]) -> Value:
        """Return what `work` returns, and raise what it raises."""
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


class TextThreads:
    """The threads that work on texts, by what they work on.

    So many `keys` share them; with one, or none, nobody is kept out by who takes all of them.
    """

    def __init__(self, keys: int = 0) -> None:
        self._texts = FairThreadPool("prompts", THREADS, THREADS)
        self._chats = FairThreadPool("renders", THREADS, THREADS)
        self._large = FairThreadPool("large", THREADS, THREADS if keys < 2 else 1)

    def close(self) -> None:
        """Let the threads go."""
        for pool in (self._texts, self._chats, self._large):
            pool.close()

    async def run(self, key: bytes, size: int, work: Callable[[], Value], chat: bool = False) -> Value:
        """Do `work` on so many characters of a request of `key`: a text's, or a conversation's (`chat`)."""
        pool = self._large if size > LARGE else self._chats if chat else self._texts
        return await pool.run(key, work)
