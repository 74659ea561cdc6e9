"""Several models over HTTP, each with a fake engine that can fail to load: what clients see, and what they never do."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from attar import faults
from attar.faults import Fault
from attar.protocol.settings import CHANGED, HOPELESS, Settings
from attar.server.errors import APIError
from attar.server.http.security import Keys
from attar.server.models import load_scheduler
from attar.server.models.load_scheduler import State
from attar.server.models.served import ModelSpec, ServedModel
from attar.server.models.server import ModelsServer
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Reply, Running
from tests.server.fake_engine import CONTEXT, FakeEngine

COMPLETIONS = "/v1/completions"
SIZE = 10
POINT = "models.lease"


class FakeProcess:
    """A process that takes `seconds` to load, or ends with `status` instead. It counts those that exist."""

    def __init__(self, owner: Several, model: ServedModel, gave_up: Callable[[int], None]) -> None:
        self.owner, self.model, self.gave_up, self.engine = owner, model, gave_up, None

    def start(self) -> None:
        owner, name = self.owner, self.model.name
        owner.held[name] += 1
        owner.peak = max(owner.peak, SIZE * owner.held.total())
        time.sleep(owner.seconds)
        if (status := owner.broken.get(name)) is not None:
            self.gave_up(status)
            return
        engine = FakeEngine(self.model.socket, owner.tokenizer, name=name)
        asyncio.run_coroutine_threadsafe(engine.start(), owner.loop).result()
        self.engine = owner.engines[name] = engine

    def kill(self) -> None:
        """Nothing hangs here."""

    def end(self) -> None:
        if self.engine is not None:
            asyncio.run_coroutine_threadsafe(self.engine.stop(), self.owner.loop).result()
            del self.owner.engines[self.model.name]
        self.owner.held[self.model.name] -= 1


class Several(Running):
    """A server of models a, b and c in memory for two, in a thread."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: ServerOptions, names: str = "abc") -> None:
        self.folder, self.tokenizer, self.options, self.names = folder, tokenizer, options, names
        self.engines: dict[str, FakeEngine] = {}
        self.held: Counter[str] = Counter()
        self.peak, self.seconds = 0, 0.0
        self.broken: dict[str, int] = {}
        self.port, self._begun = 0, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._begun.wait(60)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        settings = Settings("", "", context=CONTEXT, max_waiting=64)
        specs = [
            (ModelSpec(replace(settings, name=name), SIZE, self.tokenizer), self.folder / f"{name}.sock")
            for name in self.names
        ]
        self.server = ModelsServer(  # type: ignore[assignment]
            specs, 2 * SIZE, lambda model, served, gave_up: FakeProcess(self, model, gave_up), self.options
        )

        def started(url: str) -> None:
            self.port = int(url.rpartition(":")[2])
            self._begun.set()

        await self.server.run(started, signals=False)

    @property
    def pool(self) -> Any:
        return self.server.pool  # type: ignore[attr-defined]

    def states(self) -> dict[str, str]:
        return {each["id"]: each["state"] for each in self.get("/v1/models").json["data"]}

    def ask(self, model: str, **more: Any) -> Reply:
        return self.post(COMPLETIONS, {"model": model, "prompt": "a", "max_tokens": 4, **more})


@pytest.fixture
def several(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Several]:
    made = Several(tmp_path, tokenizer, ServerOptions(port=0))
    yield made
    assert made.stop()
    assert not made.held.total()


def test_a_model_is_loaded_on_first_use_and_the_least_recently_used_makes_room(several: Several) -> None:
    assert several.states() == dict.fromkeys("abc", "unloaded")
    for name in "ab":
        reply = several.ask(name)
        assert (reply.status, reply.json["model"]) == (200, name)
    assert several.ask("a").status == 200
    assert several.ask("c").json["model"] == "c"
    assert several.states() == {"a": "ready", "b": "unloaded", "c": "ready"}
    listed = several.get("/v1/models/b").json
    assert (listed["loaded"], listed["memory"], listed["max_model_len"]) == (False, SIZE, CONTEXT)
    assert several.peak <= 2 * SIZE


def test_a_model_must_be_named_and_known(several: Several) -> None:
    missing = several.post(COMPLETIONS, {"prompt": "a"})
    assert (missing.status, missing.code) == (400, "missing_field")
    unknown = several.ask("d")
    assert (unknown.status, unknown.code) == (404, "model_not_found")
    assert (several.get("/v1/models/d").status, several.get("/v1/nothing").status) == (404, 404)
    assert several.ask("a:latest").status == 200
    for body, code in ((b"{", "invalid_json"), (b"[]", "invalid_type"), (b'{"model": 1}', "invalid_type")):
        reply = several.post(COMPLETIONS, body)
        assert (reply.status, reply.code) == (400, code)
    assert several.get(COMPLETIONS).status == 405


def test_every_api_picks_the_model_of_its_body(several: Several) -> None:
    said = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": said, "max_tokens": 2}),
        ("/v1/messages", {"messages": said, "max_tokens": 2}),
        ("/v1/embeddings", {"input": "a"}),
        ("/api/chat", {"messages": said, "stream": False}),
    ):
        for name in "ab":
            assert several.post(path, {"model": name, **body}).json["model"] == name
    assert several.post("/tokenize", {"model": "b", "prompt": "a"}).json["count"] == 1
    assert [each["name"] for each in several.get("/api/ps").json["models"]] == ["a", "b"]
    assert [each["name"] for each in several.get("/api/tags").json["models"]] == ["a", "b", "c"]


def test_a_stored_answer_is_found_whichever_model_gave_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    several = Several(tmp_path, tokenizer, ServerOptions(port=0, response_store=1 << 20))
    made = several.post("/v1/responses", {"model": "b", "input": "Hello", "max_output_tokens": 16}).json
    assert several.get(f"/v1/responses/{made['id']}").json["model"] == "b"
    assert several.request("DELETE", f"/v1/responses/{made['id']}").json["deleted"]
    assert several.get(f"/v1/responses/{made['id']}").status == 404
    assert several.post("/api/pull", {"model": "d"}).status == 501
    assert several.stop()


def test_a_model_that_fails_to_load_harms_no_other(several: Several) -> None:
    several.broken = {"a": HOPELESS, "b": CHANGED}
    for name in "ab":
        reply = several.ask(name)
        assert (reply.status, reply.code) == (503, "model_failed")
        assert int(reply.headers["retry-after"]) >= 1
        assert several.ask(name).status == 503  # at once: it is not tried again yet
    assert several.ask("c").status == 200
    assert several.get("/readyz").status == 200
    assert several.states() == {"a": "failed", "b": "failed", "c": "ready"}


def test_a_fault_ends_its_own_request_alone(several: Several) -> None:
    several.call(lambda: faults.arm(Fault(POINT)))
    try:
        reply = several.ask("a")
    finally:
        several.call(faults.arm)
    assert (reply.status, reply.code) == (500, "internal")
    assert several.ask("a").status == 200


def test_a_failed_model_is_tried_again(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_scheduler, "BACK_OFF", 0.1)
    several.broken = {"a": 1}
    assert several.ask("a").status == 503
    several.broken.clear()
    several.wait(lambda: several.ask("a").status == 200)


def test_requests_wait_for_a_load_up_to_a_bound(several: Several) -> None:
    several.seconds = 1.0
    several.call(lambda: setattr(several.pool.scheduler.models["a"].places, "size", 2))
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: several.ask("a"), range(4)))
    assert sorted(reply.status for reply in replies) == [200, 200, 503, 503]
    refused = next(reply for reply in replies if reply.status == 503)
    assert refused.code == "loading"
    assert int(refused.headers["retry-after"]) >= 1


def test_a_client_that_leaves_while_a_model_loads_waits_no_more(several: Several) -> None:
    several.seconds = 1.0
    connection = http.client.HTTPConnection("127.0.0.1", several.port, timeout=60)
    body = json.dumps({"model": "a", "prompt": "a"}).encode()
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    several.wait(lambda: bool(several.pool.scheduler.models["a"].waiting))
    connection.close()
    several.wait(lambda: not several.pool.scheduler.models["a"].waiting)
    several.wait(lambda: several.states()["a"] == "ready")
    assert not several.pool._waiting


def test_a_busy_model_is_not_unloaded(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_scheduler, "PATIENCE", 0.1)
    for name in "ab":
        several.ask(name)
    for name in "ab":
        several.engines[name].held = True
    with ThreadPoolExecutor(3) as threads:
        running = []
        for name in "ab":
            running.append(threads.submit(several.ask, name))
            several.wait(lambda name=name: bool(several.engines[name].open))  # type: ignore[misc]
        waiting = threads.submit(several.ask, "c")
        several.wait(lambda: several.states()["a"] == "draining")
        time.sleep(0.3)
        assert set(several.engines) == {"a", "b"}
        several.engines["a"].held = False
        assert waiting.result().json["model"] == "c"
        assert running[0].result().json["model"] == "a"
        several.engines["b"].held = False
        assert running[1].result().json["model"] == "b"


def test_the_load_counts_requests_of_all_models_and_those_that_wait_for_one(several: Several) -> None:
    def load() -> int:
        return int(several.get("/load").json["server_load"])

    assert (load(), several.request("HEAD", "/load").status) == (0, 200)
    for name in "ab":
        several.ask(name)
        several.engines[name].held = True
    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(several.ask, name) for name in "ab"]
        several.wait(lambda: load() == 2)
        asking.append(threads.submit(several.ask, "c"))  # waits: there is memory for two, and both are busy
        several.wait(lambda: load() == 3)
        assert "c" not in several.engines
        for name in "ab":
            several.engines[name].held = False
        assert [each.result().status for each in asking] == [200] * 3
    several.wait(lambda: load() == 0)


def test_ping_needs_no_key_and_fails_where_every_loaded_engine_does(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trouble() -> None:
        raise APIError("engine_down", "the engine makes no progress")

    several = Several(tmp_path, tokenizer, ServerOptions(port=0, keys=Keys.of(("k" * 32,))))
    key = {"Authorization": "Bearer " + "k" * 32}
    assert several.get("/ping").json == {"status": "ready"}  # nothing is loaded yet, and anything can be
    assert several.get("/load").status == 401
    for name in "ab":
        assert several.post(COMPLETIONS, {"model": name, "prompt": "a", "max_tokens": 2}, key).status == 200
    for name, status in (("a", 200), ("b", 503)):
        monkeypatch.setattr(several.pool.models[name].dispatcher, "getting_on", trouble)
        assert several.get("/ping").status == several.request("HEAD", "/ping").status == status
    assert several.stop()


def test_one_route_for_all_picks_the_model_too(several: Several) -> None:
    for name in "ab":
        assert several.post("/invocations", {"model": name, "prompt": "a", "max_tokens": 2}).json["model"] == name
    assert several.post("/invocations", {"prompt": "a"}).code == "missing_field"


def test_metrics_tell_models_apart_and_why_finds_a_request_of_any(several: Several) -> None:
    several.ask("a")
    name = several.ask("b").json["id"]
    text = several.get("/metrics").body.decode()
    for line in (
        'attar_generated_tokens_total{model="a"} 4.0', 'attar_engine_up{model="b"} 1.0',
        'attar_engine_up{model="c"} 0.0', 'attar_model_state{model="c",state="unloaded"} 1.0',
        'attar_model_loads_total{model="a",outcome="loaded"} 1.0',
        'attar_requests_ended_total{model="b",outcome="length"} 1.0',
        'attar_http_requests_total{route="/v1/completions",status="200"} 2.0',
    ):  # fmt: skip
        assert line in text.splitlines()
    assert text.count("# TYPE attar_steps_total") == 1
    assert several.get(f"/v1/requests/{name}/why").json["generated_tokens"] == 4
    assert several.get("/v1/requests/nothing/why").status == 404
    assert several.get("/v1/engine").json["ready"]["model"] == "b"  # the last one used
    assert several.get("/v1/engine?model=a").json["ready"]["model"] == "a"


def test_the_document_names_the_models(several: Several) -> None:
    made = several.get("/openapi.json").json
    body = made["components"]["schemas"]["ChatBody"]
    assert body["properties"]["model"]["enum"] == ["a", "b", "c"]
    assert "model" in body["required"]


def test_an_end_refuses_what_waits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    several = Several(tmp_path, tokenizer, ServerOptions(port=0))
    several.seconds = 1.0
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(several.ask, "a")
        several.wait(lambda: bool(several.pool.scheduler.models["a"].waiting))
        several.loop.call_soon_threadsafe(several.server.stop)
        reply = waiting.result()
    assert (reply.status, reply.code) == (503, "draining")
    assert several.stop()
    assert not several.held.total()


def test_keys_are_asked_for_before_a_model_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    several = Several(tmp_path, tokenizer, ServerOptions(port=0, keys=Keys.of(("k" * 32, "l" * 32))))
    assert several.ask("a").status == 401
    assert several.pool.scheduler.models["a"].state is State.UNLOADED
    key = {"Authorization": "Bearer " + "k" * 32}
    reply = several.post(COMPLETIONS, {"model": "a", "prompt": "a", "max_tokens": 2}, key)
    assert reply.status == 200
    other = {"Authorization": "Bearer " + "l" * 32}
    path = f"/v1/requests/{reply.json['id']}/why"
    assert (several.get(path, key).status, several.get(path, other).status) == (200, 404)
    assert several.stop()


def test_a_thousand_random_requests_are_all_answered_by_their_own_model(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory for two, with short patience, clients that leave, and a fourth that is a stream."""
    monkeypatch.setattr(load_scheduler, "PATIENCE", 0.05)
    several.seconds = 0.02
    random = Random(3)
    asked = [(random.choice("abc"), random.randrange(1, 12), random.random() < 0.25) for _ in range(1000)]

    def one(each: tuple[str, int, bool]) -> bool:
        model, tokens, stream = each
        reply = several.ask(model, max_tokens=tokens, stream=stream)
        assert reply.status == 200, reply
        if stream:
            assert {event["model"] for event in reply.events[:-1]} == {model}
            return reply.events[-1] == "[DONE]"
        return reply.json["model"] == model and reply.json["usage"]["completion_tokens"] == tokens

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(one, asked))
    assert several.peak <= 2 * SIZE
    models = several.pool.scheduler.models.values()
    several.wait(lambda: not any(model.waiting or model.running for model in models))
    assert sum(model.loads for model in models) > 3
