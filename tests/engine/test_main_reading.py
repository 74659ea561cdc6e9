"""What the engine's loop reads between two steps."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attar.engine import main
from attar.engine.main import Loop, listen
from attar.model.decoder import Decoder
from attar.protocol.messages import Cancel, Delta, Event, Failed, Finished, QueryStatus, Ready, Submit, encode
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import make_engine
from tests.engine.test_main import SECONDS, Client, Running, held

LONG = Submit("held", (1,), SamplingParams(max_tokens=100, temperature=0, seed=0))
PROMPT = tuple(range(1000, 101_000))  # longer than the context: to be read, and refused


@pytest.fixture
def running(tmp_path: Path, tiny_decoder: Callable[..., Decoder]) -> Iterator[Running]:
    made = Running(tmp_path / "socket", tiny_decoder(layers=1))
    yield made
    made.stop()


def test_a_cancel_behind_long_prompts_is_read_before_the_next_step(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket holds a tenth of them, and a step may take seconds."""
    monkeypatch.setattr(main, "READ_SECONDS", SECONDS)
    monkeypatch.setattr(main, "REST_SECONDS", SECONDS)
    client, (long, begun, go_on) = Client(running.path), held(running.engine.step)
    monkeypatch.setattr(running.engine, "step", long)
    client.send(LONG)
    assert begun.wait(SECONDS)
    prompts = [Submit(f"long{i}", PROMPT, LONG.params) for i in range(4)]
    frames = encode(prompts) + encode([Cancel("held")])
    fits = client.socket.send(frames, socket.MSG_DONTWAIT)
    assert fits < len(frames) / 2
    sender = threading.Thread(target=client.socket.sendall, args=(frames[fits:],), daemon=True)
    sender.start()
    go_on.set()
    told: list[Event] = []
    while not any(isinstance(each, Failed) and each.id == "held" for each in told):
        told += client.frame()
    sender.join(SECONDS)
    assert sum(isinstance(each, Delta) for each in told) == 1, "of the step that was under way"
    assert {each.id for each in told if isinstance(each, Failed)} == {"held", *(each.id for each in prompts)}


def test_the_rest_of_a_frame_that_does_not_come_holds_up_nothing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "REST_SECONDS", 100 * SECONDS)
    client = Client(running.path)
    client.socket.sendall(encode([LONG]) + encode([QueryStatus(("x" * 999,))])[:500])
    client.until(Finished)


def test_a_server_that_never_pauses_does_not_keep_the_engine_from_its_steps(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = time.monotonic() + SECONDS

    class Endless:
        def recv(self, size: int) -> bytes:
            assert time.monotonic() < end, "it is read for ever"
            return encode([QueryStatus(("nobody",))])

    engine = make_engine(tiny_decoder(layers=1), 8, SchedulerConfig(), context=128)
    with listen(tmp_path / "socket") as listener:
        loop = Loop(engine, Ready("tiny", 128, 97, 8, 64, 256, ()), listener, None)
        loop._server = Endless()  # type: ignore[assignment]
        monkeypatch.setattr(main, "polled", lambda *_: True)
        loop._read(0.01)
