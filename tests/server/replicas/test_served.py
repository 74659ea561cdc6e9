"""`attar serve --replicas` with the embedded model: the table of docs/replicas.md, and engines killed in mid-stream.

Every feature is asked for alone, and again while its engine is killed by SIGKILL: the answers are the same.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from soaks.served import Served, children

from tests.engine.test_adapters import save
from tests.text.tools.families import HERMES

SECONDS = 60.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 12, "maxItems": 12},
    },
    "required": ["names"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
PROMPT = 3 * "Once upon a time there was a little fox. " + "Once upon a time"
TEXT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "seed": 5, "temperature": 0.9}
JSON: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "seed": 5, "temperature": 0.9}
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, TEXT | {"temperature": 0}),
    "sampled, with log-probabilities": (COMPLETIONS, TEXT | {"logprobs": 1, "top_p": 0.9, "presence_penalty": 0.5}),
    "n": (COMPLETIONS, TEXT | {"n": 2}),
    "grammar": (COMPLETIONS, JSON | {"structured_outputs": {"json": SCHEMA}}),
    "tools": (
        CHAT,
        {
            "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300, "seed": 5, "temperature": 0.9,
            "tools": [TOOL], "tool_choice": "required",
        },
    ),
    "LoRA": (COMPLETIONS, TEXT | {"model": "tone"}),
    "speculation off": (COMPLETIONS, TEXT | {"speculation": {"max_tokens": 0}}),
}  # fmt: skip
SERVERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "speculation": (("--draft", "suffix"), tuple(FEATURES)),
    "klt": (("--kv", "klt2"), ("greedy", "n", "grammar")),
    "sparse attention": (("--sparse-attention", "topk:32"), ("greedy", "n", "grammar")),
}


@pytest.fixture(scope="module")
def model(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a chat template that renders tools, and an adapter beside it."""
    folder = tmp_path_factory.mktemp("replicas")
    shutil.copytree(demo, folder / "model")
    told = folder / "model" / "tokenizer_config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"chat_template": HERMES}))
    config = json.loads((demo / "config.json").read_text())
    shape = config["hidden_size"], config["intermediate_size"]
    save(folder / "tone", {f"model.layers.{at}.mlp.down_proj": shape for at in range(2)}, 1)
    return folder


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Served, tuple[str, ...]]]:
    if sys.platform != "linux":
        pytest.skip("looks at processes by /proc")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two replicas need two cores")
    options, features = SERVERS[request.param]
    made = Served(
        str(model / "model"), "--no-verify", "--replicas", "2", "--memory", "4GB", "--name", "demo",
        "--adapter", f"tone={model / 'tone'}", *options,
    )  # fmt: skip
    try:
        wait(made, lambda told: all(each["state"] == "ready" for each in told["replicas"]))
        yield made, features
    finally:
        made.process.terminate()
        try:
            made.process.wait(SECONDS)
        finally:
            made.end()


def ask(served: Served, path: str, body: dict[str, Any], begun: Callable[[], Any] = lambda: None) -> Any:
    """The choices of a streamed answer: texts, log-probabilities, calls and reasons by choice. `begun` is called once
    a tenth of the answer has come."""
    connection = http.client.HTTPConnection(served.address.host, served.address.port, timeout=SECONDS)
    connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    found: dict[int, list[Any]] = {}
    for count, line in enumerate(line for line in reply if line.startswith(b"data: {")):
        event = json.loads(line[6:])
        assert "error" not in event, event
        for choice in event["choices"]:
            part = choice.get("delta") or {"content": choice.get("text")}
            told = found.setdefault(choice["index"], ["", "", [], None])
            told[0] += part.get("content") or ""
            told[1] += "".join(call["function"].get("arguments", "") for call in part.get("tool_calls", ()))
            told[2] += (choice.get("logprobs") or {}).get("token_logprobs", [])
            told[3] = choice["finish_reason"] or told[3]
        if count == 20:
            begun()
    connection.close()
    return found


def told(served: Served) -> Any:
    connection = http.client.HTTPConnection(served.address.host, served.address.port, timeout=SECONDS)
    connection.request("GET", "/v1/engine")
    reply = connection.getresponse()
    found = json.loads(reply.read())
    connection.close()
    return found if reply.status == 200 else None


def wait(served: Served, true: Callable[[Any], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not ((found := told(served)) and true(found)):
        assert time.monotonic() < end, found
        time.sleep(0.02)


def engines(served: Served) -> list[int]:
    """Process ids of the engines, which one child of the server has forked."""
    below = (each for child in children(served.process.pid) for each in children(child))
    return [pid for pid in below if Path(f"/proc/{pid}/comm").read_text() == "attar-engine\n"]


def test_answers_go_on_when_an_engine_is_killed(served: tuple[Served, tuple[str, ...]]) -> None:
    """All features at once, on both engines; one of them is killed once every answer has begun."""
    made, features = served
    alone = {name: ask(made, *FEATURES[name]) for name in features}
    assert all(each[0] or each[1] for told in alone.values() for each in told.values())
    before = told(made)
    begun, found = threading.Barrier(len(features) + 1, timeout=SECONDS), dict[str, Any]()

    def again(name: str) -> None:
        found[name] = ask(made, *FEATURES[name], begun.wait)

    threads = [threading.Thread(target=again, args=(name,)) for name in features]
    for each in threads:
        each.start()
    begun.wait()
    os.kill(engines(made)[0], signal.SIGKILL)
    for each in threads:
        each.join(SECONDS)
    assert found == alone
    after = told(made)
    assert sum(each["deaths"] for each in after["replicas"]) == sum(each["deaths"] for each in before["replicas"]) + 1
    sent = sum(each["requests"] for each in after["replicas"]) - sum(each["requests"] for each in before["replicas"])
    assert sent > len(features), "none was continued"
    wait(made, lambda told: all(each["state"] == "ready" for each in told["replicas"]))


@pytest.mark.parametrize("served", ["klt"], indirect=True)
def test_engines_are_restarted_one_after_another_and_no_answer_ends(served: tuple[Served, tuple[str, ...]]) -> None:
    made, features = served
    alone = {name: ask(made, *FEATURES[name]) for name in features}
    before = engines(made)
    deaths = [each["deaths"] for each in told(made)["replicas"]]
    found, over = list[tuple[str, Any]](), threading.Event()

    def again(name: str) -> None:
        while not over.is_set():
            found.append((name, ask(made, *FEATURES[name])))

    threads = [threading.Thread(target=again, args=(name,)) for name in features]
    for each in threads:
        each.start()
    try:
        made.process.send_signal(signal.SIGUSR1)
        wait(made, lambda told: [each["restarts"] for each in told["replicas"]] == [1, 1])
    finally:
        over.set()
        for each in threads:
            each.join(SECONDS)
    assert len(found) > len(features)
    assert all(answer == alone[name] for name, answer in found)
    assert not set(engines(made)) & set(before)
    assert [each["deaths"] for each in told(made)["replicas"]] == deaths


@pytest.mark.parametrize("served", ["speculation"], indirect=True)
@pytest.mark.parametrize("name", ["demo", "tone"])
def test_a_prompt_goes_where_it_is_cached(served: tuple[Served, tuple[str, ...]], name: str) -> None:
    """The server's digests are the engine's, which told of its blocks: of the model and of an adapter."""
    made, _ = served
    body = {"model": name, "prompt": [5 + at % 90 for at in range(200)], "max_tokens": 1}
    before = told(made)["replicas"]
    for _ in range(3):
        ask(made, COMPLETIONS, body)
    after = told(made)["replicas"]
    cached = [
        now["cached_prompt_tokens"] - last["cached_prompt_tokens"] for now, last in zip(after, before, strict=True)
    ]
    assert sorted(cached) == [0, 2 * 192], "two of three find the three whole blocks, at one engine"


@pytest.mark.parametrize("served", ["klt"], indirect=True)
def test_a_new_engine_has_the_blocks_of_the_other(served: tuple[Served, tuple[str, ...]]) -> None:
    """An engine that is killed comes back with the prompts that the other has cached; and so does the other, then. What
    was passed on twice makes the answer that was computed."""
    made, _ = served
    body = {"prompt": [5 + 7 * at % 90 for at in range(330)], "max_tokens": 20, "temperature": 0, "logprobs": 1}
    alone = ask(made, COMPLETIONS, body)
    last = [each["cached_prompt_tokens"] for each in told(made)["replicas"]]
    ask(made, COMPLETIONS, body)
    now = [each["cached_prompt_tokens"] for each in told(made)["replicas"]]
    (first,) = (at for at in range(2) if now[at] > last[at])
    for number in (1 - first, first):
        deaths = told(made)["replicas"][number]["deaths"]
        kill(made, number)
        wait(made, lambda told, at=number, had=deaths: told["replicas"][at]["deaths"] == had + 1)  # type: ignore[misc]
        wait(made, lambda told, at=number: pulled(told["replicas"][at]) >= 5)  # type: ignore[misc]
    before = told(made)["replicas"]
    assert ask(made, COMPLETIONS, body) == alone
    after = told(made)["replicas"]
    sums = [sum(each["cached_prompt_tokens"] for each in replicas) for replicas in (before, after)]
    assert sums[1] - sums[0] == 320
    used = [sum(each["stats"]["reused_tokens"] for each in replicas) for replicas in (before, after)]
    assert used[1] - used[0] >= 320


def pulled(replica: dict[str, Any]) -> int:
    """Blocks that a replica's engine has taken over."""
    return 0 if replica["stats"] is None else replica["stats"]["prefill_peer"][0]


def kill(served: Served, number: int) -> None:
    """Kill the engine of a replica, which runs on its processors."""
    cores = set(told(served)["replicas"][number]["processors"])
    (pid,) = (pid for pid in engines(served) if os.sched_getaffinity(pid) == cores)
    os.kill(pid, signal.SIGKILL)
