"""Audit of speculative decoding: seeded requests with drafts and without, every token and log probability compared.

The prompts repeat themselves, so that every drafter has something to guess. Parameters are of every kind that acts on
a draw. On CPUs no number may differ (`sampling/verify.py`). On a GPU rows of larger products may be rounded otherwise,
so there the audit tells how many texts that concerns.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from attar.engine.llm.llm import LLM
from attar.progress import Progress
from attar.protocol.request import Completion, SamplingParams
from attar.protocol.speculation import MAX_DRAFT_TOKENS

TOGETHER = 8  # requests at a time
TOKENS = 64  # of each answer
PROMPT = 48


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found. `differing` has, for each request that differs, its number and that of its first token that
    does."""

    requests: int
    tokens: int
    drafted: int
    accepted: int
    differing: tuple[tuple[int, int], ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing differs."""
        return not self.differing

    @property
    def sentence(self) -> str:
        """Return the verdict."""
        made = f"{self.accepted:,} of {self.drafted:,} drafts were right"
        if self.ok:
            return f"{self.requests:,} requests: {self.tokens:,} tokens, same with drafts as without; {made}"
        request, token = self.differing[0]
        return (
            f"{len(self.differing):,} of {self.requests:,} requests differ with drafts, the first is {request}, "
            f"from token {token} on; {made}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"ok": self.ok, **asdict(self)}


def audit(llm: LLM, requests: int, progress: Progress | None = None) -> Audit:
    """Run seeded requests with the drafts of `llm`, then the same without, and compare. Raises ValueError where a
    request fails."""
    told = progress or (lambda stage, done, total: None)
    differing: list[tuple[int, int]] = []
    tokens = 0
    for first in range(0, requests, TOGETHER):
        prompts = [_prompt(number, llm) for number in range(first, min(first + TOGETHER, requests))]
        params = _params(first // TOGETHER, llm)
        drafted = llm.generate(prompts, params)
        plain = llm.generate(prompts, replace(params, draft_tokens=0))
        for number, (one, other) in enumerate(zip(drafted, plain, strict=True), first):
            tokens += len(other.token_ids)
            if (token := _difference(one, other)) is not None:
                differing.append((number, token))
        told("requests", first + len(prompts), requests)
    return Audit(requests, tokens, *llm.drafts, tuple(differing))


def _difference(one: Completion, other: Completion) -> int | None:
    """Return the first token at which two answers differ in token or log probabilities; None where they do not."""
    ours, theirs = (list(zip(each.token_ids, each.logprobs or (), strict=True)) for each in (one, other))
    longest = max(len(ours), len(theirs))
    return next((at for at in range(longest) if ours[at : at + 1] != theirs[at : at + 1]), None)


def _prompt(number: int, llm: LLM) -> list[int]:
    """Return a few random tokens, again and again."""
    draw = random.Random(number)
    period = [draw.randrange(llm.decoder.config.vocab_size) for _ in range(draw.randrange(4, 20))]
    return (period * PROMPT)[: min(PROMPT, llm.context // 2)]


def _params(number: int, llm: LLM) -> SamplingParams:
    """Return parameters that act on the draw, of another kind for each number."""
    draw = random.Random(-1 - number)
    return SamplingParams(
        max_tokens=min(TOKENS, llm.context // 2), temperature=(0.0, 0.7, 0.0, 1.0)[number % 4],
        top_p=draw.choice((1.0, 0.95)), top_k=draw.choice((0, 40)), repetition_penalty=draw.choice((1.0, 1.1)),
        frequency_penalty=draw.choice((0.0, 0.2)), min_tokens=draw.choice((0, 8)), ignore_eos=draw.random() < 0.5,
        seed=number, logprobs=2, draft_tokens=draw.randrange(1, MAX_DRAFT_TOKENS + 1),
    )  # fmt: skip
