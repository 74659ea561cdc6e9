"""Draft heads beside their target: what they read of a step, what they guess, and texts that stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from attar.checkpoints.drafts import eagle, eagle1, early_exit, medusa
from attar.checkpoints.sources import opening
from attar.engine import startup
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.kernels import dispatch, ops
from attar.model.cache import ForwardBatch, KeptStates
from attar.model.decoder import Decoder
from attar.protocol.messages import Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from attar.sampling.drafters import eagle as eagle_module
from attar.sampling.drafters.drafter import Draft, DraftRequest
from attar.sampling.drafters.eagle import EagleDrafter
from attar.sampling.drafters.first_of import MATCHED, FirstOf
from attar.sampling.drafters.medusa import MedusaDrafter
from attar.scheduling.sequence import Sequence as Tokens
from tests.checkpoints.drafts import test_eagle as eagle_layout
from tests.checkpoints.drafts import test_eagle1 as eagle1_layout
from tests.checkpoints.drafts.test_medusa import oracle, served, write
from tests.engine.conftest import CONTEXT, ROOM, TIGHT, answers, make_engine, run, run_as_they_come
from tests.engine.test_engine import ROUNDED, some_requests
from tests.errors import user_error

DRAFTING = SchedulerConfig(max_step_tokens=48, max_drafts=16)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write(tmp_path / "head", *served())


class Watched(MedusaDrafter):
    """Medusa heads that note the states they are given, and what they guess."""

    def __init__(self, head: Path, decoder: Decoder) -> None:
        heads = medusa.read(head, decoder, None if decoder.store is None else dispatch.store("exact"))
        super().__init__(heads, decoder.final_norm, decoder.config.layers)
        self.seen: list[tuple[Tokens, int, torch.Tensor]] = []
        self.guesses: list[tuple[list[int], tuple[int, ...]]] = []

    def see(self, sequence: Tokens, start: int, states: KeptStates) -> None:
        super().see(sequence, start, states)
        self.seen.append((sequence, *self._last[sequence]))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = super().draft(requests)
        for request, draft in zip(requests, found, strict=True):
            self.guesses.append((list(request.sequence.tokens), draft.tokens))
        return found


@pytest.mark.parametrize("store", ["native", "ref"])
def test_states_are_those_of_the_rows_that_stay(tiny_decoder: Callable[..., Decoder], head: Path, store: str) -> None:
    """In prompts, in steps that are replayed, and behind drafts that were right or wrong."""
    decoder = tiny_decoder(store=dispatch.store("exact") if store == "native" else None)
    made = Watched(head, decoder)
    engine = make_engine(decoder, limits=DRAFTING, drafter=made, draft_tokens=2, context=64)
    params = SamplingParams(max_tokens=20, temperature=0)
    run(engine, [Submit("a", tuple(range(5, 15)), params), Submit("b", (9,) * 3, params)])
    assert engine.speculation is not None
    assert engine.speculation.drafted > 20
    assert engine.speculation.errors == 0
    assert len(made.seen) > 20
    texts = {sequence.id: sequence.tokens for sequence, _, _ in made.seen}
    whole = {}
    for id, tokens in texts.items():
        step = ForwardBatch((len(tokens),), 64, keep=(decoder.config.layers,))
        decoder.states(torch.tensor(tokens), step)
        whole[id] = step.kept.of(decoder.config.layers)
    for sequence, at, row in made.seen:
        if at < len(whole[sequence.id]):
            assert (row[0] - whole[sequence.id][at]).abs().max() < 1e-4


def test_drafts_are_the_heads_guesses(tiny_decoder: Callable[..., Decoder], head: Path) -> None:
    """Of a greedy request, the largest logits of the oracle from the state behind the text's last row."""
    decoder = tiny_decoder(store=dispatch.store("exact"))
    made = Watched(head, decoder)
    engine = make_engine(decoder, limits=DRAFTING, drafter=made, draft_tokens=8)
    run(engine, [Submit("a", (5, 6, 7), SamplingParams(max_tokens=12, temperature=0))])
    tensors = served()[1]
    assert len(made.guesses) > 5
    for tokens, drafts in made.guesses:
        step = ForwardBatch((len(tokens) - 1,), 64, keep=(3,))
        decoder.states(torch.tensor(tokens[:-1]), step)
        x = ops.norm(step.kept.of(3)[-1:], None, decoder.final_norm)[1]
        wanted = [
            int(oracle(x, [(tensors[f"blocks.{k}.layers.0.weight"], None)], tensors[f"lm_heads.{k}.weight"]).argmax())
            for k in range(len(drafts))
        ]
        assert list(drafts) == wanted
    assert max(len(drafts) for _, drafts in made.guesses) == 3  # as many as there are heads


@pytest.mark.parametrize("kv", [None, *ROUNDED[:2]])
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_bit(decoder: Decoder, head: Path, seed: int, kv: str | None) -> None:
    draw = random.Random(seed)
    asks = some_requests(seed + 9000, 8, decoder.config.vocab_size)
    alone = {}
    for ask in asks:
        alone |= answers(run(make_engine(decoder, kv=kv), [ask]))
    made = make_engine(
        decoder, draw.choice((ROOM, TIGHT)), DRAFTING, kv=kv, drafter=Watched(head, decoder),
        draft_tokens=draw.choice((None, 3)),
    )  # fmt: skip
    assert answers(run_as_they_come(made, asks, draw)) == alone
    assert made.speculation is not None
    assert made.speculation.errors == 0
    kept = made.speculation.drafter
    assert isinstance(kept, MedusaDrafter)
    assert not kept._last, "states of what has ended stay"


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
@pytest.mark.parametrize("seed", range(3))
def test_matches_come_before_a_head_and_change_no_bit(
    decoder: Decoder, head: Path, eagle_head: Path, seed: int, kind: str
) -> None:
    """Texts that repeat themselves are copied, elsewhere the head drafts from states that it is given all along."""
    draw = random.Random(seed)
    biased = [
        msgspec.structs.replace(each, params=replace(each.params, logit_bias={3: 5.0, 4: 5.0, 5: 5.0}, max_tokens=60))
        for each in some_requests(seed + 9800, 6, decoder.config.vocab_size)
        if isinstance(each, Submit)
    ]
    alone = {}
    for ask in biased:
        alone |= answers(run(make_engine(decoder), [ask]))
    second: MedusaDrafter | EagleDrafter = (
        Watched(head, decoder) if kind == "medusa" else eagle_drafter(eagle_head, decoder)
    )
    asked: list[int] = []

    class Told(FirstOf):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            found = super().draft(requests)
            asked.extend(each.evidence for each in found if each.tokens)
            return found

    made = make_engine(decoder, draw.choice((ROOM, TIGHT)), DRAFTING, drafter=Told(second), draft_tokens=3)
    assert made.runner.kind.keep == second.layers
    assert answers(run_as_they_come(made, biased, draw)) == alone
    assert made.speculation is not None
    assert made.speculation.errors == 0
    assert {each >= MATCHED for each in asked} == {True, False}, "both kinds of drafts are made"


def test_a_step_without_a_head_keeps_no_states(decoder: Decoder) -> None:
    made: Engine = make_engine(decoder)
    run(made, [Submit("a", (5, 6, 7), SamplingParams(max_tokens=4, temperature=0))])
    assert made.runner.kept is not None
    assert not made.runner.kept.pairs


@pytest.fixture(scope="module")
def demo_head(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, folder = opening.stored(demo)[0], tmp_path_factory.mktemp("heads") / "demo"
    folder.mkdir()
    tensors = {f"blocks.{k}.layers.0.{n}": torch.zeros(s) for k in range(2) for n, s in (
        ("weight", (config.hidden, config.hidden)), ("bias", (config.hidden,)),
    )}  # fmt: skip
    medusa.write(folder, config, 1, tensors | {"lm_heads.0.weight": torch.zeros(4, config.hidden)}, torch.arange(4))
    return folder


def test_a_head_folder_is_a_source_of_drafts(demo: Path, demo_head: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    plain = LLM(demo, verify=False).generate("Once upon a time", params)
    llm = LLM(demo, draft=str(demo_head), draft_tokens=2, verify=False)
    assert [each.token_ids for each in llm.generate("Once upon a time", params)] == [plain[0].token_ids]
    assert llm.running.engine is not None
    assert llm.running.engine.speculation is not None
    assert llm.running.engine.speculation.drafter.name == "medusa"
    assert llm.running.engine.speculation.drafted > 10
    assert llm.running.engine.speculation.errors == 0


def test_a_server_counts_the_head_in_its_memory(demo: Path, demo_head: Path) -> None:
    settings = Settings(str(demo), "", context=256, memory=700 << 20, threads=1, draft=str(demo_head))
    made = startup.start_engine(settings)[0]
    assert made.speculation is not None
    assert made.speculation.drafter.name == "medusa"
    with user_error("memory_insufficient", "draft"):
        startup.start_engine(Settings(str(demo), "", memory=1 << 20, context=256, threads=1, draft=str(demo_head)))


def test_several_processes_take_no_head(demo: Path, demo_head: Path) -> None:
    from attar.engine.loader import Parallel

    with user_error("option_conflict", "suffix"):
        LLM(demo, draft=str(demo_head), parallel=Parallel(tp=2), verify=False)


# Early exits


def test_an_exit_is_counted_and_served(demo: Path, tmp_path: Path) -> None:
    config, folder = opening.stored(demo)[0], tmp_path / "exit"
    folder.mkdir()
    tensors = {"norm.weight": torch.ones(config.hidden), "linear.weight": torch.eye(config.hidden)}
    early_exit.write(folder, config, 1, tensors, None)
    settings = Settings(str(demo), "", context=256, memory=900 << 20, threads=1, draft=f"suffix,{folder}")
    made = startup.start_engine(settings)[0]
    assert made.speculation is not None
    assert isinstance(made.speculation.drafter, FirstOf)
    assert made.speculation.drafter.second.name == "exit"
    with user_error("memory_insufficient", "draft"):
        startup.start_engine(Settings(str(demo), "", memory=1 << 20, context=256, threads=1, draft=str(folder)))


# EAGLE-3


@pytest.fixture
def eagle_head(tmp_path: Path) -> Path:
    return eagle_layout.write(tmp_path / "eagle", eagle_layout.config(), eagle_layout.tensors())


def eagle_drafter(path: Path, decoder: Decoder, blocks: int = 40) -> EagleDrafter:
    store = None if decoder.store is None else dispatch.store("exact")
    return EagleDrafter(eagle.read(path, decoder, store), CONTEXT, blocks, decoder.lossless)


def test_drafts_are_those_of_the_oracle(tiny_decoder: Callable[..., Decoder], eagle_head: Path) -> None:
    """A chain of greedy drafts, from a prompt that is read in pieces, behind drafts that were right and wrong."""
    decoder, parts = tiny_decoder(store=dispatch.store("exact")), eagle_layout.tensors()
    guesses: list[tuple[list[int], tuple[int, ...]]] = []

    class Told(EagleDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            found = super().draft(requests)
            guesses.extend((list(r.sequence.tokens), d.tokens) for r, d in zip(requests, found, strict=True))
            return found

    head = eagle.read(eagle_head, decoder, dispatch.store("exact"))
    made = Told(head, CONTEXT, 40, decoder.lossless)
    limits = SchedulerConfig(max_running=4, max_step_tokens=7, max_drafts=16)
    engine = make_engine(decoder, limits=limits, drafter=made, draft_tokens=3, context=64)
    run(engine, [Submit("a", tuple(range(5, 22)), SamplingParams(max_tokens=12, temperature=0))])
    assert len(guesses) > 4
    table = decoder.embedding.forward(torch.arange(97), torch.zeros(97, dtype=torch.int64))
    for tokens, drafts in guesses:
        step = ForwardBatch((len(tokens) - 1,), 64, keep=(0, 1, 2))
        decoder.states(torch.tensor(tokens[:-1]), step)
        rows = torch.cat([step.kept.of(layer) for layer in (0, 1, 2)], 1)
        states, text = rows @ parts["fc.weight"].T, tokens[1:]
        for draft in drafts:
            found, logits = eagle_layout.oracle(parts, table[torch.tensor(text)], states)
            assert draft == int(eagle_layout.TOKENS[logits[-1].argmax()])
            states, text = torch.cat((states, found[-1:])), [*text, draft]


def test_drafts_of_an_eagle_1_head_are_those_of_the_oracle(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    """A chain of greedy drafts, behind drafts that were right and wrong."""
    decoder, parts = tiny_decoder(store=dispatch.store("exact")), eagle1_layout.tensors()
    folder = eagle1_layout.write(tmp_path / "eagle", eagle1_layout.config(), parts)
    guesses: list[tuple[list[int], tuple[int, ...]]] = []

    class Told(EagleDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            found = super().draft(requests)
            guesses.extend((list(r.sequence.tokens), d.tokens) for r, d in zip(requests, found, strict=True))
            return found

    made = Told(eagle1.read(folder, decoder, dispatch.store("exact")), CONTEXT, 40, decoder.lossless)
    engine = make_engine(decoder, limits=DRAFTING, drafter=made, draft_tokens=3, context=64)
    run(engine, [Submit("a", tuple(range(5, 22)), SamplingParams(max_tokens=12, temperature=0))])
    assert len(guesses) > 4
    assert made.name == "eagle"
    table = decoder.embedding.forward(torch.arange(97), torch.zeros(97, dtype=torch.int64))
    for tokens, drafts in guesses:
        step = ForwardBatch((len(tokens) - 1,), 64, keep=(3,))
        decoder.states(torch.tensor(tokens[:-1]), step)
        states, text = ops.norm(step.kept.of(3), None, decoder.final_norm)[1], tokens[1:]
        for draft in drafts:
            found, logits = eagle1_layout.oracle(parts, table[torch.tensor(text)], states, table)
            assert draft == int(logits[-1].argmax())
            states, text = torch.cat((states, found[-1:])), [*text, draft]


@pytest.mark.parametrize("layout", [eagle_layout, eagle1_layout])
@pytest.mark.parametrize("kv", [None, *ROUNDED[:1]])
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_with_an_eagle_head_changes_a_bit(
    decoder: Decoder, tmp_path: Path, seed: int, kv: str | None, layout: ModuleType
) -> None:
    draw = random.Random(seed)
    asks = some_requests(seed + 9500, 8, decoder.config.vocab_size)
    alone = {}
    for ask in asks:
        alone |= answers(run(make_engine(decoder, kv=kv), [ask]))
    path = layout.write(tmp_path / "eagle", layout.config(), layout.tensors())
    read = eagle.read if layout is eagle_layout else eagle1.read
    blocks = draw.choice((2, 5, 40))
    head = EagleDrafter(read(path, decoder, dispatch.store("exact")), CONTEXT, blocks, decoder.lossless)
    made = make_engine(
        decoder, draw.choice((ROOM, TIGHT)), DRAFTING, kv=kv, drafter=head, draft_tokens=draw.choice((None, 3)),
    )  # fmt: skip
    assert answers(run_as_they_come(made, asks, draw)) == alone
    assert made.speculation is not None
    assert made.speculation.errors == 0
    assert made.speculation.drafted > 0
    assert not head._readings, "states of what has ended stay"
    assert head.pool.free == head.pool.total


def test_states_that_wait_are_bounded(decoder: Decoder, eagle_head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no draft is asked for, states are read as they come, and drafts behind them are the same."""
    ask = Submit("a", tuple(range(40)), SamplingParams(max_tokens=30, temperature=0))
    found = []
    for rows in (8, 256):
        monkeypatch.setattr(eagle_module, "ROWS", rows)
        head = eagle_drafter(eagle_head, decoder)
        made = make_engine(decoder, limits=DRAFTING, drafter=head, draft_tokens=3)
        made.submit(ask)
        while not made.idle:
            made.step()
            assert all(of.seen - of.read <= max(rows, 48) for of in head._readings.values())
        assert made.speculation is not None
        assert made.speculation.errors == 0
        found.append((made.speculation.drafted, made.speculation.accepted))
    assert found[0] == found[1]
