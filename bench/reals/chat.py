"""Whether a chat is the same by every way, and its prompt the one that transformers makes.

    PYTHONPATH=bench python -m reals.chat FILE.gguf [--prompts N] [--tokens N]

The conversations are those of `prompts.jsonl`. Their prompts are compared first, all of them: those of `LLM.chat`
with the server's, and with `apply_chat_template` of transformers, on the tokenizer and template that `attar convert
--to dense` writes. One difference is meant. Where a message spells a special token, attar reads text and transformers
the token. So of these the rendered text is compared, and that the special tokens are the template's own (`literal`).

Then the first N are answered by `LLM.chat`, by the server and, where a line can hold each turn, by `attar chat` through
its stdin: greedily, and with a temperature of 0.8 and a seed of each prompt's own. Answers of the first two are equal
in text, reason of the end, and tokens of prompt and answer. `attar chat` has further turns answered by the model, and
`LLM.chat` has to answer each of its prompts in the same words.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import AutoTokenizer
from typer.testing import CliRunner

from attar.checkpoints.convert.dense import open_dense
from attar.checkpoints.folder import CONFIG, write_json
from attar.cli.main import app
from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")
TEMPERATURES = {"greedy": 0.0, "seeded": 0.8}
CLIENTS = 8
CACHED = 8192  # tokens in the server's cache

Messages = list[dict[str, str]]
Ask = Callable[[str, dict[str, Any]], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=200, help="that are answered, evenly from all")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    args = parser.parse_args()
    every = conversations()
    answered = range(0, len(every), max(1, len(every) // args.prompts))[: args.prompts]
    llm = LLM(args.file)
    with tempfile.TemporaryDirectory() as folder, serving(args.file) as ask:
        found = rendering(llm, transformers_tokenizer(args.file, Path(folder)), every, ask)
        for name, temperature in TEMPERATURES.items():
            found |= answers(llm, ask, {at: every[at] for at in answered}, name, temperature, args.tokens)
    print(json.dumps(found))


def conversations() -> list[Messages]:
    """Those of `prompts.jsonl`."""
    return [json.loads(line)["messages"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def transformers_tokenizer(file: Path, folder: Path) -> Any:
    """What transformers loads from the files of a dense folder, less its weights."""
    dense = open_dense(file).folder
    dense.carry(dense.carry_files(), folder)
    write_json(folder / CONFIG, dense.config)
    return AutoTokenizer.from_pretrained(folder)


def rendering(llm: LLM, theirs: Any, every: Sequence[Messages], ask: Ask | None = None) -> dict[str, Any]:
    """Compare prompts, with the server's where there is one to `ask`; shares, and which conversations' differ."""
    tokenizer = llm.tokenizer
    names = [tokenizer.id_to_token(index) for index in tokenizer.special_ids]
    normalizer = theirs.backend_tokenizer.normalizer
    wrong: dict[str, list[int]] = {"text": [], "ids": [], "literal": [], "server": []}
    spelled = 0
    for at, messages in enumerate(every):
        ids = llm.encode_chat(messages)
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        normal = text if normalizer is None else normalizer.normalize_str(text)  # which tokens spell: NFC, for Qwen
        if tokenizer.decode(ids, skip_special_tokens=False) != normal:
            wrong["text"].append(at)
        if any(name in message["content"] for name in names for message in messages):
            spelled += 1
            bare = llm.encode_chat([message | {"content": "x"} for message in messages])
            if specials(llm, ids) != specials(llm, bare):
                wrong["literal"].append(at)
        elif ids != theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False):
            wrong["ids"].append(at)
        if ask is not None and ask("/tokenize", {"messages": messages})["tokens"] != ids:
            wrong["server"].append(at)
    plain = len(every) - spelled
    return {
        "prompts": len(every),
        "spelled": spelled,
        "text": 1 - len(wrong["text"]) / len(every),
        "ids": 1 - len(wrong["ids"]) / plain,
        "literal": 1 - len(wrong["literal"]) / spelled,
        "server": None if ask is None else 1 - len(wrong["server"]) / len(every),
        "rendered_otherwise": wrong,
    }


def specials(llm: LLM, ids: Sequence[int]) -> list[int]:
    return [index for index in ids if index in llm.tokenizer.special_ids]


def answers(
    llm: LLM, ask: Ask, asked: dict[int, Messages], name: str, temperature: float, tokens: int
) -> dict[str, Any]:
    """Compare answers; shares, and the numbers of conversations whose answers differ."""

    def posted(at: int) -> tuple[object, ...]:
        body = {"messages": asked[at], "max_tokens": tokens, "temperature": temperature, "seed": at}
        reply = ask("/v1/chat/completions", body)
        (choice,), usage = reply["choices"], reply["usage"]
        said = choice["message"]["content"], choice["finish_reason"]
        return (*said, usage["prompt_tokens"], usage["completion_tokens"])

    with ThreadPoolExecutor(CLIENTS) as threads:  # so that requests share steps
        served = dict(zip(asked, threads.map(posted, asked), strict=True))
    otherwise, typed, mistyped = [], 0, []
    for at, messages in asked.items():
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=at)
        ours = llm.chat(messages, params)
        if served[at] != (ours.text, ours.finish_reason, len(ours.prompt_token_ids), len(ours.token_ids)):
            otherwise.append(at)
        if can_type(messages):
            typed += 1
            told = command(llm, messages, params)
            for length, message in enumerate(told):
                if message["role"] == "assistant" and message["content"] != llm.chat(told[:length], params).text:
                    mistyped.append(at)
    return {
        "answered": len(asked),
        "typed": typed,
        name: 1 - len(otherwise) / len(asked),
        f"{name}_typed": 1 - len(set(mistyped)) / typed,
        f"{name}_otherwise": {"server": otherwise, "attar chat": mistyped},
    }


def can_type(messages: Messages) -> bool:
    """Whether the user's turns can be lines of `attar chat`, which an empty one ends."""
    return all(
        message["content"].strip() and not {"\r", "\n"} & set(message["content"])
        for message in messages
        if message["role"] == "user"
    )


def command(llm: LLM, messages: Messages, params: SamplingParams) -> Messages:
    """The conversation that `attar chat` has where a user types these turns. The model is not loaded again."""
    lines = "".join(message["content"] + "\n" for message in messages if message["role"] == "user")
    options = f"--max-tokens {params.max_tokens} --temperature {params.temperature} --seed {params.seed} --json --quiet"
    system = ["--system", messages[0]["content"]] if messages[0]["role"] == "system" else []
    with patch("attar.engine.llm.llm.LLM", lambda *args, **kwargs: llm):
        done = CliRunner().invoke(app, ["chat", str(llm.model.path), *shlex.split(options), *system], input=lines)
    if done.exit_code:
        raise RuntimeError(done.output)
    told: Messages = json.loads(done.stdout.splitlines()[-1])["messages"]
    assert [each for each in told if each["role"] == "user"] == [each for each in messages if each["role"] == "user"]
    return told


@contextmanager
def serving(file: Path) -> Iterator[Ask]:
    """A server of the model, as a function that posts a body to a route."""
    options = ("--port", "0", "--json", "--max-tokens-in-cache", str(CACHED))
    program = [sys.executable, "-m", "attar", "serve", str(file), *options]
    server = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        post = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # the server is on this machine
        url = next(json.loads(line)["url"] for line in server.stdout if line.startswith("{"))

        def ask(route: str, body: dict[str, Any] | None) -> dict[str, Any]:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url + route, data, {"Content-Type": "application/json"})
            with post(request) as reply:
                found: dict[str, Any] = json.load(reply)
            return found

        while server.poll() is None:
            try:
                ask("/readyz", None)
            except urllib.error.HTTPError:  # it is loading
                time.sleep(0.1)
            else:
                break
        yield ask
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
