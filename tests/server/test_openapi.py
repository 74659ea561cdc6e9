"""The OpenAPI document, held to by schemathesis: everything that fits it is taken, everything that does not is refused.

All of its phases, good data and bad, NUL characters, every check that it has, no operation and no kind of text left
out. It lives in the environment of the clients, and runs as a program. The fake engine's context is longer than any
body, since a prompt's length in tokens is what no schema can bound, nor how many log probabilities come of it, nor what
of a constraint can be kept, nor the integers in fields that are ignored, nor which results belong to which calls,
and its answers are short. Its queue is short, too: a request of many prompts has to fit in all the same. How many good
bodies its coverage phase sends is held, too: that phase goes through every field's values, but with a schema that it
cannot go through it sends one body and says nothing.

TEST_OPENAPI_EXAMPLES sets the examples of each operation: 10 in the tests, thousands for a long run. Where it is set, a
server without keys is asked too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from attar import strict_json
from attar.protocol.grammar import WHITESPACE, Grammar
from attar.server.api import constraints, sampling_params, schemas
from attar.server.api.dialects import tokenizing
from attar.server.api.dialects.llamacpp import completion, params, template
from attar.server.api.dialects.llamacpp import fields as native
from attar.server.api.tools import fields
from attar.server.api.tools.ollama import OpenCalls
from attar.server.http.limits import MAX_BODY
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from attar.text.grammar_proof import Prover
from attar.text.schemas import regular
from attar.text.tools import calling, generic, openai
from attar.text.tools.constraints import ToolConstraint
from tests.server.conftest import Running

SCHEMATHESIS = Path(__file__).parents[2] / ".venv-clients" / "bin" / "schemathesis"
KEY = "the-key-of-this-test-" + "k" * 20
EXAMPLES = int(os.environ.get("TEST_OPENAPI_EXAMPLES", "10"))
KEYED = [True, False] if "TEST_OPENAPI_EXAMPLES" in os.environ else [True]  # `make soak-api` asks an open server too
SEED = int(os.environ.get("TEST_OPENAPI_SEED", "1"))
SECONDS = 300 + 6 * EXAMPLES  # far more than it takes, also where other work has the cores
GOOD_BODIES = {
    "/v1/chat/completions": 250,
    "/v1/completions": 150,
    "/v1/messages": 80,
    "/v1/messages/count_tokens": 30,
    "/v1/responses": 80,
    "/v1/embeddings": 25,
    "/tokenize": 60,
    "/detokenize": 5,  # it has one field
    "/completion": 60,
    "/apply-template": 40,
    "/embedding": 10,
    "/api/show": 5,
    "/api/chat": 60,
    "/api/generate": 60,
    "/api/embed": 25,
    "/api/embeddings": 5,
}  # of the coverage phase, at least


@pytest.mark.slow
@pytest.mark.parametrize("keyed", KEYED, ids=lambda keyed: "keyed" if keyed else "open")
def test_the_server_does_what_its_document_says(
    start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    if not SCHEMATHESIS.exists():
        pytest.skip(f"no schemathesis in {SCHEMATHESIS.parents[1].name}")
    monkeypatch.setattr(sampling_params, "MAX_LOGPROBS", 2**60)
    monkeypatch.setattr(params, "MAX_BIASES", 2**60)  # of the tokens of texts
    monkeypatch.setattr(constraints, "_check_one", lambda found: None)
    spaced = constraints.check_whitespace

    def check_whitespace(prefix: str, given: Mapping[str, Any], whitespace: str | None) -> None:
        """Let pass what has the form of a pattern, in fields that have no rule."""
        if prefix != "guided_" or not re.fullmatch(WHITESPACE, whitespace or ""):
            spaced(prefix, given, whitespace)

    monkeypatch.setattr(constraints, "check_whitespace", check_whitespace)
    for module in (schemas, native):
        monkeypatch.setattr(module, "check_limits", lambda predicted, others: None)
    for module in (schemas, tokenizing, template):
        monkeypatch.setattr(module, "check_turn", lambda opened, continued: None)
    for module in (schemas, completion):
        monkeypatch.setattr(module, "check_end", lambda body: body.constraint())
    monkeypatch.setattr(Grammar, "check", lambda self, params: None)
    monkeypatch.setattr(constraints, "_check_strict", lambda schema, where: None)
    monkeypatch.setattr(regular, "expression", lambda text: ".*")
    monkeypatch.setattr(Prover, "prove", lambda self, grammar, salt=b"": None)
    monkeypatch.setattr(openai, "check", lambda tools, choice: None)
    monkeypatch.setattr(fields, "check_alone", lambda asked, ends: None)
    monkeypatch.setattr(schemas, "check_alone", lambda asked, ends: None)
    monkeypatch.setattr(generic, "for_template", lambda messages, *form: [dict(message) for message in messages])
    monkeypatch.setattr(calling, "calls_or_json", lambda *asked, **more: ToolConstraint(Grammar.json_object()))
    monkeypatch.setattr(OpenCalls, "answered", lambda self, identity, name: identity or "call_1")
    monkeypatch.setattr(calling, "constraint", lambda *asked: ToolConstraint(Grammar.json_object()))
    monkeypatch.setattr(strict_json, "MIN_INT", -(2**1023))  # in fields with any value; others have bounds of their own
    monkeypatch.setattr(strict_json, "MAX_INT", 2**1023)
    server = start(
        ServerOptions(port=0, keys=Keys.of([KEY] if keyed else []), response_store=1 << 20),
        context=2 * MAX_BODY,
        longest=3,
        step=0.0,
        queue=32,
    )
    program = [
        str(SCHEMATHESIS), "run", f"http://127.0.0.1:{server.port}/openapi.json", "--checks", "all",
        "--phases", "examples,coverage,fuzzing,stateful", "--mode", "all", "--generation-allow-x00", "true",
        "--max-examples", str(EXAMPLES), "--seed", str(SEED), "--generation-database", "none", "--no-color",
        "--report", "json", "--report-json-path", "report.json",
        *(["--header", f"Authorization: Bearer {KEY}"] if keyed else []),
    ]  # fmt: skip
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert not done.returncode, done.stdout[-20_000:] + done.stderr[-2000:]
    assert "55 selected / 55 total" in done.stdout
    rates = json.loads((tmp_path / "report.json").read_text())["valid_rates"]
    posts = {name.removeprefix("POST "): rate for name, rate in rates.items() if name.startswith("POST ")}
    taken = {path: rate["coverage"]["accepted"] for path, rate in posts.items()}
    assert taken.keys() == GOOD_BODIES.keys()
    assert not {path: number for path, number in taken.items() if number < GOOD_BODIES[path]}
    assert server.engine.open == 0
