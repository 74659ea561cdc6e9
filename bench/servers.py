"""The servers that `serving.py` compares: how each is set, made ready, started and stopped.

What a peer is best at depends on the machine and on the trace; `BEST` is the outcome of trying on a Xeon with AMX, two
threads, Llama-3.2-1B shape:

* llama.cpp (its own `llama-batched-bench`, 32 sequences at 512 tokens): flash attention, its default, decodes 50
  tokens/s, without it 78 (16 sequences 45 and 67, 64 without 80); prefill of one prompt is 210 and 180. A q8_0 cache
  with flash attention decodes 86 at 512 tokens, no more than without at 1,280, and costs a quarter of the prefill;
  a bf16 cache changes nothing, f32 halves both. One unified cache for all sequences costs 40 % of prefill and 25 % of
  decoding where nothing is shared. Larger micro-batches are slower, smaller ones no faster.
* OpenVINO (32 conversations at a quarter of their length): its defaults give 85 output tokens/s; int8 activations in
  groups of 128, which takes the f32 hint, 107; twice the tokens in a step 104.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import CACHE, CHILDREN, ROOT, environment

from attar.load.client import Server, fetch

READY = 300.0  # seconds that a server may take to load
PATIENCE = 4 * 3600.0  # seconds that one answer may take
PEERS = ("llama.cpp", "openvino")


@dataclass(frozen=True)
class Engine:
    """How to start a server; {port}, {cache} and {threads} are filled in. `files` says how its model is made."""

    command: tuple[str, ...]
    ready: str  # path that answers with 200 as soon as requests are
    version: tuple[str, ...]
    files: tuple[tuple[str, tuple[str, ...]], ...]  # name in the cache, and the command that writes it
    extra: Mapping[str, Any]  # fields of every request
    stats: str | None = None  # path to what it says about a run


@dataclass(frozen=True)
class Best:
    """The peers' best settings for one kind of trace."""

    llamacpp: tuple[str, ...]
    openvino: tuple[str, ...]


# Conversations with long answers: decoding counts. llama.cpp's flash attention is the slower of its two for many rows.
ANSWERS = Best(
    ("--parallel", "32", "--ctx-size", "139264", "--flash-attn", "off"),
    ("--group", "128", "--precision", "f32", "--step-tokens", "512"),
)
# Long prompts and short answers: what counts is prefill, and slots with room for 7,600 tokens.
PROMPTS = Best(
    ("--parallel", "16", "--ctx-size", "131072", "--flash-attn", "on"), ("--prefix-caching", "--step-tokens", "512")
)
BEST = {"sharegpt": ANSWERS, "burst": PROMPTS, "mooncake": PROMPTS}


def engines(args: argparse.Namespace, workload: str) -> dict[str, Engine]:
    """By name, as they are set for a workload. What `--attar` and its like give comes last, and so wins."""
    best = BEST[workload]
    python = sys.executable
    served = (python, "-m", "attar", "serve", "{cache}/llama-3.2-1b-attar", "--port", "{port}")
    many = ("--max-requests", "2048", "--scheduler", "max-waiting=2048", "--deadline", str(PATIENCE))
    ours = (*served, *many, "--max-running", str(args.running), "--max-tokens-in-cache", str(args.cache_tokens))
    more = tuple(shlex.split(args.attar))
    made = (("llama-3.2-1b-attar", (python, str(CHILDREN / "make_attar.py"), "--out", "{out}")),)
    version = (python, "-c", "import attar; print('attar', attar.__version__)")
    table = {
        "attar": Engine((*ours, *more), "/readyz", version, made, {}),
        "attar static": Engine((*ours, *more, "--scheduler", "policy=static"), "/readyz", version, made, {}),
    }
    llama = str(args.llamacpp_python)
    plain, words = "llama-3.2-1b-q4_0.gguf", "llama-3.2-1b-q4_0-words.gguf"
    shape = ("--shape", "llama-3.2-1b")
    table["llama.cpp"] = Engine(
        (
            str(args.llamacpp_server), "--model", f"{{cache}}/{words}", "--port", "{port}", "--alias", "llama.cpp",
            "--threads", "{threads}", "--threads-batch", "{threads}", "--threads-http", "512", "--no-ui",
            *best.llamacpp, *shlex.split(args.llamacpp),
        ),
        "/health",
        (str(args.llamacpp_server), "--version"),
        (
            (plain, (llama, str(CHILDREN / "make_gguf.py"), *shape, "--format", "q4_0", "--out", "{out}")),
            (words, (llama, str(CHILDREN / "make_gguf_words.py"), "--model", f"{{cache}}/{plain}", "--out", "{out}")),
        ),
        # Greedy at the least cost: its default chain sorts more of the vocabulary than it needs.
        {"samplers": ["top_k"], "top_k": 1},
    )  # fmt: skip
    openvino = str(args.openvino_python)
    table["openvino"] = Engine(
        (
            openvino, str(CHILDREN / "serve_openvino.py"), "--model", "{cache}/llama-3.2-1b-int4", "--port", "{port}",
            "--threads", "{threads}", "--max-seqs", str(args.running), *best.openvino, *shlex.split(args.openvino),
        ),
        "/v1/models",
        (openvino, "-c", "import openvino_genai as g; print('openvino-genai', g.__version__)"),
        (("llama-3.2-1b-int4", (openvino, str(CHILDREN / "make_openvino.py"), *shape, "--out", "{out}")),),
        {},
        "/stats",
    )  # fmt: skip
    return table


def prepare(engine: Engine, threads: int) -> str:
    """Make what is missing of its files; its version. `RuntimeError` with the end of what was said."""
    for name, command in engine.files:
        out = CACHE / name
        if not out.exists():
            print(f"making {out.relative_to(ROOT)}", file=sys.stderr, flush=True)
            call([word.format(out=out, cache=CACHE) for word in command], threads)
    said = call(engine.version, threads)
    return " ".join(said.split())


def call(command: Sequence[str], threads: int) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment(threads))
    except OSError as error:
        raise RuntimeError(f"{error}; `make bench-serving` sets the peers up") from None
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"status {done.returncode} of {shlex.join(command)}\n{end}")
    return done.stdout or done.stderr


@contextmanager
def serving(name: str, engine: Engine, threads: int) -> Iterator[tuple[Server, Path]]:
    """Its server while the block runs: its address, once it is ready, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server("127.0.0.1", port)
    log = CACHE / f"serving-{name.replace(' ', '-')}.log"
    command = [word.format(port=port, cache=CACHE, threads=threads) for word in engine.command]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(threads))
    try:
        until = time.monotonic() + READY
        while True:
            try:
                asyncio.run(fetch(server, engine.ready, 5.0))
                break
            except ValueError as error:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"it does not start: {error}\n{end_of(log)}") from None
                time.sleep(0.2)
        yield server, log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_of(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def settings(engine: Engine) -> list[str]:
    """What tells runs of an engine apart: its command, less the interpreter and the places of files."""
    return [word for word in engine.command[1:] if not word.startswith((str(ROOT), "/"))]
