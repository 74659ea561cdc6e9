"""Drafts of every kind beside each other, for one model, greedy, as the engine makes them.

    python bench/drafts.py MODEL --draft eagle3=FOLDER --draft copy=FILE.gguf [...] --text prose=FILE --text chat=FILE

For each draft and text: the share of right drafts at depths 1 to 3, the draft's bytes, what a draft costs in steps of
the model (D), tokens a step with the best number of drafts by measured costs, and the speed that these costs predict
beside the measured one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attar.evaluation import head_quality
from attar.evaluation.head_quality import HeadQuality

SHOWN = 3  # depths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    columns = " | ".join(f"depth {depth}" for depth in range(1, SHOWN + 1))
    print(f"| draft | text | {columns} | MB | D | best K | tokens a step | predicted speed | measured speed |")
    print("|---" * (SHOWN + 8) + "|")
    found = []
    for name, path in (pair.split("=", 1) for pair in args.draft):
        for kind, text in (pair.split("=", 1) for pair in args.text):
            made = head_quality.measure(args.model, path, Path(text), temperature=args.temperature)
            print(_row(name, kind, made, _bytes(Path(path))), flush=True)
            found.append({"draft": name, "text": kind, "bytes": _bytes(Path(path)), **made.to_dict()})
    print(json.dumps({"model": Path(args.model).name, "drafts": found}))


def _row(name: str, text: str, made: HeadQuality, size: int) -> str:
    best = max(made.speeds, key=lambda each: each.predicted)
    shares = " | ".join(f"{share:.2f}" for share in (*made.acceptance, *[0.0] * SHOWN)[:SHOWN])
    return (
        f"| {name} | {text} | {shares} | {size / 1e6:.1f} | {made.draft_cost:.2f} | {best.drafts} | {best.tokens:.2f} "
        f"| {best.predicted:.2f} | {best.measured:.2f} |"
    )


def _bytes(path: Path) -> int:
    """Return the bytes of a draft's weights."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return sum(each.stat().st_size for each in files)


if __name__ == "__main__":
    main()
