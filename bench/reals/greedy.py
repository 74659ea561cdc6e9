"""Whether greedy answers are llama.cpp's: up to the end, or to a position where its two likeliest tokens are close.

    PYTHONPATH=bench python -m reals.greedy FILE.gguf --llamacpp PYTHON [--as-f32 | --itself] [--prompts N] [--tokens N]
        [--activations exact] [--kept FOLDER]

Prompts are problems of GSM8K in the model's template, or as they are where it has none. attar answers; llama.cpp's
logits of prompt and answer say which token it would have written at each position. Up to the first that differs both
have written the same. A tie is a position at which llama.cpp's top two logits differ by less than 0.05. `near` counts
answers that are equal to the end or first differ at a tie, `to_tie` those that are equal up to the first tie, whether
they differ there or not. `found` lists the others: prompt, position, and how far apart llama.cpp's two tokens are.

llama.cpp rounds each row to int8 before it multiplies. With --as-f32 it gets the same values as an F32 file, and rounds
nothing: then only what is read or computed wrongly makes a text differ. With --itself the answers are not attar's but
llama.cpp's, step by step and by the kernels that read weights as they are stored: how far one program is from itself.

Prompts that were compared are kept in a folder, so that a run that was broken off goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from compressors import DATA
from llamacpp_logits import ROOT, as_f32

from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams
from reals.divergence import theirs

CLOSE = 0.05  # between two logits
AT_ONCE = 5  # prompts between two writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llamacpp", type=Path, required=True, metavar="PYTHON")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--as-f32", action="store_true")
    way.add_argument("--itself", action="store_true")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--activations", default="exact")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "real" / "greedy", metavar="FOLDER")
    args = parser.parse_args()
    rows = args.activations + ("-f32" if args.as_f32 else "-itself" if args.itself else "")
    kept = args.kept / f"{args.file.stem}-{rows}-{args.tokens}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = kept.read_text().splitlines() if kept.exists() else []
    found = list({each["prompt"]: each for each in map(json.loads, lines)}.values())  # two runs may have kept one twice
    if len(found) < args.prompts:
        with kept.open("a") as out:
            for each in compared(args, len(found)):
                found.append(each)
                print(json.dumps(each), file=out, flush=True)
    print(json.dumps(figures(found[: args.prompts])))


def compared(args: argparse.Namespace, done: int) -> Iterator[dict[str, Any]]:
    """Compare answers to the prompts behind the first `done`, some at a time."""
    llm = LLM(args.file, activations=args.activations)
    lines = (DATA / "data" / "tasks" / "gsm8k_test.jsonl").read_text().splitlines()[: args.prompts]
    prompts = [asked(llm, json.loads(line)["question"]) for line in lines]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ("--exact-attention",) if args.as_f32 else ()
        file = as_f32(args.file, folder, args.llamacpp) if args.as_f32 else args.file
        for begin in range(done, len(prompts), AT_ONCE):
            some = prompts[begin : begin + AT_ONCE]
            if args.itself:
                answers = written(args.llamacpp, args.file, some, args.tokens, folder)
            else:
                params = SamplingParams(max_tokens=args.tokens, temperature=0)
                answers = [list(each.token_ids) for each in llm.generate(some, params)]
            inputs = [[*prompt, *answer[:-1]] for prompt, answer in zip(some, answers, strict=True)]
            logits = theirs(args.llamacpp, file, inputs, folder, *options)
            for number, (prompt, ids, answer) in enumerate(zip(some, inputs, answers, strict=True), begin):
                rows = torch.cat(list(logits(torch.tensor(ids), 0)))[len(prompt) - 1 :]
                yield {"prompt": number, **beside(rows, answer)}


def beside(logits: torch.Tensor, answer: Sequence[int]) -> dict[str, Any]:
    """Compare an answer [T] with logits [T, vocab]: its length, the first position that differs with the distance of
    the two tokens' logits there, and the first tie. Positions are None where there is none."""
    top, ids = logits.topk(2), torch.tensor(answer)
    differs = (top.indices[:, 0] != ids).nonzero()[:, 0].tolist()
    ties = (top.values[:, 0] - top.values[:, 1] < CLOSE).nonzero()[:, 0].tolist()
    at = differs[0] if differs else None
    return {
        "tokens": len(answer),
        "differs": at,
        "top_two": None if at is None else float(top.values[at, 0] - top.values[at, 1]),
        "to_ours": None if at is None else float(top.values[at, 0] - logits[at, ids[at]]),
        "tie": ties[0] if ties else None,
    }


def figures(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of prompts, and those that differ before any tie."""
    equal = [each for each in found if each["differs"] is None]
    near = [each for each in found if each["differs"] is not None and each["top_two"] < CLOSE]
    wrong = [
        each for each in found if each["differs"] is not None and (each["tie"] is None or each["tie"] > each["differs"])
    ]
    return {
        "equal": len(equal) / len(found),
        "near": (len(equal) + len(near)) / len(found),
        "to_tie": 1 - len(wrong) / len(found),
        "prompts": len(found),
        "found": wrong,
    }


def written(python: Path, file: Path, prompts: Sequence[Sequence[int]], tokens: int, folder: Path) -> list[list[int]]:
    """llama.cpp's own greedy answers, up to an end of a turn."""
    ids, out = folder / "prompts.json", folder / "answers.json"
    ids.write_text(json.dumps([list(each) for each in prompts]))
    program = ROOT / "bench" / "peers" / "llama_greedy.py"
    command = [str(each) for each in (python, program, file, ids, out, "--tokens", tokens, "--plain-kernels")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp: {done.stderr[-2000:]}")
    answers: list[list[int]] = json.loads(out.read_text())
    return answers


def asked(llm: LLM, question: str) -> list[int]:
    if not llm.tokenizer.chat_templates:
        return llm.tokenizer.encode(question)
    return llm.encode_chat([{"role": "user", "content": question}])


if __name__ == "__main__":
    main()
