"""Requests with images: the tokens of a model whose token table has the features, in any company."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from attar.engine.engine import Engine
from attar.model.decoder import Decoder
from attar.protocol.messages import Delta, Event, Failed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import answers, make_engine, run, run_as_they_come
from tests.engine.images.seeing import GREEDY, TOKEN, UNIT, SeededTower, alone, image, prompt, submit

A, B, C = image(1), image(2), image(3, 20)
TEXT = tuple(range(1, 30))


def seeing(decoder: Decoder, **how: Any) -> tuple[Engine, SeededTower]:
    tower = how.pop("tower", None) or SeededTower()
    return make_engine(decoder, tower=tower, **how), tower


def tokens(events: Iterable[Event], id: str, choice: int = 0) -> list[int]:
    events = list(events)
    assert not (failed := [event for event in events if isinstance(event, Failed) and event.id == id]), failed
    deltas = (event for event in events if isinstance(event, Delta) and (event.id, event.choice) == (id, choice))
    return [token for delta in deltas for token in delta.token_ids]


def code(events: Iterable[Event], id: str) -> str:
    return next(event.code for event in events if isinstance(event, Failed) and event.id == id)


def check(engine: Engine) -> None:
    """Images are held by what is there, and by nothing else."""
    assert engine.images is not None
    engine.step()  # what was dropped is put away
    engine.cache.check()
    within = [token for _, _, node in engine.cache.nodes() for token in node.tokens]
    engine.images.check((choice.sequence for choice in engine.requests.choices.values()), within)


ASKS = [
    submit("first", *TEXT[:5], A, 7, 8),
    submit("only", A),
    submit("last", 3, 4, B),
    submit("two", A, 9, B, 10),
    submit("twice", 5, A, 6, A, 7),
    submit("long", *TEXT, C, *TEXT, B, 1),
    submit("text", *TEXT),
]


@pytest.mark.parametrize("budget", [256, 5, 1])
def test_tokens_are_those_of_a_table_with_the_features(decoder: Decoder, budget: int) -> None:
    limits = SchedulerConfig(max_running=1, max_step_tokens=budget)
    for ask in ASKS:
        engine, tower = seeing(decoder, limits=limits)
        assert tokens(run(engine, [ask]), ask.id) == alone(decoder, tower, ask), ask.id
        check(engine)


def test_requests_in_company_get_what_they_get_alone(decoder: Decoder) -> None:
    asks = [replace_id(ask, f"{ask.id} {copy}") for copy in range(2) for ask in ASKS]
    for seed in range(6):
        draw = random.Random(seed)
        blocks = draw.choice([8, 12, 40])
        limits = SchedulerConfig(max_running=8, max_step_tokens=draw.choice([20, 48]), headroom=0.0)
        engine, tower = seeing(decoder, blocks=blocks, limits=limits, image_cache=draw.choice([32, 64]) * 256)
        events = run_as_they_come(engine, draw.sample(asks, len(asks)), draw)
        for ask in asks:
            assert tokens(events, ask.id) == alone(decoder, tower, ask), (seed, ask.id)
        check(engine)
        engine.cache.flush()
        check(engine)
        assert not len(engine.images.ids)


def replace_id(ask: Submit, id: str) -> Submit:
    return Submit(id, ask.prompt, ask.params, images=ask.images)


def test_an_image_sent_again_is_a_hit_past_it(decoder: Decoder) -> None:
    engine, tower = seeing(decoder)
    parts = (*TEXT, A, 7, 8, 9)
    first = tokens(run(engine, [submit("a", *parts)]), "a")
    events = run(engine, [submit("b", *parts)])
    assert tokens(events, "b") == first
    assert reused(events) == len(prompt(*parts)) - 1
    assert tower.seen == [A.digest]
    events = run(engine, [submit("c", *TEXT, A, 55)])
    assert reused(events) == len(prompt(*TEXT, A))
    assert tower.seen == [A.digest], "nothing of it is computed, so its features are not needed"


def test_a_hit_ends_exactly_before_another_image(decoder: Decoder) -> None:
    engine, tower = seeing(decoder)
    run(engine, [submit("a", *TEXT, A, 7, B, 8)])
    events = run(engine, [submit("b", *TEXT, A, 7, C, 8)])
    assert reused(events) == len(prompt(*TEXT, A, 7))
    assert tokens(events, "b") == alone(decoder, tower, submit("b", *TEXT, A, 7, C, 8))
    assert tower.seen == [A.digest, B.digest, C.digest]


def test_a_hit_that_ends_right_before_an_image_is_copied(decoder: Decoder) -> None:
    """Nothing else runs in the step that copies part of a block, and the sequence itself waits for its image."""
    engine, tower = seeing(decoder)
    run(engine, [submit("a", *TEXT[:5], 50)])
    ask = submit("b", *TEXT[:5], A, 7)
    events = run(engine, [ask])
    assert reused(events) == 5
    assert tokens(events, "b") == alone(decoder, tower, ask)


def reused(events: Iterable[Event]) -> int:
    report = next(event.report for event in events if isinstance(event, Finished))
    assert report is not None
    return report.reused_tokens


def test_features_are_of_one_salt(decoder: Decoder) -> None:
    engine, tower = seeing(decoder)
    run(engine, [submit("a", A, 1), submit("b", A, 2), submit("c", A, 3, cache_salt=b"other")])
    assert tower.seen == [A.digest, A.digest]


def test_features_stay_after_the_prefix_cache_forgot(decoder: Decoder) -> None:
    engine, tower = seeing(decoder)
    run(engine, [submit("a", A, 1)])
    engine.cache.flush()
    assert not len(engine.images.ids)
    assert reused(run(engine, [submit("b", A, 1)])) == 0
    assert tower.seen == [A.digest]


def test_one_image_for_several_choices_and_seeds(decoder: Decoder) -> None:
    params = replace(GREEDY, temperature=0.9, seed=5, logprobs=2)
    ask = submit("a", *TEXT, A, 7, params=params, n=3)
    engine, tower = seeing(decoder)
    together = answers(run(engine, [ask]))
    assert len(together) == 3
    assert tower.seen == [A.digest]
    others = [submit("b", *TEXT, B, 7, n=2), submit("c", *TEXT, A, 8)]
    limits = SchedulerConfig(max_running=4, max_step_tokens=11, headroom=0.0)
    engine, _ = seeing(decoder, blocks=20, limits=limits)
    again = answers(run(engine, [*others, ask]))
    assert {key: again[key] for key in together} == together
    check(engine)


def test_text_goes_on_while_the_tower_works(decoder: Decoder) -> None:
    tower = SeededTower()
    engine, _ = seeing(decoder, tower=tower)
    big = image(9, 150)
    engine.submit(submit("text", *TEXT, params=replace(GREEDY, max_tokens=60)))
    while not engine.scheduler.running or engine.scheduler.running[0].output < 3:
        engine.step()
    engine.images.took = lambda seconds: None
    engine.images._steps = [1e-9]  # a unit a step
    engine.submit(submit("image", big, 5))
    before = tower.units_done
    said = 0
    while not engine.images.encoded:
        said += sum(isinstance(event, Delta) for event in engine.step())
    assert tower.units_done - before == 3 * -(-150 // UNIT)
    assert said >= tower.units_done - before - 2
    events = run(engine)
    assert tokens(events, "image") == alone(decoder, tower, submit("image", big, 5))


@pytest.mark.parametrize(
    ("ask", "expected", "words"),
    [
        (Submit("a", prompt(1, A), GREEDY), "invalid", "image tokens"),
        (Submit("a", prompt(1, A), GREEDY, images=(A, B)), "invalid", "image tokens"),
        (submit("a", 1, A, params=replace(GREEDY, prompt_logprobs=0)), "invalid", "prompt_logprobs"),
        (submit("a", 1, image(1, 100)), "too_long", "--image-cache"),
        (submit("a", *[image(n, 1) for n in range(9)]), "invalid", "9 images"),
    ],
)
def test_what_is_refused_leaves_nothing(decoder: Decoder, ask: Submit, expected: str, words: str) -> None:
    engine, _ = seeing(decoder, image_cache=99 * 256)
    events = run(engine, [ask])
    assert code(events, "a") == expected
    assert words in next(event.message for event in events if isinstance(event, Failed))
    check(engine)
    assert not len(engine.images.ids)


def test_a_model_without_a_tower_refuses_images(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    events = run(engine, [submit("a", 1, A), Submit("b", (1, TOKEN, 2), GREEDY)])
    assert code(events, "a") == "invalid"
    assert len(tokens(events, "b")) == GREEDY.max_tokens


def test_ids_used_up_are_taken_from_the_prefix_cache_then_refused(decoder: Decoder) -> None:
    engine, _ = seeing(decoder)
    engine.images.ids.most = 3
    run(engine, [submit(str(n), *TEXT[:n], image(n)) for n in range(3)])
    assert len(engine.images.ids) == 3
    assert len(tokens(run(engine, [submit("more", image(7), 1)]), "more")) == GREEDY.max_tokens
    many = submit("many", *[image(n) for n in range(4)])
    assert code(run(engine, [many]), "many") == "full"
    check(engine)


def test_tiles_of_open_requests_are_bounded(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.engine.images.images.MAX_TILES", 2 * len(A.tiles))
    engine, _ = seeing(decoder)
    events = run(engine, [submit("a", A, B), submit("b", A)])
    assert code(events, "b") == "full"
    assert len(tokens(run(engine, [submit("c", C)]), "c")) == GREEDY.max_tokens if len(C.tiles) <= 96 else True
    check(engine)


@pytest.mark.parametrize("way", ["cancel", "deadline", "close"])
def test_an_end_while_the_tower_works_leaves_nothing(decoder: Decoder, way: str) -> None:
    now = [0.0]
    engine, tower = seeing(decoder, clock=lambda: now[0])
    engine.images._steps = [1e-9]
    deadline = 5.0 if way == "deadline" else None
    engine.submit(submit("text", *TEXT, params=replace(GREEDY, max_tokens=40)))
    engine.submit(submit("image", 1, 2, image(9, 150), deadline=deadline))
    other = submit("other", 1, 2, image(9, 150), 3)
    engine.submit(other)
    while tower.units_done < 5:
        engine.step()
    if way == "cancel":
        engine.cancel("image")
    elif way == "deadline":
        now[0] = 6.0
    else:
        engine.close()
    events = run(engine)
    if way != "close":
        assert code(events, "image") == ("cancelled" if way == "cancel" else "deadline")
        assert tokens(events, "other") == alone(decoder, tower, other)
    check(engine)
    engine.cache.flush()
    check(engine)
    assert not len(engine.images.ids)


def test_an_image_is_computed_again_after_a_preemption(decoder: Decoder) -> None:
    params = replace(GREEDY, max_tokens=100)
    asks = [submit("a", A, *TEXT, params=params), submit("b", B, *TEXT, params=params)]
    limits = SchedulerConfig(max_step_tokens=48, headroom=0.0, max_preemptions=4)
    engine, tower = seeing(decoder, blocks=4, limits=limits, image_cache=9 * 256)
    for ask in asks:
        engine.submit(ask)
    events: list[Event] = []
    while not engine.scheduler.preemptions:
        events += engine.step()
    engine.cache.flush()
    assert engine.images.store.hold({b"another": 9 * 256})
    engine.images.store.drop(b"another")
    events += run(engine)
    assert len(tower.seen) > 2
    for ask in asks:
        assert tokens(events, ask.id) == alone(decoder, tower, ask)
    check(engine)


def test_resumed_answers_go_on(decoder: Decoder) -> None:
    engine, tower = seeing(decoder)
    ask = submit("a", *TEXT, A, 5)
    whole = alone(decoder, tower, ask)
    begun = Submit("b", ask.prompt, ask.params, images=ask.images, generated=(tuple(whole[:4]),))
    assert tokens(run(engine, [begun]), "b") == whole[4:]


def test_penalties_see_the_image_token_as_one_token(decoder: Decoder) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, seed=0, repetition_penalty=1.5)
    engine, _ = seeing(decoder)
    events = run(engine, [submit("a", *TEXT, A, 5, params=params)])
    assert len(tokens(events, "a")) == 8
