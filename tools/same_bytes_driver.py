"""Run the steps of `same_bytes.py` under one commit, whose `src` is on PYTHONPATH: its command line and facade alone.

A job is a line of JSON on stdin, {"folder", "log", "steps", "seconds"}, and its answer a line on stdout: null, or why
it failed. Torch and the facade are imported once, and each step runs in a fork of that process, which is several times
as quick as a process for each. A step is a line of shell words, and `> NAME` keeps the last line that it prints in the
job's folder:

    attar WORDS...                the command line, as `python -m attar` runs it
    facade MODEL OUT              `attar.compress`
    generate MODEL                `attar.LLM`, every mode of PROMPTS, to one line of JSON
    serve MODEL OPTIONS...        a server's completions, to one line of JSON
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS = ["Once upon a time", "It was a dark and stormy night, and the rain", "The licensor", "No"]
TOKENS = 64
SECONDS = 120  # for an engine to load its model
GREEDY = {"max_tokens": TOKENS, "temperature": 0.0, "seed": 0, "logprobs": 3}
SEEDED = {"max_tokens": TOKENS, "temperature": 0.9, "top_p": 0.95, "seed": 7, "logprobs": 3}
FILTERED = {
    "max_tokens": TOKENS, "temperature": 1.1, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "frequency_penalty": 0.1, "seed": 11, "ignore_eos": True, "prompt_logprobs": 1,
}  # fmt: skip
CHANGING = {"id", "created"}
"""Fields of an HTTP answer that no two answers share."""


def generate(model: str) -> None:
    """Print the completions of every mode, each alone and in a batch of four. JSON keeps each float to the bit."""
    from attar import LLM, SamplingParams

    llm, found = LLM(model), dict[str, Any]()
    for name, mode in (("greedy", GREEDY), ("seeded", SEEDED), ("filtered", FILTERED)):
        params = SamplingParams(**mode)  # type: ignore[arg-type]
        found[f"{name}, alone"] = [each.to_dict() for each in llm.generate(PROMPTS[0], params)]
        found[f"{name}, four"] = [each.to_dict() for each in llm.generate(PROMPTS, params)]
    print(json.dumps(found))


def facade(model: str, output: str) -> None:
    """Compress by the Python facade, on eight sequences of 64 token ids."""
    import attar

    ids = [[(97 * i + 31 * j) % 4096 for j in range(TOKENS)] for i in range(8)]
    attar.compress(model, output, recipe="gptq-w4g128", calibration=ids)


def serve(*words: str) -> None:
    """Print a server's answers to one prompt and to four in one request, greedy and seeded."""
    command = [sys.executable, "-m", "attar", "serve", *words, "--port", "0", "--name", "it", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            _wait(f"{url}/readyz")
            found = dict[str, Any]()
            for name, mode in (("greedy", GREEDY), ("seeded", SEEDED)):
                for prompts in (PROMPTS[:1], PROMPTS):
                    body = json.dumps({"model": "it", "prompt": prompts, **mode}).encode()
                    request = urllib.request.Request(
                        f"{url}/v1/completions", body, {"content-type": "application/json"}
                    )
                    with urllib.request.urlopen(request) as answer:
                        fields = json.load(answer)
                    found[f"{name}, {len(prompts)}"] = {k: v for k, v in fields.items() if k not in CHANGING}
            print(json.dumps(found))
        finally:
            server.terminate()


def _wait(ready: str) -> None:
    """Wait until the engine has loaded its model: until then a server refuses requests. Raises HTTPError."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(ready).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > until:
                raise
            time.sleep(0.2)


def command_line(*words: str) -> None:
    """Run `attar` as `python -m attar` does. Raises SystemExit."""
    sys.argv = ["attar", *words]
    runpy.run_module("attar", run_name="__main__", alter_sys=True)


KINDS: dict[str, Callable[..., None]] = {"attar": command_line, "facade": facade, "generate": generate, "serve": serve}


def forked(step: list[str], folder: Path, log: int, output: int, seconds: int) -> int:
    """Run one step in a fork of this process, and return its exit status."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(seconds)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(log, 2)
    KINDS[step[0]](*step[1:])
    sys.exit()


def run(job: dict[str, Any]) -> str | None:
    """Run the steps of one job in turn, and return the first failure."""
    folder, log = Path(job["folder"]), Path(job["log"])
    for step in job["steps"]:
        words = shlex.split(step)
        kept = words[words.index(">") + 1] if ">" in words else None
        printed = log.with_suffix(".out")
        with log.open("ab") as errors, printed.open("wb") as output:
            words = words[: words.index(">")] if kept else words
            status = forked(words, folder, errors.fileno(), output.fileno(), job["seconds"])
        if status:
            said = (printed.read_bytes() + log.read_bytes()).decode(errors="replace").strip()
            return f"`{step}` ended with {status}: {said[-600:]}"
        if kept:
            (folder / kept).write_bytes(printed.read_bytes().strip().rpartition(b"\n")[2] + b"\n")
    return None


def main() -> None:
    attar = importlib.import_module("attar")  # first: it says how threads wait, which torch reads once
    importlib.import_module("torch")
    assert str(attar.__file__).startswith(os.environ["PYTHONPATH"]), f"{attar.__file__} is not this commit's"
    for name in attar.__all__:
        getattr(attar, name)  # imports what is behind it
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
