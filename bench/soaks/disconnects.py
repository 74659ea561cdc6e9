"""L6: clients that go away, 10,000 of them, at every phase of a request, with a reset or with an orderly end.

Half of them come and go as they like, 48 at a time on 16 slots, so that a disconnect meets a queue, a prompt being
computed, or a stream, each among others that stay. The other half comes in rounds of 48, of which all leave in the same
moment: how long it takes from there until the engine has every block back is measured, by asking /metrics, which
answers from what the engine last said (it says so at once when it falls idle). The bar is 100 ms and a full step; what
the asking takes, and what 48 at once take of the server's processor, is in the figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable

from soaks.mixed import CANARIES, LAG_BAR, PREFIXES, WORDS, Body, essence
from soaks.served import Gate, Served, State, idle
from soaks.wire import Address, Connection, once, percentile, request

COUNT = 10_000
AT_ONCE = 48
OPTIONS = ("--max-running", "16")
BACK_BAR = 0.1  # seconds, beyond a step
PHASES = ("headers", "body", "sent", "working", "answering", "ending")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/embeddings")


async def run(served: Served, count: int, tell: Callable[[str], None]) -> list[Gate]:
    """All of it. The server must be idle."""
    path, body = CANARIES[0]
    canary = request("POST", path, body)
    for warm_path, warm_body in CANARIES:  # what serves a first chat stays, such as the process that renders templates
        await once(served.address, request("POST", warm_path, warm_body))
    expected = essence(await once(served.address, canary))
    watch = await Connection.open(served.address)  # now: who asks nothing for ten seconds is hung up on
    _, state = await idle(watch)
    total, before = state.blocks, served.look()
    rng, phases, differing = random.Random(6), Counter[str](), 0
    began, cpu = time.perf_counter(), time.process_time()

    free = count // 2
    limit = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with limit:
            phases[await _leave(served.address, rng, None)] += 1

    for at in range(0, free, 500):
        tasks = [asyncio.create_task(one()) for _ in range(min(500, free - at))]
        differing += essence(await once(served.address, canary)) != expected  # while they come and go
        await asyncio.gather(*tasks)
        tell(f"{phases.total()}/{count}, canaries that differ: {differing}")
    watch.transport.abort()  # it may have been idle for longer than the server keeps it
    watch = await Connection.open(served.address)
    await idle(watch)

    step = await _full_step(served.address, watch)
    backs: list[float] = []
    leaks = 0
    for at in range(free, count, AT_ONCE):
        go = asyncio.Event()
        leaving = [asyncio.create_task(_leave(served.address, rng, go)) for _ in range(min(AT_ONCE, count - at))]
        await asyncio.sleep(0.02 + 0.1 * rng.random())
        go.set()
        phases.update(await asyncio.gather(*leaving))
        back, state = await idle(watch)
        backs.append(back)
        leaks += state.blocks != total
        if at % (AT_ONCE * 10) < AT_ONCE:
            differing += essence(await once(served.address, canary)) != expected
            tell(f"{phases.total()}/{count}, back within {1e3 * max(backs):.0f} ms, canaries that differ: {differing}")
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    differing += essence(await once(served.address, canary)) != expected
    _, state = await idle(watch)
    after = await served.settled(before)
    watch.transport.abort()
    return [
        Gate("disconnects", f"{phases.total()} in {took:.0f} s: {dict(phases.most_common())}"),
        Gate("blocks that did not come back", str(total - state.free - state.cached), "0", state.blocks == total),
        Gate("rounds after which one was missing", f"{leaks} of {len(backs)}", "0", leaks == 0),
        Gate("all blocks back, p50 / p99 / max",
             " / ".join(f"{1e3 * each:.0f}" for each in (percentile(backs, 0.5), percentile(backs, 0.99), max(backs)))
             + " ms"),
        Gate("the same beyond a full step, max", f"{1e3 * (max(backs) - step):.0f} ms, a step {1e3 * step:.0f} ms",
             "<= 100 ms", max(backs) - step <= BACK_BAR, timed=True),
        Gate("canaries that differ", str(differing), "0", differing == 0),
        Gate("descriptors", f"server {before[0].descriptors} -> {after[0].descriptors}, "
             f"engine {before[1].descriptors} -> {after[1].descriptors}", "no more",
             after[0].descriptors <= before[0].descriptors and after[1].descriptors <= before[1].descriptors),
        Gate("worst lag of the event loop", f"{1e3 * state.lag:.0f} ms", "<= 100 ms", state.lag <= LAG_BAR, timed=True),
        Gate("load generator", f"{cpu / took:.2f} of a core"),
    ]  # fmt: skip


async def _full_step(address: Address, watch: Connection) -> float:
    """Seconds of a full step, such as a client may leave in: 500 tokens of a prompt; the median of five."""
    took = []
    for _ in range(5):
        before = await State.look(watch)
        await once(address, request("POST", "/v1/embeddings", {"input": [list(range(10, 510))]}))
        _, after = await idle(watch)
        took.append((after.step_seconds - before.step_seconds) / max(1, after.steps - before.steps))
    return percentile(took, 0.5)


async def _leave(address: Address, rng: random.Random, go: asyncio.Event | None) -> str:
    """Come, get to some phase of a request, and go: at once, or when `go` says so. Returns the phase."""
    phase, rude = rng.choice(PHASES), rng.random() < 0.5
    path = rng.choice(PATHS if phase != "ending" else PATHS[:2])
    stream = path != "/v1/embeddings" and (phase == "ending" or rng.random() < 0.6)
    data = _request(rng, path, stream, tokens=rng.randrange(2, 12) if phase == "ending" else 300)
    connection = await Connection.open(address)
    with contextlib.suppress(ConnectionError):
        if phase == "headers":
            connection.begin(data[: rng.randrange(60)])
        elif phase == "body":
            connection.begin(data[: -rng.randrange(1, 30)])
        else:
            connection.begin(data)
            if go is None:
                await _wait(connection, rng, phase, stream)
        if go is not None:
            await go.wait()
        connection.leave(rude)
    return f"{phase}, {'stream' if stream else 'whole'}" if phase not in ("headers", "body") else phase


async def _wait(connection: Connection, rng: random.Random, phase: str, stream: bool) -> None:
    """Until the phase to leave in: nothing; while it waits or is computed; in the stream; before its last event."""
    if phase == "working":
        await asyncio.sleep(rng.random() * 0.1)
    elif phase == "answering" and stream:
        await connection.until(rng.randrange(1, 8))
    elif phase == "answering":
        await asyncio.sleep(rng.random())
    elif phase == "ending":  # finish_reason has come, [DONE] may be on its way
        await connection.until(rng.randrange(2, 12))


def _request(rng: random.Random, path: str, stream: bool, tokens: int) -> bytes:
    text = f"{rng.choice(PREFIXES)} {' '.join(rng.choices(WORDS, k=rng.choice([3, 150])))}"
    if path == "/v1/embeddings":
        return request("POST", path, {"input": [text] * 8})
    body: Body = {"max_tokens": tokens, "stream": stream}
    if path != "/v1/messages":
        body |= {"ignore_eos": True, "n": rng.choice([1, 1, 1, 3])}
    body |= {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return request("POST", path, body)
