"""What choosing bits by layer gains over the same bits everywhere, at equal size: KL on text that nothing has seen.

    python bench/allocation.py [--model demo] [--methods rtn gptq] [--bits 3.5 ...] [--tokens N] [--samples N]

For each method, uniform 2 to 4 bits in groups and the allocation for each number of bits, all run by the same walk on
the same calibration tokens. No uniform scheme has most numbers of bits, so "uniform" between two schemes is their KL
interpolated, logarithm against bits; the ratio's interval is a bootstrap over windows, all three read on the same
draws. A second ratio is to the best uniform scheme that is no larger, with which nobody needs to interpolate.
Texts are those of `lanes.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressors import DATA, group_size
from lanes import LENGTH, slug, texts

from attar.checkpoints.sources import hf, hub
from attar.compression.request.request import CompressionRequest, Target, parse_candidates
from attar.compression.runs.pipeline import compress_request
from attar.evaluation.report import evaluate
from attar.metrics.bootstrap import LEVEL, resamples


@dataclass(frozen=True)
class Scored:
    """One output: its bits a weight, and the KL of each window of each text."""

    label: str
    bits: float
    kl: dict[str, np.ndarray[Any, np.dtype[np.float64]]]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, a Hub id or `demo`")
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq"])
    parser.add_argument("--bits", nargs="+", type=float, default=[3.5])
    parser.add_argument("--ladder", help="schemes to choose among; default: the recipe's own")
    parser.add_argument("--samples", type=int, default=64, help=f"calibration sequences of {LENGTH} tokens")
    parser.add_argument("--tokens", type=int, default=32768, help="of each held-out text")
    parser.add_argument("--calib", type=Path, default=DATA / "data" / "text" / "novels.jsonl.xz")
    parser.add_argument("--text", type=Path, default=DATA / "data" / "text" / "novels_valid.jsonl")
    parser.add_argument("--other", type=Path, default=DATA / "data" / "text" / "wikitext2_test.txt")
    parser.add_argument("--seed", type=int, default=0, help="of calibration texts")
    args = parser.parse_args()
    source = hub.resolve(args.model)
    size = group_size(hf.Checkpoint.open(source))
    read = texts(source, args.calib, args.text, args.other, args.samples, args.tokens, args.seed)
    decoder = hf.load(source, torch.float32)
    candidates = None if args.candidates is None else parse_candidates(args.candidates)
    uniform = [f"w2g{min(size, 64)}", f"w3g{size}", f"w3g{min(size, 64)}", f"w3g{min(size, 32)}", f"w4g{size}"]
    found: dict[str, Any] = {}

    def score(label: str, recipe: str, target: Target | None, folder: Path) -> Scored:
        out = folder / slug(label)
        done = compress_request(
            CompressionRequest(
                source,
                out,
                recipe=recipe,
                target=target and replace(target, candidates=candidates),
                calibration=read.calibration,
                seed=args.seed,
                overwrite=True,
                resume=False,
            )
        )
        reports = {name: evaluate(out, against=decoder, tokens=ids) for name, ids in read.held_out.items()}
        kl = {name: report.measurement.kl_windows for name, report in reports.items()}
        shown = "".join(f"{report.figures['kl_mean'].value:>28.5f}" for report in reports.values())
        print(f"{label:<22}{done.bits_per_weight:7.3f}{shown}{done.seconds:9.1f}", flush=True)
        return Scored(label, done.bits_per_weight, kl, done.seconds)

    names = "".join(f"{name:>28}" for name in read.held_out)
    print(f"{args.samples} x {LENGTH} tokens to calibrate on, {args.tokens:,} of each text to score on")
    print(f"{'':<22}{'bits':>7}{names}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            same = [score(f"{method}-{name}", f"{method}-{name}", None, Path(folder)) for name in uniform]
            for bits in args.bits:
                label = f"{method} at {bits:g}"
                chosen = score(label, f"{method}-w4g{size}", Target(bits=bits), Path(folder))
                found[label] = {"bits": chosen.bits, "seconds": chosen.seconds, "ratio": {}}
                for text in read.held_out:
                    ratio = against(chosen, [same[1], same[4]] if chosen.bits > same[1].bits else same[:2], text)
                    smaller = [each for each in same if each.bits <= chosen.bits + 0.01]
                    plain = max(against(chosen, [each], text) for each in smaller)
                    found[label]["ratio"][text] = {"interpolated": ratio, "best_no_larger": plain}
                    print(f"    {text}: {shown(ratio)} of uniform interpolated, {shown(plain)} of the best no larger")
    print(json.dumps({"model": args.model, "samples": args.samples, "tokens": args.tokens, "allocation": found}))


def against(chosen: Scored, uniform: Sequence[Scored], text: str) -> list[float]:
    """KL of `chosen` over that of uniform bits at its size, with the ends of the interval."""
    low, high = uniform[0], uniform[-1]
    share = 0.0 if low is high else (chosen.bits - low.bits) / (high.bits - low.bits)

    def ratio(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        between = (1 - share) * np.log(counts @ low.kl[text]) + share * np.log(counts @ high.kl[text])
        ratios: np.ndarray[Any, Any] = np.exp(np.log(counts @ chosen.kl[text]) - between)
        return ratios

    windows = len(chosen.kl[text])
    tail = (1 - LEVEL) / 2
    drawn = np.quantile(ratio(resamples(windows)), (tail, 1 - tail), method="inverted_cdf")
    return [float(ratio(np.ones((1, windows)))[0]), float(drawn[0]), float(drawn[1])]


def shown(ratio: list[float]) -> str:
    return f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"


if __name__ == "__main__":
    main()
