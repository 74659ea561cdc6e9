"""HumanEval's pass@1: how many problems a model solves with its likeliest program (Chen et al. 2021, arXiv 2107.03374).

    PYTHONPATH=bench python -m reals.humaneval MODEL [--problems N] [--tokens N]

The model continues each problem's signature and docstring greedily, without a chat template, until a line that is no
longer of the function. The problem's own tests run behind that, by `sandbox.py`. Where it refuses, nothing is run, and
the object has `skipped` with the reason in place of a figure. `values` has the mark of each problem, `verdicts` what
was wrong.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from compressors import DATA

from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams
from reals import sandbox
from reals.program_child import PASSED

PROBLEMS = DATA / "data" / "tasks" / "humaneval.jsonl.gz"
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert", "\n@", "\n```")
"""Beginnings of lines behind the function."""
TOKENS = 384

Problem = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--problems", type=int, default=164)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a program at most")
    args = parser.parse_args()
    print(json.dumps(solved(args.model, args.problems, args.tokens)))


def solved(model: Path, count: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Return `humaneval`, the share of the first `count` problems that a model solves, or why it was `skipped`."""
    if (why := sandbox.refused()) is not None:
        return {"skipped": f"programs cannot be run here: {why}"}
    tasks = problems()[:count]
    llm = LLM(model, activations="exact")
    params = SamplingParams(max_tokens=tokens, temperature=0, stop=ENDS)
    answers = llm.generate([task["prompt"] for task in tasks], params)
    verdicts = [sandbox.verdict(program(task, answer.text)) for task, answer in zip(tasks, answers, strict=True)]
    marks = [float(verdict == PASSED) for verdict in verdicts]
    return {"humaneval": sum(marks) / len(marks), "values": marks, "verdicts": verdicts}


def problems() -> list[Problem]:
    with gzip.open(PROBLEMS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def program(problem: Problem, completion: str) -> str:
    """Return a program that raises where the completion is wrong."""
    return f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"


if __name__ == "__main__":
    main()
