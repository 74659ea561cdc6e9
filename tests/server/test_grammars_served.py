"""Constraints over HTTP: every dialect's fields reach the engine as one grammar, and none is dropped in silence."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from attar.protocol.grammar import Grammar
from attar.server import grammars
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from tests.server.bad_requests import USER
from tests.server.conftest import Running
from tests.text.hostile_grammars import HOSTILE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 1},
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
SPACED = Grammar.json_schema(SCHEMA, "[ ]?")

TAKEN: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        Grammar.json_schema(SCHEMA),
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, Grammar.json_schema({})),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": "[ ]?"}}, SPACED),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ({"structured_outputs": {"json_object": False, "regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": None, "guided_json": None, "grammar": ""}, None),
    ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": "[ ]?"}, SPACED),
    ({"guided_regex": "[0-9]{3}"}, Grammar("regex", "[0-9]{3}")),
    ({"guided_choice": ["yes", "no"]}, Grammar.choice(["yes", "no"])),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
    ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
    ({"json_schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
]


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize(("fields", "grammar"), TAKEN, ids=[str(fields)[:60] for fields, _ in TAKEN])
def test_each_dialect_reaches_the_engine(
    server: Running, path: str, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    server.engine.commands.clear()
    assert server.post(path, LEAST[path] | fields).status == 200
    (command,) = server.engine.commands
    found = command.grammar  # type: ignore[union-attr]
    if grammar is not None and grammar.kind == "json_schema":
        assert found is not None
        assert (json.loads(found.text), found.whitespace) == (json.loads(grammar.text), grammar.whitespace)
    else:
        assert found == grammar


WHERE = "response_format.json_schema.schema"


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one constraint"),
    ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar", "response_format"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "one constraint"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "guided_regex"),
    ({"guided_json": {"items": {"uniqueItems": True}}}, "guided_json", "#/items"),
    ({"json_schema": {"properties": {"x": {"$ref": "http://localhost/"}}}}, "json_schema", "nothing is fetched"),
    (strict({"type": "object", "properties": {"a": {}}, "required": ["a"]}), WHERE, "additionalProperties"),
    (strict({**SCHEMA, "required": []}), WHERE, "'a'"),
    (strict({**SCHEMA, "properties": {"a": {"type": "object"}}}), WHERE, "#/properties/a"),
    (strict({"not": {}}), WHERE, "not"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look"),
    ({"grammar": 'root ::= ("a"*)*'}, "grammar", "gbnf"),
]


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[str(fields)[:60] for fields, *_ in REFUSED])
def test_what_cannot_be_kept_is_refused_by_name(
    server: Running, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    server.engine.commands.clear()
    reply = server.post(path, LEAST[path] | fields)
    assert reply.status == 400
    assert reply.json["error"]["param"] == param
    assert words in reply.json["error"]["message"]
    assert not server.engine.commands


def test_hostile_constraints_harm_nobody(server: Running) -> None:
    """Through the one field that takes each kind, as far as a body may hold it."""
    names = {"regex": "guided_regex", "gbnf": "grammar", "lark": "guided_grammar", "json_schema": "guided_json"}
    canary = LEAST[COMPLETIONS] | {"seed": 5, "max_tokens": 4}
    expected = server.post(COMPLETIONS, canary).json["choices"]
    for name, grammar in HOSTILE.items():
        if not grammar.text:
            continue
        reply = server.post(COMPLETIONS, LEAST[COMPLETIONS] | {names[grammar.kind]: grammar.text})
        assert reply.status == 400, name
        assert len(reply.body) < 1000, name
        assert server.post(COMPLETIONS, canary).json["choices"] == expected, name
    assert server.engine.open == 0


def test_what_fails_along_an_answer_says_so(server: Running) -> None:
    server.engine.fail = ("grammar_limit", 1)
    try:
        reply = server.post(COMPLETIONS, LEAST[COMPLETIONS] | {"guided_regex": "a+", "max_tokens": 8})
    finally:
        server.engine.fail = None
    assert (reply.status, reply.code) == (400, "grammar_limit")


def test_proofs_wait_in_a_queue_of_bounded_length(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One proof is held. Known constraints and others' requests go on."""
    keys = [f"key-number-{number}-" + "k" * 24 for number in range(3)]
    server = start(ServerOptions(port=0, keys=Keys.of(keys)))
    heads = [{"Authorization": f"Bearer {key}"} for key in keys]
    assert server.post(COMPLETIONS, LEAST[COMPLETIONS] | {"guided_regex": "known"}, heads[1]).status == 200
    monkeypatch.setattr(grammars, "MAX_PROOFS", 2)
    going_on, statuses = threading.Event(), list[int]()
    real = grammars.Prover.prove

    def slow(self: Any, grammar: Grammar, salt: bytes = b"") -> None:
        if grammar.text.startswith("held"):
            going_on.wait(30)
        real(self, grammar, salt)

    monkeypatch.setattr(grammars.Prover, "prove", slow)

    def ask(text: str, head: dict[str, str]) -> None:
        statuses.append(server.post(COMPLETIONS, LEAST[COMPLETIONS] | {"guided_regex": text}, head).status)

    threads = [threading.Thread(target=ask, args=each) for each in (("held one", heads[0]), ("held two", heads[2]))]
    try:
        for thread in threads:
            thread.start()
        server.wait(lambda: server.server.grammars._waiting == 2)
        reply = server.post(COMPLETIONS, LEAST[COMPLETIONS] | {"guided_regex": "third"}, heads[1])
        assert (reply.status, reply.code) == (503, "busy")
        assert "retry-after" in reply.headers
        assert server.post(COMPLETIONS, LEAST[COMPLETIONS] | {"guided_regex": "known"}, heads[1]).status == 200
        assert server.post(COMPLETIONS, LEAST[COMPLETIONS], heads[1]).status == 200
    finally:
        going_on.set()
    for thread in threads:
        thread.join(30)
    assert statuses == [200, 200]


def test_a_key_does_not_learn_what_another_has_asked(start: Callable[..., Running]) -> None:
    keys = [f"key-number-{number}-" + "k" * 24 for number in range(2)]
    server = start(ServerOptions(port=0, keys=Keys.of(keys)))
    salts = []
    for key in keys:
        body = LEAST[COMPLETIONS] | {"guided_regex": "secret"}
        assert server.post(COMPLETIONS, body, {"Authorization": f"Bearer {key}"}).status == 200
        salts.append(server.engine.commands[-1].cache_salt)
    prover = server.server.grammars._prover
    assert prover is not None
    assert [prover.knows(Grammar("regex", "secret"), salt) for salt in (*salts, b"")] == [True, True, False]
