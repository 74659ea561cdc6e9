"""The suffix automaton against a search by brute force, and the drafts made of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.protocol.request import SamplingParams
from attar.sampling.drafters import suffix as module
from attar.sampling.drafters.automaton import SuffixAutomaton
from attar.sampling.drafters.drafter import DraftRequest
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence


def longest_match(text: list[int]) -> int:
    """Return the length of the longest suffix that occurs earlier too, overlaps allowed."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[i : i + length] == text[-length:] for i in range(len(text) - length)):
            return length
    return 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60))
def test_match_is_the_longest_suffix_that_occurred(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, 1):
        automaton.push(token)
        assert automaton.match == longest_match(text[:count])
        if automaton.match:
            behind, length = automaton.behind, automaton.match
            assert length <= behind < count
            assert text[behind - length : behind] == text[count - length : count]


def request(tokens: list[int], count: int) -> DraftRequest:
    sequence = Sequence(id="a", prompt_ids=tokens, max_tokens=50)
    return DraftRequest(sequence, Sampler(SamplingParams(), tokens, 1000), count)


def test_drafts_follow_the_last_occurrence() -> None:
    text = [1, 2, 3, 9, 9, 9, 1, 2, 3, 7, 8, 6, 5, 1, 2, 3]
    (draft,) = SuffixDrafter().draft([request(text, 4)])
    assert draft.tokens == (7, 8, 6, 5)
    assert draft.evidence == 3


def test_a_text_that_repeats_itself_is_continued() -> None:
    (draft,) = SuffixDrafter().draft([request([4, 5, 6] * 3, 8)])
    assert draft.tokens == (4, 5, 6, 4, 5, 6, 4, 5)
    assert draft.evidence == 6


def test_no_match_no_draft() -> None:
    assert SuffixDrafter().draft([request([1, 2, 3], 4)])[0].tokens == ()


def test_what_is_indexed_is_bounded_and_goes_with_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INDEXED", 16)
    drafter, asked = SuffixDrafter(), request([1, 2, 3, 4] * 10, 2)
    for step in range(40):
        (draft,) = drafter.draft([asked])
        assert draft.tokens == ((1, 2), (2, 3), (3, 4), (4, 1))[step % 4]
        asked.sequence.tokens.append(draft.tokens[0])
        automaton, *_ = drafter._known[asked.sequence]
        assert len(automaton) <= 17
    drafter.forget(asked.sequence)
    assert not drafter._known
