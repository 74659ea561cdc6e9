"""The input items of stored answers: what they are, in pages of any size, and for their key alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from attar.server.api.responses.types import InputItemList, ListedMessage
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from tests.server.api.responses.test_routes import BODY, PATH
from tests.server.api.responses.test_store import ONE, TWO, of
from tests.server.bad_requests import USER
from tests.server.conftest import Running

CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": 1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "seen"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]},
    THOUGHT,
    {"role": "assistant", "content": "I look."},
    CALL,
    RESULT,
]


@pytest.fixture(scope="module")
def storing(start: Callable[..., Running]) -> Running:
    return start(ServerOptions(port=0, keys=Keys.of([ONE, TWO]), response_store=1 << 20))


def made(server: Running, items: Any, **more: Any) -> Any:
    reply = server.post(PATH, BODY | {"input": items} | more, of(ONE))
    assert reply.status == 200, reply.body
    return reply.json


def page(server: Running, id: str, query: str = "") -> InputItemList:
    reply = server.get(f"{PATH}/{id}/input_items{query}", of(ONE))
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body, type=InputItemList)


def test_items_are_those_of_the_request(storing: Running) -> None:
    answer = made(storing, ITEMS)
    found = msgspec.to_builtins(page(storing, answer["id"], "?order=asc").data)
    ids = [item.pop("id") for item in found]
    assert len(set(ids)) == len(ITEMS)
    done = {"status": "completed"}
    said = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    assert found == [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}], **done},
        {"type": "message", **ITEMS[1], **done},
        THOUGHT | done,
        {"type": "message", "role": "assistant", "content": [said], **done},
        CALL | done,
        RESULT | done,
    ]
    assert page(storing, answer["id"]).data == page(storing, answer["id"], "?order=asc").data[::-1]
    told = server_items(storing, answer["id"])
    assert [item["id"] for item in told] == ids  # the same each time
    made(storing, told)  # and they can be sent back


def server_items(server: Running, id: str) -> list[Any]:
    return list(server.get(f"{PATH}/{id}/input_items?order=asc&limit=100", of(ONE)).json["data"])


def test_a_conversation_that_went_on_has_all_before_it(storing: Running) -> None:
    first = made(storing, USER)
    second = made(storing, "more", previous_response_id=first["id"])
    before, found = server_items(storing, first["id"]), server_items(storing, second["id"])
    assert len(before) == 1
    assert found[:1] == before
    assert found[1] == first["output"][0]
    assert [part["text"] for part in found[2]["content"]] == ["more"]
    assert len(found) == 3


@pytest.mark.parametrize("name", ["include", "include[]"])
def test_log_probabilities_are_included_on_request(storing: Running, name: str) -> None:
    first = made(storing, USER, include=["message.output_text.logprobs"], top_logprobs=2)
    later = made(storing, "more", previous_response_id=first["id"])
    [scored] = first["output"][0]["content"]
    assert scored["logprobs"]
    path = f"{PATH}/{later['id']}/input_items?order=asc"
    plain, reasoned, full = (
        storing.get(path + query, of(ONE)).json["data"][1]["content"]
        for query in ("", f"&{name}=reasoning.encrypted_content", f"&{name}=message.output_text.logprobs")
    )
    assert plain == reasoned == [scored | {"logprobs": []}]
    assert full == [scored]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 5, 7, 100])
def test_pages_have_each_item_once(storing: Running, order: str, limit: int) -> None:
    """Also where a client gives one id to several items, or to none."""
    ids = [None, "a", "b", "a", "a_2", None, "a"]
    items = [{"role": "user", "content": str(at), "id": id} for at, id in enumerate(ids)]
    id, after, found = made(storing, items)["id"], "", []
    for _ in range(len(items)):
        read = page(storing, id, f"?order={order}&limit={limit}{after}")
        found += [each.content[0].text for each in read.data if isinstance(each, ListedMessage)]  # type: ignore[union-attr]
        assert (read.first_id, read.last_id) == (read.data[0].id, read.data[-1].id)
        assert len(read.data) == limit or not read.has_more
        after = f"&after={read.last_id}"
        if not read.has_more:
            break
    assert found == [str(at) for at in range(len(items))][:: 1 if order == "asc" else -1]
    end = page(storing, id, f"?order={order}{after}")
    assert (end.data, end.first_id, end.last_id, end.has_more) == ([], None, None, False)


@pytest.mark.parametrize(
    "query, code, param",
    [
        ("order=up", "invalid_value", "order"),
        *((f"limit={limit}", "out_of_range", "limit") for limit in ("0", "101", "-1", "x", "1.0", "", "9" * 500, "²")),
        ("after=msg_1", "invalid_value", "after"),
        ("include[]=file_search_call.results", "unsupported_field", "include[]"),
        ("include=message.output_text.logprobs&include=all", "unsupported_field", "include"),
    ],
)
def test_a_query_that_is_refused(storing: Running, query: str, code: str, param: str) -> None:
    id = made(storing, USER)["id"]
    reply = storing.get(f"{PATH}/{id}/input_items?{query.replace('²', '%C2%B2')}", of(ONE))
    assert (reply.status, reply.code, reply.json["error"]["param"]) == (400, code, param)


def test_items_are_known_to_their_key_alone(storing: Running, server: Running) -> None:
    path = f"{PATH}/{made(storing, USER)['id']}/input_items"
    assert storing.get(path, of(ONE)).status == 200
    assert storing.get(path).status == 401
    unknown = f"{PATH}/resp_1/input_items"
    for reply in (storing.get(path, of(TWO)), storing.get(unknown, of(ONE)), server.get(path)):
        assert (reply.status, reply.code) == (404, "not_found")
    assert made(storing, USER, store=False)["store"] is False
