"""What sparse prefill saves and costs on a model: one full prefill, and one for each setting, of the same prompt.

    PYTHONPATH=src:. python bench/sparse_prefill.py MODEL TEXT [--context 16384] [--at 0] [--settings tri-shape,skip]

KL divergence is that of 256 teacher-forced tokens behind the prompt, from full prefill with the same activations.
`--harmless` adds full prefill with a cache rounded to bfloat16: a floor of what any change costs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from attar.evaluation.long_context.sparse_prefill import ACTIVATIONS, ROWS
from attar.evaluation.long_context.windows import Subject, log_chances, run
from attar.kv.schemes import scheme
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.cache import KVCache


def prefill(
    subject: Subject, cache: KVCache, ids: torch.Tensor, few: SparsePrefill | None
) -> tuple[float, torch.Tensor]:
    """Return the processor's seconds of a prompt, and log probabilities [256, V] of its continuation."""
    cache.truncate(0, 0)
    cache.prefill, first = None, len(ids) - ROWS
    if few is not None:
        cache.read_few(few, [first])
    begun = time.process_time()
    run(subject.decoder, cache, ids[:first])
    seconds = time.process_time() - begun
    return seconds, log_chances(subject.decoder, cache, ids[first:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--at", type=int, default=0, help="which window of the text")
    parser.add_argument("--kv", default="float32")
    parser.add_argument("--activations", default=ACTIVATIONS)
    parser.add_argument("--settings", default="tri-shape,skip")
    parser.add_argument("--harmless", action="store_true", help="also measure a cache of bfloat16 beside --kv")
    args = parser.parse_args()
    most = args.context * (args.at + 1)
    subject = Subject.load(
        args.model, args.text, args.context, max_tokens=most, kv=args.kv, activations=args.activations
    )
    ids, decoder = torch.tensor(subject.ids[args.context * args.at :]), subject.decoder
    config = decoder.config
    heads = config.heads * sum(window is None for window in config.windows)
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        cache = decoder.cache(args.context, scheme=subject.scheme)
        prefill(subject, cache, ids[: 2 * ROWS], None)  # memory that is touched for the first time would be timed
        whole, full = prefill(subject, cache, ids, None)
        cases: list[tuple[str, SparsePrefill | None]] = [
            (text, SparsePrefill.parse(text)) for text in args.settings.split(",") if text
        ]
        for name, few in [*cases, *([("harmless", None)] if args.harmless else [])]:
            own = cache if few is not None else decoder.cache(args.context, scheme=scheme("bfloat16"))
            seconds, sparse = prefill(subject, own, ids, few)
            loss = (full.exp() * (full - sparse)).sum(-1)
            skipped = 0 if own.skipped is None else int(own.skipped) / heads
            prompt = args.context - ROWS
            found[name] = {
                "seconds": seconds, "speedup": whole / seconds, "kl": float(loss.mean()), "worst": float(loss.max()),
                "top1": float((full.argmax(-1) == sparse.argmax(-1)).double().mean()),
                "skipped": skipped / (prompt * (prompt + 1) / 2),
            }  # fmt: skip
            print(name, found[name], flush=True)
    print(json.dumps({"context": args.context, "kv": args.kv, "full_seconds": whole, "settings": found}))


if __name__ == "__main__":
    main()
