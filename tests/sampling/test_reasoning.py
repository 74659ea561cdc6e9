"""A mask with a reasoning section: the same behind drafts as behind tokens, and a budget that no text exceeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.protocol.grammar import Grammar
from attar.protocol.reasoning import ReasoningSection
from attar.sampling.masks import GrammarMasks
from attar.sampling.reasoning import ReasoningMask
from attar.text.grammars import Vocabulary
from tests.errors import user_error

TOKENS = [b"", b"<think>", b"</think>", *(bytes([byte]) for byte in b"abc\n"), b"ab", b"ca", *[b""] * 30]
END, START, STOP = 0, 1, 2
A, B, C, NEWLINE, AB, CA = range(3, 9)
VOCABULARY = Vocabulary.make(TOKENS, special=(0, 1, 2), ends=(END,))
MASKS = GrammarMasks(lambda: VOCABULARY, len(TOKENS))
WORD = Grammar("regex", "(ab|ba){1,2}c")


def make(opened: bool = False, budget: int | None = None, grammar: Grammar | None = WORD) -> ReasoningMask:
    section = ReasoningSection(START, STOP, opened, budget)
    return ReasoningMask(section, len(TOKENS), None if grammar is None else MASKS.mask(grammar), (END,))


def tokens_of(bits: torch.Tensor) -> set[int]:
    shifts = torch.arange(32, dtype=torch.int32)
    return set((bits[:, None] >> shifts & 1).flatten().nonzero().flatten().tolist()) & set(range(len(TOKENS)))


EVERY = set(range(len(TOKENS)))


def test_inside_every_token_may_come_but_the_end_of_an_unfulfilled_constraint() -> None:
    assert tokens_of(make(opened=True).allowed()) == EVERY - {END}
    assert tokens_of(make(opened=True, grammar=None, budget=3).allowed()) == EVERY


def test_a_section_may_begin_only_with_the_first_token() -> None:
    mask = make()
    assert tokens_of(mask.allowed()) == {START, A, B, AB}
    mask.consume(AB)
    assert START not in tokens_of(mask.allowed())


@pytest.mark.parametrize("opened", [False, True])
def test_the_constraint_holds_behind_the_end_marker(opened: bool) -> None:
    mask = make(opened)
    for token in ([] if opened else [START]) + [C, NEWLINE, START, C, STOP]:
        assert token in tokens_of(mask.allowed())
        mask.consume(token)
    assert tokens_of(mask.allowed()) == {A, B, AB}
    for token in (AB, C):
        assert not mask.finished
        mask.consume(token)
    assert mask.finished


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_used_up_budget_forces_the_end_marker(budget: int) -> None:
    mask = make(budget=budget, grammar=Grammar("regex", "abc"))
    mask.consume(START)
    for _ in range(budget):
        assert not mask.forced()
        mask.consume(A)
    assert tokens_of(mask.allowed()) == {STOP}
    assert mask.forced() == b"\xff[2]abc"
    mask.consume(STOP)
    assert mask.forced() == b"abc"


def test_an_answer_without_a_section_needs_no_budget() -> None:
    mask = make(budget=0, grammar=None)
    mask.consume(A)
    assert tokens_of(mask.allowed()) == EVERY
    assert not mask.finished


@pytest.mark.parametrize("grammar", [None, WORD], ids=["free", "constrained"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_behind_drafts_a_mask_is_what_it_is_behind_tokens(grammar: Grammar | None, data: st.DataObject) -> None:
    """Along a random output that obeys the mask, any run of drafts is foreseen; foreseeing changes nothing."""
    opened, budget = data.draw(st.booleans()), data.draw(st.none() | st.integers(0, 4))
    mask, text = make(opened, budget, grammar), list[int]()
    for _ in range(data.draw(st.integers(0, 8))):
        drafts = data.draw(st.lists(st.integers(0, CA), max_size=4))
        mask.allowed(drafts)  # also where a draft is wrong
        may = sorted(tokens_of(mask.allowed()) & set(range(1, CA + 1)))
        if mask.finished or not may:
            break
        text.append(data.draw(st.sampled_from(may)))
        assert tokens_of(consumed(opened, budget, grammar, text[:-1]).allowed(text[-1:])) == tokens_of(
            consumed(opened, budget, grammar, text).allowed()
        )
        mask.consume(text[-1])
    for at in range(len(text)):
        foreseen = consumed(opened, budget, grammar, text[:at]).allowed(text[at:])
        assert torch.equal(foreseen, mask.allowed())


def consumed(opened: bool, budget: int | None, grammar: Grammar | None, tokens: Sequence[int]) -> ReasoningMask:
    mask = make(opened, budget, grammar)
    for token in tokens:
        mask.consume(token)
    return mask


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"start": -1, "end": 2}, "option_out_of_range"),
        ({"start": 1, "end": 2, "budget": -1}, "option_out_of_range"),
        ({"start": 1, "end": 2, "budget": True}, "option_out_of_range"),
        ({"start": 1, "end": 1}, "option_conflict"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(given: dict[str, Any], code: str) -> None:
    with user_error(code):
        ReasoningSection(**given)
