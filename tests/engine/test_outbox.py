"""The outbox: whole frames in order, whichever thread says them, and an answer that no frame holds."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from attar.engine.outbox import Outbox, framed
from attar.protocol import messages
from attar.protocol.messages import (
    Beat,
    Delta,
    Event,
    Failed,
    Ready,
    encode,
)

SECONDS = 20.0  # that anything here may take


def test_frames_of_two_threads_never_mix_and_one_that_nobody_reads_holds_up_neither() -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    ready = Ready("tiny", 1, 1, 1, 1, 256, ())
    outbox = Outbox(near, encode([ready]))
    said = [Delta("a", i, (i,), "x" * (i % 7000)) for i in range(500)]
    ended = threading.Event()

    def heart() -> None:
        while not ended.is_set():
            outbox.beat(encode([Beat(1.0)]))

    thread = threading.Thread(target=heart, daemon=True)
    thread.start()
    try:
        for event in said:  # nobody reads: the socket is full long before the end
            outbox.put(encode([event]))
        assert outbox.waiting > 0
        received: list[Event] = []
        far.settimeout(SECONDS)
        with far.makefile("rb") as stream:
            while len([event for event in received if isinstance(event, Delta)]) < len(said):
                size = int.from_bytes(stream.read(4), "little")
                received += msgspec.msgpack.decode(stream.read(size), type=list[Event])
    finally:
        ended.set()
        thread.join(SECONDS)
    near.close()
    far.close()
    assert received[0] == ready
    assert [event for event in received if isinstance(event, Delta)] == said


def test_beats_do_not_pile_up_where_nobody_reads() -> None:
    near, far = socket.socketpair()
    outbox = Outbox(near, b"")
    while not outbox.waiting:
        outbox.put(bytes(1 << 16))
    waiting = outbox.waiting
    for _ in range(100):
        outbox.beat(b"beat")
    assert outbox.waiting == waiting
    near.close()
    far.close()


def test_an_answer_that_no_frame_holds_is_a_failure_and_the_others_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME", 200)
    long = Delta("long", 0, (1,), "x" * 300)
    short = Delta("short", 0, (1,), "y")
    lost: set[str] = set()
    frames, events = framed([short, long, long, short], lost), []
    while frames:
        size = int.from_bytes(frames[:4], "little")
        events += msgspec.msgpack.decode(frames[4 : 4 + size], type=list[Event])
        frames = frames[4 + size :]
    assert events == [short, Failed("long", "too_long", "the answer is too long to be sent"), short]
    assert lost == {"long"}
