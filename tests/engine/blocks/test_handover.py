"""A new engine takes over another replica's blocks: the bits that it would compute, and none of a block in doubt.

Faults are those of a source that dies, hangs, lies about what it has, or sends other blocks than were asked for. Each
time the new engine is left with what was verified, holds nothing, and answers as an engine alone.
"""

from __future__ import annotations

import random
import socket
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from attar.engine.blocks import handover
from attar.engine.blocks.moves import PeerBlocks
from attar.engine.engine import Engine
from attar.model.decoder import Decoder
from attar.protocol.messages import Event, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.scheduling import prefix_cache
from attar.transfer.header import BlockHeader, Names
from attar.transfer.wire import Address, Blocks, Greeting, Hottest, Prefill, Prefixes, Wire
from tests.engine.blocks.test_peers import PROMPT, Fake, counts, engine_of, greeted, prefiller, question, wait
from tests.engine.conftest import CONTEXT, ROOM, answers, run

BLOCK = 64
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)
SCHEMES = (None, "int8", "klt4")  # of blocks: as computed, with scales, and of calibrated bases


def sibling(path: Path, **how: Any) -> PeerBlocks:
    return PeerBlocks(Address(path), True, "model", how.get("settings", "settings"), replicas=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(0o700)
    return tmp_path / "run"


def prompts(draw: random.Random, count: int) -> list[Submit]:
    """Requests of two keys, whose prompts share beginnings of one block and of two."""
    bases = [[draw.randrange(5, 94) for _ in range(2 * BLOCK)] for _ in range(2)]
    found = []
    for at in range(count):
        shared = draw.choice((0, BLOCK, 2 * BLOCK))
        own = [draw.randrange(5, 94) for _ in range(draw.randrange(1, CONTEXT - GREEDY.max_tokens - shared))]
        salt = draw.choice((b"", b"key"))
        found.append(Submit(f"r{at}", tuple(draw.choice(bases)[:shared] + own), GREEDY, cache_salt=salt))
    return found


def contents(made: Engine) -> dict[tuple[bytes, bytes], bytes]:
    """The bytes of every whole block in an engine's tree, by salt and tokens up to its end."""
    assert made.moves is not None
    found, blocks = {}, made.moves._bytes
    for salt, before, node in made.cache.nodes():
        for at, block in enumerate(node.blocks[: len(node.tokens) // BLOCK]):
            data = bytearray(blocks.nbytes)
            blocks.read(block, data)
            found[salt, (before + node.tokens[: (at + 1) * BLOCK]).tobytes()] = bytes(data)
    return found


def take_over(made: Engine, path: Path) -> None:
    """Let an engine take over blocks, to the end; it holds nothing then."""
    made.take_over(path)
    assert made.moves is not None
    assert made.moves.handover is not None
    until = time.monotonic() + 30
    while made.moves.handover._puller is not None:
        assert time.monotonic() < until, "it does not come to an end"
        made.moves.settle()
        made.scheduler.check()
        made.pool.check()
        time.sleep(0.001)
    assert not made.moves.under_way
    assert made.pool.active == 0


def end(made: Engine) -> None:
    assert made.moves is not None
    made.moves.close()
    made.cache.check()
    made.cache.flush()
    assert made.pool.free == made.pool.total


def reused(events: Sequence[Event]) -> int:
    return sum(event.report.reused_tokens for event in events if isinstance(event, Finished) and event.report)


@pytest.mark.parametrize("kv", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_taken_over_are_those_computed(kv: str | None, seed: int, decoder: Decoder, folder: Path) -> None:
    draw = random.Random(seed)
    asks = prompts(draw, 6)
    source = engine_of(decoder, kv=kv, peer=sibling(folder / "old"))
    whole = answers(run(source, asks))
    with prefiller(source) as old:
        made = engine_of(decoder, kv=kv, peer=sibling(folder / "new"))
        take_over(made, folder / "old")
        had, got = contents(old.made), contents(made)
        assert got
        assert got.items() <= had.items()
        assert len(got) == min(len(had), ROOM // 2)
        assert counts(made)["pulled_blocks"] == counts(old.made)["sent_blocks"] == len(got)
        alone = engine_of(decoder, kv=kv, peer=sibling(folder / "alone"))
        assert answers(run(alone, asks)) == whole
        assert got.items() <= contents(alone).items()  # the bits that it would have computed
        events = run(made, asks)
        assert answers(events) == whole
        assert reused(events) > 0
        end(made)
        end(alone)


def test_the_last_used_come_first_and_no_more_than_half_of_the_cache(decoder: Decoder, folder: Path) -> None:
    asks = [Submit(str(at), tuple((at + 31 * each) % 89 + 5 for each in range(130)), GREEDY) for at in range(6)]
    source = engine_of(decoder, peer=sibling(folder / "old"))
    run(source, asks)
    run(source, asks[:1])  # used again
    before = source.cache.last_used(ROOM)
    with prefiller(source):
        made = engine_of(decoder, blocks=8, peer=sibling(folder / "new"))
        take_over(made, folder / "old")
        assert counts(made)["pulled_blocks"] == 4
        assert made.cache.last_used(ROOM) == before[:2]  # the first is that which was used again
        assert before[0][1] == array("i", asks[0].prompt[:128])
        assert source.cache.last_used(ROOM) == before, "what is taken over counts as used"
        end(made)


def test_the_list_is_bounded(decoder: Decoder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts that share a block have three blocks together, and four in a list of both."""
    asks = [Submit(str(at), (*range(5, 5 + BLOCK), *(at + each for each in range(5, 75))), GREEDY) for at in range(2)]
    source = engine_of(decoder, peer=sibling(folder / "old"))
    run(source, asks)
    assert [len(tokens) for _, tokens in source.cache.last_used(ROOM)] == [2 * BLOCK, 2 * BLOCK]
    monkeypatch.setattr(prefix_cache, "MAX_TOLD", 4 * BLOCK - 1)
    assert [tuple(tokens) for _, tokens in source.cache.last_used(ROOM)] == [asks[1].prompt[: 2 * BLOCK]]
    end(source)


def test_nothing_is_evicted_and_nothing_is_asked_for_twice(decoder: Decoder, folder: Path) -> None:
    asks = [Submit(str(at), tuple((at + 31 * each) % 89 + 5 for each in range(130)), GREEDY) for at in range(3)]
    source = engine_of(decoder, peer=sibling(folder / "old"))
    run(source, asks)
    with prefiller(source):
        made = engine_of(decoder, blocks=6, peer=sibling(folder / "new"))
        run(made, asks[:1])  # two blocks, and a part
        had = contents(made)
        take_over(made, folder / "old")
        assert had.items() <= contents(made).items()
        assert counts(made)["pulled_blocks"] <= 3
        pulled = counts(made)["pulled_blocks"]
        take_over(made, folder / "old")
        assert counts(made)["pulled_blocks"] == pulled
        end(made)


def test_requests_go_on_meanwhile(decoder: Decoder, folder: Path) -> None:
    asks = prompts(random.Random(7), 8)
    source = engine_of(decoder, peer=sibling(folder / "old"))
    whole = answers(run(source, asks))
    with prefiller(source):
        made = engine_of(decoder, peer=sibling(folder / "new"))
        made.take_over(folder / "old")
        assert answers(run(made, asks)) == whole
        take_over(made, folder / "old")
        end(made)


def test_both_sides_ask_for_what_their_kind_may(decoder: Decoder, folder: Path) -> None:
    """A replica computes nothing for others, and a prefill engine tells nobody what it has cached."""
    replica = engine_of(decoder, peer=sibling(folder / "old"))
    prefill = engine_of(decoder, peer=PeerBlocks(Address(folder / "prefill"), True, "model", "settings"))
    for each in (replica, prefill):
        run(each, [Submit("a", PROMPT, GREEDY)])
    with prefiller(replica), prefiller(prefill):
        for path, ask in (
            (folder / "old", question()), (folder / "prefill", Hottest(4)), (folder / "prefill", question(cached=True)),
        ):  # fmt: skip
            wire = greeted(path)
            wire.send(ask, time.monotonic() + 5)
            with pytest.raises(OSError):
                wire.receive(time.monotonic() + 5)
            wire.close()
        assert wait(lambda: counts(prefill)["refused"] == 2)
        assert counts(replica)["refused"] == 1


class Source(Fake):
    """A replica that speaks as `fault` says, with the blocks that a real one has."""

    def _speak(self, wire: Wire, fault: str) -> None:
        assert self.real.moves is not None
        assert self.real.moves.listener is not None
        until, origin = time.monotonic() + 30, self.real.moves.listener._origin
        changed = {name: "other" for name in ("model", "settings", "layout") if fault == f"another {name}"}
        wire.send(Greeting.of(msgspec.structs.replace(origin, **changed)), until)
        wire.receive(until)
        ask = wire.receive(until)
        assert isinstance(ask, Hottest)
        if fault == "dies when asked":
            return
        if fault == "hangs when asked":
            self.gate.wait(30)
            return
        prefixes = [(salt, tokens.tobytes()) for salt, tokens in self.real.cache.last_used(ask.blocks)]
        if fault == "part of a block":
            prefixes[0] = prefixes[0][0], prefixes[0][1][:-4]
        wire.send(Blocks(1) if fault == "blocks, not prefixes" else Prefixes(tuple(prefixes)), until)
        while True:
            ask = wire.receive(until)
            assert isinstance(ask, Prefill)
            self._send(wire, ask, until)

    def _send(self, wire: Wire, ask: Prefill, until: float) -> None:
        assert self.real.moves is not None
        assert self.real.moves.listener is not None
        fault, origin, tokens = self.fault, self.real.moves.listener._origin, array("i", ask.tokens)
        blocks = self.real.cache.match(ask.block_salt, tokens, use=False).blocks
        count = 0 if fault == "evicted meanwhile" else len(blocks) - ask.first
        wire.send(Blocks(count), until)
        names = Names(b"", origin)
        chain = names.chain(ask.block_salt, tokens, BLOCK)
        for at in range(ask.first, ask.first + count):
            data = bytearray(origin.size)
            self.real.moves._bytes.read(blocks[at], data)
            own = tokens[at * BLOCK : (at + 1) * BLOCK]
            header = BlockHeader.of(origin, names.salt(ask.block_salt), chain[at - 1] if at else b"", own)
            checksum = xxhash.xxh3_64_digest(data)
            bad = at == 1  # the second one
            if bad and fault == "a flipped byte":
                data[len(data) // 2] ^= 1
            if bad and fault == "another block":
                header = msgspec.structs.replace(header, before=b"")
            if bad and fault == "dies between blocks":
                self.listener.close()  # it is not back at once
                raise OSError
            if bad and fault == "hangs between blocks":
                self.gate.wait(30)
                raise OSError
            wire.send_bytes(len(header.encode()).to_bytes(4, "little") + header.encode(), until)
            wire.send_bytes(data[:100] if bad and fault == "dies within a block" else data, until)
            if bad and fault == "dies within a block":
                raise OSError
            wire.send_bytes(checksum, until)


FAULTS = {  # with the blocks that are verified before
    "another model": 0, "another settings": 0, "another layout": 0, "dies when asked": 0, "hangs when asked": 0,
    "part of a block": 0, "blocks, not prefixes": 0, "evicted meanwhile": 0, "a flipped byte": 1, "another block": 1,
    "dies between blocks": 1, "dies within a block": 1, "hangs between blocks": 1, "none": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def real(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, dict[Any, Any]]]:
    """A replica that has computed a prompt, and the answer to it."""
    path = tmp_path_factory.mktemp("run")
    path.chmod(0o700)
    made = engine_of(decoder, peer=sibling(path / "old"))
    yield made, answers(run(made, [Submit("a", PROMPT, GREEDY)]))
    end(made)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_the_source_does_the_new_engine_computes_the_rest(
    fault: str, real: tuple[Engine, dict[Any, Any]], decoder: Decoder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, whole = real
    if "hangs" in fault:
        monkeypatch.setattr(handover, "SECONDS", 0.3)
    source = Source(folder / "old", engine, fault)
    made = engine_of(decoder, peer=sibling(folder / "new"))
    take_over(made, folder / "old")
    assert counts(made)["pulled_blocks"] == FAULTS[fault] == len(contents(made))
    told = counts(made)
    assert (told["refused"] + told["failed"] + told["busy"] > 0) == (fault != "none" and "hangs" not in fault)
    events = run(made, [Submit("a", PROMPT, GREEDY)])
    assert answers(events) == whole
    assert reused(events) == FAULTS[fault] * BLOCK
    source.close()
    end(made)


@pytest.mark.parametrize("there", [False, True])
def test_a_source_that_is_gone_leaves_the_cache_empty(there: bool, decoder: Decoder, folder: Path) -> None:
    if there:  # the socket that a dead process left
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(folder / "old"))
        dead.close()
    made = engine_of(decoder, peer=sibling(folder / "new"))
    take_over(made, folder / "old")
    assert counts(made)["failed"] == 1
    assert not contents(made)
    end(made)


def test_a_new_engine_that_dies_leaves_nothing_held(decoder: Decoder, folder: Path) -> None:
    source = engine_of(decoder, peer=sibling(folder / "old"))
    run(source, [Submit("a", PROMPT, GREEDY)])
    salt, tokens = source.cache.last_used(ROOM)[0]
    with prefiller(source):
        for read in (False, True):
            wire = greeted(folder / "old")
            wire.send(Hottest(8), time.monotonic() + 5)
            assert wire.receive(time.monotonic() + 5) == Prefixes(((salt, tokens.tobytes()),))
            wire.send(Prefill(tokens.tobytes(), b"", salt, "", 0, 5.0, cached=True), time.monotonic() + 5)
            if read:
                assert wire.receive(time.monotonic() + 5) == Blocks(2)
                wire.receive_into(bytearray(700), time.monotonic() + 5)
            wire.close()
        assert wait(lambda: source.pool.active == 0)
