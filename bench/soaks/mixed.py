"""L1: 64 clients that ask for everything the server has, for minutes, and check every answer.

Of the requests, half are streams, about 15 % hang up on the way, 10 % have long prompts, 5 % must be refused, and the
others ask for log probabilities, several choices or prompts, stop strings, biases, penalties, embeddings and tokens.
Canaries are among them throughout: fixed requests whose answers must stay the same to the bit. The server drafts, and
some requests are asked again without drafts: the answer must be the same to the bit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from soaks.served import Gate, Probe, Process, Served, State, idle
from soaks.wire import Address, Connection, Reply, once, percentile, request

CLIENTS = 64
MEMORY_BAR = 8 << 20  # bytes that a process may grow over the second half
MEMORY_SECONDS = 300  # shorter runs are all warm-up: their memory is only shown
LAG_BAR = 0.1
OPTIONS = ("--draft", "suffix")
CHAT, COMPLETIONS, MESSAGES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"

PREFIXES = [" ".join(f"{word} {number}" for number in range(30)) for word in ("sea", "hill", "lamp", "crow")]
TEXT = "the old man went down to the river and saw that the boat was gone so he sat under a tree until night came"
WORDS = TEXT.split()

Body = dict[str, Any]

CANARIES: list[tuple[str, Body]] = [
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "logprobs": 3}),
    (COMPLETIONS, {"prompt": PREFIXES[0] + " and", "max_tokens": 12, "seed": 7, "n": 2, "temperature": 0.9}),
    (CHAT, {"messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 16, "temperature": 0}),
    (EMBEDDINGS, {"input": ["a lamp", "a crow"], "encoding_format": "base64"}),
]

BAD: list[tuple[str, Any, int]] = [
    (COMPLETIONS, b'{"prompt": "a", ', 400),
    (COMPLETIONS, {"prompt": "a", "temperature": 3}, 400),
    (COMPLETIONS, {"prompt": "a", "unheard_of": 1}, 400),
    (COMPLETIONS, {"prompt": "a " * 2000}, 400),
    (COMPLETIONS, {"prompt": [99999999]}, 400),
    (COMPLETIONS, {"prompt": "a", "model": "another"}, 404),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "yaml"}}, 400),
    (MESSAGES, {"messages": [{"role": "user", "content": "a"}]}, 400),
    (EMBEDDINGS, {"input": []}, 400),
    ("/v1/nowhere", {}, 404),
    ("/livez", {}, 405),
]


@dataclass
class Seen:
    """What went wrong, and how much went at all."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """By gate: status, terminal, usage, canary, drafts."""
    examples: dict[str, str] = field(default_factory=dict)

    def fault(self, gate: str, what: str) -> None:
        self.wrong[gate] += 1
        self.examples.setdefault(gate, what[:400])


def essence(reply: Reply) -> Any:
    """What a canary's answer must be, whenever it is asked."""
    answer = reply.json
    return answer.get("choices") or answer.get("data")


async def run(served: Served, seconds: float, tell: Callable[[str], None], clients: int = CLIENTS) -> list[Gate]:
    """All of it. The server must be idle."""
    expected = [essence(await once(served.address, request("POST", path, body))) for path, body in CANARIES]
    watch = await Connection.open(served.address)  # which the server closes where nothing is asked for ten seconds
    await idle(watch)
    before, total = served.look(), (await State.look(watch)).blocks
    seen, samples, unaccounted = Seen(), [], 0
    probe, end = Probe(served.address), time.perf_counter() + seconds
    users = [
        asyncio.create_task(_client(served.address, random.Random(number), end, seen, expected))
        for number in range(clients)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    while not all(user.done() for user in users):
        await asyncio.wait(users, timeout=1.0)
        state, looks = await State.look(watch), served.look()
        samples.append((time.perf_counter() - began, looks))
        unaccounted += state.blocks != total
        tell(
            f"{samples[-1][0]:.0f}/{seconds:.0f} s: {seen.answers.total()} answers, {seen.wrong.total()} faults, "
            f"{state.running} running, {state.waiting} waiting, {state.active} active, {state.cached} cached, "
            f"{looks[0].anonymous >> 20} + {looks[1].anonymous >> 20} MB, {looks[0].descriptors} files"
        )
    for user in users:
        user.result()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    lags = probe.end()
    settled, state = await idle(watch)
    after = await served.settled(before)
    watch.transport.abort()
    return [
        *_correct(seen),
        Gate("blocks active at the end", str(state.active), "0", state.active == 0),
        Gate("blocks unaccounted for", f"{unaccounted + (state.blocks != total)} looks", "0", not unaccounted),
        *_resources("server", [(at, looks[0]) for at, looks in samples], before[0], after[0], seconds),
        *_resources("engine", [(at, looks[1]) for at, looks in samples], before[1], after[1], seconds),
        Gate("answers", f"{seen.answers.total()}: {dict(seen.answers.most_common())}"),
        Gate("/livez p99 / max", f"{1e3 * percentile(lags, 0.99):.0f} / {1e3 * max(lags):.0f} ms of {len(lags)}",
             "p99 <= 100 ms", percentile(lags, 0.99) <= LAG_BAR, timed=True),
        Gate("worst lag of the event loop", f"{1e3 * state.lag:.0f} ms", "<= 100 ms", state.lag <= LAG_BAR, timed=True),
        Gate("idle after the last answer", f"{settled:.2f} s"),
        Gate("load generator", f"{cpu / took:.2f} of a core"),
    ]  # fmt: skip


def _correct(seen: Seen) -> list[Gate]:
    names = {
        "status": "wrong statuses",
        "terminal": "streams without exactly one end",
        "usage": "usage that does not add up",
        "canary": "canaries that differ",
        "drafts": "answers that differ without drafts",
    }
    return [
        Gate(name, f"{seen.wrong[key]} {seen.examples.get(key, '')}".strip(), "0", seen.wrong[key] == 0)
        for key, name in names.items()
    ]


def _resources(
    name: str, samples: list[tuple[float, Process]], before: Process, after: Process, seconds: float
) -> list[Gate]:
    half = [(at, look.anonymous) for at, look in samples if at >= seconds / 2]
    grown = slope(half) * seconds / 2
    held = grown <= MEMORY_BAR if seconds >= MEMORY_SECONDS else None
    most = max(look.descriptors for _, look in samples)
    return [
        Gate(f"{name}: memory, growth over the second half", f"{grown / 2**20:+.1f} MiB "
             f"(from {before.anonymous >> 20} to {after.anonymous >> 20})", f"<= {MEMORY_BAR >> 20} MiB", held),
        Gate(f"{name}: descriptors", f"{before.descriptors} -> {after.descriptors}, at most {most}", "no more",
             after.descriptors <= before.descriptors),
        Gate(f"{name}: threads", f"{before.threads} -> {after.threads}", "no more than the pools hold",
             after.threads <= before.threads + 2),
    ]  # fmt: skip


def slope(points: Sequence[tuple[float, int]]) -> float:
    """Bytes a second, by least squares."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


async def _client(address: Address, rng: random.Random, end: float, seen: Seen, expected: list[Any]) -> None:
    connection = await Connection.open(address)
    while time.perf_counter() < end:
        try:
            if connection.closed or rng.random() < 0.2:  # some keep their connection, some do not
                connection.leave(rudely=False)
                connection = await Connection.open(address)
            await _ask(connection, rng, seen, expected)
        except (OSError, ValueError, KeyError) as error:  # no connection, or an answer that cannot be read
            seen.fault("status", repr(error))
            connection.leave(rudely=False)
    connection.leave(rudely=False)


async def _ask(connection: Connection, rng: random.Random, seen: Seen, expected: list[Any]) -> None:
    kind = rng.random()
    if kind < 0.05:
        path, body, status = rng.choice(BAD)
        await _bad(connection, path, body, status, seen)
    elif kind < 0.10:
        number = rng.randrange(len(CANARIES))
        await _canary(connection, number, expected[number], seen)
    elif kind < 0.25:
        await _cancelled(connection, rng, seen)
    elif kind < 0.30:
        await _audited(connection, rng, seen)
    else:
        await _good(connection, rng, seen, slow=kind > 0.97)


async def _bad(connection: Connection, path: str, body: Any, status: int, seen: Seen) -> None:
    seen.answers["refused"] += 1
    reply = await connection.ask(request("POST", path, body))
    if reply.status != status or not reply.complete or "error" not in reply.json:
        seen.fault("status", f"{reply.status}, not {status}: {path} {body!r:.100} {reply.body[:200]!r}")


async def _canary(connection: Connection, number: int, expected: Any, seen: Seen) -> None:
    seen.answers["canary"] += 1
    path, body = CANARIES[number]
    reply = await connection.ask(request("POST", path, body))
    if reply.status != 200:
        seen.fault("status", f"{reply.status}: a canary, {reply.body[:200]!r}")
    elif essence(reply) != expected:
        seen.fault("canary", f"{reply.body[:300]!r}, not {expected!r}")


async def _audited(connection: Connection, rng: random.Random, seen: Seen) -> None:
    seen.answers["with drafts and without"] += 1
    text = rng.choice(PREFIXES) + " " + " ".join(rng.choices(WORDS, k=6) * 3)
    body: Body = {"prompt": text, "max_tokens": 40, "temperature": rng.choice([0, 0.7]), "seed": 5, "logprobs": 2}
    replies = [
        await connection.ask(request("POST", COMPLETIONS, body | more))
        for more in ({}, {"speculation": {"max_tokens": 0}})
    ]
    if any(reply.status != 200 for reply in replies):
        seen.fault("status", f"{[reply.status for reply in replies]}: {body!r:.200}")
    elif essence(replies[0]) != essence(replies[1]):
        seen.fault("drafts", f"{replies[0].body[:300]!r}, not {replies[1].body[:300]!r}")


async def _cancelled(connection: Connection, rng: random.Random, seen: Seen) -> None:
    seen.answers["hung up"] += 1
    path, body, _ = made(rng)
    connection.begin(request("POST", path, body))
    if body.get("stream") and rng.random() < 0.5:
        await connection.until(rng.randrange(1, 20))
    else:
        await asyncio.sleep(rng.random() * 0.3)
    connection.leave(rudely=rng.random() < 0.5)


async def _good(connection: Connection, rng: random.Random, seen: Seen, slow: bool) -> None:
    path, body, tokens = made(rng)
    connection.begin(request("POST", path, body))
    if slow:  # reads nothing for a while
        connection.transport.pause_reading()
        await asyncio.sleep(rng.random())
        if not connection.closed:
            connection.transport.resume_reading()
    reply = await connection.end()
    seen.answers[path.rpartition("/")[2] + (", stream" if body.get("stream") else "")] += 1
    if reply.status != 200:
        seen.fault("status", f"{reply.status}: {path} {body!r:.200} {reply.body[:200]!r}")
    elif body.get("stream"):
        check_stream(reply, path, body, tokens, seen)
    elif not reply.complete:
        seen.fault("terminal", f"{path} {body!r:.200} was cut")
    elif path != EMBEDDINGS and path != "/tokenize":
        check_usage(reply.json["usage"], tokens, body, seen)


def made(rng: random.Random) -> tuple[str, Body, int]:
    """A good request: path, body, and how many tokens it must bring, or 0 where it may stop earlier."""
    path = rng.choices((COMPLETIONS, CHAT, MESSAGES, EMBEDDINGS, "/tokenize"), (40, 30, 15, 10, 5))[0]
    long = rng.random() < 0.1
    text = rng.choice([*PREFIXES, "", "", ""]) + " " + " ".join(rng.choices(WORDS, k=220 if long else 12))
    if path == EMBEDDINGS:
        return path, {"input": [text] * rng.randrange(1, 4), "pooling": rng.choice(["mean", "last"])}, 0
    if path == "/tokenize":
        return path, {"prompt": text}, 0
    tokens = rng.choice([4, 8, 16, 32, 100])
    body: Body = {"max_tokens": tokens, "stream": rng.random() < 0.6}
    if path == MESSAGES:
        return path, body | {"messages": [{"role": "user", "content": text}]}, 0
    body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body |= {"temperature": rng.choice([0, 0.7, 1.2]), "ignore_eos": True, "seed": rng.randrange(1000)}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    extra = rng.random()
    if extra < 0.1:
        body |= {"n": rng.randrange(2, 4)}
    elif extra < 0.2:
        body |= {"logprobs": 5} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    elif extra < 0.3:
        return path, body | {"stop": [" the", "a", "\n"]}, 0
    elif extra < 0.4:
        body |= {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.5}
    elif extra < 0.45:
        body |= {"logit_bias": {"100": 5, "200": -100}}
    elif extra < 0.5 and path == COMPLETIONS:
        body |= {"prompt": [text, text + " more"]}
        return path, body, 2 * tokens
    return path, body, tokens * body.get("n", 1)


def check_usage(usage: dict[str, Any], tokens: int, body: Body, seen: Seen) -> None:
    """That what was counted is what was asked for, and that it adds up."""
    if "input_tokens" in usage:
        right = 0 < usage["output_tokens"] <= body["max_tokens"]
    else:
        out = usage["completion_tokens"]
        right = usage["total_tokens"] == usage["prompt_tokens"] + out and (not tokens or out == tokens)
    if not right:
        seen.fault("usage", f"{usage} of {body!r:.200}")


def check_stream(reply: Reply, path: str, body: Body, tokens: int, seen: Seen) -> None:
    """That a stream ends once, in the way of its API, with every choice finished and its usage right."""
    events = reply.events
    usage: dict[str, Any] | None
    if path == MESSAGES:
        kinds = [event["type"] for event in events]
        right = kinds.count("message_stop") == 1 and kinds[-1] == "message_stop" and "error" not in kinds
        usage = next((event["usage"] for event in events if event["type"] == "message_delta"), {})
    else:
        chunks = [event for event in events if event != "[DONE]"]
        finished = Counter(
            choice["index"] for chunk in chunks for choice in chunk.get("choices", ()) if choice["finish_reason"]
        )
        choices = body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
        right = (
            events[-1:] == ["[DONE]"]
            and len(chunks) == len(events) - 1
            and not any("error" in chunk for chunk in chunks)
            and finished == Counter(range(choices))
        )
        usage = chunks[-1].get("usage") if chunks else None
    if not (right and reply.complete and usage):
        seen.fault("terminal", f"{path} {body!r:.200} ended with {reply.body[-300:]!r}")
    else:
        check_usage(usage, tokens, body, seen)
