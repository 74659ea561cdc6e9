"""What `/why` tells of requests at a real engine: of those that ended, run, were left, or generate nothing."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

from soaks.served import Served

COMPLETIONS = "/v1/completions"
MANY, CHOICES = 400, 16  # of which some are still to come whenever this looks
LONG = {"prompt": "Once upon a time", "max_tokens": MANY, "n": CHOICES, "ignore_eos": True}
SECONDS = 120.0  # far more than anything takes


def ask(served: Served, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(served.address.host, served.address.port, timeout=SECONDS)
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def why(served: Served, name: str) -> Any:
    connection, reply = ask(served, f"/v1/requests/{name}/why")
    trace = json.loads(reply.read())
    connection.close()
    return trace


def whole(served: Served, path: str, body: Any) -> Any:
    """The trace of a request, once it has its answer."""
    connection, reply = ask(served, path, body)
    assert reply.status == 200, reply.read()
    reply.read()
    name = reply.headers["x-request-id"]
    connection.close()
    return why(served, name)


def test_a_request_of_one_step_and_an_embedding_are_told_of_to_the_last_step(real: Served) -> None:
    first = whole(real, COMPLETIONS, {"prompt": [5, 6, 7, 8], "max_tokens": 1, "n": 3})
    [report] = first["prompts"]
    assert (first["outcome"], first["generated_tokens"], report["prompt_tokens"]) == ("length", 3, 4)
    assert sum(report["limited_by"].values()) >= 1
    embedded = whole(real, "/v1/embeddings", {"input": [[5, 6, 7, 8], [9, 10]]})
    assert [each["reuse_ended"] for each in embedded["prompts"]] == ["bypassed", "bypassed"]
    assert [each["prompt_tokens"] for each in embedded["prompts"]] == [4, 2]
    assert all(each["limited_by"] for each in embedded["prompts"])
    assert all(each["prefill"] > 0 for each in embedded["prompts"])


def test_a_request_is_told_of_while_it_runs_and_when_it_was_left(real: Served) -> None:
    connection, reply = ask(real, COMPLETIONS, LONG | {"stream": True})
    name = reply.headers["x-request-id"]
    while not reply.fp.readline().startswith(b"data: "):
        pass
    trace = why(real, name)
    [report] = trace["prompts"]
    assert (trace["outcome"], report["reuse_ended"]) == ("running", "differs")
    assert 0 < report["decode"] <= trace["seconds"]
    assert 0 < trace["seconds_to_first_token"] <= trace["seconds"]
    reply.close()
    connection.close()
    end = time.monotonic() + SECONDS
    while (trace := why(real, name))["outcome"] == "running" or trace["prompts"] == [None]:
        assert time.monotonic() < end, trace
        time.sleep(0.01)
    assert trace["outcome"] == "cancelled"
    [report] = trace["prompts"]
    assert report["decode"] > 0
    assert 0 < trace["generated_tokens"] < MANY * CHOICES
    assert 0 < sum(report["limited_by"].values()) < MANY + CHOICES  # steps, however many choices had a part in one
