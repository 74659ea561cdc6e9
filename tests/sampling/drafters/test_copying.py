"""The place of a copy, across changes of all kinds."""

from __future__ import annotations

import random
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from attar.protocol.request import SamplingParams
from attar.sampling.drafters.automaton import SuffixAutomaton
from attar.sampling.drafters.copying import BEGUN, PATIENCE, SKIPPED, Copy
from attar.sampling.drafters.drafter import DraftRequest
from attar.sampling.drafters.suffix import RESUMED, SuffixDrafter
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence

PASSAGE = list(range(100, 160))


def followed(tokens: list[int]) -> tuple[Copy, array[int]]:
    """Return the copy behind a text, and the text."""
    copy, automaton = Copy(), SuffixAutomaton()
    for token in tokens:
        automaton.push(token)
        copy.follow(automaton.text, token, automaton.match, automaton.behind)
    return copy, automaton.text


@given(st.integers(BEGUN, 40), st.integers(0, SKIPPED - 1), st.lists(st.integers(0, 9), max_size=PATIENCE - 1))
def test_a_copy_goes_on_behind_a_change(kept: int, replaced: int, inserted: list[int]) -> None:
    """The first token of the passage behind the change is enough."""
    text = [*PASSAGE, 99, *PASSAGE[:kept], *inserted, *PASSAGE[kept + replaced : kept + replaced + 1]]
    copy, tokens = followed(text)
    assert tokens[copy.at] == PASSAGE[kept + replaced + 1]
    assert copy.resumed == bool(replaced or inserted)


def test_a_copy_ends_where_the_passage_does_not_go_on() -> None:
    text = [*PASSAGE, 99, *PASSAGE[:10], *range(10, 10 + PATIENCE + 1)]
    copy, _ = followed(text)
    assert copy.at == -1
    copy, tokens = followed([*text, *PASSAGE[20 : 20 + BEGUN]])
    assert tokens[copy.at] == PASSAGE[20 + BEGUN], "another begins with a match"


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=80))
def test_the_place_lies_within_the_text(text: list[int]) -> None:
    for count in range(len(text) + 1):
        copy, tokens = followed(text[:count])
        assert -1 <= copy.at < max(1, len(tokens))


def test_a_renamed_function_is_drafted_behind_its_new_name() -> None:
    """A match of the new name would lead to where it stood last."""
    draw = random.Random(3)
    name, new, call = [50, 51, 52], [50, 51, 52, 53, 54], 60
    lines = [[*name, call, *(draw.randrange(1000, 2000) for _ in range(12))] for _ in range(6)]
    prompt = [token for line in lines for token in line]
    edited = [token for line in lines for token in (*new, *line[3:])]
    drafter, right, resumed = SuffixDrafter(), 0, 0
    sequence = Sequence(id="a", prompt_ids=[*prompt, 7], max_tokens=len(edited) + 1)
    for token in edited:
        sampler = Sampler(SamplingParams(), sequence.tokens, 4000)
        (draft,) = drafter.draft([DraftRequest(sequence, sampler, 4)])
        if draft.evidence > RESUMED:
            resumed += 1
            right += draft.tokens[:1] == (token,)
        sequence.tokens.append(token)
    assert resumed >= len(lines) - 1
    assert right >= 0.8 * resumed
