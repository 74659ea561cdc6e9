"""What is found in a text whose keys were dropped, by a model that finds anything in a whole cache."""

from __future__ import annotations

from functools import cache

import pytest

from attar.engine.engine import Engine
from attar.kv.eviction import Eviction
from attar.model.decoder import Decoder
from attar.protocol.messages import Delta, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import make_engine, run
from tests.model.lookup_model import NEEDLES, VALUES, haystack, lookup_model

LENGTH = 1000
KEPT = 256  # a fourth


@cache
def decoder() -> Decoder:
    return lookup_model()


def engine(policy: Eviction | None) -> Engine:
    limits, evictions = SchedulerConfig(max_running=1, max_step_tokens=256, headroom=0.0), (policy and (policy,)) or ()
    return make_engine(decoder(), 40, limits, context=LENGTH + 64, evictions=evictions)


def found(policy: str | None, known: bool) -> list[bool]:
    """Whether each needle is found, from early to late: its key ends the prompt, or comes behind it."""
    ids, needles = haystack(LENGTH, seed=3)
    made, answers = engine(None if policy is None else Eviction.parse(policy)), []
    for number, (key, *values) in enumerate(needles):
        params = SamplingParams(max_tokens=VALUES + (not known), temperature=0, seed=0)
        ask = Submit(f"{number}", (*ids.tolist(), *[key] * known), params, generated=() if known else ((key,),))
        said = [token for event in run(made, [ask]) if isinstance(event, Delta) for token in event.token_ids]
        answers.append(said[-VALUES:] == values)
    return answers


def test_a_whole_cache_answers_all() -> None:
    assert found(None, known=True) == found(None, known=False) == [True] * NEEDLES


@pytest.mark.parametrize("policy", [f"snapkv:{KEPT}", f"expected:{KEPT}"])
def test_a_question_in_the_prompt_is_answered_and_a_later_one_is_not(policy: str) -> None:
    assert all(found(policy, known=True))
    assert sum(found(policy, known=False)) <= NEEDLES // 2


def test_a_stream_finds_what_is_in_its_window_and_nothing_before() -> None:
    within = KEPT * NEEDLES // LENGTH  # of the needles, one in each eighth of the text
    for known in (True, False):
        answers = found(f"sink:4+{KEPT - 4}", known)
        assert not any(answers[: NEEDLES - within - 1])
        assert answers[-1]
