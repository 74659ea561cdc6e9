"""Texts of requests that have ended: found by those that follow, of the same salt alone, and forgotten in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.protocol.request import SamplingParams
from attar.sampling.drafters import past_texts as module
from attar.sampling.drafters.automaton import SuffixAutomaton
from attar.sampling.drafters.drafter import DraftRequest
from attar.sampling.drafters.past_texts import PastTexts
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence


def sequence(prompt: list[int], output: list[int], salt: bytes = b"") -> Sequence:
    made = Sequence(id="a", prompt_ids=prompt, max_tokens=100, cache_salt=salt)
    made.tokens.extend(output)
    return made


TOKENS = st.lists(st.integers(0, 2), max_size=30)


@settings(max_examples=200, deadline=None)
@given(TOKENS, TOKENS)
def test_the_longest_suffix_that_a_text_has_is_found(text: list[int], tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.push(token)
    state = length = 0
    for count, token in enumerate(tokens, 1):
        state, length = automaton.follow(state, length, token)
        assert length == max(n for n in range(count + 1) if occurs(tokens[count - n : count], text))


@settings(max_examples=200, deadline=None)
@given(TOKENS, TOKENS)
def test_while_a_text_grows_what_is_found_does_occur(text: list[int], tokens: list[int]) -> None:
    """A state may be split while a sequence is at it."""
    automaton = SuffixAutomaton()
    state = length = 0
    for count, token in enumerate(tokens, 1):
        for each in text[2 * count - 2 : 2 * count]:
            automaton.push(each)
        state, length = automaton.follow(state, length, token)
        behind = automaton.behind_state(state)
        assert length <= count
        assert automaton.text[behind - length : behind].tolist() == tokens[count - length : count]


def occurs(part: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def test_what_followed_in_an_earlier_text_is_found_by_its_salt_alone() -> None:
    past = PastTexts()
    past.end(sequence([1, 2, 3], [10, 11, 12, 13, 14], b"mine"))
    assert past.find(sequence([7, 2, 3], [10], b"mine"), 3) == ([11, 12, 13], 3)
    assert past.find(sequence([7, 8], [13], b"mine"), 9) == ([14], 1)  # the text ends there
    assert past.find(sequence([7, 8], [14], b"mine"), 9) == ([], 0)
    assert past.find(sequence([7, 2, 3], [10], b"another's"), 3) == ([], 0)


def test_a_sequence_is_followed_as_it_grows() -> None:
    past, text = PastTexts(), list(range(100, 140))
    past.end(sequence([1], text))
    asked = sequence([1], text[:1])
    for count in range(2, 35):
        found, length = past.find(asked, 2)
        assert found == text[count - 1 : count + 1]
        assert length == count
        asked.tokens.append(text[count - 1])
    past.end(asked)
    assert not past._places


def test_old_texts_and_old_salts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PER_SALT", 20)
    monkeypatch.setattr(module, "TOTAL", 60)
    past = PastTexts()
    for number in range(50):
        past.end(sequence([1], [100 * number + place for place in range(8)], bytes([number % 3])))
        assert len(past) <= 60
        assert all(len(indexes) <= 2 for indexes in past._salts.values())
    assert past.find(sequence([1], [4900], bytes([49 % 3])), 2)[0] == [4901, 4902]
    assert past.find(sequence([1], [100], bytes([1 % 3])), 2)[0] != [101, 102]
    past.reset()
    assert len(past) == 0


def test_the_drafter_takes_the_longer_match() -> None:
    drafter = SuffixDrafter()

    def draft(asked: Sequence) -> tuple[int, ...]:
        state = Sampler(SamplingParams(), list(asked.tokens), 1000)
        return drafter.draft([DraftRequest(asked, state, 2)])[0].tokens

    first = sequence([1, 2, 3], [4, 5, 6, 7])
    draft(first)
    drafter.forget(first)
    assert draft(sequence([3, 9, 9, 2, 3], [])) == (4, 5)  # two tokens there, one here
    assert draft(sequence([2, 3, 8, 8, 2, 3], [])) == (8, 8)  # two in both: its own
