"""Calls of tools by a real model, through attar's server and, where one is named, llama.cpp's.

    python bench/tools.py MODEL [--llama-server PROGRAM] [--prompts N] [--threads N] [--answers FOLDER]

200 prompts ask for one of 20 functions each (`tool_calls/prompts.jsonl`, `tool_calls/functions.jsonl`). Each is one
greedy chat completion with all 20 as `tools` and `tool_choice: auto`, the same bytes for both servers. The table has
the share of prompts with a call; of calls that name a function and satisfy its schema; of prompts that were answered
with the right function; and of those with the right function and valid arguments.

Answers are kept in the folder, a file for each server and model; a run that was broken off goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

HERE = Path(__file__).resolve().parent
DATA = HERE / "tool_calls"
READY = 300.0  # seconds that a server may take to load
PATIENCE = 600.0  # seconds that one answer may take
TOKENS = 192  # of an answer


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that broke off is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def post(port: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """The message that a server answers a chat completion with, or `{"error": ...}`."""
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
            return message
    except urllib.error.HTTPError as error:
        return {"error": error.read().decode(errors="replace")[:2000]}


@contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """A server, from where it answers /health to its end."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        since = time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError as error:
                if process.poll() is not None or time.monotonic() - since > READY:
                    raise SystemExit(f"no server by {shlex.join(command)}") from error
                time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait()


def answered(command: Sequence[str], port: int, file: Path, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a server, those in the file first, which gets the others."""
    found = lines(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(each) + "\n" for each in found))  # without a line that broke off
    if len(found) >= len(prompts):
        return found[: len(prompts)]
    tools = lines(DATA / "functions.jsonl")
    with serving(command, port), file.open("a") as out:
        for prompt in prompts[len(found) :]:
            body = {
                "messages": [{"role": "user", "content": prompt}], "tools": tools, "tool_choice": "auto",
                "temperature": 0, "max_tokens": TOKENS,
            }  # fmt: skip
            found.append(post(port, body))
            print(json.dumps(found[-1]), file=out, flush=True)
    return found


def valid(call: Mapping[str, Any], schemas: Mapping[str, Any]) -> bool:
    """Whether a call names a function, with arguments that satisfy its schema."""
    function = call["function"]
    try:
        jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return True


def counts(messages: Sequence[Mapping[str, Any]], right: Sequence[str]) -> tuple[int, int, int, int, int, int]:
    """Counts of prompts with a call, of calls, valid ones, prompts with the right function, with valid arguments as
    well, and errors."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in lines(DATA / "functions.jsonl")}
    calling = made = good = found = whole = 0
    for message, name in zip(messages, right, strict=True):
        calls = message.get("tool_calls") or []
        calling += bool(calls)
        made += len(calls)
        good += sum(valid(call, schemas) for call in calls)
        if calls and calls[0]["function"]["name"] == name:
            found += 1
            whole += valid(calls[0], schemas)
    return calling, made, good, found, whole, sum("error" in message for message in messages)


def main() -> None:
    """Ask the servers, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file, or a folder for attar alone")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, asked as well; it reads GGUF files")
    parser.add_argument("--prompts", type=int, default=200, help="the first of the file (default 200)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--answers", type=Path, default=HERE.parent / "build" / "tool-calls", help="their folder")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows = lines(DATA / "prompts.jsonl")[: args.prompts]
    commands = {
        "attar": [sys.executable, "-m", "attar", "serve", str(args.model), "--port", str(port), "--threads",
                  str(args.threads)],
    }  # fmt: skip
    if args.llama_server is not None:
        commands["llama.cpp"] = [
            str(args.llama_server), "-m", str(args.model), "--port", str(port), "-t", str(args.threads), "--jinja",
            "-c", "8192", "-np", "1",
        ]  # fmt: skip
    print(f"{shlex.join(['python', *sys.argv])}\n{platform.node()}, {platform.machine()}, {args.threads} thread(s)\n")
    print(f"| {args.model.name} | prompts | with a call | valid calls | right function | right and valid | errors |")
    print("|---|---|---|---|---|---|---|")
    for name, command in commands.items():
        file = args.answers / f"{name}-{args.model.name}.jsonl"
        messages = answered(command, port, file, [row["prompt"] for row in rows])
        calling, made, good, found, whole, errors = counts(messages, [row["function"] for row in rows])
        print(f"| {name} | {len(rows)} | {calling} | {good} of {made} | {found} | {whole} | {errors} |", flush=True)


if __name__ == "__main__":
    main()
