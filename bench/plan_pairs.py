"""KL divergences of weights with a KV cache: the sum that a plan predicts beside what was measured.

    python bench/plan_pairs.py MODEL OUTPUT ... --text FILE [--kv bfloat16 int8 klt4] [--tokens 4096] [--context 512]
                               [--out FOLDER]

Each output of the model is measured with the plain cache, each KV format with the model as it is, and then every pair.
A plan knows the two parts and adds them. The table has sum, measured pair, their relative difference, and whether the
predicted interval holds the measured value. The bar is 10 % each, and 9 intervals of 10.

Finished measurements are kept in --out; the same command goes on there. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from attar.compression.resume import Log
from attar.evaluation.report import evaluate
from attar.plan.goals.quality import UNCHANGED, Quality

OWN = "as it is"  # the model's weights
PLAIN = "float32"  # the KV format that changes nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("outputs", nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "int8", "klt4"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("build/pairs"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    about = [str(Path(given.model).resolve()), str(given.text.resolve()), given.tokens, given.context]
    notes = Log(given.out / "divergences.jsonl", json.dumps(about))

    def measured(weights: str, kv: str) -> Quality:
        key = f"{weights} with {kv}"
        if notes.get(key) is None:
            print(key, file=sys.stderr)
            found = evaluate(
                given.model if weights == OWN else weights, against=None if weights == OWN else given.model,
                text=given.text, context=given.context, max_tokens=given.tokens, kv=kv,
            ).figures["kl_mean"]  # fmt: skip
            notes.put(key, [found.value, found.low, found.high])
        value, *ends = notes.get(key)
        value, low, high = (max(0.0, value if each is None else each) for each in (value, *ends))
        return Quality(value, low, high, "measured")

    weights = {each: measured(each, PLAIN) for each in given.outputs}
    formats = {kv: UNCHANGED if kv == PLAIN else measured(OWN, kv) for kv in given.kv}
    errors, covered = [], 0
    for path, of_weights in weights.items():
        for kv, of_cache in formats.items():
            expected, pair = of_weights + of_cache, measured(path, kv)
            errors.append(expected.kl / pair.kl - 1)
            inside = expected.low <= pair.kl <= expected.high
            covered += inside
            print(
                f"{Path(path).name}, {kv}: {of_weights.kl:.5f} + {of_cache.kl:.5f} = {expected.kl:.5f}, "
                f"measured {pair.kl:.5f} ({errors[-1]:+.1%}), {'inside' if inside else 'outside'} "
                f"{expected.low:.5f} to {expected.high:.5f}"
            )
    sizes = [abs(each) for each in errors]
    found = {"pairs": len(errors), "median": statistics.median(sizes), "most": max(sizes), "covered": covered}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
