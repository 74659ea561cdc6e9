"""Whether the gain of drafts can be predicted: fitted on one half of the texts, measured on the other.

    PYTHONPATH=bench python -m speculation.predicted MODEL --draft DRAFT [--kinds code chat] [--temperature 0.8]
        [--top-p 0.95] [--prompts 8] [--tokens 96]

On the first half of the prompts of each kind, one run without drafts and one with `MOST` of them in each pass say which
drafts are right, what a draft takes (D), and what a pass takes besides the model's step. c(r) is measured apart. From
these come, for each fixed number K of drafts, the tokens of a pass, E(K), and the speed. Both are then measured on the
other half. A walk along the first half's texts gives E(K): a pass with fewer drafts begins the next one earlier.

The last line is a JSON object. Exit status 1 where E(K) is off by more than 5 %, a speed by more than 10 %, or the best
K by more than one place in the list.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.engine.speculation import drafter
from attar.evaluation import row_costs
from speculation import texts
from speculation.runs import CONTEXT, Ask, Run, answer, asks, engine
from speculation.tables import ROWS, RowCosts

MOST = 8
COUNTS = (0, 1, 2, 3, 4, MOST)
COST_PROMPT, COST_ROUNDS = 192, 5
OF_TOKENS, OF_SPEED = 0.05, 0.10  # most that a prediction may be off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--kinds", nargs="+", default=("code", "chat"), choices=texts.KINDS)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind, both halves together")
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    llm = LLM(args.model, verify=False)
    costs = RowCosts(row_costs.measure(llm.decoder, llm.decoder.lossless, COST_PROMPT, ROWS, COST_ROUNDS))
    engines = {}
    for count in COUNTS:
        made = drafter(args.draft, llm.model, CONTEXT, 1, activations="int8g128", verify=False) if count else None
        engines[count] = engine(llm, 1, made, count)
    halves: tuple[list[Ask], list[Ask]] = [], []
    for kind in args.kinds:
        asked = asks(texts.prompts(llm, kind, args.prompts), args.tokens, args.temperature, args.top_p)
        for at, half in enumerate(halves):
            half += asked[at::2]
    for each in engines.values():
        answer(each, halves[0][:1])  # records steps
    plain, drafted = total(engines[0], halves[0]), [answer(engines[MOST], [ask])[0] for ask in halves[0]]
    draft_cost = sum(run.drafting for run in drafted) / sum(sum(run.drafted) for run in drafted)
    besides = plain.seconds / plain.tokens - costs.of(1)  # sampling, and Python, of a token
    right = [matches(run) for run in drafted]
    found = {count: total(each, halves[1]) for count, each in engines.items()}
    rows = []
    for count in COUNTS:
        tokens = walked(right, count)
        seconds = costs.of(1 + count) + count * draft_cost + besides * tokens
        run = found[count]
        rows.append({
            "drafts": count, "tokens": tokens, "measured_tokens": run.tokens / len(run.brought),
            "tok_s": tokens / seconds, "measured_tok_s": run.tokens / run.seconds,
        })  # fmt: skip
    return report(rows, costs, draft_cost)


def total(engine: Engine, asked: Sequence[Ask]) -> Run:
    return sum((answer(engine, [ask])[0] for ask in asked), Run())


def matches(run: Run) -> list[bool]:
    """For each token of a text whether its draft was right. Behind `MOST` right ones none was made: it counts as
    right."""
    return [ok for count in run.brought for ok in (*[True] * (count - 1), count > MOST)]


def walked(right: Sequence[Sequence[bool]], count: int) -> float:
    """Tokens of a pass with `count` drafts, walking along the texts."""
    passes = tokens = 0
    for each in right:
        at = 0
        while at < len(each):
            room = min(count, len(each) - at - 1)
            kept = next((n for n in range(room) if not each[at + n]), room)
            at += 1 + kept
            passes += 1
        tokens += len(each)
    return tokens / passes


def report(rows: Sequence[dict[str, Any]], costs: RowCosts, draft_cost: float) -> int:
    print("| drafts | tokens a pass, predicted | measured | off | tokens/s, predicted | measured | off |")
    print("|---|---|---|---|---|---|---|")
    for each in rows:
        each["off_tokens"] = each["tokens"] / each["measured_tokens"] - 1
        each["off_speed"] = each["tok_s"] / each["measured_tok_s"] - 1
        print(
            f"| {each['drafts']} | {each['tokens']:.2f} | {each['measured_tokens']:.2f} | {each['off_tokens']:+.1%} "
            f"| {each['tok_s']:.1f} | {each['measured_tok_s']:.1f} | {each['off_speed']:+.1%} |"
        )
    best = [max(range(len(rows)), key=lambda at: rows[at][key]) for key in ("tok_s", "measured_tok_s")]
    print(f"best number of drafts: predicted {COUNTS[best[0]]}, measured {COUNTS[best[1]]}")
    print(f"D {draft_cost / costs.seconds[0]:.2f}; c(r): " + ", ".join(
        f"{count}: {seconds / costs.seconds[0]:.2f}" for count, seconds in zip(ROWS, costs.seconds, strict=True)
    ))  # fmt: skip
    held = {
        "tokens": max(abs(each["off_tokens"]) for each in rows) <= OF_TOKENS,
        "speed": max(abs(each["off_speed"]) for each in rows) <= OF_SPEED,
        "best": abs(best[0] - best[1]) <= 1,
    }
    print(json.dumps({"rows": rows, "held": held, "row_costs": costs.seconds, "draft_cost": draft_cost}))
    return int(not all(held.values()))


if __name__ == "__main__":
    sys.exit(main())
