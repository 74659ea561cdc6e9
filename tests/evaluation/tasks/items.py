"""Twenty items of each task, written for these tests, in the form that the Hub has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

THINGS = ["cup", "door", "river", "lamp", "stone", "garden", "letter", "boat", "clock", "horse"]
PLACES = ["on the table", "behind the house"]
NUMBER = 20
Item = dict[str, Any]


def _thing(i: int) -> str:
    return THINGS[i % len(THINGS)]


def arc(i: int) -> Item:
    texts = [f"a {_thing(i)}", f"a {_thing(i + 3)}", "a cloud", "a song"]
    choices = {"text": texts, "label": list("ABCD") if i % 2 else list("1234")}
    return {
        "id": str(i),
        "question": f"Which of these is a {_thing(i)}?",
        "choices": choices,
        "answerKey": choices["label"][0],
    }


def gsm8k(i: int) -> Item:
    question = f"Ann has {i} {_thing(i)}s and buys {i + 2} more. How many has she?"
    return {"question": question, "answer": f"She has {i} + {i + 2} = {2 * i + 2}.\n#### {2 * i + 2}"}


def hellaswag(i: int) -> Item:
    endings = [f"puts it {place}." for place in (*PLACES, "in the sky", "under a song")]
    return {
        "ind": i, "activity_label": "Carrying", "ctx_a": f"A man lifts a {_thing(i)}.", "ctx_b": "he",
        "endings": endings, "ctx": f"A man lifts a {_thing(i)}. he", "source_id": "", "split": "val",
        "split_type": "indomain", "label": str(i % 4),
    }  # fmt: skip


def ifeval(i: int) -> Item:
    kinds = ["punctuation:no_comma", "length_constraints:number_words"]
    return {
        "key": i, "prompt": f"Write of a {_thing(i)} without a comma, in more than 5 words.",
        "instruction_id_list": kinds,
        "kwargs": [{"relation": None, "num_words": None}, {"relation": "at least", "num_words": 5}],
    }  # fmt: skip


def lambada(i: int) -> Item:
    return {"text": f"The {_thing(i)} lay {PLACES[i % 2]} all day, and nobody saw the {_thing(i)}"}


def mmlu(i: int) -> Item:
    return {
        "question": f"What is {i} + 1?", "subject": "abstract_algebra" if i % 2 else "anatomy",
        "choices": [str(i + 1), str(i), str(i + 2), "0"], "answer": 0,
    }  # fmt: skip


def piqa(i: int) -> Item:
    goal = f"How do you open a {_thing(i)}?"
    return {"goal": goal, "sol1": "Pull at its handle.", "sol2": "Sing to the moon.", "label": i % 2}


def truthfulqa(i: int) -> Item:
    choices = [f"No, a {_thing(i)} cannot fly.", f"Yes, every {_thing(i)} flies.", "It flies at night."]
    return {
        "question": f"Can a {_thing(i)} fly?", "mc1_targets": {"choices": choices, "labels": [1, 0, 0]},
        "mc2_targets": {"choices": choices, "labels": [1, 0, 0]},
    }  # fmt: skip


def winogrande(i: int) -> Item:
    sentence = f"The {_thing(i)} did not fit in the box because the _ was too large."
    return {"sentence": sentence, "option1": _thing(i), "option2": "box", "answer": str(1 + i % 2)}


TASKS: Mapping[str, Callable[[int], Item]] = {
    "arc_easy": arc, "gsm8k": gsm8k, "hellaswag": hellaswag, "ifeval": ifeval, "lambada": lambada, "mmlu": mmlu,
    "piqa": piqa, "truthfulqa": truthfulqa, "winogrande": winogrande,
}  # fmt: skip


def write(folder: Path, task: str, name: str | None = None) -> Path:
    """Write a task's items to FOLDER/NAME.jsonl, and return that path."""
    path = folder / f"{name or task}.jsonl"
    path.write_text("".join(json.dumps(TASKS[task](i)) + "\n" for i in range(NUMBER)))
    return path
