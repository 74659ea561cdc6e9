"""Trees of drafts: texts to the bit, bugs planted in their path that must be found, and what takes none."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest

from attar import faults
from attar.engine.engine import Engine
from attar.execution import model_runner
from attar.kv.schemes import SCHEMES
from attar.model.decoder import Decoder
from attar.protocol.messages import Embed, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import verify
from attar.sampling.drafters.drafter import Draft, DraftRequest
from attar.sampling.sampler import Sampler
from attar.scheduling.block_tables import BlockTables
from attar.scheduling.sequence import Sequence as Tokens
from tests.engine.conftest import ROOM, TIGHT, Answers, answers, make_engine, run, run_as_they_come
from tests.engine.test_engine import some_requests
from tests.engine.test_speculation_schedules import texts_of
from tests.errors import user_error

DRAFTING = SchedulerConfig(max_step_tokens=48, max_drafts=16)
LAST = 5  # the right branch is the last of so many at most
EXACT = [name for name, scheme in SCHEMES.items() if not scheme.recent]


class Bushy:
    """A drafter of trees, each with the text that is to come as one of its branches."""

    name, costly = "bushy", False

    def __init__(self, texts: dict[str, list[int]], seed: int) -> None:
        self.texts, self.draw = texts, random.Random(seed)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        at = request.sequence.output
        right = self.texts[request.sequence.id][at : at + self.draw.randrange(1, 6)]
        tokens: list[int] = []
        parents: list[int] = []
        row = 0
        for token in right:
            for wrong in range(self.draw.randrange(LAST)):
                tokens.append(token ^ 1 + wrong % 3)
                parents.append(self.draw.choice([row, row, len(tokens) - 1]))
            tokens.append(token)
            parents.append(row)
            row = len(tokens)
        return Draft(tuple(tokens), 1, parents=tuple(parents))

    def forget(self, sequence: Tokens) -> None:
        pass

    def reset(self) -> None:
        pass


def asks_of(seed: int, size: int) -> list[Submit | Embed]:
    """Requests of several beginnings, most of them at a temperature and under a penalty: a state tells of its path."""
    return [
        msgspec.structs.replace(
            each, params=replace(each.params, presence_penalty=0.8, logprobs=2, temperature=(0.0, 0.8, 1.3)[i % 3])
        )
        if isinstance(each, Submit)
        else each
        for i, each in enumerate(some_requests(seed + 7000, 6, size))
    ]


def with_trees(decoder: Decoder, seed: int, kv: str | None = None) -> tuple[Engine, Answers, Answers]:
    """An engine, what requests get of it with trees, and what each gets alone without."""
    asks, draw = asks_of(seed, decoder.config.vocab_size), random.Random(seed)
    alone, texts = {}, {}
    for ask in asks:
        events = run(make_engine(decoder, kv=kv), [ask])
        alone |= answers(events)
        texts |= texts_of(events)
    made = make_engine(
        decoder, draw.choice((ROOM, ROOM, TIGHT)), DRAFTING, kv=kv, drafter=Bushy(texts, seed), draft_tree=16
    )
    return made, answers(run_as_they_come(made, asks, draw)), alone


@pytest.mark.parametrize("kv", [None, *EXACT])
@pytest.mark.parametrize("seed", range(2))
def test_trees_change_no_bit(decoder: Decoder, seed: int, kv: str | None) -> None:
    made, found, alone = with_trees(decoder, seed, kv)
    assert found == alone
    assert made.speculation is not None
    assert made.speculation.errors == 0
    assert made.speculation.accepted > 10
    assert made.pool.active == 0


def test_trees_change_no_bit_of_the_reference(tiny_decoder: Callable[..., Decoder]) -> None:
    """Its rows may differ by a last bit where batches do; tokens of greedy requests do not here."""
    decoder = tiny_decoder()
    ask = Submit("a", (5, 6, 7), SamplingParams(max_tokens=30, temperature=0))
    events = run(make_engine(decoder), [ask])
    made = make_engine(decoder, limits=DRAFTING, drafter=Bushy(texts_of(events), 1), draft_tree=16)
    assert texts_of(run(made, [ask])) == texts_of(events)
    assert made.steps < 25


def _a_sibling(drafts: Sequence[int], parents: Sequence[int], row: int, token: int) -> int | None:
    return next((i for i, parent in enumerate(parents or range(len(drafts)), 1) if parent == row), None)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the walk goes to a sibling": lambda patch: patch.setattr(verify, "child", _a_sibling),
    "branches lack the keys that they share": lambda patch: patch.setattr(
        model_runner, "rows_of", lambda *given, real=model_runner.rows_of: (real(*given)[0], None)
    ),
    "branches lack the keys before them": lambda patch: patch.setattr(model_runner, "copies_of", lambda *given: []),
    "the first branch is taken for the right one": lambda patch: patch.setattr(
        BlockTables, "take_branch", lambda *given: None
    ),
    "a state is that of the row before": lambda patch: patch.setattr(
        Sampler, "along", lambda self, drafts, parents=(), real=Sampler.along: real(self, drafts)
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    BUGS[bug](monkeypatch)
    for seed in range(6):
        try:
            _, found, alone = with_trees(decoder, seed)
        except AssertionError:  # of the scheduler, where tokens are no drafts of the tree
            return
        if found != alone:
            return
    pytest.fail("no schedule finds it")


def test_trees_save_steps_where_the_first_branch_is_wrong(decoder: Decoder) -> None:
    ask = Submit("a", (5, 6, 7), SamplingParams(max_tokens=33, temperature=0))
    text = texts_of(run(make_engine(decoder), [ask]))["a#0"]

    class Second(Bushy):
        def _draft(self, request: DraftRequest) -> Draft:
            right = text[request.sequence.output :][:3]
            return Draft((right[0] ^ 1, *right), 1, parents=(0, 0, 2, 3)[: 1 + len(right)])

    made = make_engine(decoder, limits=DRAFTING, drafter=Second({}, 0), draft_tree=4)
    assert texts_of(run(made, [ask]))["a#0"] == text
    assert made.steps == 1 + 8
    assert made.speculation is not None
    assert made.speculation.accepted == 24
    assert made.stats().drafted_by_position[:4] == (16, 8, 8, 0)
    assert made.stats().accepted_by_position[:4] == (8, 8, 8, 0)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_trees_in_pieces_change_no_bit(decoder: Decoder, rows: int) -> None:
    """A later piece finds the keys that an earlier one has written to its branches."""
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=1, presence_penalty=0.5, logprobs=1)
    asks: list[Submit | Embed] = [Submit("a", (5, 6, 7) * 19, params), Submit("b", (9,), params)]
    events = run(make_engine(decoder), asks)
    made = make_engine(decoder, limits=DRAFTING, drafter=Bushy(texts_of(events), 3), draft_tree=8)
    made.launcher.rows = rows
    assert answers(run(made, asks)) == answers(events)
    assert made.speculation is not None
    assert made.speculation.accepted > 30


def test_a_fault_in_a_step_with_a_tree_changes_no_bit(decoder: Decoder) -> None:
    """A step that raises is run again, its copies and keys of branches too."""
    ask = Submit("a", (5, 6, 7), SamplingParams(max_tokens=30, temperature=0.9, seed=1))
    events = run(make_engine(decoder), [ask])
    for name in ("runner.copy", "runner.rows", "runner.table", "runner.memory"):
        for after in (1, 2, 3, 4):
            made = make_engine(decoder, limits=DRAFTING, drafter=Bushy(texts_of(events), 3), draft_tree=8)
            fault = faults.Fault(name, after)
            faults.arm(fault)
            assert answers(run(made, [ask])) == answers(events)
            assert fault.fired


def test_a_tree_without_room_for_its_branches_is_its_first_branch(decoder: Decoder) -> None:
    ask = Submit("a", (5, 6, 7), SamplingParams(max_tokens=33, temperature=0))
    text = texts_of(run(make_engine(decoder), [ask]))
    made = make_engine(decoder, 1, DRAFTING, drafter=Bushy(text, 0), draft_tree=8, context=64)
    assert texts_of(run(made, [ask])) == text
    assert made.speculation is not None
    assert made.speculation.drafted > 0


def test_schemes_with_unfinished_blocks_refuse_trees(decoder: Decoder) -> None:
    make_engine(decoder, kv="klt2", drafter=Bushy({}, 0), limits=DRAFTING)
    with user_error("option_conflict", "klt2", "int8"):
        make_engine(decoder, kv="klt2", drafter=Bushy({}, 0), limits=DRAFTING, draft_tree=4)


def test_trees_of_a_drafter_that_may_make_none_are_errors(decoder: Decoder) -> None:
    ask = Submit("a", (5, 6, 7), SamplingParams(max_tokens=9, temperature=0))
    text = texts_of(run(make_engine(decoder), [ask]))
    made = make_engine(decoder, limits=DRAFTING, drafter=Bushy(text, 0), draft_tokens=8)
    assert texts_of(run(made, [ask])) == text
    assert made.speculation is not None
    assert made.speculation.drafted == 0
    assert made.speculation.errors > 0
