"""Greedy answers beside another program's logits: where they differ first, and what counts as a tie."""

from __future__ import annotations

import torch
from reals import greedy


def logits(*pairs: tuple[int, float]) -> torch.Tensor:
    """Rows of eight logits: a token's is as far above that of the next token, as it says."""
    rows = torch.zeros(len(pairs), 8)
    for row, (token, margin) in zip(rows, pairs, strict=True):
        row[token], row[(token + 1) % 8] = 2 + margin, 2
    return rows


def test_an_answer_differs_first_where_the_likeliest_token_is_another() -> None:
    rows = logits((1, 1.0), (2, 0.01), (3, 0.5))
    equal = {"tokens": 3, "differs": None, "top_two": None, "to_ours": None, "tie": 1}
    assert greedy.beside(rows, [1, 2, 3]) == equal
    found = greedy.beside(rows, [1, 2, 0])
    assert (found["differs"], found["tie"]) == (2, 1)
    assert (found["top_two"], found["to_ours"]) == (0.5, 2.5)


def test_answers_are_counted_to_the_end_to_a_tie_and_before_it() -> None:
    rows = logits((1, 1.0), (2, 0.01), (3, 0.5))
    answers = ([1, 2, 3], [1, 3, 3], [1, 2, 4], [2, 2, 3])  # equal, differs at a tie, behind it, before it
    found = greedy.figures([{"prompt": at, **greedy.beside(rows, each)} for at, each in enumerate(answers)])
    assert (found["equal"], found["near"], found["to_tie"]) == (0.25, 0.5, 0.75)
    assert [each["prompt"] for each in found["found"]] == [3]
