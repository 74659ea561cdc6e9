"""Random fleets in virtual time: engines that die, are drained, are full and answer late; no token is lost or doubled.

A seed makes everything: requests with one or more choices, when they come and are left, slow links, deaths, drains, and
requests that end every engine. `TEST_FLEETS` is the number of seeds.
"""

from __future__ import annotations

import asyncio
import os
import random
import selectors
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attar.protocol.messages import (
    Cancel,
    Command,
    Delta,
    Event,
    Failed,
    Finished,
    Ready,
    Report,
    Submit,
    encode,
)
from attar.protocol.request import SamplingParams
from attar.server.engine_client.connection import Event as Decoded
from attar.server.engine_client.response_stream import ResponseStream
from attar.server.replicas.group import MAX_REPLAYS, ReplicaGroup

FLEETS = int(os.environ.get("TEST_FLEETS", "60"))
REQUESTS, QUEUE, RUNNING = 25, 6, 3
END = 3600.0  # virtual seconds in which all must have ended
POISON = 13  # first token of a prompt that ends its engine


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.now += max(0.0, timeout or 0.0)
        return super().select(0)


def token(command: Submit, choice: int, index: int) -> int:
    return zlib.crc32(repr((command.prompt, command.params.seed, choice, index)).encode()) % 1000


@dataclass
class Choice:
    command: Submit
    number: int
    index: int  # of the next token
    begun: bool = False


@dataclass
class FakeEngine:
    """An engine at the other end of a client's connection, without a socket. Both directions keep their order."""

    group: ReplicaGroup
    number: int
    draw: random.Random
    choices: list[Choice] = field(default_factory=list)
    life: int = 0
    alive: bool = False
    deaths: int = 0
    _last: dict[str, float] = field(default_factory=dict)

    @property
    def client(self) -> Any:
        return self.group.replicas[self.number].client

    def begin(self) -> None:
        self.alive, self.choices = True, []
        self.client._connection = self
        self.say([Ready("m", 100, 1000, 40, 4, QUEUE, (), (), RUNNING, 8, "same")])
        self.later(0.01, self.step)

    def die(self) -> None:
        """Everything on its way is lost with it."""
        if self.alive:
            self.alive, self.choices, self.life = False, [], self.life + 1
            self.deaths += 1
            self.client._lost()
            asyncio.get_running_loop().call_later(self.draw.choice([0.01, 1.0, 5.0]), self.begin)

    def later(self, seconds: float, act: Callable[[], None], way: str = "") -> None:
        """Do something in this life, things of the same `way` in their order."""
        loop, life = asyncio.get_running_loop(), self.life
        when = loop.time() + seconds
        if way:  # the loop's timers of equal times are in no order
            self._last[way] = when = max(when, self._last.get(way, 0.0) + 1e-6)
        loop.call_at(when, lambda: act() if self.life == life and self.alive else None)

    def write(self, data: bytes) -> None:
        commands = msgspec.msgpack.decode(data[4:], type=list[Command])
        self.later(self.draw.choice([0.0, 0.001, 0.3]), lambda: self.obey(commands), "in")

    def close(self) -> None: ...

    def say(self, events: list[Event]) -> None:
        decoded = msgspec.msgpack.decode(encode(events)[4:], type=list[Decoded])
        self.later(self.draw.choice([0.0, 0.001, 0.3]), lambda: self.client._arrived(decoded), "out")

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                assert all(each.command.id != command.id for each in self.choices), "twice at one engine"
                if sum(not each.begun for each in self.choices) + command.n > QUEUE or self.draw.random() < 0.05:
                    self.say([Failed(command.id, "full", "")])
                    continue
                for number, known in enumerate(command.generated or ((),) * command.n):
                    if known is not None:
                        assert known == tuple(token(command, number, at) for at in range(len(known)))
                        self.choices.append(Choice(command, number, len(known)))
            elif isinstance(command, Cancel):
                left = [each for each in self.choices if each.command.id != command.id]
                if len(left) < len(self.choices):
                    self.choices = left
                    self.say([Failed(command.id, "cancelled", "")])

    def step(self) -> None:
        events: list[Event] = []
        for each in self.choices[:RUNNING]:
            command = each.command
            each.begun = True
            if command.prompt[0] == POISON and each.index > 2:
                self.die()
                return
            events.append(Delta(command.id, each.number, (token(command, each.number, each.index),), "x"))
            each.index += 1
            if each.index == command.params.max_tokens:
                self.choices = [other for other in self.choices if other is not each]
                last = all(other.command is not command for other in self.choices)
                report = Report(prompt_tokens=len(command.prompt)) if last else None
                events.append(Finished(command.id, each.number, "length", each.index, None, report))
        if events:
            self.say(events)
        self.later(0.05, self.step)


@dataclass
class Reader:
    """A request, and what its reader got."""

    command: Submit
    left: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    async def read(self, stream: ResponseStream) -> None:
        while events := await stream.take():
            assert not self.failed, "something follows the end"
            for event in events:
                if isinstance(event, Delta):
                    self.tokens.setdefault(event.choice, []).extend(event.token_ids)
                elif isinstance(event, Finished):
                    assert event.choice not in self.ended, "ended twice"
                    self.ended[event.choice] = event.completion_tokens
                elif isinstance(event, Failed):
                    self.failed.append(event.code)
        stream.close()

    def check(self) -> None:
        command = self.command
        for choice, tokens in self.tokens.items():
            assert tokens == [token(command, choice, at) for at in range(len(tokens))], "lost, doubled or others"
        if not self.failed:
            assert self.ended == dict.fromkeys(range(command.n), command.params.max_tokens)
            assert all(len(self.tokens[choice]) == command.params.max_tokens for choice in range(command.n))
        else:
            assert len(self.failed) == 1


async def fleet(seed: int) -> None:
    draw, loop = random.Random(seed), asyncio.get_running_loop()
    group = ReplicaGroup([Path("unused")] * draw.randint(2, 4), clock=loop.time)
    engines = [FakeEngine(group, at, draw) for at in range(len(group.replicas))]
    for engine in engines:
        engine.begin()
    while not all(each.client.ready for each in group.replicas):
        await asyncio.sleep(0.01)
    poison, deadly = draw.random() < 0.3, draw.random() < 0.8
    readers: list[Reader] = []
    tasks: list[asyncio.Task[None]] = []

    async def mishaps() -> None:
        while True:
            await asyncio.sleep(draw.expovariate(0.3))
            engine = draw.choice(engines)
            if draw.random() < 0.5:
                engine.die()
            elif not any(each.draining for each in group.replicas):
                await group.drain(engine.number, draw.choice([0.0, 0.5]))
                engine.die()
                while not engine.alive or engine.client.ready is None:
                    await asyncio.sleep(0.05)
                group.replicas[engine.number].draining = False

    mishap = loop.create_task(mishaps()) if deadly else None
    for number in range(REQUESTS):
        await asyncio.sleep(draw.expovariate(5.0))
        while group.ready is None:
            await asyncio.sleep(0.05)
        first = POISON if poison and number == 5 else draw.randrange(14, 20)
        params = SamplingParams(max_tokens=draw.choice([1, 5, 40]), seed=draw.randrange(100))
        prompt = (first, *(draw.randrange(100) for _ in range(draw.choice([3, 12]))))
        reader = Reader(Submit(str(number), prompt, params, draw.choice([1, 1, 3])))
        stream = group.ask([reader.command], QUEUE)
        readers.append(reader)
        tasks.append(loop.create_task(reader.read(stream)))
        if draw.random() < 0.1:
            reader.left = True
            loop.call_later(draw.random(), stream.cancel)
        assert group.router is not None
        group.router.check()
    async with asyncio.timeout(END):
        await asyncio.gather(*tasks)
    if mishap is not None:
        mishap.cancel()
    for reader in readers:
        reader.check()
    failed = [reader for reader in readers if reader.failed and not reader.left]
    exhausted = [reader for reader in failed if reader.failed == ["shutdown"]]
    assert all(reader.failed in (["shutdown"], ["full"]) for reader in failed)
    assert len(exhausted) <= group.replays["exhausted"]
    assert sum(each.deaths for each in group.replicas) * REQUESTS >= group.replays["exhausted"]
    if not deadly and poison:  # one request that ends engines ends as many as it may be sent to, and no other with it
        assert sum(engine.deaths for engine in engines) <= MAX_REPLAYS + 1
    assert not group.open
    assert group.router is not None
    group.router.check()
    assert not group.router.routed
    assert group.places.total == group.places.running == 0
    assert group.held == 0
    await group.close()


DRAINED = (1098, 3092, 5206, 5941, 7223)  # seeds with requests that meet more than two drains and no death


@pytest.mark.parametrize("seed", [*range(FLEETS), *(seed for seed in DRAINED if seed >= FLEETS)])
def test_no_token_is_lost_or_doubled(seed: int) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(fleet(seed))
