"""What a card's memory is divided into: from a device that only counts, and the trial on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import pytest
import torch
from torch import Tensor

from attar.engine.fitting import on_gpu
from attar.engine.memory_profile import MemoryProfile, ProfileRun, measure
from attar.kernels.operands import Adapter
from attar.model.decoder import Decoder
from attar.plan.costs import BLOCK
from attar.plan.fit import ROOM, Fit
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from tests.errors import user_error
from tests.execution.test_cuda_graphs import Again

GB = 10**9
BLOCK_BYTES = 2**20
SETTINGS = Settings("model", "socket", device="cuda")
MEASURED = MemoryProfile(available=10 * GB, weights=5 * GB, step=GB, graphs=GB // 4, driver=GB // 2)


class Card:
    """A device with a trial on it: a step takes 300, and the first keeps 40; a graph keeps 70, others will 5."""

    pages, others = 100, 5

    def __init__(self) -> None:
        self.kept, self.most, self.driver, self.steps = 1000 + self.pages, 0, 200, 0

    def free(self) -> int:
        return 10_000 - self.kept - self.driver

    def held(self) -> int:
        return self.kept

    def peak(self) -> int:
        return self.most

    def settle(self) -> None:
        self.most = self.kept

    def step(self) -> None:
        if not self.steps:
            self.kept += 40
            self.driver += 11
        self.steps += 1
        self.most = max(self.most, self.kept + 300)

    def record(self) -> None:
        self.kept += 70
        self.driver += 2


def test_each_part_is_what_it_added() -> None:
    card = Card()
    found = measure(card, 10_000, card)  # type: ignore[arg-type]
    assert found == MemoryProfile(available=10_000, weights=1040, step=300, graphs=75, driver=213)


@pytest.mark.parametrize(("context", "tokens"), [(1024, 96), (40, 45)])
def test_the_trial_is_the_largest_step(decoder: Decoder, context: int, tokens: int) -> None:
    """As many rows as a step may have, or a context, and logits for as many sequences as may run."""
    record = Again()
    made = ProfileRun(decoder, decoder.lossless, SchedulerConfig(max_running=6, max_step_tokens=96), context, record)
    (plan,) = made._plans
    assert plan.tokens == tokens
    assert len(plan.chunks) == 6
    made.step()
    made.step()
    assert not record.recorded
    made.record()
    assert record.recorded == [6]
    assert made.others == (1 + 2 + 4) * 4 * (97 + 2 * -(-context // 64))
    assert made.pages == 2 * sum(pages.nbytes for pages in decoder.cache(64).layers)


def test_the_largest_graph_has_rows_for_drafts(decoder: Decoder) -> None:
    record, limits = Again(), SchedulerConfig(max_running=6, max_step_tokens=96, max_drafts=5)
    made = ProfileRun(decoder, decoder.lossless, limits, 1024, record)
    made.record()
    assert record.recorded == [11]
    assert made.others == (1 + 2 + 4 + 8) * 4 * (97 + 2 * 16)


@dataclass(frozen=True, eq=False)
class Noting(Adapter):
    """It notes how many rows it is asked for."""

    rows: list[int] = field(default_factory=list)

    def product(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return super().product(x)


@pytest.mark.parametrize(("running", "rows"), [(6, 95), (1, 96)])
def test_the_trial_runs_with_each_adapter(decoder: Decoder, running: int, rows: int) -> None:
    """One row stays without it, if there is another sequence: then rows are gathered, which takes the most."""
    linear = next(decoder.blocks[0].linears())
    outputs, inputs = linear.shape
    made = [Noting(torch.zeros(2, inputs), torch.zeros(outputs, 2)) for _ in range(2)]
    linear.adapters.update(enumerate(made, 1))
    limits, record = SchedulerConfig(max_running=running, max_step_tokens=96), Again()
    try:
        ProfileRun(decoder, decoder.lossless, limits, 1024, record, adapters=2).step()
    finally:
        linear.adapters.clear()
    assert [each.rows for each in made] == [[rows], [rows]]


def divided(limits: SchedulerConfig | None = None, measured: MemoryProfile = MEASURED, **changed: object) -> Fit:
    settings = msgspec.structs.replace(SETTINGS, **changed)
    return on_gpu(settings, measured, BLOCK_BYTES, settings.context or 131072, limits or SchedulerConfig())


def test_the_cache_gets_what_is_left() -> None:
    found = divided(context=8192)
    assert found.memory == 9 * GB  # what else runs on the card may grow
    assert found.graphs == MEASURED.graphs + BLOCK_BYTES  # and the block that is nobody's
    assert 0 <= found.unused < BLOCK_BYTES
    assert dict(found.table())["graphs"] == found.graphs


def test_a_size_that_was_given_is_all_there_is() -> None:
    assert divided(memory=8 * GB, context=4096).memory == 8 * GB


def test_without_a_context_requests_may_be_as_long_as_the_cache() -> None:
    small = replace(MEASURED, available=8 * GB)
    found = divided(measured=small)
    assert found.context == found.tokens < 131072


def test_the_cache_has_room_for_prompts_besides_all_requests_together_and_no_more() -> None:
    """As much as `attar plan` gives it, which knows no card's measurements."""
    made = divided(SchedulerConfig(max_running=2, max_step_tokens=64), context=1024)
    assert made.tokens == ROOM * (2 * 1024 + BLOCK), "and the block that the second has to leave free"
    bare = divided(SchedulerConfig(max_running=2, max_step_tokens=64, headroom=0.0), context=1024)
    assert bare.tokens == ROOM * 2 * 1024
    assert bare.requests == ROOM * 2
    assert divided(context=4096, max_cached_tokens=8 * 4096).requests == 7


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"memory": 6 * GB}, "memory_insufficient"),
        ({"context": 131072, "memory": 7 * GB}, "plan_does_not_fit"),
        ({"context": 4096, "max_cached_tokens": 10**7}, "memory_insufficient"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(changed: dict[str, object], sentence: str) -> None:
    with user_error(sentence):
        divided(**changed)  # type: ignore[arg-type]
