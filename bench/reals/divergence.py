"""How far a program's arithmetic on a file is from exact rows: KL of its logits, position by position.

    PYTHONPATH=bench python -m reals.divergence FILE.gguf [--activations int8g128 | --llamacpp PYTHON]
        [--text prose|code|chat] [--tokens N]

The base is the file's own values in float32 by the reference, with no row rounded. `largest_at` is the position of the
largest divergence in the text. Windows are of 512 tokens. llama.cpp is taken as it comes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from llamacpp_logits import ROOT
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import opening
from attar.kernels import ops
from attar.metrics.perplexity import plan_windows
from attar.metrics.streaming import LOGITS_AT_ONCE, Logits, decoder_logits, stream
from reals.texts import KINDS, LENGTH, scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--activations", default="int8g128")
    parser.add_argument("--llamacpp", type=Path, metavar="PYTHON", help="measure llama.cpp instead")
    parser.add_argument("--text", choices=KINDS, default="prose")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    tokenizer = vocabulary.tokenizer(args.file)
    windows = plan_windows(scored(tokenizer, args.text, args.tokens), LENGTH, bos=tokenizer.added_bos)
    base = opening.load(args.file, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        if args.llamacpp is None:
            model = decoder_logits(opening.load(args.file, torch.float32, None, ops.store(args.activations)))
        else:
            inputs = [list(window.inputs) for window in windows]
            model = theirs(args.llamacpp, args.file, inputs, Path(folder))
        found = stream(model, windows, decoder_logits(base))
    figures = {name: each.value for name, each in found.figures().items()}
    assert found.kl is not None
    print(json.dumps(figures | {"largest_at": int(found.kl.argmax()), "tokens": found.tokens}))


def theirs(python: Path, file: Path, inputs: list[list[int]], folder: Path) -> Logits:
    """llama.cpp's logits of windows, as `stream` asks for them: one after another."""
    import subprocess

    ids, out = folder / "ids.json", folder / "logits.npy"
    ids.write_text(json.dumps(inputs))
    program = ROOT / "bench" / "peers" / "llama_logits.py"
    done = subprocess.run([python, program, file, ids, out], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp: {done.stderr[-2000:]}")
    rows = np.load(out, mmap_mode="r")
    starts = iter(np.cumsum([0, *map(len, inputs[:-1])]).tolist())

    def logits(ids: Tensor, first: int) -> Iterator[Tensor]:
        at = next(starts)
        at_once = max(1, LOGITS_AT_ONCE // rows.shape[1])
        for begin in range(at + first, at + len(ids), at_once):
            yield torch.from_numpy(rows[begin : min(begin + at_once, at + len(ids))].copy())

    return logits


if __name__ == "__main__":
    main()
