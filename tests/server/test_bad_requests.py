"""Bad requests get exactly the answer they should, and leave no trace: a canary's answer stays what it was."""

from __future__ import annotations

import http.client
import json
import re

from attar.server.errors import CATALOGUE
from tests.server import bad_requests
from tests.server.conftest import Running

CANARY = {"prompt": "the canary", "max_tokens": 1, "seed": 5, "logprobs": 1, "temperature": 1}
LEAKS = re.compile(rb"0x[0-9a-fA-F]{6,}|Traceback|/src/|site-packages|\.py\b|object at|msgspec|Error\(")
OPENAI = {400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error"}


def test_there_are_enough_of_them() -> None:
    assert len(bad_requests.cases()) >= 400


def test_bad_requests_have_their_status_and_code_and_harm_nobody(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)

    def ask(path: str, body: bytes) -> tuple[int, bytes]:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()

    def canary() -> object:
        status, body = ask(bad_requests.COMPLETIONS, json.dumps(CANARY).encode())
        assert status == 200
        return json.loads(body)["choices"]

    expected = canary()
    wrong = []
    for case in bad_requests.cases():
        status, body = ask(case.path, case.body)
        assert not LEAKS.search(body), (case.name, body)
        assert status >= 400, case.name
        error = json.loads(body)["error"]
        if case.path == bad_requests.MESSAGES:
            if (status, error["type"]) != (case.status, CATALOGUE[case.code].anthropic):
                wrong.append((case.name, case.status, case.code, status, error))
        elif (status, error["code"], error["type"]) != (case.status, case.code, OPENAI[case.status]):
            wrong.append((case.name, case.status, case.code, status, error))
        assert canary() == expected, case.name
    connection.close()
    assert not wrong
    assert server.engine.open == 0


def test_the_name_of_the_field_is_in_the_answer(server: Running) -> None:
    for field, value in (("tools", 1), ("n", 17), ("nonsense", 1), ("temperature", "1")):
        reply = server.post("/v1/chat/completions", {"messages": bad_requests.USER, field: value})
        assert reply.json["error"]["param"] == field
        assert field in reply.json["error"]["message"]


def test_a_prompt_over_the_context_is_told_both_numbers(server: Running) -> None:
    reply = server.post("/v1/completions", {"prompt": [1] * 600})
    assert "600" in reply.json["error"]["message"]
    assert "512" in reply.json["error"]["message"]


def test_strange_but_good_text_is_taken(server: Running) -> None:
    for text in ("👨‍👩‍👧‍👦", "\u0301" * 40, "\u202eabc", "a\u0000b", "\uffff", "\ufeff", "<|endoftext|>x", "𐀀"):
        reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1})
        assert reply.status == 200, text
    for field, value in (
        ("temperature", 1e-9), ("temperature", 0), ("top_p", 1), ("seed", 2**63 - 1), ("stop", "e" * 256),
        ("stop", "é" * 128), ("seed", -1), ("seed", -(2**63)), ("top_p", 0), ("priority", -100), ("priority", 100),
        ("stop_token_ids", [4095]), ("logit_bias", {"4095": -100}), ("n", 16), ("max_tokens", 2**31 - 1),
        ("temperature", -0.0), ("temperature", 1e-400), ("presence_penalty", -0.0), ("metadata", {"a": "b"}),
    ):  # fmt: skip
        body = {"messages": bad_requests.USER, "max_tokens": 1} | {field: value}
        assert server.post("/v1/chat/completions", body).status == 200, field
