"""A compressed file as a dense folder, or compressed anew: how near its logits come to the file's own.

    PYTHONPATH=bench python -m reals.converted FILE.gguf --place FOLDER (--dtype NAME | --requantize RECIPE)
        [--tokens N]

The base is the file's own values in float32, with no row rounded, in windows of 512 tokens of prose. `kl_transformers`
is that of a dense folder as transformers loads it, in float32: code that shares nothing with attar's reads it there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from attar.checkpoints import vocabulary
from attar.checkpoints.convert.run import convert
from attar.checkpoints.sources import opening
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.formats.codecs.ggml_mix import MIXES
from attar.metrics.perplexity import plan_windows
from attar.metrics.streaming import LOGITS_AT_ONCE, Logits, decoder_logits
from reals.divergence import compared
from reals.texts import LENGTH, scored

DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--place", type=Path, required=True, help="where the output stands meanwhile")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--dtype", choices=DTYPES)
    what.add_argument("--requantize", metavar="RECIPE")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    tokenizer = vocabulary.tokenizer(args.file)
    windows = plan_windows(scored(tokenizer, "prose", args.tokens), LENGTH, bos=tokenizer.added_bos)
    args.place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.place) as folder:
        out, since, bits = Path(folder) / "out", time.perf_counter(), None
        if args.dtype:
            convert(args.file, out, to="dense", dtype=args.dtype)
        else:
            if args.requantize.rpartition("-")[2] in MIXES:
                out = out.with_suffix(".gguf")
            request = CompressionRequest(args.file, out, recipe=args.requantize, requantize=True, resume=False)
            bits = compress_request(request).bits_per_weight
        seconds = time.perf_counter() - since
        models = {"attar": decoder_logits(opening.load(out, torch.float32))}
        if args.dtype:
            models["transformers"] = by_transformers(out)
        found = compared(models, decoder_logits(opening.load(args.file, torch.float32)), windows)
    means = {f"kl_{name}": each.figures()["kl_mean"].value for name, each in found.items()}
    print(json.dumps({"seconds": seconds, "bits": bits, **means}))


def by_transformers(folder: Path) -> Logits:
    """Load a dense folder by transformers, in float32, as `stream` asks for logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(ids: Tensor, first: int) -> Iterator[Tensor]:
        with torch.inference_mode():
            rows = model(ids[None]).logits[0]
        yield from rows[first:].split(max(1, LOGITS_AT_ONCE // rows.shape[1]))

    return logits


if __name__ == "__main__":
    main()
