"""Hostile chat templates behind every endpoint that renders one: an error each time, and nobody else notices.

What the renderer itself must refuse is in `tests/text/test_template.py`, with the time that it takes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attar.server.prompts import Prompts
from attar.text import template as renderer
from attar.text.literal import LiteralChat
from attar.text.tokenizer import Tokenizer
from tests.server.bad_requests import USER
from tests.server.conftest import Reply, Running
from tests.text.hostile_templates import BIG, RUNS, SLOW, WALKS

RENDERING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/tokenize": {"messages": USER},
}
CANARY = {"prompt": "the canary", "max_tokens": 3, "seed": 5}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
GROWTH = 8 << 20  # bytes of resident memory


@pytest.fixture(scope="module")
def server(start: Callable[..., Running]) -> Running:
    """Of this module alone: its template changes."""
    return start()


@pytest.fixture
def serve(server: Running, demo: Path, tmp_path: Path) -> Callable[[str], None]:
    """Gives the server another model folder: the embedded model's tokenizer, with this chat template."""
    shutil.copy(demo / "tokenizer.json", tmp_path)
    config = json.loads((demo / "tokenizer_config.json").read_text())

    def load(template: str) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        prompts: Prompts = server.server.prompts
        tokenizer = Tokenizer.load(tmp_path)

        def put() -> None:
            prompts.tokenizer, prompts._literal = tokenizer, LiteralChat(tokenizer)

        server.call(put)

    return load


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def refused(reply: Reply, path: str) -> bool:
    """Whether it is the one answer to a template that fails."""
    error = reply.json["error"]
    shown = error["type"] == "invalid_request_error" if path == "/v1/messages" else error["code"] == "template_error"
    return reply.status == 400 and shown and len(reply.body) < 500


@pytest.mark.parametrize("kind", ["walks", "big", "slow"])
def test_every_endpoint_that_renders_refuses_hostile_templates(
    server: Running, serve: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    canary_file = tmp_path / "ran"
    attacks = {
        "walks": [*WALKS, *(each.replace("CANARY", str(canary_file)) for each in RUNS)],
        "big": BIG,
        "slow": SLOW,
    }
    if kind == "slow":
        monkeypatch.setattr(renderer, "RENDER_SECONDS", 0.3)
    serve(PLAIN)
    for path, body in RENDERING.items():
        assert server.post(path, body).status == 200
    expected = server.post("/v1/completions", CANARY).json["choices"]
    wrong = []
    growth = {}
    for attack in attacks[kind]:
        serve(attack)
        before = resident()
        for path, body in RENDERING.items():
            reply = server.post(path, body)
            if not refused(reply, path):
                wrong.append((path, attack[:60], reply))
        growth[attack[:60]] = resident() - before
        assert server.post("/v1/completions", CANARY).json["choices"] == expected
    assert not wrong
    assert not canary_file.exists()
    assert max(growth.values()) <= GROWTH, growth
    assert server.engine.open == 0
    serve(PLAIN)
    for path, body in RENDERING.items():
        assert server.post(path, body).status == 200


ROLES = "Conversation roles must alternate user/assistant/user/assistant/..."


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        (ROLES, True),
        ("Only text, no </s> and/or <br/>: see https://huggingface.co/docs/x", True),
        ("System role not supported", True),
        ("<object at 0x7f4a1ea8e850>", False),
        ("cannot open /usr/lib/python3/jinja2.py", False),
        ("cannot open '/usr/lib/x'", False),
        ("~/models/x is missing", False),
    ],
)
def test_a_templates_own_words_are_passed_on(
    server: Running, serve: Callable[[str], None], sentence: str, shown: bool
) -> None:
    serve("{{ raise_exception(" + json.dumps(sentence) + ") }}")
    path = "/v1/chat/completions"
    reply = server.post(path, RENDERING[path])
    assert refused(reply, path)
    assert (sentence in reply.json["error"]["message"]) == shown


def test_there_are_enough_of_them() -> None:
    assert len({*WALKS, *RUNS, *BIG, *SLOW}) >= 80


def test_a_refusal_comes_within_a_second_and_a_half() -> None:
    """By construction: what renders is killed at its deadline. No clock is read here, for it would tell of the load."""
    assert renderer.RENDER_SECONDS <= 1.5 - 0.3


def test_a_render_that_takes_its_time_holds_up_no_other_kind_of_request(
    server: Running, serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that renders is stopped, so no clock is needed: all others must be answered before it goes on."""
    monkeypatch.setattr(renderer, "RENDER_SECONDS", 120.0)
    serve(PLAIN)
    assert server.post("/tokenize", RENDERING["/tokenize"]).status == 200  # now there is such a process
    child = renderer._renderer._child
    assert child is not None
    replies: list[int] = []

    def ask(path: str, body: dict[str, Any]) -> None:
        replies.append(server.post(path, body).status)

    threads = [threading.Thread(target=ask, args=each) for each in RENDERING.items()]
    os.kill(child.pid, signal.SIGSTOP)
    try:
        for thread in threads:
            thread.start()
        server.wait(lambda: server.server.middleware.open == len(threads))
        for path in ("/livez", "/readyz", "/metrics", "/v1/models", "/v1/engine", "/"):
            assert server.get(path).status == 200
        long = "word " * 4000  # read and tokenized by a thread, too
        others: dict[str, dict[str, Any]] = {
            "/v1/completions": CANARY,
            "/v1/embeddings": {"input": "text"},
            "/tokenize": {"prompt": long},
            "/detokenize": {"tokens": [1, 2]},
        }
        for path, body in others.items():
            assert server.post(path, body).status == 200
        assert not replies
    finally:
        os.kill(child.pid, signal.SIGCONT)
    for thread in threads:
        thread.join(20)
    assert replies == [200] * len(threads)
