"""Proof in a child: hostile grammars are refused in bounded time, and nothing dies but a copy of the child."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attar.protocol.grammar import Grammar
from attar.text import _proof_child, grammar_proof, limited_child
from attar.text.grammar_proof import Prover
from attar.text.grammars import GrammarError, Vocabulary
from tests.errors import user_error
from tests.text.hostile_grammars import HEAVY, HOSTILE
from tests.text.test_grammars import SCHEMA, VOCABULARY

SECONDS = 2.5


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    made = Prover(VOCABULARY)
    made.prove(Grammar("regex", "started"))
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused(prover: Prover, name: str) -> None:
    child = prover._child._child
    assert child is not None
    began = _processor(child.pid)
    with pytest.raises(GrammarError) as caught:
        prover.prove(HOSTILE[name])
    assert _processor(child.pid) - began <= SECONDS
    assert 0 < len(str(caught.value)) < 500
    assert str(caught.value).isprintable()
    prover.prove(Grammar("regex", name.replace("(", "").replace(")", "")[:3] or "a"))
    assert prover._child._child is child, "it was not the copy that died"


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_grammars_within_the_limits_are_taken(prover: Prover, name: str) -> None:
    prover.prove(HEAVY[name])


def _processor(pid: int) -> float:
    """Processor seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def test_a_verdict_is_remembered_for_its_salt_alone(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Grammar.json_schema(SCHEMA), Grammar.json_schema({"not": {}})
    prover.prove(good, b"one")
    with user_error("grammar_invalid"):
        prover.prove(bad, b"one")
    assert prover.knows(good, b"one")
    assert not prover.knows(good, b"two")
    asked: list[Grammar] = []
    monkeypatch.setattr(prover, "_verdict", asked.append)
    prover.prove(good, b"one")
    with pytest.raises(GrammarError) as caught:
        prover.prove(bad, b"one")
    assert caught.value.pointer == ""
    assert asked == []
    prover.prove(good, b"two")
    assert asked == [good]


def test_what_is_remembered_of_a_refusal_is_short(prover: Prover) -> None:
    """A property's name may have a megabyte, and there are 10,000 verdicts."""
    name = "\n" + "x" * 500_000
    with user_error("grammar_invalid", "/properties/?xxx") as caught:
        prover.prove(Grammar.json_schema({"properties": {name: {"uniqueItems": True}}}))
    assert len(str(caught.value)) < 1000
    (verdict,) = list(prover._verdicts.values())[-1:]
    assert verdict is not None
    assert len(str(verdict)) < 2000


def test_verdicts_are_bounded(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_proof, "REMEMBERED", 2)
    monkeypatch.setattr(prover, "_verdict", lambda grammar: None)
    monkeypatch.setattr(prover, "_verdicts", type(prover._verdicts)())
    texts = [Grammar("regex", f"a{number}") for number in range(4)]
    for grammar in texts:
        prover.prove(grammar)
    assert [prover.knows(grammar) for grammar in texts] == [False, False, True, True]


def test_a_child_that_was_killed_is_replaced() -> None:
    prover = Prover(Vocabulary.make([b"a", b"b"], (), ()))
    prover.prove(Grammar("regex", "a"))
    child = prover._child._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    prover.prove(Grammar("regex", "b"))
    with user_error("grammar_invalid"):
        prover.prove(Grammar("regex", "c"))  # no token spells it
    prover.close()


def test_a_starved_child_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    prover = Prover(Vocabulary.make([b"a", b"b"], (), ()))
    prover.prove(Grammar("regex", "a"))
    child = prover._child._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_proof, "STARVED_SECONDS", 0.1)
        patch.setattr(limited_child, "STARVED_SECONDS", 0.1)
        with user_error("worker_failed") as caught:
            prover.prove(Grammar("regex", "b"))
    assert not isinstance(caught.value, GrammarError)
    assert not prover.knows(Grammar("regex", "b"))
    prover.prove(Grammar("regex", "b"))
    prover.close()


def test_the_child_opens_no_file_and_a_copy_has_limits_of_its_own(prover: Prover) -> None:
    """The copy is looked at while it works, on a grammar that takes long."""
    child = prover._child._child
    assert child is not None
    seen: dict[str, list[str]] = {}  # the last values: limits are set one after another
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
                try:
                    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
                except OSError:
                    continue
                rows = {line[:26].strip(): line[26:].split()[:2] for line in lines}
                if rows and rows["Max cpu time"][0] != "unlimited":
                    seen.update(rows)
            time.sleep(0.001)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    with user_error("grammar_invalid"):
        prover.prove(HOSTILE["35,000 rules"], b"again")
    done.set()
    thread.join(10)
    assert seen["Max cpu time"][1] == str(_proof_child.CPU_SECONDS + 1)
    assert int(seen["Max cpu time"][0]) in (_proof_child.CPU_SECONDS, _proof_child.CPU_SECONDS + 1)
    assert seen["Max open files"] == ["3", "3"]
    assert seen["Max file size"] == ["0", "0"]
    assert int(seen["Max address space"][0]) < 1 << 30


def test_a_schema_of_the_size_of_the_limit_is_answered(prover: Prover) -> None:
    with user_error("grammar_invalid"):
        prover.prove(Grammar.json_schema({"enum": [f"value {number}" for number in range(65_536)]}))
