"""Whether greedy answers are llama.cpp's: up to the end, or to a position where its two likeliest tokens are close.

    PYTHONPATH=bench python -m reals.greedy FILE.gguf --llamacpp PYTHON [--as-f32] [--prompts N] [--tokens N]
        [--activations exact]

Prompts are problems of GSM8K in the model's template, or as they are where it has none. attar answers; llama.cpp's
logits of prompt and answer say which token it would have written at each position. Up to the first that differs both
have written the same. `near` counts answers that are equal to the end, or to a position at which llama.cpp's top two
logits differ by less than 0.05.

llama.cpp rounds each row to int8 before it multiplies. With --as-f32 it gets the same values as an F32 file, and rounds
nothing: then only what is read or computed wrongly makes a text differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from compressors import DATA
from llamacpp_logits import as_f32

from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams
from reals.divergence import theirs

CLOSE = 0.05  # between two logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llamacpp", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--as-f32", action="store_true")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--activations", default="exact")
    args = parser.parse_args()
    llm = LLM(args.file, activations=args.activations)
    lines = (DATA / "data" / "tasks" / "gsm8k_test.jsonl").read_text().splitlines()[: args.prompts]
    prompts = [asked(llm, json.loads(line)["question"]) for line in lines]
    answers = llm.generate(prompts, SamplingParams(max_tokens=args.tokens, temperature=0))
    whole = near = 0
    with tempfile.TemporaryDirectory() as folder:
        options = ("--exact-attention",) if args.as_f32 else ()
        file = as_f32(args.file, Path(folder), args.llamacpp) if args.as_f32 else args.file
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = [*prompt, *answer.token_ids[:-1]]
            rows = torch.cat(list(theirs(args.llamacpp, file, [ids], Path(folder), *options)(torch.tensor(ids), 0)))
            rows = rows[len(prompt) - 1 :]
            differs = (rows.argmax(-1) != torch.tensor(answer.token_ids)).nonzero()[:, 0].tolist()
            top = rows[differs[0]].topk(2).values if differs else torch.zeros(2)
            whole += not differs
            near += bool(top[0] - top[1] < CLOSE)
    print(json.dumps({"equal": whole / len(prompts), "near": near / len(prompts), "prompts": len(prompts)}))


def asked(llm: LLM, question: str) -> list[int]:
    if not llm.tokenizer.chat_templates:
        return llm.tokenizer.encode(question)
    return llm.encode_chat([{"role": "user", "content": question}])


if __name__ == "__main__":
    main()
