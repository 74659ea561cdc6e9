"""The whole tool against a small server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attar.load import sweep
from attar.load.sweep import Options
from attar.load.traces import Synthetic
from tests.errors import user_error
from tests.load.fake import Behave, Fake, answer, well

SMALL = Synthetic(prompt=6, output=3)


def test_several_rates(honest: Fake) -> None:
    told: list[str] = []
    options = Options(
        honest.url, synthetic=SMALL, requests=8, rates=(200.0, 400.0), slo={"ttft": 60.0, "tpot": 60.0}, seed=3
    )
    report = sweep.bench_serve(options, lambda stage, done, total: told.append(stage))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["model"], report["endpoint"], report["prompts"]) == ("fake", "/v1/completions", "token ids")
    assert [run["label"] for run in report["runs"]] == ["200/s", "400/s"]
    for run in report["runs"]:
        assert (run["requests"], run["succeeded"], run["errors"]) == (8, 8, {})
        assert (run["output_tokens"], run["prompt_tokens"], run["counted"]) == (24, 48, "usage")
        assert run["goodput"]["met"] == 8
    assert list(dict.fromkeys(told)) == ["200/s", "400/s"]
    asked = [tuple(body["prompt"]) for body in honest.asked[1:]]  # the first is the probe
    assert len(set(asked)) == 16  # the second run asks for nothing that the first has left in a cache
    assert "200/s" in sweep.to_text(report).splitlines()[2]


def test_clients_chat(honest: Fake) -> None:
    report = sweep.bench_serve(Options(honest.url, chat=True, synthetic=SMALL, requests=6, clients=(2,)))
    assert (report["endpoint"], report["prompts"], report["arrivals"]) == (
        "/v1/chat/completions",
        "text",
        "closed loop",
    )
    assert all(body["messages"][0]["role"] == "user" for body in honest.asked)
    assert honest.most == 2


def test_a_trace_at_its_own_times(honest: Fake, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 20 * i, "input_length": 600, "output_length": 64, "hash_ids": [0, i + 1]} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)))
    options = Options(honest.url, trace=path, divisor=16, longest=60)
    report = sweep.bench_serve(options)
    assert (report["source"], report["arrivals"], report["runs"][0]["label"]) == ("trace.jsonl", "trace", "trace")
    prompts = [body["prompt"] for body in honest.asked[1:]]
    assert [len(prompt) for prompt in prompts] == [38] * 5
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    with user_error("option_out_of_range"):
        sweep.loads(Options(honest.url, trace=path, divisor=16, longest=10))


def test_words_where_ids_are_refused(serve: Callable[[Behave], Fake]) -> None:
    async def words_only(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if isinstance(body["prompt"], list):
            writer.write(answer("400 Bad Request", b"prompt must be a string"))
        else:
            await well(body, writer)

    report = sweep.bench_serve(Options(serve(words_only).url, synthetic=SMALL, requests=2, clients=(1,)))
    assert report["prompts"] == "text"
    assert report["runs"][0]["succeeded"] == 2


def test_a_server_that_refuses_says_why(serve: Callable[[Behave], Fake]) -> None:
    async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer("400 Bad Request", b"unknown field ignore_eos"))

    with user_error("request_refused"):
        sweep.bench_serve(Options(serve(refuse).url, synthetic=SMALL, clients=(1,)))


def test_requests_past_the_server_s_context_are_not_sent(honest: Fake, tmp_path: Path) -> None:
    honest.models = [{"id": "fake", "max_model_len": 50}]

    def refused(**settings: Any) -> str:
        with user_error("context_exceeded") as caught:
            sweep.bench_serve(Options(honest.url, clients=(1,), requests=4, **settings))
        assert not honest.asked
        return str(caught.value)

    long = Synthetic(prompt=40, output=11)
    for settings in ({}, {"chat": True}, {"text": True}, {"decode": str}, {"model": "fake"}):
        found = refused(synthetic=long, **settings)
        assert found.startswith("4 of 4 requests are longer")
        assert found.endswith("up to 51 (40 of the prompt, 11 of the answer): lower --prompt or --gen")
    assert refused(synthetic=Synthetic(40, 10, spread=0.2)).endswith(", or leave these out with --longest 50")
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [0]}))
    assert refused(trace=trace).endswith(": shorten them with --divisor")

    def sent(**settings: Any) -> int:
        sweep.bench_serve(Options(honest.url, clients=(1,), requests=4, **settings))
        found, honest.asked[:] = len(honest.asked) - 1, []  # less the probe
        return found

    assert sent(synthetic=Synthetic(40, 10)) == sent(synthetic=long, extra={"max_tokens": 2}) == 4
    assert sent(synthetic=long, chat=True, decode=str) == 4, "how long a text is only the server knows"
    assert sent(synthetic=Synthetic(40, 10, spread=0.2), longest=50) < 4
    honest.models = [{"id": "fake"}]
    assert sent(synthetic=long) == 4


def test_a_report_in_which_nothing_succeeded(serve: Callable[[Behave], Fake]) -> None:
    def behave(until: int) -> Behave:
        async def some(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            if len(fake.asked) <= until:
                await well(body, writer)
            else:
                writer.write(answer("503 Service Unavailable", b"no room"))

        return some

    for until, expected in ((1, "none of 4 requests succeeded: status 503 x 4: no room"), (2, None), (9, None)):
        fake = serve(behave(until))  # the first that is asked is the probe
        report = sweep.bench_serve(Options(fake.url, synthetic=SMALL, requests=2, clients=(1, 2)))
        assert sweep.failure(report) == expected
    report = sweep.bench_serve(Options(fake.url, synthetic=SMALL, requests=2, rates=(0.01,), seconds=0.0))
    assert str(sweep.failure(report)).startswith("no request was sent: --seconds")


def test_a_report_s_head_has_the_address_once_and_steers_no_terminal(honest: Fake) -> None:
    honest.models = [{"id": "fa\x1bke"}]
    report = sweep.bench_serve(Options(f"{honest.url}/v1/", synthetic=SMALL, requests=1, clients=(1,)))
    assert (report["url"], report["model"]) == (honest.url, "fa\x1bke")
    assert sweep.to_text(report).startswith(rf"fa\x1bke at {honest.url}/v1/completions: ")
    assert [head.split()[1] for head in honest.heads] == [b"/v1/models"] * 2 + [b"/v1/completions"] * 2


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for model in (None, "m"):
            with user_error("server_unreachable"):
                sweep.bench_serve(Options(url, model=model, synthetic=SMALL, clients=(1,)))


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({}, "option_missing"),
        ({"arrivals": "trace", "rates": (1.0,)}, "option_missing"),
        ({"rates": (1.0,), "clients": (1,)}, "option_conflict"),
        ({"rates": (1.0,), "requests": 0}, "option_out_of_range"),
        ({"rates": (1.0,), "arrivals": "uniform"}, "name_unknown"),
        ({"clients": (0,)}, "option_out_of_range"),
        ({"clients": (1,), "vocabulary": 50}, "option_out_of_range"),
    ],
)
def test_impossible_options(settings: dict[str, Any], sentence: str) -> None:
    with user_error(sentence):
        sweep.loads(Options("http://x", **settings))


def test_a_schedule_depends_on_its_seed_alone() -> None:
    def made(seed: int) -> object:
        return sweep.loads(Options("http://x", rates=(1.0, 2.0), requests=20, seed=seed))

    assert made(1) == made(1) != made(2)


def test_lists_of_numbers() -> None:
    assert sweep.parse_list("--rates", "1,2.5, 4", float) == (1.0, 2.5, 4.0)
    assert sweep.parse_list("--rates", None, float) == ()
    with user_error("option_malformed"):
        sweep.parse_list("--rates", "fast", float)


def test_lists_of_whole_numbers() -> None:
    assert sweep.parse_list("--clients", "1, 4,16", int) == (1, 4, 16)
    assert sweep.parse_list("--clients", None, int) == ()
    for given in ("inf", "nan", "1.7", "1,2.0", "", "1,,2"):
        with user_error("option_malformed"):
            sweep.parse_list("--clients", given, int)
