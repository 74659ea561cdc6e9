"""OpenVINO GenAI's continuous batching behind OpenAI's completions, as little of it as `bench/serving.py` needs.

    .venv-openvino/bin/python bench/engines/serve_openvino.py --model FOLDER --port N [--prefix-caching] [...]

The package has the batching and no server. A server rather than a replay within the process, so that all engines are
driven by the same client over the same sockets; and the smallest that can be, so that what is measured is OpenVINO's:
one thread does nothing but step, and after a step it hands all new tokens over at once to a second one, which writes
the events. Prompts are token ids, and a token's text is its number: nothing is encoded or decoded, which a real server
would have to do. `/stats` says how much of the time that requests were running was outside of steps: the most that this
file can have cost OpenVINO.

Sampling is greedy, in OpenVINO, and answers have the length that was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import openvino
import openvino_genai as genai
from openvino_genai.py_openvino_genai import GenerationStatus

NAME = "openvino"


@dataclass(eq=False)
class Request:
    """One answer in the making. `events` gets lists of token ids, and None behind the last."""

    prompt: list[int]
    wanted: int
    events: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    made: int = 0


class Stepper(threading.Thread):
    """Owns the pipeline: takes requests between steps, and tells `loop` what each step made."""

    def __init__(self, pipe: genai.ContinuousBatchingPipeline, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self.asked: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.busy = self.stepping = 0.0  # seconds
        self.steps = 0
        self._pipe, self._loop = pipe, loop
        self._running: list[tuple[Request, Any]] = []
        self._count = 0

    def run(self) -> None:
        try:
            while True:
                self._admit(self.asked.get())
                began = time.perf_counter()
                while self._running:
                    self._step()
                    while not self.asked.empty():
                        self._admit(self.asked.get())
                self.busy += time.perf_counter() - began
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)  # nothing would ever answer again
            raise

    def _admit(self, request: Request) -> None:
        ids = openvino.Tensor(np.array([request.prompt], np.int64))
        options = genai.GenerationConfig(max_new_tokens=request.wanted, ignore_eos=True)
        self._count += 1
        self._running.append((request, self._pipe.add_request(self._count, ids, options)))

    def _step(self) -> None:
        began = time.perf_counter()
        self._pipe.step()
        self.stepping += time.perf_counter() - began
        self.steps += 1
        news: list[tuple[Request, list[int], bool]] = []
        for request, handle in self._running:
            if handle.can_read():
                tokens = next(iter(handle.read().values())).generated_ids
                request.made += len(tokens)
                news.append((request, tokens, request.made >= request.wanted))
            elif handle.get_status() == GenerationStatus.IGNORED:
                raise SystemExit(f"OpenVINO refuses a prompt of {len(request.prompt)} tokens: its cache is too small")
        if any(done for _, _, done in news):
            self._running = [each for each in self._running if each[0].made < each[0].wanted]
        if news:
            self._loop.call_soon_threadsafe(deliver, news)


def deliver(news: list[tuple[Request, list[int], bool]]) -> None:
    for request, tokens, done in news:
        request.events.put_nowait(tokens)
        if done:
            request.events.put_nowait(None)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Path and content of one request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    lengths = [line.split(":")[1] for line in lines if line.lower().startswith("content-length:")]
    return first.split(" ")[1], await reader.readexactly(int(lengths[0])) if lengths else b""


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def complete(stepper: Stepper, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Stream one completion."""
    request = Request(body["prompt"], body["max_tokens"])
    stepper.asked.put(request)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    while (tokens := await request.events.get()) is not None:
        text = "".join(f" {token}" for token in tokens)
        writer.write(event({"object": "text_completion", "choices": [{"index": 0, "text": text}]}))
    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": request.made}
    end = [{"index": 0, "text": "", "finish_reason": "length"}]
    writer.write(event({"object": "text_completion", "choices": end, "usage": usage}) + b"data: [DONE]\n\n")


async def serve(args: argparse.Namespace) -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = args.cache_gb
    scheduler.max_num_seqs = args.max_seqs
    scheduler.max_num_batched_tokens = args.step_tokens
    scheduler.dynamic_split_fuse = not args.no_split_fuse
    scheduler.enable_prefix_caching = args.prefix_caching
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads}
    for name, value in (
        ("DYNAMIC_QUANTIZATION_GROUP_SIZE", args.group),
        ("INFERENCE_PRECISION_HINT", args.precision),
        ("KV_CACHE_PRECISION", args.kv_precision),
    ):
        if value is not None:
            properties[name] = value
    stepper = Stepper(
        genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties), asyncio.get_running_loop()
    )
    stepper.start()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path, content = await read_request(reader)
        if path == "/v1/completions":
            await complete(stepper, json.loads(content), writer)
        else:
            outside = stepper.busy - stepper.stepping
            known = {
                "/v1/models": {"object": "list", "data": [{"id": NAME, "object": "model"}]},
                "/stats": {"busy_s": stepper.busy, "outside_steps_s": outside, "steps": stepper.steps},
            }
            found = json.dumps(known.get(path, {})).encode()
            status = b"200 OK" if path in known else b"404 Not Found"
            head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
            writer.write(head % (status, len(found)) + found)
        await writer.drain()
        writer.close()

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with await asyncio.start_server(answer, "127.0.0.1", args.port, backlog=1024):
        await stopped.wait()
    os._exit(0)  # the pipeline is given back by the system, without waiting for a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gb", type=int, default=4, help="of its KV cache")
    parser.add_argument("--max-seqs", type=int, default=32, help="sequences that run together")
    parser.add_argument("--step-tokens", type=int, default=256, help="tokens in one step")
    parser.add_argument("--no-split-fuse", action="store_true", help="whole prompts, apart from decode steps")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--group", type=int, help="activations that share a scale")
    parser.add_argument("--precision", choices=("f32", "bf16"), help="instead of OpenVINO's choice")
    parser.add_argument("--kv-precision", choices=("u8", "bf16", "f32"), help="instead of OpenVINO's choice")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
