"""Prompts of causal rerankers, after which a model says `yes` or `no` about a document.

The form is Qwen3-Reranker's: its own chat markup around an instruction, the query and the document. The score is the
probability of `yes` among the two. Texts cannot contain special tokens: they are encoded as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attar.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_MARKUP = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


class Reranker:
    """Makes a tokenizer's prompts. `encode` encodes a text in which nothing is a special token."""

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[str], list[int]], no: int, yes: int) -> None:
        self.no, self.yes = no, yes
        self._encode = encode
        self._before, self._behind = tokenizer.encode_chat(_BEFORE), tokenizer.encode_chat(_BEHIND)

    @classmethod
    def of(cls, tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> Reranker | None:
        """Return the maker of prompts for this tokenizer; None where it lacks the markup or the two words."""
        no, yes = tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")
        if no is None or yes is None or any(tokenizer.token_to_id(mark) is None for mark in _MARKUP):
            return None
        return cls(tokenizer, encode, no, yes)

    def ids(self, query: str, document: str, instruction: str = INSTRUCTION) -> tuple[int, ...]:
        """Return the prompt that asks about a document."""
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        return (*self._before, *self._encode(text), *self._behind)


def score(no: float, yes: float) -> float:
    """Return the probability of `yes` among both, by their log probabilities."""
    largest = max(no, yes)
    weights = math.exp(no - largest), math.exp(yes - largest)
    return weights[1] / sum(weights)
