"""How far arithmetic on a file is from exact rows: KL of the logits, position by position.

    PYTHONPATH=bench python -m reals.divergence FILE.gguf [--activations int8g128 ...] [--llamacpp PYTHON [--as-f32]]
        [--text prose|code|chat] [--tokens N]

The base is the file's own values in float32 by the reference, with no row rounded. It is computed once for all that is
measured: attar with each kind of activations, and llama.cpp as it comes. `largest_at` is the position of the largest
divergence in the text. Windows are of 512 tokens.

With --as-f32 llama.cpp gets the same values, which its own quantizer wrote as an F32 file, and computes attention in
float32: neither side rounds anything, and a file that one of them reads wrongly shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from llamacpp_logits import ROOT, as_f32
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import opening
from attar.kernels import dispatch
from attar.metrics.perplexity import Window, plan_windows
from attar.metrics.streaming import LOGITS_AT_ONCE, Logits, Measurement, decoder_logits, stream
from reals.texts import KINDS, LENGTH, scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--activations", nargs="*", default=[])
    parser.add_argument("--llamacpp", type=Path, metavar="PYTHON")
    parser.add_argument("--as-f32", action="store_true")
    parser.add_argument("--text", choices=KINDS, default="prose")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    tokenizer = vocabulary.tokenizer(args.file)
    windows = plan_windows(scored(tokenizer, args.text, args.tokens), LENGTH, bos=tokenizer.added_bos)
    base = decoder_logits(opening.load(args.file, torch.float32))
    models = {
        name: decoder_logits(opening.load(args.file, torch.float32, None, dispatch.store(name)))
        for name in args.activations
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.llamacpp is not None:
            inputs = [list(window.inputs) for window in windows]
            options = ("--exact-attention",) if args.as_f32 else ()
            file = as_f32(args.file, Path(folder), args.llamacpp) if args.as_f32 else args.file
            models["llama.cpp"] = theirs(args.llamacpp, file, inputs, Path(folder), *options)
        found = compared(models, base, windows)
    print(json.dumps({name: told(each) for name, each in found.items()}))


def compared(models: Mapping[str, Logits], base: Logits, windows: Sequence[Window]) -> dict[str, Measurement]:
    """Each model against the base, whose logits are held for one window at a time."""
    parts: dict[str, list[Measurement]] = {name: [] for name in models}
    for window in windows:
        runs = list(base(torch.tensor(window.inputs), window.first))
        for name, model in models.items():
            parts[name].append(stream(model, [window], partial(_again, runs)))
    return {name: joined(each) for name, each in parts.items()}


def _again(runs: Sequence[Tensor], ids: Tensor, first: int) -> Iterator[Tensor]:
    return iter(runs)


def joined(parts: Sequence[Measurement]) -> Measurement:
    """Measurements of a window each, as one."""
    of = np.repeat(np.arange(len(parts), dtype=np.int64), [each.tokens for each in parts])
    names = [field.name for field in fields(Measurement) if field.name != "window"]
    return Measurement(of, **{name: np.concatenate([getattr(each, name) for each in parts]) for name in names})


def told(found: Measurement) -> dict[str, float]:
    assert found.kl is not None
    figures = {name: each.value for name, each in found.figures().items()}
    return figures | {"largest_at": int(found.kl.argmax()), "tokens": found.tokens}


def theirs(python: Path, file: Path, inputs: list[list[int]], folder: Path, *options: str) -> Logits:
    """llama.cpp's logits of windows, as `stream` asks for them: one after another."""
    ids, out = folder / "ids.json", folder / "logits.npy"
    ids.write_text(json.dumps(inputs))
    program = ROOT / "bench" / "peers" / "llama_logits.py"
    done = subprocess.run([python, program, file, ids, out, *options], capture_output=True, text=True)
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
