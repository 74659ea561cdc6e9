"""One recipe on a real model: KL from the original, and how often tasks are answered right.

    PYTHONPATH=bench python -m reals.asked FILE.gguf --place FOLDER [--recipe NAME] [--items N] [--samples N]
        [--tokens N] [--problems N]

The original is the file's values in bfloat16 (`dense.py`), kept in FOLDER; without a recipe it is asked itself. Recipes
are calibrated on text of all kinds, and KL is measured on held-out text of these. Items are the first N of HellaSwag,
PIQA and LAMBADA, asked by lm-eval's rules without examples. Accuracies are those normalized by length where a task has
both; of HumanEval (`humaneval.py`), where asked for, the share of problems solved. `values` has the mark of each item,
for paired intervals.
"""

from __future__ import annotations

import argparse
import bz2
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from compressors import DATA
from dense import dense

from attar.checkpoints.sources import opening
from attar.evaluation.tasks.catalogue import TaskSource
from attar.evaluation.tasks.run import evaluate_tasks
from attar.text.tokenizer import Tokenizer
from reals import humaneval
from reals.compression import forget, kept, ours
from reals.scoring import score
from reals.texts import LENGTH, MIXED, calibration, scored

FIGURE = {"hellaswag": "acc_norm", "piqa": "acc_norm", "lambada_openai": "acc"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--place", type=Path, required=True, help="where the dense original is kept")
    parser.add_argument("--recipe")
    parser.add_argument("--items", type=int, default=200, help="of each task")
    parser.add_argument("--samples", type=int, default=32, help=f"calibration sequences of {LENGTH} tokens")
    parser.add_argument("--tokens", type=int, default=8192, help="to score on")
    parser.add_argument("--problems", type=int, default=0, help="of HumanEval")
    args = parser.parse_args()
    args.bits, args.seed = None, 0
    original = dense(args.file, args.place / args.file.stem)
    tokenizer = Tokenizer.load(original)
    with kept(args) as place:
        found: dict[str, Any] = {"kl_mean": 0.0}
        out = original
        if args.recipe is not None:
            sequences = calibration(tokenizer, MIXED, args.samples, args.seed)
            forget(original)
            made, out = ours(original, place / "out", sequences, args)
            text = scored(tokenizer, MIXED, args.tokens)
            windows = [text[at : at + LENGTH] for at in range(0, len(text), LENGTH)]
            figures = score(opening.load(out, torch.float32), original, args.place, windows)
            found = {"bits": made["bits"], "kl_mean": figures["kl_mean"].value}
        sources = [TaskSource(name, path) for name, path in items(args.place).items()]
        answers = evaluate_tasks(out, sources, tokenizer=tokenizer, limit=args.items, shots=0).answers
        solved = humaneval.solved(out, args.problems) if args.problems else {}
    for name, figure in FIGURE.items():
        found[name] = answers[name].figures[figure].value
    values = {name: answers[name].values[key] for name, key in FIGURE.items()}
    values["humaneval"] = solved.pop("values", [])
    print(json.dumps(found | solved | {"values": values}))


def items(folder: Path) -> dict[str, Path]:
    """Write the items of the test data in the Hub's form, and return the files by task."""
    given = DATA / "data" / "tasks"
    rows = {
        "hellaswag": list(_hellaswag(given / "hellaswag_val_full.txt.bz2")),
        "piqa": [
            json.loads(line) | {"label": int(label)}
            for line, label in zip(
                (given / "piqa_valid.jsonl").read_text().splitlines(),
                (given / "piqa_valid-labels.lst").read_text().split(),
                strict=True,
            )
        ],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return {name: folder / f"{name}.jsonl" for name in rows} | {"lambada": given / "lambada_test.jsonl"}


def _hellaswag(path: Path) -> Iterator[dict[str, Any]]:
    """Yield items of the file's six lines each: activity and context, the right ending's number, four endings."""
    with bz2.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    for at in range(0, len(lines) - 5, 6):
        activity, _, context = lines[at].partition(": ")
        yield {
            "ind": at // 6, "activity_label": activity, "ctx_a": context, "ctx_b": "", "ctx": context,
            "endings": lines[at + 2 : at + 6], "source_id": "", "split": "val", "split_type": "",
            "label": lines[at + 1],
        }  # fmt: skip


if __name__ == "__main__":
    main()
