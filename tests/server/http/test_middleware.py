"""Who is let in: every route with every kind of key, foreign hosts and origins, a full server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.routing import Route

from attar.server.admission.rate_limits import KeyLimits
from attar.server.api import anthropic, openai
from attar.server.http import middleware
from attar.server.http.middleware import OPEN_TO_ALL
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from tests.errors import user_error
from tests.server.conftest import Reply, Running

KEY, OTHER = "first-key-of-the-test-" + "a" * 20, "other-key-of-the-test-" + "b" * 20
ORIGIN = "https://chat.example"
GOOD: list[dict[str, str]] = [{"Authorization": f"Bearer {KEY}"}, {"x-api-key": OTHER}]
BAD: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer "},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": f"Basic {KEY}"},
    {"x-api-key": KEY.upper()},
    {"Cookie": f"key={KEY}"},
]


@pytest.fixture(scope="module")
def keyed(start: Callable[..., Running]) -> Running:
    """A server with two keys and one origin."""
    return start(ServerOptions(port=0, keys=Keys.of([KEY, OTHER]), origins=frozenset({ORIGIN})))


def routes(server: Running) -> list[tuple[str, str]]:
    found = []
    for route in server.server.app.routes:
        assert isinstance(route, Route)  # nothing is mounted that could have doors of its own
        found += [(method, route.path.replace("{name:path}", "x").replace("{name}", "x")) for method in route.methods]
    return found


def test_every_route_but_livez_and_the_page_needs_a_key(keyed: Running) -> None:
    asked = routes(keyed)
    assert len(asked) >= 13
    for method, path in [*asked, ("GET", "/nope"), ("GET", "/"), ("PUT", "/v1/models")]:
        for headers in BAD:
            reply = keyed.request(method, path, b"{}" if method == "POST" else None, headers)
            assert reply.status == (200 if path in OPEN_TO_ALL else 401), (method, path, headers)
            if path not in OPEN_TO_ALL:
                assert reply.headers["www-authenticate"] == "Bearer"
        for headers in GOOD:
            reply = keyed.request(method, path, b"{}" if method == "POST" else None, headers)
            assert reply.status in (200, 400, 404, 405, 501), (method, path, reply)


def test_refusals_have_the_shape_of_their_api(keyed: Running) -> None:
    assert keyed.post("/v1/messages", {}).json["error"]["type"] == "authentication_error"
    assert keyed.post("/v1/completions", {}).code == "invalid_api_key"


def test_keys_do_not_share_caches_or_stories(keyed: Running) -> None:
    body = {"prompt": "a shared prompt", "max_tokens": 2}
    first = keyed.post("/v1/completions", body, GOOD[0]).json
    assert keyed.post("/v1/completions", body, GOOD[1]).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert keyed.post("/v1/completions", body, GOOD[0]).json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    why = f"/v1/requests/{first['id']}/why"
    assert keyed.get(why, GOOD[0]).json["generated_tokens"] == 2
    assert keyed.get(why, GOOD[1]).status == 404


def test_a_wrong_method_is_told_the_right_one(server: Running) -> None:
    assert server.request("DELETE", "/v1/completions").headers["allow"] == "POST"
    assert server.request("POST", "/readyz", b"{}").headers["allow"] == "GET, HEAD"


def test_a_body_is_not_read_before_the_key(keyed: Running) -> None:
    assert keyed.request("POST", "/v1/completions", b"{" * 100, BAD[2]).status == 401


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://chat.example.evil", "*"])
def test_pages_of_other_servers_get_no_cors_headers(keyed: Running, origin: str) -> None:
    asking = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for reply in (keyed.get("/readyz", GOOD[0] | asking), keyed.request("OPTIONS", "/v1/completions", None, asking)):
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_listed_pages_may_call(keyed: Running) -> None:
    preflight = keyed.request(
        "OPTIONS", "/v1/completions", None, {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-credentials" not in preflight.headers
    for wanted, allowed in (
        ("authorization,content-type,x-stainless-os", "authorization,content-type,x-stainless-os"),
        ("a, (b)", "authorization, content-type"),
        (None, "authorization, content-type"),
    ):
        asking = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        asking |= {} if wanted is None else {"Access-Control-Request-Headers": wanted}
        reply = keyed.request("OPTIONS", "/v1/completions", None, asking)
        assert reply.headers["access-control-allow-headers"] == allowed
    assert "retry-after" in keyed.get("/readyz", GOOD[0] | {"Origin": ORIGIN}).headers["access-control-expose-headers"]
    assert keyed.get("/readyz", GOOD[0] | {"Origin": ORIGIN}).headers["access-control-allow-origin"] == ORIGIN


def test_no_interface_that_tries_the_api_is_served(keyed: Running) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect", "/swagger", "/debug", "/admin"):
        assert keyed.get(path, GOOD[0]).status == 404
    assert keyed.get("/openapi.json").status == 401
    assert keyed.get("/openapi.json", GOOD[0]).json["security"] == [{"bearer": []}, {"key": []}]


def test_no_answer_sends_a_client_elsewhere(server: Running) -> None:
    for method, path in (("POST", "/tokenize/"), ("GET", "/livez/"), ("GET", "//evil.example/%2e%2e")):
        reply = server.request(method, path, {"prompt": "a"} if method == "POST" else None)
        assert reply.status == 404
        assert "location" not in reply.headers


def test_without_origins_nothing_is_said_of_cors(server: Running) -> None:
    reply = server.get("/livez", {"Origin": ORIGIN})
    assert not [name for name in reply.headers if name.startswith(("access-control", "vary"))]


def test_a_full_server_says_so_and_when_to_come_back(start: Callable[..., Running]) -> None:
    server = start(ServerOptions(port=0, max_requests=0))
    reply = server.post("/v1/completions", {"prompt": "a"})
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "overloaded", "1")
    assert server.get("/readyz").status == 200


@pytest.fixture
def limited(start: Callable[..., Running]) -> Running:
    """Each key may have two requests open, and 60 tokens a minute on a clock that stands still."""
    server = start(ServerOptions(port=0, keys=Keys.of([KEY, OTHER]), limits=KeyLimits(2, 60)))
    server.call(lambda: setattr(server.server.middleware.quotas, "_clock", lambda: 1e9))
    return server


def refusals(server: Running) -> dict[str, float]:
    """By limit, as the metrics have them."""
    lines = server.get("/metrics", GOOD[0]).body.decode().split("\n")
    found = [line.partition('limit="')[2] for line in lines if line.startswith("attar_requests_limited_total")]
    return {line.partition('"')[0]: float(line.rpartition(" ")[2]) for line in found}


def settled(server: Running) -> None:
    """An answer is whole for its reader a moment before its request has ended."""
    server.wait(lambda: not any(state.open for state in server.server.middleware.quotas._keys.values()))


def test_a_key_may_have_so_many_requests_open(limited: Running) -> None:
    limited.engine.held = True
    body = {"prompt": [1], "max_tokens": 1}
    threads = [threading.Thread(target=limited.post, args=("/v1/completions", body, GOOD[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    limited.wait(lambda: limited.engine.open == 2)
    reply = limited.post("/v1/messages", {}, GOOD[0])
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert reply.json["error"]["type"] == "rate_limit_error"
    assert limited.get("/readyz", GOOD[0]).status == 200  # asking how things are costs nothing
    assert limited.post("/tokenize", {"prompt": "a"}, GOOD[1]).status == 200  # nor do others notice
    limited.engine.held = False
    for thread in threads:
        thread.join(20)
    settled(limited)
    assert limited.post("/tokenize", {"prompt": "a"}, GOOD[0]).status == 200
    assert refusals(limited) == {"requests": 1.0}


def test_a_key_may_have_so_many_tokens_a_minute(limited: Running) -> None:
    def ask(tokens: int, key: dict[str, str] = GOOD[0], **more: object) -> Reply:
        body = {"prompt": [1, 2, 3, 4, 5], "max_tokens": tokens, "ignore_eos": True, **more}
        return limited.post("/v1/completions", body, key)

    assert ask(20).status == 200  # 25
    assert ask(2, n=5).status == 200  # 40
    settled(limited)
    reply = ask(20)  # 25 more: 5 too many, at one a second
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "rate_limit_exceeded", "5")
    assert ask(20, GOOD[1]).status == 200
    said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 500}
    end = limited.post("/v1/chat/completions", said, GOOD[1])
    assert (end.status, end.code, end.json["error"]["param"]) == (
        400,
        "out_of_range",
        "max_tokens",
    )  # more than a minute has
    settled(limited)
    assert limited.post("/v1/embeddings", {"input": [[1] * 10, [2] * 10]}, GOOD[0]).status == 200  # 60
    assert limited.post("/v1/embeddings", {"input": [1]}, GOOD[0]).status == 429
    assert refusals(limited) == {"tokens": 2.0}


def test_tokens_that_were_asked_for_and_not_used_are_free_again(limited: Running) -> None:
    for _ in range(8):  # 8 x 32 are far more than 60, but each ends with its first token
        body = {"prompt": [7], "max_tokens": 31, "logit_bias": {"9": 100}, "stop_token_ids": [9]}
        reply = limited.post("/v1/completions", body, GOOD[0])
        assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 1)
        settled(limited)


def test_a_request_that_found_no_room_costs_no_tokens(limited: Running) -> None:
    limited.engine.queue = 0
    for _ in range(8):
        assert limited.post("/v1/completions", {"prompt": [7] * 30, "max_tokens": 9}, GOOD[0]).code == "overloaded"
        settled(limited)
    limited.engine.queue = 256
    assert limited.post("/v1/completions", {"prompt": [7] * 30, "max_tokens": 9}, GOOD[0]).status == 200


def test_of_several_keys_each_has_half_where_nothing_else_is_said() -> None:
    both = Keys.of([KEY, OTHER])
    assert ServerOptions(keys=both).shares == KeyLimits(128, None)
    assert ServerOptions(keys=both, max_requests=1).shares.requests == 1
    assert ServerOptions(keys=both, limits=KeyLimits(tokens_per_minute=9)).shares == KeyLimits(128, 9)
    assert ServerOptions(keys=both, limits=KeyLimits(256)).shares == KeyLimits(256, None)
    assert ServerOptions(keys=Keys.of([KEY])).shares == ServerOptions().shares == KeyLimits()


def test_one_key_of_several_cannot_keep_the_others_out(start: Callable[..., Running]) -> None:
    server = start(ServerOptions(port=0, keys=Keys.of([KEY, OTHER]), max_requests=4))
    server.engine.held = True
    body = {"prompt": [1], "max_tokens": 1}
    threads = [threading.Thread(target=server.post, args=("/v1/completions", body, GOOD[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    server.wait(lambda: server.engine.open == 2)
    assert server.post("/v1/completions", body, GOOD[0]).code == "rate_limit_exceeded"
    assert server.post("/tokenize", {"prompt": "a"}, GOOD[1]).status == 200
    server.engine.held = False
    for thread in threads:
        thread.join(20)
    settled(server)
    assert server.post("/v1/completions", body, GOOD[0]).status == 200


def test_the_bytes_of_all_bodies_are_bounded_and_one_key_of_several_has_half_of_them(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MAX_BODIES", 4000)
    body = {"prompt": "a" * 1500, "max_tokens": 1}
    for keys, first, second in (([], {}, None), ([KEY, OTHER], GOOD[0], GOOD[1])):
        server = start(ServerOptions(port=0, keys=Keys.of(keys)), context=2000)
        server.engine.held = True
        threads = [
            threading.Thread(target=server.post, args=("/v1/completions", body, by))
            for by in (first, first if second is None else second)
        ]
        for thread in threads:
            thread.start()
        server.wait(lambda server=server: server.engine.open == 2)  # type: ignore[misc]
        reply = server.post("/tokenize", {"prompt": "a" * 1500}, first)
        assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "overloaded", "1")
        assert server.post("/tokenize", {"prompt": "a"}, first).status == 200
        server.engine.held = False
        for thread in threads:
            thread.join(20)
        server.wait(lambda server=server: not server.server.middleware.bodies.total())  # type: ignore[misc]
        assert server.post("/v1/completions", body, first).status == 200
    reply = server.post("/v1/completions", {"prompt": "a" * 2500, "max_tokens": 1}, GOOD[0])
    assert (reply.status, reply.code) == (429, "overloaded")  # more than a key's half


def test_limits_are_for_keys() -> None:
    with user_error("option_missing"):
        ServerOptions(limits=KeyLimits(tokens_per_minute=5))


def test_logs_hold_no_content_and_no_keys(keyed: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="attar")
    body: dict[str, Any] = {"prompt": "CANARY in a prompt", "max_tokens": 2, "user": "CANARY"}
    keyed.post("/v1/completions", body, GOOD[0] | {"X-Other": "CANARY\x1b[31m"})
    keyed.post("/v1/completions", body | {"CANARY": 1}, GOOD[0])
    keyed.post("/v1/completions?CANARY", b"CANARY", {"Authorization": "Bearer CANARY"})
    keyed.get("/CANARY%0d%0aInjected:yes", GOOD[0])
    keyed.request("CANARY", "/v1/completions")
    text = caplog.text + keyed.get("/metrics", GOOD[0]).body.decode()
    assert "/v1/completions" in text
    for secret in ("CANARY", "Injected", KEY, OTHER, "\x1b"):
        assert secret not in text


def test_an_unexpected_error_is_told_as_such_and_no_more(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("SECRET in /etc/passwd at 0xdeadbeef")

    monkeypatch.setattr(server.server.prompts.tokenizer, "decode", fail, raising=False)
    reply = server.post("/detokenize", {"tokens": [1]})
    assert (reply.status, reply.code) == (500, "internal")
    server.wait(lambda: "RuntimeError" in caplog.text)  # the answer goes out first
    assert "SECRET" not in reply.body.decode() + caplog.text
    monkeypatch.undo()
    assert server.post("/detokenize", {"tokens": [1]}).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_unexpected_error_within_a_stream_is_its_last_event(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("SECRET")

    monkeypatch.setattr(openai.ChatFormat, "closing", fail)
    monkeypatch.setattr(anthropic, "_reason", fail)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}
    reply = server.post(path, body)
    assert reply.status == 200
    assert [event for event in reply.events if "error" in event] == [reply.events[-1]]
    assert len(reply.events) > 1
    server.wait(lambda: "RuntimeError" in caplog.text)
    assert "SECRET" not in caplog.text
    server.wait(lambda: server.engine.open == 0)
