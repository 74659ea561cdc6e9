"""An engine that speaks `protocol/messages.py` on a real Unix socket and knows no model: a token is a hash of what came
before it, a step takes a millisecond, and it fails when it is told to.

It runs in the loop of whoever starts it, or as a program (`python fake_engine.py SOCKET TOKENIZER STEP`, where `-` is
the socket of the settings on standard input).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from attar.protocol.messages import (
    Beat,
    Cancel,
    Command,
    Delta,
    Drain,
    Embed,
    Embedding,
    Event,
    Failed,
    Finished,
    PromptLogprobs,
    QueryStatus,
    Ready,
    Report,
    RequestStatus,
    Stats,
    Submit,
    encode,
)
from attar.protocol.request import TokenLogprob
from attar.sampling.stop_strings import StopChecker
from attar.text.tokenizer import Detokenizer, Tokenizer

CONTEXT = 512
BLOCKS, CACHED = 100, 12  # of the cache, and those of them that nobody uses
SLIDING = (3, 1, 2)  # free, active and cached blocks of layers with a sliding window


def embedding(prompt: Sequence[int]) -> list[float]:
    """The engine's vector of a prompt: of any length, as models' are."""
    return [((token * 31 + at) % 101) / 101 for at, token in enumerate((*prompt, *range(8)))][:8]


@dataclass
class Choice:
    request: Submit | None  # None: it has ended
    number: int
    detokenizer: Detokenizer
    stops: StopChecker
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """`held` stops the steps, `beats` off also the heart, and `tells` off what is said of requests that run; `busy` is
    how long it says that its step takes; `script` are tokens that every answer begins with; `fail` fails requests with
    a code after so many tokens; `die` ends the connection, as a process does when it dies."""

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        batch: int = 64,
        queue: int = 256,
        step: float = 0.001,
        context: int = CONTEXT,
        longest: int = 2**31,
        adapters: tuple[str, ...] = (),
        name: str = "fake",
        bits: str = "fake",
        images: bool = False,
        no_images: str = "",
    ) -> None:
        self.images, self.no_images = images, no_images
        self.path, self.tokenizer, self.batch, self.queue, self.step = path, tokenizer, batch, queue, step
        self.context, self.longest = context, longest  # tokens: of a request, and of an answer
        self.adapters, self.name, self.bits = adapters, name, bits
        self.commands: deque[Submit | Embed] = deque(maxlen=4096)  # that came
        self.held = False
        self.beats, self.busy = True, 0.0
        self.tells = True
        self.fail: tuple[str, int] | None = None
        self.script: tuple[int, ...] = ()
        self.choices: list[Choice] = []
        self.cancelled = 0
        self.generated = 0
        self.seen: set[tuple[bytes, tuple[int, ...]]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._out: list[Event] = []
        self._stats: Stats | None = None
        self._embeds = 0  # since the last step
        self._work = asyncio.Event()

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len({choice.request.id for choice in self.choices if choice.request is not None})

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=1 << 26)
        os.chmod(self.path, 0o600)

    async def stop(self) -> None:
        self._server.close()
        self.die()
        self.path.unlink(missing_ok=True)

    def die(self) -> None:
        """What the other side sees of a crash: the end of the stream."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None
        self.choices.clear()

    def say(self, raw: bytes) -> None:
        """Send bytes that need not be a frame."""
        assert self._writer is not None
        self._writer.write(raw)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, self._drained = writer, False
        blocks, vocab = (("weights", 10), ("cache", 20)), self.tokenizer.vocab_size
        ready = Ready(
            self.name, self.context, vocab, BLOCKS, 16, self.queue, blocks, self.adapters, self.batch, 8, self.bits,
            images=self.images, no_images=self.no_images,
        )  # fmt: skip
        writer.write(encode([ready]))
        steps = asyncio.get_running_loop().create_task(self._steps(writer))
        heart = asyncio.get_running_loop().create_task(self._beat(writer))
        decoder = msgspec.msgpack.Decoder(list[Command])
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                for command in decoder.decode(await reader.readexactly(size)):
                    self._obey(command)
                self._work.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            steps.cancel()
            heart.cancel()
            writer.close()
            self.choices.clear()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            if self.beats:
                writer.write(encode([Beat(self.busy)]))
            await asyncio.sleep(0.1)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit | Embed):
            self.commands.append(command)
            waiting = self._embeds + sum(not choice.tokens for choice in self.choices)
            if waiting + (command.n if isinstance(command, Submit) else 1) > self.queue:
                self._out.append(Failed(command.id, "full", "no room"))
                return
        if isinstance(command, Submit):
            params = command.params
            if params.prompt_logprobs is not None and not command.generated:
                self._out.append(PromptLogprobs(command.id, self._of_prompt(command.prompt, params.prompt_logprobs)))
            if params.max_tokens == 0:
                self._out += [Finished(command.id, number, "length", 0) for number in range(command.n - 1)]
                self._out.append(Finished(command.id, command.n - 1, "length", 0, None, self._report(command)))
                return
            for number, known in enumerate(command.generated or ((),) * command.n):
                if known is None:
                    continue
                detokenizer = Detokenizer(self.tokenizer, visible=params.visible_token_ids)
                choice = Choice(command, number, detokenizer, StopChecker(params.stop), list(known))
                for token in known:
                    choice.stops.push(detokenizer.push(token))
                self.choices.append(choice)
        elif isinstance(command, Embed):
            numbers = embedding(command.prompt)
            self._embeds += 1
            report = Report(prompt_tokens=len(command.prompt), reuse_ended="bypassed", limited_by={"compute": 1})
            self._out.append(Embedding(command.id, array("f", numbers).tobytes(), report))
        elif isinstance(command, Cancel):
            asked = next(
                (each.request for each in self.choices if each.request and each.request.id == command.id), None
            )
            if asked is not None:
                self.choices = [each for each in self.choices if each.request is not asked]
                self._out.append(Failed(command.id, "cancelled", "as told", self._report(asked)))
                self.cancelled += 1
        elif isinstance(command, QueryStatus):
            running = {each.request.id: each.request for each in self.choices if each.request is not None}
            known = [running[id] for id in command.ids if id in running and self.tells]
            self._out += [RequestStatus(request.id, self._report(request)) for request in known]
        elif isinstance(command, Drain):
            self._drained = True

    def _logprob(self, token: int, k: int) -> TokenLogprob:
        top = tuple(((token + i) % self.tokenizer.vocab_size, -0.5 - i) for i in range(k))
        return TokenLogprob(token, -0.5, top)

    def _of_prompt(self, prompt: tuple[int, ...], k: int) -> tuple[TokenLogprob, ...]:
        return tuple(self._logprob(token, k) for token in prompt[1:])

    async def _steps(self, writer: asyncio.StreamWriter) -> None:
        while True:
            if not self.choices and not self._out:
                self._work.clear()
                await self._work.wait()
            if not self.held:
                for choice in self.choices[: self.batch]:
                    self._advance(choice)
                self.choices = [choice for choice in self.choices if choice.request is not None]
                self._tell_stats()
            if self._out:
                writer.write(encode(self._out))
                self._out, self._embeds = [], 0
            await asyncio.sleep(self.step)

    def _advance(self, choice: Choice) -> None:
        request = choice.request
        if request is None:  # it failed with another of its choices
            return
        params = request.params
        if self.fail is not None and len(choice.tokens) >= self.fail[1]:
            self._out.append(Failed(request.id, self.fail[0], "as told", self._report(request)))
            for each in self.choices:
                if each.request is request:
                    each.request = None
            return
        seed = 0 if params.temperature == 0 else (params.seed or 0) + choice.number
        state = (request.prompt[-64:], seed, len(choice.tokens), tuple(choice.tokens[-4:]))
        token = zlib.crc32(repr(state).encode()) % self.tokenizer.vocab_size
        bias = params.logit_bias
        if bias and max(bias.values()) >= 100:
            token = max(bias, key=lambda key: bias[key])
        elif token == self.tokenizer.eos_id:  # an answer ends where a test says so, never by chance
            token += 1
        if len(choice.tokens) < len(self.script):
            token = self.script[len(choice.tokens)]
        choice.tokens.append(token)
        self.generated += 1
        ended = token == self.tokenizer.eos_id or token in params.stop_token_ids
        text = "" if ended else choice.stops.push(choice.detokenizer.push(token))
        full = len(choice.tokens) >= min(params.max_tokens, self.longest)
        reason = "stop" if ended or choice.stops.done else "length" if full else None
        if reason is not None and not choice.stops.done:
            text += choice.stops.push(choice.detokenizer.flush())
            text += "" if choice.stops.done else choice.stops.flush()
        logprobs = None if params.logprobs is None else (self._logprob(token, params.logprobs),)
        if params.logprob_token_ids:
            top = tuple((each, -1.0 - (sum(request.prompt) * each) % 11) for each in params.logprob_token_ids)
            logprobs = (TokenLogprob(token, -0.5, top),)
        self._out.append(Delta(request.id, choice.number, (token,), text, logprobs))
        if reason is not None:
            last = sum(each.request is request for each in self.choices) == 1
            report = self._report(request) if last else None
            self._out.append(
                Finished(request.id, choice.number, reason, len(choice.tokens), choice.stops.stopped, report)
            )
            choice.request = None

    def _report(self, request: Submit) -> Report:
        known = (request.cache_salt, request.prompt) in self.seen
        self.seen.add((request.cache_salt, request.prompt))
        length = len(request.prompt)
        reused = length - 1 if known else 0
        return Report(
            0.001, 0.002, 0.003, 0, 0, length, reused, "complete" if known else "differs", None, {"overhead": 1}
        )

    def _tell_stats(self) -> None:
        running = min(len(self.choices), self.batch)
        free = BLOCKS - CACHED - running
        states = b"\1" * running + b"\2" * CACHED + b"\0" * free
        waiting = len(self.choices) - running
        stats = Stats(
            running, waiting, free, running, CACHED, 1, 8, 2, self.generated, 3, 0.5, states, sliding_blocks=SLIDING
        )
        if stats != self._stats:
            self._out.append(stats)
            self._stats = stats


async def main(path: str, tokenizer: str, step: str) -> None:
    engine = FakeEngine(Path(path), Tokenizer.load(Path(tokenizer)), step=float(step))
    await engine.start()
    while not getattr(engine, "_drained", False):
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    socket, *rest = sys.argv[1:]
    if socket == "-":  # started as the supervisor starts an engine, with its settings on standard input
        socket = json.loads(sys.stdin.buffer.readline())["socket"]
    asyncio.run(main(socket, *rest))
