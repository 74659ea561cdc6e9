"""The lab on a server: who gets the page, and of whose requests its data tell."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from soaks.served import Served

from attar.server.api.response_types import state as state_types
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from attar.server.pages.chat_page import POLICY as CHAT
from attar.server.pages.lab_page import POLICY
from tests.server.conftest import Running

KEYS = ("first-" + "a" * 32, "second" + "b" * 32)
BROWSER = {"Accept": "text/html,application/xhtml+xml"}
SECONDS = 60.0


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(start: Callable[..., Running]) -> Running:
    """A server with two keys, whose engine takes its time."""
    return start(ServerOptions(port=0, keys=Keys.of(KEYS)), step=0.05, batch=4)


def test_a_page_without_data_and_data_by_their_type(start: Callable[..., Running]) -> None:
    server = start()
    page = server.get("/lab")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"] == POLICY
    assert b'"model":null' in page.body
    assert server.engine.name.encode() not in page.body
    found = msgspec.json.decode(server.get("/v1/lab").body, type=state_types.Lab)
    assert found.live
    assert found.engine.ready.model == server.engine.name
    assert found.sequences == []


def test_the_policy_is_no_wider_than_the_chats() -> None:
    def parts(policy: str) -> dict[str, str]:
        return {name: rest for name, _, rest in (part.strip().partition(" ") for part in policy.split(";"))}

    lab, chat = parts(POLICY), parts(CHAT)
    assert chat.keys() - lab.keys() == {"img-src"}, "the chat shows pasted images, the lab none"
    assert lab["default-src"] == "'none'", "what is not named is forbidden"
    assert all(lab[name] == chat[name] for name in lab if name != "script-src")
    assert lab["script-src"].count("sha256-") == 1
    assert "unsafe" not in lab["script-src"]


def test_a_key_is_needed(keyed: Running) -> None:
    for path in ("/lab", "/v1/lab"):
        refused = keyed.get(path)
        assert (refused.status, refused.code) == (401, "invalid_api_key")
        assert keyed.get(path, bearer(KEYS[0])).status == 200
        assert keyed.get(path, bearer("x" * 40)).status == 401


def test_a_browser_without_a_key_gets_the_page_that_asks_for_one(keyed: Running) -> None:
    page = keyed.get("/lab", BROWSER)
    assert page.status == 401
    assert page.headers["content-security-policy"] == POLICY
    assert b'id="login"' in page.body
    assert keyed.engine.name.encode() not in page.body
    data = keyed.get("/v1/lab", BROWSER)  # and no page for data
    assert (data.status, data.code) == (401, "invalid_api_key")


def test_a_key_sees_its_own_requests_only(keyed: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", keyed.port, timeout=SECONDS)
    body = json.dumps({"prompt": "a b c", "max_tokens": 400, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **bearer(KEYS[0])})
    reply = connection.getresponse()
    while not reply.fp.readline().startswith(b"data: "):
        pass
    own, other = (keyed.get("/v1/lab", bearer(key)).json for key in KEYS)
    connection.close()
    (seen,) = own["sequences"]
    assert seen["id"] == reply.headers["x-request-id"]
    assert 0 < seen["tokens"] < seen["max_tokens"]
    assert seen["max_tokens"] > 400
    assert other["sequences"] == []
    assert own["steps"] is other["steps"] is None  # rows of a step would tell of the other key's requests
    keyed.wait(lambda: not keyed.engine.open)
    keyed.wait(lambda: keyed.get("/v1/lab", bearer(KEYS[0])).json["sequences"] == [])


def lab(served: Served) -> Any:
    connection = http.client.HTTPConnection(served.address.host, served.address.port, timeout=SECONDS)
    connection.request("GET", "/v1/lab")
    found = connection.getresponse().read()
    connection.close()
    return json.loads(found)


def test_a_real_engine_tells_its_shape_its_rates_and_its_steps(real: Served) -> None:
    connection = http.client.HTTPConnection(real.address.host, real.address.port, timeout=SECONDS)
    body = json.dumps({"prompt": [5, 6, 7, 8], "max_tokens": 8, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert connection.getresponse().read()
    connection.close()
    found = lab(real)
    table = dict(found["engine"]["ready"]["table"])
    weights = found["model"]["bytes"]
    assert sum(weights[part] for part in ("linears", "head", "embedding", "norms")) == table["weights"]
    assert found["machine"]["read"] > 0
    assert found["steps"]
    for rows, sequences, held, seconds in found["steps"]:
        assert 1 <= sequences <= rows <= held
        assert seconds > 0
