"""A router in front of attar's servers: where requests go, what becomes of them when a host fails, and keys."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from attar.errors import UserError
from attar.protocol import block_digests, framing
from attar.protocol.messages import MAX_FRAME, CachedBlocks, encode
from attar.server.engine_client import heartbeat as heartbeat_module
from attar.server.fleet import attar_hosts, host_client, wire
from attar.server.fleet.router_key import PassedKeys, salt_secret
from attar.server.replicas.group import MAX_REPLAYS
from tests.server.fleet.conftest import ROUTER_KEY, Hosts

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "seed": 3}
KEYS = tuple(f"client-key-{at}-of-at-least-32-characters" for at in range(2))
FAILURES: dict[str, Callable[[Hosts, int], None]] = {
    "the host dies": lambda made, at: made.kill(at),
    "the engine dies": lambda made, at: made.call(made.engines[at].die),
    "connections are cut": lambda made, at: made.call(made.wires[at].cut),
    "the host drains": lambda made, at: made.call(made.hosts[at].stop),
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def choices(reply: Any) -> Any:
    assert reply.status == 200, reply.body
    return reply.json["choices"]


def metric(made: Hosts, name: str) -> float:
    lines = made.get("/metrics").body.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


def test_requests_are_shared_and_every_host_is_told_of(fleet: Callable[..., Hosts]) -> None:
    made = fleet(2, step=0.005)
    waits = [made.post_beside(COMPLETIONS, LONG | {"seed": at, "max_tokens": 100}) for at in range(4)]
    made.wait(lambda: made.with_work() == [0, 1])
    first = made.urls[0].removeprefix("http://")
    assert metric(made, f'attar_engine_up{{replica="{first}"}}') == 1
    assert metric(made, f'attar_replica_state{{replica="{first}",state="ready"}}') == 1
    told = made.get("/v1/engine").json["replicas"]
    assert [(each["host"], each["state"]) for each in told] == [(url, "ready") for url in made.urls]
    assert all(wait().status == 200 for wait in waits)
    made.wait(lambda: not made.group.open)
    assert made.group.router is not None
    made.group.router.check()
    assert made.get("/readyz").status == 200
    made.wait(lambda: all(host.middleware.open == 1 for host in made.hosts))  # the stream of events


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": 2}, {"prompt": ["a", "b"]}], ids=str)
def test_answers_are_those_of_a_host(fleet: Callable[..., Hosts], more: dict[str, Any]) -> None:
    made = fleet(1)
    body = json.dumps(LONG | more).encode()
    connection = http.client.HTTPConnection("127.0.0.1", made.wires[0].target, timeout=60)
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    alone = json.loads(connection.getresponse().read())["choices"]
    connection.close()
    assert choices(made.post(COMPLETIONS, LONG | more)) == alone


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("more", [{}, {"n": 2, "logprobs": 1}], ids=str)
def test_an_answer_goes_on_at_another_host(fleet: Callable[..., Hosts], failure: str, more: dict[str, Any]) -> None:
    made = fleet(2, step=0.003)
    alone = choices(made.post(COMPLETIONS, LONG | more))
    wait = made.post_beside(COMPLETIONS, LONG | more)
    at = made.half_way()
    FAILURES[failure](made, at)
    assert choices(wait()) == alone
    assert metric(made, 'attar_replays_total{outcome="continued"}') == 1
    deaths = [each.deaths for each in made.group.replicas]
    assert sum(deaths) == (failure in ("the host dies", "the engine dies")), "deaths, and nothing else, are attributed"


def test_a_silent_host_is_left_and_comes_back(fleet: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.server.engine_client.client.STOPPED", 2.0)
    made = fleet(2, step=0.003)
    alone = choices(made.post(COMPLETIONS, LONG))
    wait = made.post_beside(COMPLETIONS, LONG)
    at = made.half_way()
    made.call(made.wires[at].free.clear)
    assert choices(wait()) == alone
    assert made.states()[at] == "stuck"
    made.call(made.wires[at].free.set)
    made.wait(lambda: made.states() == ["ready", "ready"])


def test_a_silent_engine_is_told_of_once_it_is_heard(fleet: Callable[..., Hosts]) -> None:
    made = fleet(1)
    heartbeat = made.hosts[0].dispatcher.engine.heartbeat
    silence = threading.Event()

    def keep() -> None:
        heartbeat.silent = heartbeat_module.SILENCE
        if not silence.is_set():
            made.loop.call_later(0, keep)

    made.call(keep)
    connection = http.client.HTTPConnection("127.0.0.1", made.wires[0].target, timeout=60)
    connection.request("GET", wire.EVENTS, headers={"X-Attar-Router-Key": ROUTER_KEY})
    time.sleep(3 * wire.BEAT_SECONDS)
    silence.set()
    reply, buffer = connection.getresponse(), bytearray()
    while (body := framing.take(buffer, MAX_FRAME)) is None:
        buffer += reply.read1(1 << 16)
    told = msgspec.msgpack.decode(body, type=wire.Told)
    assert [type(each) for each in told.events].count(CachedBlocks) == 1, "and not once a beat"
    connection.close()


def test_a_request_ends_after_its_replays(fleet: Callable[..., Hosts]) -> None:
    made = fleet(MAX_REPLAYS + 2, step=0.003)
    wait = made.post_beside(COMPLETIONS, LONG)
    killed = []
    for _ in range(MAX_REPLAYS + 1):
        killed.append(made.half_way(5))
        made.kill(killed[-1])
        made.wait(lambda: all(relay.engine not in killed for relay in list(made.group.open.values())))
    assert wait().code == "engine_down"
    assert len(set(killed)) == MAX_REPLAYS + 1
    assert metric(made, 'attar_replays_total{outcome="exhausted"}') == 1


def test_only_a_host_of_the_same_bits_continues_an_answer(fleet: Callable[..., Hosts]) -> None:
    made = fleet(2, step=0.003, each=lambda at: {"bits": f"of host {at}"})
    alone = choices(made.post(COMPLETIONS, LONG))
    wait = made.post_beside(COMPLETIONS, LONG)
    at = made.half_way()
    sent = len(made.engines[1 - at].commands)
    made.kill(at)
    made.wait(lambda: made.states()[at] == "down")
    time.sleep(0.2)
    assert len(made.engines[1 - at].commands) == sent
    made.wires[at].refuse = False
    assert choices(wait()) == alone


@pytest.mark.parametrize("says", [
    b"\x00\xff garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\"a\": 1}\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n" + b"[" * 200_000,
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000,
], ids=["no HTTP", "another answer", "a redirect", "too long", "endless headers"])  # fmt: skip
def test_one_bad_host_does_not_disturb_the_others(fleet: Callable[..., Hosts], says: bytes) -> None:
    made = fleet(2)

    def spoil() -> None:
        made.wires[0].says = says
        made.wires[0].cut()

    made.call(spoil)
    made.wait(lambda: made.states() == ["down", "ready"])
    assert all(made.post(COMPLETIONS, LONG | {"max_tokens": 5}).status == 200 for _ in range(4))
    made.wires[0].says = None
    made.wait(lambda: made.states() == ["ready", "ready"])


def test_full_hosts_are_passed_over_and_say_when(fleet: Callable[..., Hosts]) -> None:
    made = fleet(2, queue=2, batch=1, step=0.005)
    for engine in made.engines:
        engine.held = True
    waits = [made.post_beside(COMPLETIONS, LONG | {"seed": at, "max_tokens": 10}) for at in range(6)]
    made.wait(lambda: sum(map(len, (engine.choices for engine in made.engines))) >= 4)
    reply = made.post(COMPLETIONS, LONG | {"seed": 9})
    assert (reply.status, reply.code) == (429, "overloaded")
    assert int(reply.headers["retry-after"]) >= 1
    for engine in made.engines:
        engine.held = False
    assert {wait().status for wait in waits} <= {200, 429}


def test_keys_of_clients_are_checked_by_hosts_and_reach_them_alone(fleet: Callable[..., Hosts]) -> None:
    made = fleet(2, keys=KEYS)
    assert made.post(COMPLETIONS, LONG).code == "invalid_api_key"
    assert made.post(COMPLETIONS, LONG, bearer("wrong" * 10)).code == "invalid_api_key"
    for key in KEYS:
        choices(made.post(COMPLETIONS, LONG | {"max_tokens": 3}, bearer(key)))
    salts = {command.cache_salt for engine in made.engines for command in engine.commands}
    assert len(salts) == 2, "each key has a cache of its own, made by the hosts"
    keys = PassedKeys((), salt_secret(ROUTER_KEY), True)
    known = {keys.cache_salt({b"authorization": f"Bearer {key}".encode()}) for key in KEYS}
    assert salts == known, "and the router knows its digests"


@pytest.mark.parametrize("path", [wire.HELLO, wire.TOKENIZER, wire.EVENTS, wire.REQUESTS])
@pytest.mark.parametrize("key", ["", "x" * 40, KEYS[0]])
def test_internal_routes_need_the_router_key(fleet: Callable[..., Hosts], path: str, key: str) -> None:
    made = fleet(1, keys=KEYS)
    for port, status in ((made.wires[0].target, 401), (made.port, 401)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = bearer(KEYS[0]) | {"X-Attar-Router-Key": key, "Content-Type": "application/json"}
        connection.request("POST" if path == wire.REQUESTS else "GET", path, b"{}", headers)
        reply = connection.getresponse()
        assert reply.status == status, "a router serves none of them"
        reply.read()
        connection.close()


def test_a_router_key_is_no_api_key(fleet: Callable[..., Hosts]) -> None:
    made = fleet(1, keys=KEYS)
    connection = http.client.HTTPConnection("127.0.0.1", made.wires[0].target, timeout=60)
    for method, path in (("GET", "/v1/engine"), ("POST", COMPLETIONS), ("POST", wire.REQUESTS)):
        headers = {"X-Attar-Router-Key": ROUTER_KEY, "Content-Type": "application/json"}
        connection.request(method, path, b"{}", headers)
        reply = connection.getresponse()
        assert (reply.status, b"invalid_api_key" in reply.read()) == (401, True)
    connection.close()


@pytest.mark.parametrize("body", [b"", b"[1]", b"{}", b'{"type": "submit"}', b'{"type":"submit","id":"a","prompt":[1],'
    b'"params":{"temperature":-1}}', b'{"type":"submit","id":"a","prompt":[1],"params":{},"n":-5}'])  # fmt: skip
def test_bodies_that_are_no_requests_are_refused(fleet: Callable[..., Hosts], body: bytes) -> None:
    made = fleet(1)
    connection = http.client.HTTPConnection("127.0.0.1", made.wires[0].target, timeout=60)
    headers = {"X-Attar-Router-Key": ROUTER_KEY, "Content-Type": "application/json"}
    connection.request("POST", wire.REQUESTS, body, headers)
    reply = connection.getresponse()
    assert (reply.status, b"error" in reply.read()) == (400, True)
    connection.close()


def test_blocks_are_known_by_the_clients_salt_and_after_a_lost_connection(fleet: Callable[..., Hosts]) -> None:
    made = fleet(2, keys=KEYS)
    tokens = array("i", [5 + at % 90 for at in range(70)])
    keys = PassedKeys((), salt_secret(ROUTER_KEY), True)
    salts = {key: keys.cache_salt({b"authorization": f"Bearer {key}".encode()}) for key in KEYS}

    def tell(at: int, key: str, evict: bool = False) -> None:
        salt = salts[key]
        assert salt is not None
        digests = block_digests.packed(
            block_digests.chain(block_digests.key_of(block_digests.salt_of(0, salt)), tokens, 16)
        )
        change = CachedBlocks(b"", digests) if evict else CachedBlocks(digests)
        made.call(lambda: made.engines[at].say(encode([change])))

    def matched(key: str) -> list[int]:
        salt, router = salts[key], made.group.router
        assert salt is not None
        assert router is not None
        digests = block_digests.chain(block_digests.key_of(block_digests.salt_of(0, salt)), tokens, 16)
        found = router.prefixes.matched(digests, (0, 1))
        return [found[0], found[1]]

    tell(1, KEYS[0])
    made.wait(lambda: matched(KEYS[0]) == [0, 4])
    assert matched(KEYS[1]) == [0, 0], "of another key's salt"
    made.call(made.wires[1].cut)
    tell(1, KEYS[1])
    made.wait(lambda: matched(KEYS[1]) == [0, 4])
    assert matched(KEYS[0]) == [0, 4], "resumed by number"
    before = len(made.engines[1].commands)
    for _ in range(3):
        choices(made.post(COMPLETIONS, {"prompt": list(tokens), "max_tokens": 1}, bearer(KEYS[0])))
    assert len(made.engines[1].commands) == before + 3, "a prompt goes where it is cached"
    tell(1, KEYS[0], evict=True)
    made.wait(lambda: matched(KEYS[0]) == [0, 0])


@pytest.mark.parametrize("seed", range(3))
def test_hosts_that_fail_at_random_lose_no_token(fleet: Callable[..., Hosts], seed: int) -> None:
    """Deaths, cut connections and engines that end; a host comes back before the next fails."""
    rng = random.Random(seed)
    made = fleet(3, step=0.002)
    bodies = [LONG | {"seed": at, "max_tokens": 120, "prompt": "ab" * rng.randint(1, 40)} for at in range(6)]
    alone = [choices(made.post(COMPLETIONS, body)) for body in bodies]
    waits = [made.post_beside(COMPLETIONS, body) for body in bodies]
    made.wait(lambda: len(made.group.open) > 0)
    for _ in range(2):
        at = made.half_way(over=lambda: not made.group.open)
        FAILURES[rng.choice(["the host dies", "connections are cut", "the engine dies"])](made, at)
        time.sleep(0.1)
        made.wires[at].refuse = False
        made.wait(lambda: made.states() == ["ready"] * 3 or not made.group.open)
    found = [wait() for wait in waits]
    assert all(reply.status == 200 for reply in found), [reply.body for reply in found if reply.status != 200]
    assert [choices(reply) for reply in found] == alone
    made.wait(lambda: not made.group.open)
    assert made.group.router is not None
    made.group.router.check()
    assert not made.group.router.routed
    assert made.group.places.total == made.group.places.running == 0
    assert all(not each.client._carried for each in made.group.replicas)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url", ["", "10.0.0.7", "ftp://a", "http://", "http://a:b", "http://a b", "http://u:p@a", "http://a?b"]
)
def test_addresses_of_hosts(url: str) -> None:
    with pytest.raises(UserError) as refused:
        attar_hosts.check_urls([url])
    assert refused.value.code == "address_invalid"
    with pytest.raises(UserError):
        attar_hosts.check_urls(["http://a/", "http://a"])
    assert attar_hosts.check_urls(["http://a:1/chat/", "https://b"]) == ("http://a:1/chat", "https://b")
    assert host_client.DOUBT < host_client.AGAIN_SECONDS
