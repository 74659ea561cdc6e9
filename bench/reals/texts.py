"""Texts as tokens of a model: to score on, and others of the same kinds to calibrate on.

Prose is WikiText-2 (test text to score, training text to calibrate); code is a sample of programs, and chat are
problems of GSM8K with their answers in the model's own chat template. Of these two the first half is scored and the
second one calibrates. `mixed` is equal parts of all three.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from compressors import DATA

from attar.text.template import render_chat
from attar.text.tokenizer import Tokenizer

TEXT = DATA / "data" / "text"
KINDS = ("prose", "code", "chat")
MIXED = "mixed"
LENGTH = 512  # tokens of a window, and of a calibration sequence


def scored(tokenizer: Tokenizer, kind: str, count: int) -> list[int]:
    """The first `count` tokens of the text of a kind. Raises ValueError where it is shorter."""
    if kind == MIXED:
        return [index for each in KINDS for index in scored(tokenizer, each, count // len(KINDS) // LENGTH * LENGTH)]
    return _first(_texts(tokenizer, kind, second=False), tokenizer, count, count)


def calibration(tokenizer: Tokenizer, kind: str, samples: int, seed: int) -> list[list[int]]:
    """Sequences of `LENGTH` tokens from all over the text of a kind, the first at a place that the seed says.

    Raises ValueError where the text is shorter than so many sequences.
    """
    if kind == MIXED:
        shares = [len(range(at, samples, len(KINDS))) for at in range(len(KINDS))]
        parts = [calibration(tokenizer, each, share, seed) for each, share in zip(KINDS, shares, strict=True)]
        return [sequence for part in parts for sequence in part]
    ids = _first(_texts(tokenizer, kind, second=True), tokenizer, 8 * samples * LENGTH, samples * LENGTH)
    room = len(ids) // LENGTH
    starts = [((i * room // samples + seed * 61) % room) * LENGTH for i in range(samples)]
    return [ids[at : at + LENGTH] for at in starts]


def _texts(tokenizer: Tokenizer, kind: str, second: bool) -> Iterator[str]:
    """The text of a kind to score, or the `second` one, to calibrate on."""
    if kind == "chat":
        yield from _chats(tokenizer, second)
    elif kind == "prose":
        yield (TEXT / ("wikitext2_train_part.txt" if second else "wikitext2_test.txt")).read_text()
    else:
        code = (TEXT / "code.txt").read_text()
        yield code[len(code) // 2 :] if second else code[: len(code) // 2]


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


def _first(texts: Iterator[str], tokenizer: Tokenizer, count: int, least: int) -> list[int]:
    """The first `count` tokens of texts one after another; fewer, but at least `least`, where there are no more."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= count:
            break
    if len(ids) < least:
        raise ValueError(f"the text has {len(ids):,} tokens, and {least:,} are needed")
    return ids[:count]
