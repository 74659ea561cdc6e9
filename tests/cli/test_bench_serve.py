"""`attar bench-serve` as it is typed, against a small server: what options ask of it, what is reported and drawn."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attar.cli.main import app
from attar.text.tokenizer import Tokenizer
from tests.cli.test_commands import last_json, refused
from tests.load.fake import Fake, answer, well

KEY = "sk-" + "k" * 40
SMALL = "--prompt 6 --gen 3 --requests 4"


@pytest.fixture
def fake() -> Any:
    with Fake(well) as server:
        yield server


@pytest.fixture(autouse=True)
def keyless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTAR_API_KEY", raising=False)


def bench(fake: Fake, options: str, *more: str) -> Result:
    return CliRunner().invoke(app, ["bench-serve", "--url", fake.url, *shlex.split(options), *more, "--json"])


def test_an_open_loop_with_a_stated_objective(fake: Fake) -> None:
    done = bench(fake, f"{SMALL} --rates 100,200 --slo ttft=60,tpot=0.000001 --seed 5")
    report = last_json(done)
    assert [run["label"] for run in report["runs"]] == ["100/s", "200/s"]
    for run in report["runs"]:
        assert (run["requests"], run["succeeded"], run["errors"], run["output_tokens"]) == (4, 4, {}, 12)
        assert run["goodput"]["met"] == 0, "no server is that fast"
        for name in ("ttft", "itl", "tpot", "e2e"):
            assert run[name]["p50"] <= run[name]["p95"] <= run[name]["p99"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fake at ")
    assert lines[2].split() == ["load", "100/s", "200/s"]
    assert [len(body["prompt"]) for body in fake.asked[1:]] == [6] * 8
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] for body in fake.asked[1:])


def test_options_reach_every_request(fake: Fake) -> None:
    options = "--clients 2 --temperature 0.5 --model mine --no-ignore-eos --spread 0.5 --vocabulary 150 --quiet"
    report = last_json(bench(fake, f"{SMALL} {options}", "--extra", '{"top_k": 1, "user": "u"}'))
    assert (report["model"], report["arrivals"]) == ("mine", "closed loop")
    assert fake.most <= 2
    for body in fake.asked[1:]:
        assert (body["model"], body["temperature"], body["top_k"], body["user"]) == ("mine", 0.5, 1, "u")
        assert "ignore_eos" not in body
        assert max(body["prompt"]) < 150
        assert 3 <= len(body["prompt"]) <= 9


def test_chat_in_words_of_a_tokenizer(fake: Fake, demo: Path) -> None:
    report = last_json(bench(fake, f"{SMALL} --clients 1 --chat --text --tokenizer {demo}"))
    assert (report["endpoint"], report["prompts"]) == ("/v1/chat/completions", "text")
    tokenizer = Tokenizer.load(demo)
    for body in fake.asked[1:]:
        assert len(tokenizer.encode(body["messages"][0]["content"])) > 0


def test_a_trace_and_shared_beginnings(fake: Fake, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": 600, "output_length": 64, "hash_ids": [0, i + 1]} for i in range(6)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    found = last_json(
        bench(fake, f"--trace {trace} --divisor 16 --longest 60 --requests 5 --arrivals trace --rate 100")
    )
    assert (found["source"], found["arrivals"]) == ("trace.jsonl", "trace")
    assert [len(body["prompt"]) for body in fake.asked[1:]] == [38] * 5
    fake.asked.clear()
    last_json(bench(fake, "--prompt 26 --gen 3 --requests 4 --clients 1 --prefixes 1 --prefix-tokens 20"))
    prompts = [body["prompt"] for body in fake.asked[1:]]
    assert {len(prompt) for prompt in prompts} == {26}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 4


@pytest.mark.parametrize("name, begins", [("load.html", b"<!doctype html>"), ("load.png", b"\x89PNG\r\n")])
def test_latency_against_load_is_drawn(fake: Fake, tmp_path: Path, name: str, begins: bytes) -> None:
    if name.endswith(".png"):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    done = bench(fake, f"{SMALL} --clients 1,2 --slo ttft=60", "--plot", str(tmp_path / name))
    assert last_json(done)["runs"]
    assert f"drawn into {tmp_path / name}" in done.stderr
    assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize("good, status", [(1, 1), (2, 0)])
def test_the_exit_status_is_1_where_nothing_succeeded(good: int, status: int) -> None:
    async def behave(body: dict[str, Any], writer: Any) -> None:
        if len(server.asked) <= good:  # the first is the probe
            await well(body, writer)
        else:
            writer.write(answer("429 Too Many Requests", b"the queue \x1b[2J is full"))

    with Fake(behave) as server:
        done = bench(server, f"{SMALL} --clients 1")
    assert done.exit_code == status, done.output
    failed, says = 5 - good, r"the queue \x1b[2J is full"
    run = last_json(done)["runs"][0]
    assert (run["errors"], run["examples"]) == ({"status 429": failed}, {"status 429": says})
    assert f"error: status 429 x {failed}: {says}" in done.stdout.splitlines()
    told = f"attar: none of 4 requests succeeded: status 429 x 4: {says}\n"
    assert done.stderr == (told if status else "")


def test_without_a_load_some_numbers_of_clients_take_turns(fake: Fake) -> None:
    report = last_json(bench(fake, "--requests 2"))
    assert [run["label"] for run in report["runs"]] == ["1 client", "4 clients", "16 clients"]
    assert {len(body["prompt"]) + body["max_tokens"] for body in fake.asked[1:]} == {256 + 64}


def test_progress_goes_to_stderr_alone(fake: Fake) -> None:
    done = bench(fake, f"{SMALL} --clients 1")
    quiet = bench(fake, f"{SMALL} --clients 1 --quiet")
    assert quiet.stderr == ""
    for each in (done, quiet):
        assert each.exit_code == 0
        assert "%" not in each.stdout.splitlines()[-1]


def test_the_key_comes_from_a_file_or_the_environment(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent() -> set[bytes]:
        heads = [line for head in fake.heads for line in head.split(b"\r\n")]
        fake.heads.clear()
        return {line.partition(b": ")[2] for line in heads if line.lower().startswith(b"authorization")}

    assert last_json(bench(fake, f"{SMALL} --clients 1"))
    assert sent() == set()
    monkeypatch.setenv("ATTAR_API_KEY", KEY)
    assert last_json(bench(fake, f"{SMALL} --clients 1"))
    assert sent() == {b"Bearer " + KEY.encode()}
    file = tmp_path / "key"
    file.write_text("of-a-file\n")
    assert last_json(bench(fake, f"{SMALL} --clients 1 --api-key-file {file}"))
    assert sent() == {b"Bearer of-a-file"}
    for content in ("", "one\ntwo\n"):
        file.write_text(content)
        refused(bench(fake, f"{SMALL} --clients 1 --api-key-file {file}"), 2, "key_invalid", as_json=True)


def test_no_key_is_taken_from_the_command_line(fake: Fake) -> None:
    done = bench(fake, f"{SMALL} --clients 1 --api-key {KEY}")
    assert done.exit_code == 2
    assert "--api-key" in done.stderr
    assert KEY not in done.output


@pytest.mark.parametrize(
    "options, words",
    [
        ("--rates 1 --clients 1", "option_conflict"),
        ("--rates none", "option_malformed"),
        ("--arrivals trace", "option_missing"),
        ("--arrivals trace --rates 2", "option_missing"),
        ("--clients inf", "option_malformed"),
        ("--clients nan", "option_malformed"),
        ("--clients 1,1.7", "option_malformed"),
        ("--clients 1 --extra ''", "option_malformed"),
        ("--seconds 0", "should be greater than or equal to 0.1"),
        ("--clients 1 --slo fast", "option_malformed"),
        ("--clients 1 --extra [1]", "option_malformed"),
        ("--clients 1 --extra {", "option_malformed"),
        ("--clients 1 --plot load.pdf", "output_invalid"),
        ("--clients 1 --plot missing/load.html", "file_not_found"),
        ("--clients 1 --trace missing.jsonl", "file_not_found"),
    ],
)
def test_mistakes_are_one_sentence_and_send_nothing(fake: Fake, options: str, words: str) -> None:
    refused(bench(fake, f"{SMALL} {options}"), 2, words, as_json=True)
    assert not fake.asked
