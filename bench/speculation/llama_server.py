"""llama.cpp's server beside attar: the same file, prompts and sampling, with its own settings of drafts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.protocol.request import SamplingParams
from speculation.runs import CONTEXT, Run

READY = 120.0  # seconds
OFF = "off"
NGRAMS = ("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "12")
SURE = ("--spec-draft-n-max", "8", "--spec-draft-p-min", "0.75")
SETTINGS = {
    "ngram-simple": ("--spec-type", "ngram-simple", *NGRAMS),
    "draft": ("--spec-type", "draft-simple", *SURE),
    "draft and ngram-simple": ("--spec-type", "ngram-simple,draft-simple", *NGRAMS, *SURE),
}


@dataclass(frozen=True)
class Peer:
    """A server of one setting, and its processor seconds."""

    name: str
    url: str
    process: int

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Run:
        """Answer a prompt; times are those behind the first token."""
        body = {
            "prompt": list(prompt), "n_predict": params.max_tokens, "temperature": params.temperature,
            "seed": params.seed, "cache_prompt": False, "samplers": ["top_p", "temperature"], "top_p": params.top_p,
        }  # fmt: skip
        if params.temperature == 0:
            body |= {"samplers": ["top_k"], "top_k": 1}
        before = self._processor()
        found = _post(f"{self.url}/completion", body)
        times = found["timings"]
        share = times["predicted_ms"] / (times["predicted_ms"] + times["prompt_ms"])
        run = Run(times["predicted_ms"] / 1000, (self._processor() - before) * share, times["predicted_n"] - 1)
        run.drafted[0], run.accepted[0] = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
        return run

    def _processor(self) -> float:
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _post(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
    with opener.open(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


@contextmanager
def serving(program: Path, model: str, draft: str | None, threads: int) -> Iterator[list[Peer]]:
    """One server without drafts, and one of each setting; those of a draft model where a file of one is named."""
    named = {OFF: ()} | {name: given for name, given in SETTINGS.items() if draft or not name.startswith("draft")}
    with ExitStack() as stack:
        peers = []
        for name, given in named.items():
            more = ("--model-draft", str(draft), "--threads-draft", str(threads)) if name.startswith("draft") else ()
            peers.append(stack.enter_context(_served(program, name, model, (*given, *more), threads)))
        yield peers


@contextmanager
def _served(program: Path, name: str, model: str, options: Sequence[str], threads: int) -> Iterator[Peer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(program), "--model", model, "--host", "127.0.0.1", "--port", str(port), "--parallel", "1", "--no-ui",
        "--ctx-size", str(CONTEXT), "--threads", str(threads), "--threads-batch", str(threads), *options,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            peer = Peer(name, f"http://127.0.0.1:{port}", process.pid)
            if not _ready(peer, process):
                log.seek(0)
                said = log.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"{program} with {options} did not start\n{said}")
            yield peer
        finally:
            process.terminate()
            process.wait()


def _ready(peer: Peer, process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + READY
    while process.poll() is None and time.monotonic() < until:
        try:
            _post(f"{peer.url}/health", None)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return True
    return False
