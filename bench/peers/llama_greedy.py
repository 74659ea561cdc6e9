"""llama.cpp's greedy answers, a token at a time. Runs in llama.cpp's environment.

    .venv-llamacpp/bin/python bench/peers/llama_greedy.py FILE.gguf PROMPTS.json OUT.json [--tokens N] [--plain-kernels]

PROMPTS.json holds lists of token ids; OUT.json the tokens that follow each, which end with N or with a token that the
file names as an end. `--plain-kernels` has weights read as they are stored, and not laid out anew for the machine's
best instructions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
from llama_logits import load


def step(context: Any, batch: Any, ids: list[int], first: int, vocab: int) -> int:
    """Append ids from a position on, and choose the next."""
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, first + i, i == len(ids) - 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    status = lib.llama_decode(context, batch)
    if status:
        raise SystemExit(f"llama_decode returned {status}")
    return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, len(ids) - 1), (vocab,)).argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--plain-kernels", action="store_true")
    args = parser.parse_args()
    prompts: list[list[int]] = json.loads(args.prompts.read_text())
    longest = max(map(len, prompts))
    model = load(args.model, args.plain_kernels)
    params = lib.llama_context_default_params()
    params.n_ctx = -(-(longest + args.tokens) // 256) * 256
    params.n_batch = params.n_ubatch = longest
    params.n_threads = params.n_threads_batch = 1
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp could not make a context")
    table = lib.llama_model_get_vocab(model)
    vocab = lib.llama_vocab_n_tokens(table)
    batch = lib.llama_batch_init(longest, 0, 1)
    answers: list[list[int]] = []
    for ids in prompts:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        answer = [step(context, batch, ids, 0, vocab)]
        while len(answer) < args.tokens and not lib.llama_vocab_is_eog(table, answer[-1]):
            answer.append(step(context, batch, answer[-1:], len(ids) + len(answer) - 1, vocab))
        answers.append(answer)
    args.out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
