"""Prefill apart from decode: the same tokens and log probabilities as alone, and every fault of a peer is recomputed.

The faults are those of the field (vLLM, SGLang, Dynamo): a peer that dies, hangs, truncates, lies about sizes, sends
what was not asked for, or sends it twice. Each time the request has one terminal event, nothing is held, and no token
is wrong.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from attar.engine.blocks import moves
from attar.engine.blocks.moves import PeerBlocks
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.model.decoder import Decoder
from attar.protocol.framing import frame
from attar.protocol.messages import PREFILL_PEER, Event, Failed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.transfer import listener, puller
from attar.transfer.header import PROTOCOL, BlockHeader, Names
from attar.transfer.wire import Address, Blocks, Greeting, Prefill, Wire
from tests.engine.blocks.test_moves import ALL_COMPUTED, long
from tests.engine.conftest import answers, make_engine, run
from tests.engine.test_resume import FEATURES, answer, llm, make, submit
from tests.errors import user_error

__all__ = ["llm", "make"]  # fixtures
BLOCK = 64
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
PROMPT = tuple(5 + 31 * at % 89 for at in range(180))  # two blocks, and a part
ASK = Submit("a", PROMPT, GREEDY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(0o700)
    return tmp_path / "run" / "prefill"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "PULL_SECONDS", 5.0)
    monkeypatch.setattr(puller, "PAUSE_SECONDS", 0.0)


def peer(path: Path, serves: bool = False, settings: str = "settings") -> PeerBlocks:
    return PeerBlocks(Address(path), serves, "model", settings)


TURN = threading.Lock()
"""Engines of one process compute one at a time: kernels share the process's threads."""


def in_turn(made: Engine) -> Engine:
    step = made.step

    def locked() -> list[Event]:
        with TURN:
            return step()

    made.step = locked  # type: ignore[method-assign]
    return made


def engine_of(decoder: Decoder, **how: Any) -> Engine:
    return in_turn(make_engine(decoder, **how))


class Prefiller:
    """A prefill engine in a thread of its own."""

    def __init__(self, made: Engine) -> None:
        self.made, self._ended = made, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self.made.moves is not None
        while not self._ended.is_set():
            self.made.moves.settle()
            if self.made.idle:
                select.select([self.made.moves.descriptor], [], [], 0.01)
            else:
                assert not self.made.step(), "an event of a request that nobody made"
                self.made.scheduler.check()

    def end(self) -> None:
        """End it; nothing is held."""
        self._ended.set()
        self._thread.join(30)
        assert self.made.moves is not None
        let_go(self.made)
        self.made.moves.close()
        assert self.made.pool.active == 0
        assert not self.made.requests.own


def let_go(made: Engine) -> None:
    """Wait until the threads hold nothing, and everything has ended."""
    assert made.moves is not None
    end = time.monotonic() + 30
    while made.moves.under_way or not made.idle:
        assert time.monotonic() < end, "blocks are held for ever"
        made.moves.settle()
        made.step()
        time.sleep(0.002)


def end(made: Engine) -> None:
    let_go(made)
    assert made.moves is not None
    made.moves.close()
    assert made.pool.active == 0
    made.cache.flush()
    assert made.pool.free == made.pool.total


@contextlib.contextmanager
def prefiller(made: Engine) -> Iterator[Prefiller]:
    running = Prefiller(made)
    try:
        yield running
    finally:
        running.end()


def fetched(events: list[Event]) -> int:
    return sum(event.report.fetched_tokens for event in events if isinstance(event, Finished) and event.report)


def counts(made: Engine) -> dict[str, int]:
    told = made.stats().prefill_peer
    assert told is not None
    return dict(zip(PREFILL_PEER, told, strict=True))


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_has_the_same_answer(feature: str, make: Callable[..., Engine], llm: LLM, path: Path) -> None:
    how, asked = FEATURES[feature]
    ask = submit(llm, {"prompt": long(llm)} | asked)
    whole = answer(run(make(**how), [ask]))
    alike = {name: value for name, value in how.items() if name in ("kv", "sparse", "prefill")}
    with prefiller(in_turn(make(**alike, peer=peer(path, serves=True)))) as other:
        made = in_turn(make(**how, peer=peer(path)))
        events = run(made, [ask])
        assert answer(events) == whole
        if feature not in ALL_COMPUTED and "eviction" not in feature:  # which has a prompt of one block
            assert fetched(events) >= 2 * BLOCK
        assert counts(other.made)["sent_blocks"] == counts(made)["pulled_blocks"]
        assert counts(made)["failed"] == counts(made)["refused"] == 0
        end(made)


def test_only_what_the_tree_lacks_is_pulled(decoder: Decoder, path: Path) -> None:
    longer = (*PROMPT[:128], *PROMPT[:128][::-1])
    whole = answers(run(make_engine(decoder, context=320), [Submit("a", longer, GREEDY)]))
    with prefiller(engine_of(decoder, context=320, peer=peer(path, serves=True))):
        made = engine_of(decoder, context=320, peer=peer(path))
        run(made, [Submit("b", PROMPT[:70], GREEDY)])  # one block, which is computed here
        assert counts(made)["pulled_blocks"] == 0
        assert answers(run(made, [Submit("a", longer, GREEDY)])) == whole
        assert counts(made)["pulled_blocks"] == 2
        end(made)


def test_keys_are_apart_on_the_other_side_too(decoder: Decoder, path: Path) -> None:
    with prefiller(engine_of(decoder, peer=peer(path, serves=True))) as other:
        for salt in (b"one", b"two"):
            made = engine_of(decoder, peer=peer(path))
            assert fetched(run(made, [msgspec.structs.replace(ASK, cache_salt=salt)])) == 128
            end(made)
        assert other.made.cache.asked == 256
        assert other.made.cache.reused == 0


def test_other_settings_are_refused_on_both_sides(decoder: Decoder, path: Path) -> None:
    whole = answers(run(make_engine(decoder), [ASK]))
    with prefiller(engine_of(decoder, peer=peer(path, serves=True))) as other:
        made = engine_of(decoder, peer=peer(path, settings="others"))
        assert answers(run(made, [ASK])) == whole
        assert counts(made)["refused"] == 1
        assert wait(lambda: counts(other.made)["refused"] + counts(other.made)["failed"] >= 1)
        end(made)


def wait(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not (held := true()) and time.monotonic() < end:
        time.sleep(0.005)
    return held


class Fake:
    """A prefill engine that speaks as `fault` says, with the blocks that a real one has."""

    def __init__(self, path: Path, real: Engine, fault: str) -> None:
        self.real, self.fault, self.gate = real, fault, threading.Event()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self.listener.accept()
                with connected, contextlib.suppress(OSError, ValueError, IndexError):
                    self._speak(Wire(connected), self.fault)

    def _speak(self, wire: Wire, fault: str) -> None:
        assert self.real.moves is not None
        assert self.real.moves.listener is not None
        until, origin = time.monotonic() + 30, self.real.moves.listener._origin
        if fault == "dies at once":
            return
        if fault == "greets with rubbish":
            wire.send_bytes(frame(b"\xc1" * 20), until)
        changed = {"another version": {"protocol": PROTOCOL + 1}}.get(fault, {})
        for name in ("model", "settings", "layout", "size"):
            if fault == f"another {name}":
                value = getattr(origin, name)
                other = msgspec.structs.replace(origin, **{name: value + 1 if isinstance(value, int) else value + "x"})
                changed = {"origin": other}
        wire.send(msgspec.structs.replace(Greeting.of(origin), **changed), until)
        wire.receive(until)
        ask = wire.receive(until)
        assert isinstance(ask, Prefill)
        if fault == "dies when asked":
            return
        if fault == "hangs when asked":
            self.gate.wait(30)
            return
        count = {"has none": 0, "too many": 3, "less than none": -1, "without end": 1 << 62}.get(fault, 2)
        if fault == "a frame without end":
            wire.send_bytes(b"\xff\xff\xff\xff", until)
        wire.send(Greeting.of(origin) if fault == "greets again" else Blocks(count), until)
        tokens, size = array("i", ask.tokens), origin.tokens
        blocks = self.real.cache.match(ask.block_salt, tokens).blocks
        names = Names(b"", origin)
        chain = names.chain(ask.block_salt, tokens, size)
        for at in range(count):
            data = bytearray(origin.size)
            self.real.moves._bytes.read(blocks[at], data)
            bad = at == 1  # the second one
            own = tokens[at * size : (at + 1) * size]
            if bad and fault == "other tokens":
                own[5] += 1
            salt = names.salt(b"other" if bad and fault == "another salt" else ask.block_salt)
            before = chain[at - 1] if at else b""
            if bad and fault == "another place":
                before = chain[1]
            header = BlockHeader.of(origin, salt, before, own)
            checksum = xxhash.xxh3_64_digest(data)
            if bad and fault == "a block twice":
                header = BlockHeader.of(origin, salt, b"", tokens[:size])
            if bad and fault == "another size in the header":
                header = msgspec.structs.replace(header, size=origin.size - 64)
            if bad and fault == "a flipped byte":
                data[len(data) // 2] ^= 1
            if bad and fault == "a header without end":
                wire.send_bytes((1 << 31).to_bytes(4, "little"), until)
            if bad and fault == "dies between blocks":
                return
            if bad and fault == "hangs between blocks":
                self.gate.wait(30)
                return
            wire.send_bytes(frame(header.encode()), until)
            truncated = bad and fault == "a truncated block"
            wire.send_bytes(data[:100] if truncated else data + checksum, until)
        if fault == "a byte too many":
            wire.send_bytes(b"x", until)

    def close(self) -> None:
        self.gate.set()
        self.listener.close()


BEFORE = (
    "dies at once", "greets with rubbish", "another version", "another model", "another settings", "another layout",
    "another size", "dies when asked", "hangs when asked", "has none", "too many", "less than none", "without end",
    "a frame without end", "greets again",
)  # fmt: skip
WITHIN = (
    "other tokens", "another salt", "another place", "a block twice", "another size in the header", "a flipped byte",
    "a header without end", "dies between blocks", "hangs between blocks", "a truncated block",
)  # fmt: skip
BEHIND = ("none", "a byte too many")


@pytest.fixture(scope="module")
def real(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, dict[Any, Any]]]:
    """An engine that has computed the prompt, and the answer to it."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    made = engine_of(decoder, peer=peer(folder / "prefill", serves=True))
    whole = answers(run(made, [ASK]))
    yield made, whole
    end(made)


@pytest.mark.parametrize("fault", [*BEFORE, *WITHIN, *BEHIND])
def test_every_fault_is_recomputed(
    fault: str, real: tuple[Engine, dict[Any, Any]], decoder: Decoder, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, whole = real
    if "hangs" in fault:
        monkeypatch.setattr(moves, "PULL_SECONDS", 0.3)
        monkeypatch.setattr(puller, "BLOCKS_SECONDS", 0.3)
    fake = Fake(path, engine, fault)
    made = engine_of(decoder, peer=peer(path))
    events = run_to_end(made, ASK)
    assert answers(events) == whole
    assert sum(isinstance(event, Finished | Failed) for event in events) == 1
    expected = 0 if fault in BEFORE else BLOCK if fault in WITHIN else 2 * BLOCK
    assert fetched(events) in (expected, 0 if "hangs" in fault else expected)
    told = counts(made)
    noted = told["refused"] + told["failed"] + told["busy"] > 0
    assert noted == (fault not in BEHIND) or "hangs" in fault  # which nobody waits for after a while
    end(made)
    fake.close()


def run_to_end(made: Engine, ask: Submit) -> list[Event]:
    made.submit(ask)
    events = list[Event]()
    until = time.monotonic() + 30
    while not made.idle:
        assert time.monotonic() < until
        events += made.step()
        made.scheduler.check()
        made.pool.check()
    return events


@pytest.mark.parametrize("fault", ["hangs when asked", "hangs between blocks"])
def test_a_cancelled_request_waits_for_no_peer(
    fault: str, real: tuple[Engine, dict[Any, Any]], decoder: Decoder, path: Path
) -> None:
    engine, whole = real
    fake = Fake(path, engine, fault)
    made = engine_of(decoder, peer=peer(path))
    made.submit(ASK)
    time.sleep(0.05)
    made.cancel("a")
    assert [event.code for event in made.step() if isinstance(event, Failed)] == ["cancelled"]
    began = time.monotonic()
    let_go(made)
    assert time.monotonic() - began < 2
    fake.close()
    assert answers(run(made, [ASK])) == whole
    end(made)


def test_a_peer_that_is_not_there_costs_a_moment(decoder: Decoder, path: Path) -> None:
    whole = answers(run(make_engine(decoder), [ASK]))
    made = engine_of(decoder, peer=peer(path))
    assert answers(run(made, [ASK])) == whole
    assert counts(made)["failed"] == 1
    end(made)


def greeted(path: Path) -> Wire:
    """A decode engine's side of a connection, after its greeting."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(str(path))
    wire = Wire(connected)
    theirs = wire.receive(time.monotonic() + 5)
    assert isinstance(theirs, Greeting)
    wire.send(theirs, time.monotonic() + 5)
    return wire


def question(**changed: Any) -> Prefill:
    tokens = array("i", PROMPT[:128]).tobytes()
    return msgspec.structs.replace(Prefill(tokens, b"", bytes(4), "", 0, 5.0), **changed)


@pytest.mark.parametrize(
    "ask",
    [
        question(tokens=b""), question(tokens=b"\0" * 255), question(first=2), question(first=-1),
        question(seconds=0.0), question(seconds=1e9), question(tokens=b"\xff" * 512), question(adapter="none"),
        question(block_salt=b"other"), Blocks(1),
    ],
)  # fmt: skip
def test_a_wrong_question_harms_nothing(ask: Any, decoder: Decoder, path: Path) -> None:
    whole = answers(run(make_engine(decoder), [ASK]))
    with prefiller(engine_of(decoder, peer=peer(path, serves=True))):
        wire = greeted(path)
        wire.send(ask, time.monotonic() + 5)
        with contextlib.suppress(OSError):
            assert wire.receive(time.monotonic() + 5) == Blocks(0, "busy")
        wire.close()
        made = engine_of(decoder, peer=peer(path))
        assert answers(run(made, [ASK])) == whole
        assert counts(made)["pulled_blocks"] == 2
        end(made)


def test_what_is_asked_at_the_end_is_not_begun(decoder: Decoder, path: Path) -> None:
    made = engine_of(decoder, peer=peer(path, serves=True))
    assert made.moves is not None
    ask = question()
    made.moves.worker.tell(listener.PrefillAsked(ask, array("i", ask.tokens)))
    made.moves.close()
    assert made.idle
    assert not made.requests.own


@pytest.mark.parametrize("when", ["at once", "before the blocks", "within the blocks", "never reads"])
def test_a_decode_engine_that_dies_leaves_nothing_behind(
    when: str, decoder: Decoder, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LEASE_SECONDS", 0.5)
    with prefiller(engine_of(decoder, peer=peer(path, serves=True))) as other:
        for _ in range(3):
            wire = greeted(path)
            wire.send(question(), time.monotonic() + 5)
            if when in ("before the blocks", "within the blocks"):
                assert wire.receive(time.monotonic() + 5) == Blocks(2)
            if when == "within the blocks":
                wire.receive_into(bytearray(700), time.monotonic() + 5)
            if when == "never reads":
                assert wait(lambda: bool(other.made.cache.asked))
                time.sleep(0.6)
            wire.close()
        assert wait(lambda: other.made.pool.active == 0)


def test_a_second_listener_is_refused_and_a_dead_ones_socket_is_taken(decoder: Decoder, path: Path) -> None:
    with prefiller(engine_of(decoder, peer=peer(path, serves=True))), user_error("output_locked"):
        make_engine(decoder, peer=peer(path, serves=True))
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with prefiller(engine_of(decoder, peer=peer(path, serves=True))):
        pass


@pytest.mark.parametrize("serves", [True, False])
def test_a_folder_that_others_may_enter_is_refused(serves: bool, decoder: Decoder, path: Path) -> None:
    path.parent.chmod(0o755)
    with user_error("file_unsafe"):
        make_engine(decoder, peer=peer(path, serves=serves))
