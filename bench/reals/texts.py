"""Texts as tokens of a model: to score on, and others of the same kinds to calibrate on.

Prose is WikiText-2 (test text to score, training text to calibrate); code is a sample of programs, and chat are
problems of GSM8K with their answers in the model's own chat template. Of these two the first half is scored and the
second one calibrates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from compressors import DATA

from attar.text.template import render_chat
from attar.text.tokenizer import Tokenizer

KINDS = ("prose", "code", "chat")
LENGTH = 512  # tokens of a window, and of a calibration sequence


def scored(tokenizer: Tokenizer, kind: str, count: int) -> list[int]:
    """The first `count` tokens of the text of a kind. Raises ValueError where it is shorter."""
    text = DATA / "data" / "text"
    if kind == "chat":
        return _first(_chats(tokenizer, second=False), tokenizer, count)
    if kind == "prose":
        return _first(iter([(text / "wikitext2_test.txt").read_text()]), tokenizer, count)
    return _first(iter([_half(text / "code.txt", second=False)]), tokenizer, count)


def calibration(tokenizer: Tokenizer, kind: str, samples: int, seed: int) -> list[list[int]]:
    """Sequences of `LENGTH` tokens from all over the text of a kind, the first at a place that the seed says."""
    text, most = DATA / "data" / "text", 8 * samples * LENGTH
    if kind == "chat":
        ids = _first(_chats(tokenizer, second=True), tokenizer, most, enough=samples * LENGTH)
    else:
        whole = (text / "wikitext2_train_part.txt").read_text() if kind == "prose" else _half(text / "code.txt", True)
        ids = _first(iter([whole]), tokenizer, most, enough=samples * LENGTH)
    room = len(ids) // LENGTH
    starts = [((i * room // samples + seed * 61) % room) * LENGTH for i in range(samples)]
    return [ids[at : at + LENGTH] for at in starts]


def _half(path: Path, second: bool) -> str:
    text = path.read_text()
    return text[len(text) // 2 :] if second else text[: len(text) // 2]


def _chats(tokenizer: Tokenizer, second: bool) -> Iterator[str]:
    """Conversations in the model's template. Raises ValueError where it has none."""
    template = tokenizer.chat_template()
    lines = (DATA / "data" / "tasks" / "gsm8k_test.jsonl").read_text().splitlines()
    middle = len(lines) // 2
    for line in lines[middle:] if second else lines[:middle]:
        problem = json.loads(line)
        messages = [
            {"role": "user", "content": problem["question"]},
            {"role": "assistant", "content": problem["answer"]},
        ]
        yield render_chat(
            template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token,
            add_generation_prompt=False,
        )  # fmt: skip


def _first(texts: Iterator[str], tokenizer: Tokenizer, count: int, enough: int | None = None) -> list[int]:
    """The first `count` tokens of texts one after another; fewer, but at least `enough`, where there are no more."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= count:
            break
    least = count if enough is None else enough
    if len(ids) < least:
        raise ValueError(f"the text has {len(ids):,} tokens, and {least:,} are needed")
    return ids[:count]
