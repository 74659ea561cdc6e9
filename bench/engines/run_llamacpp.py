"""One measurement of llama.cpp. Runs in its environment; `contract.py` says what it prints.

    .venv-llamacpp/bin/python bench/engines/run_llamacpp.py --shape llama-3.2-1b --format q4_0 --batch 1 --cache FOLDER
    .venv-llamacpp/bin/python bench/engines/run_llamacpp.py --file MODEL.gguf --batch 1

Its C functions are called as its own benchmark program does: the prompts in batches as large as it takes, logits for
the last token of each only, then one token of every sequence a step. The next tokens are drawn beforehand rather than
sampled, so no time but llama.cpp's is counted. Flash attention, the fp16 cache, repacking of weights at load time (into
AMX tiles where the machine has them) and mapped files are its defaults.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from importlib.metadata import version

import llama_cpp as lib
import numpy as np
from contract import SEED, WARM_UP, arguments, peak_mb, report, resident
from numpy.typing import NDArray

STEP = 2048  # tokens that one call takes
ERROR = 4  # ggml's level; the bindings have no name for it


@lib.llama_log_callback
def log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Errors, and everything else where LLAMA_LOG is set."""
    if level == ERROR or "LLAMA_LOG" in os.environ:
        sys.stderr.write(text.decode(errors="replace"))


class Decoder:
    """A context and the one batch structure that is filled again for each call."""

    def __init__(self, path: str, threads: int, sequences: int, tokens: int) -> None:
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp could not load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * -(-tokens // 256) * 256  # a multiple of 256 for each sequence
        params.n_batch = STEP
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp could not make a context")
        self.model = model
        self.batch = lib.llama_batch_init(STEP, 0, 1)

    def decode(self, tokens: NDArray[np.int32], start: int) -> None:
        """Feed tokens [S, N] at positions from `start`; logits for the last of each sequence."""
        flat = [(sequence, i) for sequence in range(len(tokens)) for i in range(tokens.shape[1])]
        for at in range(0, len(flat), STEP):
            part = flat[at : at + STEP]
            self.batch.n_tokens = len(part)
            for row, (sequence, i) in enumerate(part):
                self.batch.token[row] = int(tokens[sequence, i])
                self.batch.pos[row] = start + i
                self.batch.n_seq_id[row] = 1
                self.batch.seq_id[row][0] = sequence
                self.batch.logits[row] = i == tokens.shape[1] - 1
            status = lib.llama_decode(self.context, self.batch)
            if status:
                raise SystemExit(f"llama_decode returned {status}")
        lib.llama_synchronize(self.context)

    def forget(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)


def main() -> None:
    args = arguments(__doc__, ("q4_0", "q4_0-q8_0", "bf16"), files=True).parse_args()
    path = args.file or args.cache / f"{args.shape}-{args.format}.gguf"
    lib.llama_log_set(log, ctypes.c_void_p(0))
    lib.llama_backend_init()
    baseline = resident()
    began = time.perf_counter()
    decoder = Decoder(str(path), args.threads, args.batch, args.prompt + args.gen)
    loaded = time.perf_counter()

    draw = np.random.default_rng(SEED).integers
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(decoder.model))
    tokens = draw(0, vocab, (args.batch, args.prompt + args.gen), dtype=np.int32)
    decoder.decode(tokens[:1, :WARM_UP], 0)
    warm = time.perf_counter()
    decoder.decode(tokens[:1, WARM_UP : WARM_UP + 1], WARM_UP)
    decoder.forget()

    start = time.perf_counter()
    decoder.decode(tokens[:, : args.prompt], 0)
    first = time.perf_counter()
    for i in range(args.prompt, args.prompt + args.gen):
        decoder.decode(tokens[:, i : i + 1], i)
    last = time.perf_counter()
    report(
        {
            "prefill_tok_s": args.batch * args.prompt / (first - start),
            "decode_tok_s": args.batch * args.gen / (last - first),
            "load_s": loaded - began,
            "first_token_s": warm - began,
            "peak_rss_mb": peak_mb(baseline),
            "bytes_per_token": int(lib.llama_model_size(decoder.model)),
            "version": f"llama-cpp-python {version('llama-cpp-python')}",
            "isa": " ".join(
                part.split("=")[0].split(":")[-1].strip()
                for part in lib.llama_print_system_info().decode().split("|")
                if part.strip().endswith("= 1")
            ),
        }
    )


if __name__ == "__main__":
    main()
