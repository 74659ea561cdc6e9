"""Prompts of five kinds, from real texts, for models that answer them.

`code` is a problem of HumanEval, to be completed as it stands. `edit` is a conversation: a solved problem of HumanEval,
to be repeated with its function under another name. `chat` are conversations of `reals/prompts.jsonl`. `prose` is
WikiText-2's test text, and `novel` a novel that no draft was trained on: both are continued.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from compressors import DATA
from reals import humaneval
from reals.chat import conversations

from attar.engine.llm.llm import LLM

KINDS = ("code", "edit", "chat", "prose", "novel")
CHARACTERS = 400_000  # of a text, from which prompts are taken
LENGTH = 128  # tokens of a prompt that is prose
EDIT = (
    "Repeat this Python code with one change: rename the function `{0}` to `{0}_checked`, wherever it occurs. Answer "
    "with the whole code and nothing else.\n\n```python\n{1}```"
)


def prompts(llm: LLM, kind: str, count: int) -> list[tuple[int, ...]]:
    """The token ids of `count` prompts of a kind, evenly from all that there are. Raises ValueError for another."""
    if kind == "code":
        return [tuple(llm.tokenizer.encode(each["prompt"])) for each in _evenly(humaneval.problems(), count)]
    if kind == "edit":
        asked = [
            EDIT.format(each["entry_point"], each["prompt"] + each["canonical_solution"])
            for each in _evenly(humaneval.problems(), count)
        ]
        return [tuple(llm.encode_chat([{"role": "user", "content": each}])) for each in asked]
    if kind == "chat":
        return [tuple(llm.encode_chat(each)) for each in _evenly(conversations(), count)]
    if kind not in KINDS:
        raise ValueError(f"there are no prompts of the kind {kind}: there are {', '.join(KINDS)}")
    text = DATA / "data" / "text" / ("novels_valid.jsonl" if kind == "novel" else "wikitext2_test.txt")
    words = text.read_text(encoding="utf-8")
    if kind == "novel":
        words = json.loads(words.splitlines()[0])["text"]
    ids = llm.tokenizer.encode(words[:CHARACTERS])
    if len(ids) < count * LENGTH:
        raise ValueError(f"{text} has {len(ids):,} tokens, and {count * LENGTH:,} are needed")
    apart = len(ids) // count
    return [tuple(ids[at * apart : at * apart + LENGTH]) for at in range(count)]


def _evenly(every: Sequence[Any], count: int) -> Sequence[Any]:
    return every[:: max(1, len(every) // count)][:count]
