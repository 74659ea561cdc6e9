"""The page in a real browser, at the width of a desk and of a phone, by keyboard."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running
from tests.server.fake_engine import BLOCKS, CACHED

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def seen(start: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the browser saw."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    found = PYTHON.exists() and subprocess.run([PYTHON, "-c", "import playwright"], capture_output=True)
    if not found or found.returncode:
        pytest.skip(f"no playwright in {PYTHON.parents[1].name}")
    server = start(step=0.05, batch=2)  # an answer of 400 tokens lasts: there is time to look at it, and to stop it
    program = [PYTHON, str(HERE / "browser_program.py"), f"http://127.0.0.1:{server.port}", CHROMIUM]
    done = subprocess.run([*program, str(tmp_path_factory.mktemp("page"))], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


SIZE = pytest.mark.parametrize("size", ["wide", "phone"])
KEYS = ["ArrowUp", "PageUp", "Home"]
KNOBS = [
    "system", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "schema", "tools",
]  # fmt: skip


@SIZE
def test_everything_is_reached_by_tab_and_shows_that_it_has_the_focus(seen: dict[str, Any], size: str) -> None:
    page = seen[size]
    assert page["first"] == "text"
    assert page["folded"] == ["send", "max_tokens", "fold"]  # Stop is dead while nothing runs
    assert page["way"] == KNOBS
    assert page["to stop"][-1] == "stop"


@SIZE
def test_knobs_set_by_key_are_sent(seen: dict[str, Any], size: str) -> None:
    first, *others = seen[size]["asked"]
    knobs = {"temperature": 0.5, "top_p": 0, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "seed": -7}
    assert first["messages"] == [{"role": "system", "content": "hm"}, {"role": "user", "content": "hello"}]
    for body, most in zip([first, *others], [6, 400, 400, 2, 400, 2], strict=True):
        assert body | knobs | {"max_tokens": most} == body


@SIZE
def test_a_conversation_by_key(seen: dict[str, Any], size: str) -> None:
    page = seen[size]
    assert page["errors"] == []
    assert page["turns"] == ["hello", "more", "and", "end"]
    first, stopped, escaped, last = page["notes"]
    assert first.startswith("6 tokens, ")
    assert (stopped, escaped) == ("stopped", "stopped")
    assert last.startswith("2 tokens")
    assert page["in view"]
    assert not page["too_wide"]


@SIZE
def test_the_focus_is_never_lost_and_never_taken(seen: dict[str, Any], size: str) -> None:
    page = seen[size]
    assert page["while asked"] == "text"  # Send, which had it, is dead meanwhile
    assert page["after"] == page["stopped"] == "text"
    assert page["at a knob"] == "temperature"


@SIZE
def test_another_conversation_begins_empty(seen: dict[str, Any], size: str) -> None:
    page = seen[size]
    assert page["left"] == [0, "text"]
    assert [message["content"] for message in page["asked"][-1]["messages"]] == ["hm", "fresh"]


def test_a_reload_keeps_the_conversation_and_the_knobs(seen: dict[str, Any]) -> None:
    found = seen["reload"]
    assert found["errors"] == []
    assert found["turns"][0] == found["turns"][1]
    assert found["turns"][0][-1].startswith("4 tokens, ")
    assert found["knobs"] == ["0.5", "4", "hm"]
    assert [message["content"] for message in found["asked"]["messages"]] == ["hm", *found["said"], "more"]
    assert found["left"] == [[], 1]


def test_a_model_without_a_chat_template_completes_a_text(seen: dict[str, Any]) -> None:
    found = seen["completes"]
    first, second = found["turns"]
    assert first
    assert second
    assert found["prompts"] == ["Once", f"Once{first}\nand"]
    assert (found["errors"], found["chats"]) == (0, 1)  # once is enough to know it


def test_one_of_several_models_is_chosen(seen: dict[str, Any]) -> None:
    assert seen["chooses"] == {"asked": ["one", "two"], "kept": "two"}


@SIZE
def test_the_figures_are_the_engines(seen: dict[str, Any], size: str) -> None:
    page = seen[size]
    free = BLOCKS - CACHED - 2
    assert page["figures"] == {
        "running": "2", "reused": "25 %", "preemptions": "3", "free": str(free), "active": "2", "cached": str(CACHED),
    }  # fmt: skip
    assert page["cells"] == "aa" + "c" * CACHED + "f" * free
    shown, passed = page["first token"]
    number, unit = shown.split(" ")
    assert unit == "ms"
    assert 300 <= int(number) <= 1000 * passed + 1


def test_the_view_follows_an_answer_until_its_reader_goes_back(seen: dict[str, Any]) -> None:
    found = seen["read back"]
    assert found["errors"] == []
    near = [found[name] for name in ("at the end", "asked", "noted", *(f"back from {key}" for key in KEYS))]
    assert all(0 <= below < 4 for below in near), found
    assert [found[key] for key in KEYS] == [[True, 0]] * 3  # away from the end, and not moved from there
    assert found["stopped"] == [0, 0]


def test_the_pool_is_drawn_as_it_is_and_the_rate_is_of_what_was_made(seen: dict[str, Any]) -> None:
    assert seen["look"] == {"cells": [True] * 4, "rates": ["\u2013", "120.0", "0.0", "\u2013"]}


def test_a_question_that_had_no_answer_can_be_asked_again(seen: dict[str, Any]) -> None:
    found = seen["refused"]
    assert found["500"] == ["try this", ["before"], "it broke"]
    typed, turns, says = found["401"]
    assert (typed, turns) == ("try this", ["before"])
    assert "API key" in says
    assert "on this page" in says
    assert [message["content"] for message in found["asked"] if message["role"] == "user"] == ["before", "try this"]
    assert found["typed"] == ""
