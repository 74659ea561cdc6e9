"""The bound on a step's memory against what a decoder really holds at once, counted to the byte."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.kernels.native import extension, workspace
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.plan import steps
from attar.plan.costs import Storage
from attar.plan.steps import StepLimits
from attar.protocol.scheduler_config import PRESETS, SchedulerConfig
from tests.errors import user_error

ROWS, SEQUENCES = 60, 3
SLACK = 1.35  # of the bound over what is counted: it holds for every family and every scheme

pytestmark = pytest.mark.skipif(dispatch.store() is None, reason="the native kernels are off or do not load")


class Counting(workspace.Workspace):
    """A workspace that counts the bytes of results that are alive, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        piece = mmap.mmap(-1, count * dtype.itemsize)
        self.alive += len(piece)
        self.most = max(self.most, self.alive)
        lease = memoryview(piece)
        out = torch.frombuffer(lease, dtype=dtype, count=count).view(shape)
        weakref.finalize(lease, self.give, len(piece))
        return out

    def give(self, size: int) -> None:
        self.alive -= size


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Results without the rounding to huge pages, which would hide what is counted."""
    counter = Counting()
    monkeypatch.setattr(extension, "_workspace", counter)
    monkeypatch.setattr(steps, "LARGE", 1 << 60)
    return counter


def storage_of(decoder: Decoder, scheme: str | None) -> Storage:
    head = Storage(dtype="float32")
    return head if scheme is None else Storage(Scheme.parse(scheme), None, "float32")


@pytest.mark.parametrize("scheme", [None, "w4g32", "w8a8"])
def test_no_step_holds_more_than_the_bound(
    tiny_decoder: Callable[..., Decoder], counting: Counting, scheme: str | None
) -> None:
    decoder = tiny_decoder(scheme=scheme, store=dispatch.store())
    counting.alive = counting.most = 0
    step = ForwardBatch((ROWS // SEQUENCES,) * SEQUENCES, ROWS, KVCache(decoder.config, ROWS, SEQUENCES))
    ends = torch.arange(ROWS // SEQUENCES - 1, ROWS, ROWS // SEQUENCES)
    decoder.forward(torch.zeros(ROWS, dtype=torch.int64), step, ends)
    bound = steps.largest_step(decoder.config, storage_of(decoder, scheme), StepLimits(ROWS, SEQUENCES), ROWS)
    assert counting.most <= bound.results <= SLACK * counting.most
    assert counting.alive == 0


def test_a_vocabulary_wider_than_the_layers_is_the_largest(
    tiny_decoder: Callable[..., Decoder], counting: Counting
) -> None:
    decoder = tiny_decoder(vocab=5000, layers=1, store=dispatch.store())
    counting.alive = counting.most = 0
    logits = decoder.forward(
        torch.zeros(8, dtype=torch.int64), ForwardBatch((1,) * 8, 8, KVCache(decoder.config, 8, 8)), torch.arange(8)
    )
    bound = steps.largest_step(decoder.config, Storage(dtype="float32"), StepLimits(8, 8), 8)
    assert counting.most <= bound.results <= SLACK * counting.most
    assert logits.shape == (8, 5000)


def test_a_recorded_step_keeps_every_result(tiny_decoder: Callable[..., Decoder], counting: Counting) -> None:
    decoder = tiny_decoder(store=dispatch.store())
    step = ForwardBatch((1,) * 5, 8, KVCache(decoder.config, 8, 5))
    for rope in dict.fromkeys(decoder.config.ropes):
        assert rope is not None
        step.rotation(rope)
    ids = torch.zeros(5, dtype=torch.int64)
    with torch.inference_mode(), extension.record() as recording:
        decoder.run(ids, step)
    kept = sum(tensor.nbytes for tensor in recording.tensors)
    planned = steps.recorded_step(decoder.config, Storage(dtype="float32"), 5)
    assert kept <= planned <= SLACK * kept
    limits = StepLimits(sequences=5, recordings=3)
    assert steps.largest_step(decoder.config, Storage(dtype="float32"), limits, 64).recorded == 3 * planned
    assert steps.recorded_step(decoder.config, Storage.named("fp8-atensor"), 5) == 0  # the reference is not recorded


def test_what_the_workspace_and_the_tables_keep() -> None:
    """The constants of this floor are those of rooms that it may not import."""
    from attar.model import rope

    assert (steps.LARGE, steps.UNIT, steps.IDLE) == (workspace.LARGE, workspace.UNIT, workspace.MOST_FREE)
    assert steps.ANGLES == rope.TABLE_ROWS
    assert rope._table.cache_parameters()["maxsize"] == steps.TABLES


@pytest.mark.parametrize("context", [1, 256, 257, 5000])
def test_tables_of_angles(tiny_decoder: Callable[..., Decoder], context: int) -> None:
    from attar.model import rope

    config = tiny_decoder().config
    angles = config.ropes[0]
    assert angles is not None
    cos, sin = rope.table(angles, context)
    assert steps.largest_step(config, Storage(), StepLimits(), context).angles == cos.nbytes + sin.nbytes


def test_pieces_of_every_size_stay_within_the_idle_bound() -> None:
    """Steps of growing numbers of rows, the worst order: no free piece is large enough for the next step."""

    class Sizes(workspace.Workspace):
        """Only the sizes of pieces, not their memory."""

        def _take(self, size: int) -> Any:
            fitting = [piece for piece in self.free if size <= len(piece) < 2 * size]
            if not fitting:
                return range(size)
            best = min(fitting, key=len)
            self.free.remove(best)
            return best

    widths = [1 << 20, 3 << 20, 9 << 20]  # results alive at once: bytes at the most rows
    sizes = Sizes()
    for rows in range(1, 101):
        needs = [-(-width * rows // 100 // workspace.UNIT) * workspace.UNIT for width in widths]
        pieces = [sizes._take(need) for need in needs]
        for piece in pieces:
            sizes._give(piece)
    total = sum(map(len, sizes.free))
    assert steps._idle([[width for width in widths if width >= steps.LARGE]]) >= total


def test_fewer_rows_need_no_more(tiny_decoder: Callable[..., Decoder]) -> None:
    config = tiny_decoder().config
    sizes = [steps.largest_step(config, Storage(), StepLimits(rows), 64).total for rows in (1, 64, 512, 2048, 8192)]
    assert sizes == sorted(sizes)


def test_linears_without_a_kernel_are_named(tiny_decoder: Callable[..., Decoder]) -> None:
    config = tiny_decoder().config
    found = steps.references(config, Storage.named("fp8-atensor"))
    assert len(found) == 7 * config.layers
    assert set(found.values()) == {"one activation scale for all rows of a call would tie them to each other"}
    assert steps.references(config, Storage.named("w8a8")) == {}


IMPOSSIBLE: Mapping[str, dict[str, Any]] = {
    "the headroom is a share below 1, not 1": {"headroom": 1.0},
    "rows of a step are at least 1, not 0": {"rows": 0},
    "threads of a step are at least 1, not -1": {"threads": -1},
    "recordings of a step are at least 0, not -1": {"recordings": -1},
}


@pytest.mark.parametrize("sentence", IMPOSSIBLE)
def test_impossible_limits(sentence: str) -> None:
    with user_error("option_out_of_range"):
        StepLimits(**IMPOSSIBLE[sentence])


def test_steps_are_planned_for_as_many_as_run_together() -> None:
    assert StepLimits.of(SchedulerConfig(), 3) == StepLimits(rows=512, sequences=32, threads=3)
    assert StepLimits.of(SchedulerConfig(policy="none"), 1).sequences == 1
    throughput = StepLimits.of(PRESETS["throughput"], 2)
    assert (throughput.rows, throughput.sequences, throughput.headroom) == (2048, 128, 0.01)
