"""How answers are written: in parts, each when the reader has taken the one before, and none for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from attar.server import sse
from attar.server.sse import PART


def test_parts_are_the_same_bytes_in_writes_of_bounded_size() -> None:
    pieces: list[bytes | bytearray] = [b"a", b"", bytearray(b"b" * 3 * PART), *[b"c" * 1000] * 200, b"d"]
    found = list(sse.parts(pieces))
    assert b"".join(found) == b"".join(pieces)
    assert all(PART <= len(part) < 2 * PART for part in found[:-1])
    assert not list(sse.parts([b""]))


def test_a_small_answer_says_how_long_it_is() -> None:
    made = sse.whole([b'{"a":', b"1}"])
    assert (made.body, made.headers["content-length"]) == (b'{"a":1}', "7")
    assert made.headers["content-type"] == "application/json"


async def written(made: int, leave_after: int | None = None) -> tuple[list[dict[str, Any]], int, list[int]]:
    """What is sent of an answer of so many parts, how many of them were made, and the loop's turn at each write."""
    count, turn = 0, 0
    sent: list[dict[str, Any]] = []
    at: list[int] = []
    left = asyncio.Event()

    def pieces() -> Iterator[bytes]:
        nonlocal count
        for _ in range(made):
            count += 1
            yield b"x" * PART

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # as to a connection that takes all at once
        sent.append(message)
        at.append(turn)
        if len(sent) == leave_after:
            left.set()

    async def other() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(other())
    await sse.whole(pieces())({"type": "http"}, receive, send)  # type: ignore[arg-type]
    task.cancel()
    return sent, count, at


def test_a_large_answer_is_made_and_written_part_by_part() -> None:
    sent, count, at = asyncio.run(written(10))
    start, *bodies = sent
    assert start["status"] == 200
    assert (b"content-type", b"application/json") in start["headers"]
    assert b"content-length" not in dict(start["headers"])
    assert b"".join(body["body"] for body in bodies) == b"x" * 10 * PART
    assert [body["more_body"] for body in bodies] == [True] * 10 + [False]
    assert count == 10
    assert len(set(at[1:])) == len(at) - 1, "two parts in one turn of the loop"


@pytest.mark.parametrize("after", [1, 4])
def test_nothing_more_is_made_for_a_reader_who_left(after: int) -> None:
    _, count, _ = asyncio.run(written(100, leave_after=after))
    assert count <= after + 3
