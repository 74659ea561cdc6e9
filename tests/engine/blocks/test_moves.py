"""Blocks that an engine saves, and another takes from the disk: the same tokens and log probabilities, nothing held.

The features are those of `test_resume.py`. Doubts about a block are of every kind that `test_disk_cache.py` has; here
they are in the middle of a prompt.
"""

from __future__ import annotations

import os
import random
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attar.engine.blocks.moves import BlockMoves, SavedBlocks
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.kv.schemes import SCHEMES
from attar.model.decoder import Decoder
from attar.protocol.messages import DISK_CACHE, Event, Failed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.scheduling.sequence import Status
from attar.transfer.folder import PrivateFolder
from tests.engine.conftest import answers, make_engine, run
from tests.engine.test_resume import FEATURES, TEXT, answer, llm, make, submit
from tests.engine.test_sliding import LEAST, windowed
from tests.errors import user_error

__all__ = ["llm", "make", "windowed"]  # fixtures
BLOCK = 64
LIMIT = 64 << 20
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
PROMPT = tuple(5 + 31 * at % 89 for at in range(180))  # two blocks, and a part


def saved(path: Path, limit: int = LIMIT, owners: tuple[bytes, ...] = (b"", b"key")) -> SavedBlocks:
    folder = PrivateFolder(path)
    folder.lock()
    return SavedBlocks(folder, limit, owners, "model", "settings")


def end(made: Engine) -> None:
    """End an engine: its blocks are on disk, and it holds none."""
    assert made.moves is not None
    settle(made)
    made.moves.close()
    assert made.pool.active == 0
    made.cache.flush()
    assert made.pool.free == made.pool.total


def settle(made: Engine) -> None:
    """Let everything be saved."""
    assert made.moves is not None
    made.moves.settle()
    while made.moves._saving or made.moves.under_way:
        assert made.moves.worker.wait(30)
        made.moves.settle()


def fetched(events: list[Event]) -> int:
    return sum(event.report.fetched_tokens for event in events if isinstance(event, Finished) and event.report)


def counts(made: Engine) -> dict[str, int]:
    told = made.stats().disk_cache
    assert told is not None
    return dict(zip(DISK_CACHE, told, strict=True))


ALL_COMPUTED = ("sparse prefill", "logprobs", "KV eviction, sink")
"""The tree has no prompt's last 128 tokens; log probabilities of a prompt need all of it computed; and a sequence takes
less than a block from the tree, where it evicts soon."""


def long(llm: LLM) -> tuple[int, ...]:
    """A prompt of two blocks and a part."""
    return tuple(llm.tokenizer.encode(3 * TEXT)[: 2 * BLOCK + 20])


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_has_the_same_answer_from_disk(
    feature: str, make: Callable[..., Engine], llm: LLM, tmp_path: Path
) -> None:
    how, asked = FEATURES[feature]
    ask = submit(llm, {"prompt": long(llm)} | asked)
    whole = answer(run(make(**how), [ask]))
    for turn in range(2):
        made = make(**how, saved=saved(tmp_path / "cache"))
        events = run(made, [ask])
        assert answer(events) == whole
        if turn and feature not in ALL_COMPUTED:
            assert fetched(events) >= BLOCK
            assert all(event.report.fetched_tokens % BLOCK == 0 for event in events if getattr(event, "report", None))
        assert counts(made)["refused"] == counts(made)["failed"] == 0
        end(made)


@pytest.mark.parametrize("kv", SCHEMES)
def test_every_scheme_has_the_same_bits_from_disk(kv: str, decoder: Decoder, tmp_path: Path) -> None:
    if kv.startswith("kivi"):
        pytest.skip("heads of 16 columns hold no group of 32; the embedded model's do, above")
    asks = [Submit("a", PROMPT, GREEDY), Submit("b", (*PROMPT[:128], 1, 2, 3), GREEDY, n=2)]
    whole = answers(run(make_engine(decoder, kv=kv), asks))
    for turn in range(2):
        made = make_engine(decoder, kv=kv, saved=saved(tmp_path / "cache"))
        events = run(made, asks)
        assert answers(events) == whole
        assert fetched(events) == (256 if turn else 0)
        end(made)


def test_another_salt_and_another_scheme_find_nothing(decoder: Decoder, tmp_path: Path) -> None:
    made = make_engine(decoder, saved=saved(tmp_path / "cache"))
    run(made, [Submit("a", PROMPT, GREEDY)])
    end(made)
    made = make_engine(decoder, saved=saved(tmp_path / "cache"))
    assert fetched(run(made, [Submit("a", PROMPT, GREEDY, cache_salt=b"key")])) == 0
    end(made)
    made = make_engine(decoder, kv="int8", saved=saved(tmp_path / "cache"))
    assert counts(made)["blocks"] == 0  # they were deleted
    assert fetched(run(made, [Submit("a", PROMPT, GREEDY)])) == 0
    end(made)


@pytest.fixture
def full(decoder: Decoder, tmp_path: Path) -> tuple[Path, dict[Any, Any]]:
    """A folder with the blocks of PROMPT, and the answer to it."""
    made = make_engine(decoder, saved=saved(tmp_path / "cache"))
    whole = answers(run(made, [Submit("a", PROMPT, GREEDY)]))
    end(made)
    return tmp_path / "cache", whole


def test_a_doubt_in_the_middle_is_computed_from_there(decoder: Decoder, full: tuple[Path, dict[Any, Any]]) -> None:
    path, whole = full
    made = make_engine(decoder, saved=saved(path))
    assert made.moves is not None
    names = made.moves.disk.names.chain(bytes(4), array("i", PROMPT), BLOCK)
    (second,) = path.glob(f"*{names[1].hex()}")
    content = bytearray(second.read_bytes())
    content[len(content) // 2] ^= 1
    second.write_bytes(content)
    events = run(made, [Submit("a", PROMPT, GREEDY)])
    assert answers(events) == whole
    assert fetched(events) == BLOCK
    assert counts(made)["refused"] == 1
    end(made)
    made = make_engine(decoder, saved=saved(path))  # it was saved again
    assert fetched(run(made, [Submit("a", PROMPT, GREEDY)])) == 2 * BLOCK
    end(made)


class Slow:
    """A disk that waits for `gate` before each block."""

    def __init__(self, made: Engine) -> None:
        assert made.moves is not None
        self.gate, self.asked = threading.Event(), threading.Event()
        load = made.moves.disk.load

        def wait(*args: Any) -> Any:
            self.asked.set()
            assert self.gate.wait(30)
            return load(*args)

        made.moves.disk.load = wait  # type: ignore[method-assign]


def test_a_disk_that_hangs_is_waited_for_so_long(decoder: Decoder, full: tuple[Path, dict[Any, Any]]) -> None:
    path, whole = full
    made = make_engine(decoder, saved=saved(path))
    assert made.moves is not None
    made.moves._seconds = 0.05
    slow = Slow(made)
    made.submit(Submit("a", PROMPT, GREEDY))
    assert slow.asked.wait(30)
    events = list[Event]()
    while not made.idle:
        events += made.step()
        made.scheduler.check()
    assert answers(events) == whole
    (report,) = (event.report for event in events if isinstance(event, Finished))
    assert report is not None
    assert report.fetched_tokens == 0
    assert report.fetching >= 0.05
    (fetch,) = made.scheduler.fetching.fetches
    assert not fetch.wanted
    assert all(made.pool.holders(block) == 1 for block in fetch.filled), "given up under the thread"
    slow.gate.set()
    settle(made)
    assert not made.scheduler.fetching.fetches
    assert counts(made)["late"] == 1
    end(made)


@pytest.mark.parametrize("code", ["cancelled", "deadline", "shutdown"])
def test_a_request_may_end_while_it_waits(code: str, decoder: Decoder, full: tuple[Path, dict[Any, Any]]) -> None:
    path, whole = full
    made = make_engine(decoder, saved=saved(path))
    slow = Slow(made)
    made.submit(Submit("a", PROMPT, GREEDY, deadline=0.01 if code == "deadline" else None))
    (sequence,) = made.scheduler.sequences.values()
    assert sequence.status is Status.FETCHING
    assert not made.runnable
    assert slow.asked.wait(30)
    if code == "cancelled":
        made.cancel("a")
    elif code == "deadline":
        time.sleep(0.02)
    events = made.close() if code == "shutdown" else made.step()
    assert [event.code for event in events if isinstance(event, Failed)] == [code]
    made.scheduler.check()
    slow.gate.set()
    settle(made)
    assert made.pool.active == 0
    made.step()  # which forgets the request
    assert answers(run(made, [Submit("a", PROMPT, GREEDY)])) == whole
    end(made)


def test_requests_of_one_prompt_wait_for_one_fetch(decoder: Decoder, full: tuple[Path, dict[Any, Any]]) -> None:
    path, whole = full
    made = make_engine(decoder, saved=saved(path))
    slow = Slow(made)
    for id in "abc":
        made.submit(Submit(id, PROMPT, GREEDY))
    assert len(made.scheduler.fetching.fetches) == 1
    slow.gate.set()
    events = run(made)
    assert counts(made)["loaded_blocks"] == 2
    assert all(answers(events)[id, 0] == whole["a", 0] for id in "abc")
    end(made)


@pytest.mark.parametrize("seed", range(4))
def test_a_tight_cache_and_a_slow_disk_change_nothing(seed: int, decoder: Decoder, tmp_path: Path) -> None:
    """Random requests with common beginnings, few blocks in memory and on disk, cancellations, and restarts."""
    draw = random.Random(seed)
    bases = [tuple(draw.randrange(3, 90) for _ in range(130)) for _ in range(3)]
    asks = [
        Submit(
            str(at), (*draw.choice(bases)[: draw.choice([64, 100, 130])], *range(3, 3 + draw.randrange(1, 40))), GREEDY
        )
        for at in range(24)
    ]
    expected = answers([event for ask in asks for event in run(make_engine(decoder), [ask])])
    left = list(asks)
    for blocks in (6, 5, 8):
        made = make_engine(decoder, blocks, saved=saved(tmp_path / "cache", limit=3 * 160_000))
        assert made.moves is not None
        load = made.moves.disk.load
        made.moves.disk.load = lambda *a, load=load: (time.sleep(draw.random() / 500), load(*a))[1]  # type: ignore[method-assign,misc]
        events, dropped = list[Event](), set[str]()
        mine, left = left[:8], left[8:]
        while mine or not made.idle:
            if mine and draw.random() < 0.3:
                made.submit(mine.pop())
            if draw.random() < 0.01 and made.requests.requests:
                dropped.add(id := draw.choice(list(made.requests.requests)))
                made.cancel(id)
            events += made.step()
            made.scheduler.check()
            made.pool.check()
        for (id, number), told in answers(events).items():
            assert id in dropped or told == expected[id, number]
        end(made)


def test_what_fails_is_never_a_failed_request(
    decoder: Decoder, full: tuple[Path, dict[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = full
    made = make_engine(decoder, saved=saved(path))
    assert made.moves is not None

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("on purpose")

    for place, name in (
        (made.moves.disk, "load"),
        (made.moves._bytes, "write"),
        (made.moves.disk, "reach"),
        (os, "fsync"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            other = (*PROMPT[:128], len(name))
            assert answers(run(made, [Submit("a", PROMPT, GREEDY)])) == whole
            run(made, [Submit("b", other, GREEDY)])
            settle(made)
        made.cache.flush()
    end(made)


def test_windows_with_blocks_of_their_own_are_refused(windowed: Decoder, tmp_path: Path) -> None:
    with user_error("kv_unsupported"):
        make_engine(windowed, sliding_blocks=LEAST.held + LEAST.of_steps + 9, saved=saved(tmp_path / "cache"))


def test_the_end_does_not_wait_for_a_disk_that_hangs(decoder: Decoder, full: tuple[Path, dict[Any, Any]]) -> None:
    path, _ = full
    made = make_engine(decoder, saved=saved(path))
    slow = Slow(made)
    made.submit(Submit("a", PROMPT, GREEDY))
    made.close()
    assert isinstance(made.moves, BlockMoves)
    began = time.monotonic()
    made.moves.close(0.1)
    assert time.monotonic() - began < 5
    with user_error("output_locked"):  # the thread may still write there
        saved(path)
    slow.gate.set()
    made.moves.worker._thread.join(30)
    assert made.moves.disk is not None
    made.moves.disk.close()


if dispatch.store() is None:
    pytest.skip("the native kernels are off or do not load", allow_module_level=True)
