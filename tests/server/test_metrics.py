"""What Prometheus reads: names, and numbers that are there at any time and count what they say."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable

import pytest

from attar.protocol.messages import Delta, Submit
from attar.protocol.request import SamplingParams
from attar.server.admission.fair_queue import FairQueue
from attar.server.admission.rate_limits import Caller
from attar.server.engine_client.response_stream import ResponseStream
from attar.server.request_handler import RequestHandler
from tests.server.api.test_routes import COMPLETIONS, SEEDED
from tests.server.conftest import Running
from tests.server.fake_engine import BLOCKS, CACHED, SLIDING
from tests.server.http.test_limits import connect, post


def metric(server: Running, name: str) -> float:
    lines = [line for line in server.get("/metrics").body.decode().splitlines() if line.startswith(name + " ")]
    [line] = lines
    return float(line.rpartition(" ")[2])


def test_metrics_are_there_before_anything_ran_and_when_the_engine_is_gone(start: Callable[..., Running]) -> None:
    made = start()
    assert made.server.engine.stats is None
    assert metric(made, 'attar_kv_blocks{state="free"}') == BLOCKS
    made.call(made.engine._server.close)
    made.post(COMPLETIONS, SEEDED)
    assert metric(made, 'attar_kv_blocks{state="cached"}') == CACHED
    for state, count in zip(("free", "active", "cached"), SLIDING, strict=True):
        assert metric(made, f'attar_kv_sliding_blocks{{state="{state}"}}') == count
    assert metric(made, "attar_steps_total") > 0
    made.call(made.engine.die)
    made.wait(lambda: made.server.engine.ready is None)
    for name in ("requests_running", "requests_waiting", "steps_total", "preemptions_total", "prefix_tokens_hit_total"):
        assert metric(made, f"attar_{name}") == 0
    for state in ("free", "active", "cached"):
        assert metric(made, f'attar_kv_blocks{{state="{state}"}}') == 0


def test_the_time_between_tokens_is_of_each_token(server: Running) -> None:
    count, total = (metric(server, f"attar_inter_token_seconds_{each}") for each in ("count", "sum"))
    caller = Caller("several", time.monotonic(), b"")
    command = Submit("several", (1,), SamplingParams())
    answer = ResponseStream([command], 1, lambda answer, batch: None, lambda ids, tell: None, FairQueue())
    made = RequestHandler(caller, [(1,)], 1, answer, server.server.context)
    made._note([Delta("several", 0, (1,), "a")])
    made._last["several", 0] -= 0.9
    made._note([Delta("several", 0, (1, 2, 3), "abc")])
    assert metric(server, "attar_inter_token_seconds_count") - count == 3
    assert metric(server, "attar_inter_token_seconds_sum") - total >= 0.9
    generated = metric(server, "attar_generated_tokens_total")
    answer.late(Delta("several", 0, (1, 2), "ab"))  # of a reader that is let go: they were generated all the same
    assert metric(server, "attar_generated_tokens_total") - generated == 2
    made.close()
    answer.late(Delta("several", 0, (1, 2), "ab"))  # its account is settled
    assert metric(server, "attar_generated_tokens_total") - generated == 2
    gc.disable()  # which is not needed to be rid of it
    try:
        gone = weakref.ref(made)
        del made
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("code", ["full", "internal", "deadline"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_or_fails_is_no_served_request(start: Callable[..., Running], code: str, stream: bool) -> None:
    made = start()
    body = SEEDED | {"prompt": ["a", "b c"], "stream": stream}
    made.engine.fail = (code, 0)
    made.post(COMPLETIONS, body)
    made.engine.fail = ("internal", 3)
    made.post(COMPLETIONS, body)
    made.wait(lambda: not made.server.engine.open)
    tokens = sum(len(command.prompt) for command in list(made.engine.commands)[:2])
    assert metric(made, "attar_request_seconds_count") == 0
    ended = {name: metric(made, f'attar_requests_ended_total{{outcome="{name}"}}') for name in {code, "internal"}}
    assert ended == ({"internal": 2} if code == "internal" else {code: 1, "internal": 1})
    assert metric(made, "attar_prompt_tokens_total") == tokens  # those of the one that was begun
    made.engine.fail = None
    made.post(COMPLETIONS, body)
    made.wait(lambda: metric(made, "attar_request_seconds_count") == 1)
    assert metric(made, 'attar_requests_ended_total{outcome="length"}') == 1
    assert metric(made, "attar_prompt_tokens_total") == 2 * tokens


def test_what_has_no_room_in_the_queue_is_told(start: Callable[..., Running]) -> None:
    made = start(queue=8, batch=1)
    assert metric(made, "attar_requests_held") == 0
    made.engine.held = True
    with connect(made) as sock:
        sock.sendall(post(json.dumps({"prompt": ["a"] * 10, "n": 2, "max_tokens": 1, "seed": 1}).encode()))
        made.wait(lambda: made.engine.open == 2)  # half of the queue
        assert metric(made, "attar_requests_held") == 16
        made.engine.held = False
        made.wait(lambda: metric(made, "attar_requests_held") == 0)


def test_metrics_have_their_names_and_grow(server: Running) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in server.get("/metrics").body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = read()
    server.post(COMPLETIONS, SEEDED | {"ignore_eos": True})
    server.wait(lambda: read()["attar_requests_running"] == 0)
    after = read()
    for state in ("free", "active", "cached"):
        assert f'attar_kv_blocks{{state="{state}"}}' in after
    for name in (
        "attar_requests_waiting",
        "attar_preemptions_total",
        "attar_prefix_tokens_hit_total",
        "attar_engine_up",
    ):
        assert name in after
    assert after["attar_generated_tokens_total"] - before["attar_generated_tokens_total"] == 12
    assert after["attar_inter_token_seconds_count"] - before["attar_inter_token_seconds_count"] == 11
    assert after["attar_time_to_first_token_seconds_count"] - before["attar_time_to_first_token_seconds_count"] == 1
    key = 'attar_http_requests_total{route="/v1/completions",status="200"}'
    assert after[key] - before.get(key, 0) == 1


def test_tokens_are_counted_as_they_come_and_once(start: Callable[..., Running]) -> None:
    made = start(step=0.02)
    name = "attar_generated_tokens_total"
    for stream, before in ((True, 0), (False, 200)):
        with connect(made) as sock:
            body = SEEDED | {"max_tokens": 100, "n": 2, "ignore_eos": True, "stream": stream}
            sock.sendall(post(json.dumps(body).encode()))
            made.wait(lambda before=before: metric(made, name) > before)  # type: ignore[misc]
            made.engine.held = True
            assert metric(made, "attar_http_requests_open") == 2  # it, and who asks
            assert metric(made, name) < before + 200
            made.engine.held = False
            made.wait(lambda: not made.server.engine.open)
            made.wait(lambda before=before: metric(made, name) == before + 200)  # type: ignore[misc]
    made.wait(lambda: metric(made, 'attar_requests_ended_total{outcome="length"}') == 2)
    assert metric(made, name) == 400
