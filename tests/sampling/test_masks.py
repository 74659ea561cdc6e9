"""Whatever a model says, an answer that ends satisfies its schema: random schemas, random and adversarial logits."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema
import pytest
import torch

from attar.protocol.grammar import Grammar
from attar.protocol.request import SamplingParams
from attar.sampling.masks import AllowedMask, GrammarMasks
from attar.sampling.sampler import SampledToken, Sampler, sample
from attar.text import _proof_child
from attar.text.grammars import GrammarError, Vocabulary
from tests.errors import user_error
from tests.text.random_schemas import schema

SCHEMAS = int(os.environ.get("TEST_RANDOM_SCHEMAS", "64"))
FIRST = int(os.environ.get("TEST_RANDOM_SCHEMAS_FIRST", "0"))
AT_ONCE = 16  # schemas of one test
MOST = 160  # tokens

WORDS = [b'{"', b'": ', b', "', b'"}', b'"]', b"[]", b"{}", b"}}", b'\\"', b"\\u", b"\\ud800", b"null", b"true",
         b"name", b"e999", b"0.", b"-", b"00", b"  ", b"\n\n", b"\xc3\xa9", b"\xf0\x9f", b'"x', b'a": 1',
         b"12", b"-01"]  # fmt: skip
END = 0
TOKENS = [b"", b"<call>", *(bytes([byte]) for byte in range(256)), *WORDS]
VOCABULARY = Vocabulary.make(TOKENS, special=(0, 1), ends=(END,))
# What an adversary prefers: to end at once, to open without end, to write digits, white space or escapes for ever.
PREFERRED: dict[str, list[bytes]] = {
    "ends": [b"", b"}", b"]", b'"'],
    "opens": [b"[", b"{", b'{"', b'"'],
    "digits": [b"00", b"9", b"e999", b"-", b"e", b".", b"0."],
    "space": [b"  ", b" ", b"\n\n", b"\t"],
    "escapes": [b"\\", b"\\ud800", b"\\u", b'\\"', b"\xf0\x9f", b"\xff", b"\xc3"],
    "nothing": [],
}


def logits_of(kind: str, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn((1, len(TOKENS)), generator=generator) * 3
    for rank, word in enumerate(PREFERRED[kind]):
        logits[0, TOKENS.index(word)] += 40 - rank
    return logits


def answer(masks: GrammarMasks, grammar: Grammar, kind: str, params: SamplingParams) -> tuple[bytes, bool]:
    """The text that a model of such logits writes, and whether it has ended."""
    generator = torch.Generator().manual_seed(params.seed or 0)
    mask = masks.mask(grammar)
    sampler, text = Sampler(params, [], len(TOKENS), mask=mask), b""
    for _ in range(MOST):
        (draw,) = sample(logits_of(kind, generator), [sampler])
        assert isinstance(draw, SampledToken), "nothing may follow, and it has not ended"
        if draw.token_id == END:
            return text, True
        sampler.commit(draw.token_id)
        text += TOKENS[draw.token_id]
        if mask.finished:
            return text, True
    return text, False


@pytest.mark.parametrize("first", range(FIRST, FIRST + SCHEMAS, AT_ONCE))
def test_every_answer_that_ends_is_valid(first: int) -> None:
    masks, ended = GrammarMasks(lambda: VOCABULARY, len(TOKENS)), 0
    for seed in range(first, first + AT_ONCE):
        draw = random.Random(seed)
        made = schema(draw)
        grammar = Grammar.json_schema(made, draw.choice([None, None, "", "[ \\n]{0,2}"]))
        try:
            _proof_child.prove(VOCABULARY, grammar)
        except GrammarError:
            continue
        for kind in ("nothing", draw.choice(sorted(PREFERRED))):
            params = SamplingParams(seed=seed, temperature=draw.choice([0.0, 1.0, 2.0]), max_tokens=MOST)
            text, whole = answer(masks, grammar, kind, params)
            if whole:
                ended += 1
                check(text, made)
    assert ended >= AT_ONCE // 2


def check(text: bytes, made: Any) -> None:
    jsonschema.validate(json.loads(text), made, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("drafts", [(), (40, 41)])
def test_allowed_tokens_are_the_only_ones(drafts: tuple[int, ...]) -> None:
    size = 100
    grammar = GrammarMasks(lambda: VOCABULARY, size).mask(Grammar.choice(["ab", "ac"]))
    plain, inner = AllowedMask([3, 31, 32, 99], size), AllowedMask([2 + ord("a"), 5], size, grammar)
    assert set_bits(plain.allowed(drafts)) == [3, 31, 32, 99]
    assert set_bits(inner.allowed()) == [2 + ord("a")]
    assert (plain.forced(), plain.finished, plain.failed) == (b"", False, False)
    assert inner.forced() == b"a"
    for mask in (plain, inner):
        mask.consume(2 + ord("a"))
    assert set_bits(plain.allowed()) == [3, 31, 32, 99]
    assert set_bits(inner.allowed()) == []  # neither b nor c is allowed
    with user_error("token_out_of_vocabulary", "allowed_token_ids"):
        AllowedMask([size], size)


def set_bits(words: torch.Tensor) -> list[int]:
    return [32 * at + bit for at, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1]


def test_a_sampler_draws_allowed_tokens_alone() -> None:
    allowed = [7, 64, 65]
    sampler = Sampler(SamplingParams(seed=1), [1], 96, mask=AllowedMask(allowed, 96))
    drawn = set()
    for _ in range(64):
        [token] = sample(torch.randn(1, 96, generator=torch.Generator().manual_seed(3)), [sampler])
        assert isinstance(token, SampledToken)
        sampler.commit(token.token_id)
        drawn.add(token.token_id)
    assert drawn == set(allowed)
