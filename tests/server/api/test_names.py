"""Names that clients give: aliases of the model, a prefix of paths, their own ids of requests."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from attar.server.http.security import Keys
from attar.server.options import ServerOptions, check_aliases, pattern
from attar.version import __version__
from tests.errors import user_error
from tests.server.conftest import Running

SAID = {"prompt": "hello", "max_tokens": 2}


def test_an_alias_is_the_model(start: Callable[..., Running]) -> None:
    server = start(ServerOptions(port=0, aliases=("gpt-4o", "claude-*")), adapters=("tone",))
    for name in ("fake", "gpt-4o", "claude-sonnet-4-5@20250929", "claude-"):
        assert server.post("/v1/completions", SAID | {"model": name}).json["model"] == "fake", name
    for name in ("gpt-4o-mini", "Claude-", "claude-\n", "x"):
        refused = server.post("/v1/completions", SAID | {"model": name})
        assert (refused.status, refused.code) == (404, "model_not_found"), name
        assert "--alias" in refused.json["error"]["message"]
    assert server.post("/v1/completions", SAID | {"model": "tone"}).json["model"] == "tone"
    listed = {model["id"]: (model["root"], model.get("parent")) for model in server.get("/v1/models").json["data"]}
    assert listed == {"fake": ("fake", None), "gpt-4o": ("fake", None), "tone": ("tone", "fake")}
    assert server.get("/v1/models/claude-x").json["root"] == "fake"
    names = server.get("/openapi.json").json["components"]["schemas"]["ChatBody"]["properties"]["model"]["anyOf"]
    assert names[0] == {"enum": [None, "fake", "tone", "gpt-4o"]}
    assert re.search(names[1]["pattern"], "claude-3.5")


def test_an_alias_is_a_name_that_nothing_else_has() -> None:
    assert check_aliases(["a", "b*", "a"], ("m",)) == ("a", "b*")
    assert pattern("a.b-c") == r"a\.b-c"
    with user_error("option_conflict", "m"):
        check_aliases(["m"], ("m", "n"))
    for name in ("", "a b", "-a", "a" * 257):
        with user_error("model_name_invalid"):
            check_aliases([name], ())


def test_paths_may_have_the_prefix_of_a_proxy(start: Callable[..., Running]) -> None:
    server = start(ServerOptions(port=0, root_path="/models/chat"))
    for prefix in ("", "/models/chat"):
        assert server.get(prefix + "/health").status == 200
        assert server.get(prefix + "/").status == 200
        assert server.post(prefix + "/v1/completions", SAID).status == 200
    for path in ("/models/chatv1/models", "/models/chat/models/chat/health", "/models/"):
        assert server.get(path).status == 404
    assert server.post("/models/chat/v1/messages", {}).json["type"] == "error"  # in the shape of that API
    assert server.get("/openapi.json").json["servers"] == [{"url": "/models/chat"}]
    for wrong in ("chat", "/chat/", "/a b", "/"):
        with user_error("option_malformed", "--root-path"):
            ServerOptions(root_path=wrong)


def test_a_clients_own_id_comes_back_and_names_the_request(server: Running) -> None:
    own = {"X-Request-Id": "my.id-7_"}
    replies = [server.post("/v1/completions", SAID, own) for _ in range(2)]  # nothing keeps an id from being used again
    assert {reply.headers["x-request-id"] for reply in replies} == {"my.id-7_"}
    ids = [reply.json["id"].removeprefix("cmpl-") for reply in replies]
    assert ids[0] != ids[1]
    assert server.get("/v1/requests/my.id-7_/why").json["id"] == ids[1]  # the last
    assert server.get(f"/v1/requests/cmpl-{ids[0]}/why").json["id"] == ids[0]
    assert server.get("/livez", own).headers["x-request-id"] == "my.id-7_"
    for wrong in ("", "a b", "a" * 129, "ä", "a/b"):
        given = server.post("/v1/completions", SAID, {"X-Request-Id": wrong}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", given), wrong


def test_a_request_of_another_key_is_not_found_by_its_id(start: Callable[..., Running]) -> None:
    keys = ["k" * 32, "l" * 32]
    server = start(ServerOptions(port=0, keys=Keys.of(keys)))
    mine, theirs = ({"Authorization": f"Bearer {key}", "X-Request-Id": "same"} for key in keys)
    assert server.post("/v1/completions", SAID, mine).status == 200
    assert server.get("/v1/requests/same/why", theirs).status == 404
    assert server.get("/v1/requests/same/why", mine).status == 200


def test_the_version_and_what_the_tokenizer_is(server: Running) -> None:
    assert server.get("/version").json == {"version": __version__}
    told = server.get("/tokenizer_info").json
    tokenizer = server.server.prompts.tokenizer
    assert (told["bos_token"], told["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert told["chat_template"] == tokenizer.chat_templates["default"]
    assert (told["vocab_size"], told["model_max_length"]) == (tokenizer.vocab_size, 512)


@pytest.mark.parametrize("field", ["id", "timestamp", "created_at", "model", "metadata", "cache_control"])
def test_a_front_ends_own_fields_of_messages_do_no_harm(server: Running, field: str) -> None:
    plain = [{"role": "user", "content": "hello"}]
    for value in ("x", 1, None, {"a": [1]}):
        marked = server.post("/tokenize", {"messages": [plain[0] | {field: value}]})
        assert marked.json == server.post("/tokenize", {"messages": plain}).json
