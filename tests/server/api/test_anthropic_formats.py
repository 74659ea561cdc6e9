"""The format of Anthropic's answers: `output_config.format`, and its older name `output_format`."""

from __future__ import annotations

from typing import Any

import pytest

from attar.protocol.grammar import Grammar
from attar.protocol.messages import Submit
from tests.server.bad_requests import MESSAGES, USER
from tests.server.conftest import Running

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
BODY = {"messages": USER, "max_tokens": 2}


def grammar(server: Running, more: dict[str, Any]) -> Grammar | None:
    reply = server.post(MESSAGES, BODY | more)
    assert reply.status == 200, reply.body
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    return command.grammar


@pytest.mark.parametrize("more", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}])
def test_an_answer_keeps_to_a_schema(server: Running, more: dict[str, Any]) -> None:
    assert grammar(server, more) == Grammar.json_schema(SCHEMA)
    counted = server.post("/v1/messages/count_tokens", {"messages": USER, **more})
    assert counted.status == 200


def test_without_a_format_nothing_is_constrained(server: Running) -> None:
    for more in (
        {},
        {"output_config": {}},
        {"output_config": {"effort": "low", "format": None}},
        {"output_format": None},
    ):
        assert grammar(server, more) is None


@pytest.mark.parametrize(
    "more, field",
    [
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format.schema"),
        ({"output_config": {"format": {**FORMAT, "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
    ],
)
def test_what_is_refused_is_named(server: Running, more: dict[str, Any], field: str) -> None:
    reply = server.post(MESSAGES, BODY | more)
    assert reply.status == 400
    assert field in reply.json["error"]["message"]
