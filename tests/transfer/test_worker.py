"""The thread of transfers: order, news for another thread, and its end."""

from __future__ import annotations

import os
import select
import threading

from attar.transfer.worker import Worker


def test_urgent_jobs_go_first_and_an_exception_ends_one_alone() -> None:
    worker, gate, order = Worker(), threading.Event(), list[str]()
    worker.put(lambda: gate.wait(10) and None)

    def fails() -> None:
        order.append("fails")
        raise RuntimeError("on purpose")

    worker.put(lambda: order.append("later"))
    worker.put(fails, urgent=True)
    worker.put(lambda: order.append("second"), urgent=True)
    gate.set()
    assert worker.wait(10)
    assert order == ["fails", "second", "later"]
    worker.close(1)


def test_what_it_tells_wakes_a_thread_that_sleeps() -> None:
    worker = Worker()
    worker.put(lambda: [worker.tell(number) for number in range(100_000)] and None)
    assert select.select([worker.descriptor], [], [], 10)[0]
    assert worker.wait(10)
    assert worker.take() == list(range(100_000))
    assert not select.select([worker.descriptor], [], [], 0)[0]
    worker.close(1)


def test_the_end_waits_for_so_long_and_drops_the_rest() -> None:
    worker, gate, done = Worker(), threading.Event(), list[int]()
    worker.put(lambda: gate.wait(10) and None)
    worker.put(lambda: done.append(1))
    worker.close(0.01)
    gate.set()
    worker._thread.join(10)
    assert not worker._thread.is_alive()
    assert done == []


def test_what_is_told_after_the_end_is_written_to_no_other_file() -> None:
    worker = Worker()
    assert worker.close(0)
    reads, writes = os.pipe()  # has the numbers of the worker's
    worker.tell("late")
    assert not select.select([reads], [], [], 0)[0]
    os.close(reads)
    os.close(writes)
