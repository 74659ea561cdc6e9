"""Drafts of every kind beside each other, for one model, greedy, as the engine makes them.

    python bench/drafts.py MODEL --draft eagle3=FOLDER --draft copy=FILE.gguf [...] --text prose=FILE --text chat=FILE

For each draft and text: the share of right drafts at depths 1 to 3, the draft's bytes, what a draft costs in steps of
the model (D), and tokens a step with three drafts, E(3). K is the best number of drafts by measured costs; then come
the speed that these costs predict for it, and the measured one. The last column is the speed with --draft-tokens auto
over that without drafts, prompt by prompt in turns.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from attar.engine.llm.llm import LLM
from attar.evaluation import head_quality
from attar.evaluation.head_quality import HeadQuality
from attar.metrics import greedy
from attar.protocol.request import SamplingParams
from attar.text.files import read_text

SHOWN = 3  # depths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    columns = " | ".join(f"depth {depth}" for depth in range(1, SHOWN + 1))
    print(f"| draft | text | {columns} | MB | D | E(3) | best K | predicted speed | measured speed | auto |")
    print("|---" * (SHOWN + 9) + "|")
    found = []
    for name, path in (pair.split("=", 1) for pair in args.draft):
        for kind, text in (pair.split("=", 1) for pair in args.text):
            made = head_quality.measure(
                args.model, path, Path(text), temperature=args.temperature, texts=args.prompts, length=args.tokens
            )
            auto = _auto(args, path, Path(text))
            print(_row(name, kind, made, _bytes(Path(path)), auto), flush=True)
            found.append({"draft": name, "text": kind, "bytes": _bytes(Path(path)), "auto": auto, **made.to_dict()})
    print(json.dumps({"model": Path(args.model).name, "drafts": found}))


def _auto(args: argparse.Namespace, draft: str, text: Path) -> float:
    """Return how many times as fast continuations are with `auto` as without drafts, after one that is not timed."""
    off, on = LLM(args.model, verify=False), LLM(args.model, draft=draft, verify=False)
    tokens = off.tokenizer.encode(read_text(text), add_special_tokens=False)
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True, seed=0)
    seconds = [0.0, 0.0]
    started = greedy.prompts([tokens], args.prompts + 1, off.tokenizer.added_bos, off.context).tolist()
    for number, prompt in enumerate(started):
        for place, llm in enumerate((off, on)):
            since = time.perf_counter()
            llm.generate([prompt], params)
            seconds[place] += (time.perf_counter() - since) * (number > 0)
    return seconds[0] / seconds[1]


def _row(name: str, text: str, made: HeadQuality, size: int, auto: float) -> str:
    best = max(made.speeds, key=lambda each: each.predicted)
    most = next(each for each in made.speeds if each.drafts == SHOWN)
    shares = " | ".join(f"{share:.2f}" for share in (*made.acceptance, *[0.0] * SHOWN)[:SHOWN])
    return (
        f"| {name} | {text} | {shares} | {size / 1e6:.1f} | {made.draft_cost:.2f} | {most.tokens:.2f} | {best.drafts} "
        f"| {best.predicted:.2f} | {best.measured:.2f} | {auto:.2f} |"
    )


def _bytes(path: Path) -> int:
    """Return the bytes of a draft's weights."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return sum(each.stat().st_size for each in files)


if __name__ == "__main__":
    main()
