"""Memory of the first of several processes: what it really holds, and what that leaves for keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attar.checkpoints.sources import shards
from attar.checkpoints.sources.stored import stored
from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.kernels.operands import Prepared
from attar.model.parallel import Groups
from attar.model.shapes import shape
from attar.model.split import Share
from attar.plan import costs, fit
from attar.plan.costs import Storage

GB = 10**9
CONFIG = shape("llama-3.1-8b")
STORAGE = Storage(Scheme.parse("w4g128").with_scale_dtype("bfloat16"))


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2), (2, 2)])
def test_weights_are_those_that_are_loaded(tp: int, pp: int, demo: Path) -> None:
    share, store = Share(0, tp, pp), dispatch.store()
    assert store is not None
    made = shards.load(demo, share, Groups(), torch.float32, None, store)
    linears = [linear.weight for block in made.blocks for linear in block.linears()]
    config, storage = stored(demo)
    counted = costs.weight_bytes(fit.shared(config, storage, share)[1], storage)
    assert counted.linears == sum(weight.read_bytes for weight in linears if isinstance(weight, Prepared))
    assert isinstance(made.head.weight, Prepared)
    assert counted.head == made.head.weight.read_bytes
    pages = made.cache(costs.BLOCK).layers
    own = fit.shared(config, storage, share)[0]
    assert sum(each.nbytes for each in pages) == costs.block_bytes(own, "float32")


def test_two_processes_hold_more_than_twice_the_tokens_in_twice_the_memory() -> None:
    alone = fit.fit(CONFIG, STORAGE, "bfloat16", 8 * GB)
    for share in (Share(0, 2), Share(0, 1, 2)):
        each = fit.fit(CONFIG, STORAGE, "bfloat16", 8 * GB, share=share)
        assert each.block_bytes == alone.block_bytes // 2
        assert each.tokens > 2 * alone.tokens, "weights are half as many"
    first = fit.fit(CONFIG, STORAGE, "bfloat16", 8 * GB, share=Share(1, 2))
    assert first == fit.fit(CONFIG, STORAGE, "bfloat16", 8 * GB, share=Share(0, 2)), "the first holds the most"


def test_a_plan_halves_what_each_process_reads() -> None:
    demand = fit.Demand(4096)

    def made(share: Share) -> fit.Plan:
        storages = [STORAGE, Storage.named("w8a8")]
        return fit.plan("m", CONFIG, storages, demand, 20 * GB, "x", kv_schemes=["int8"], bandwidth=GB, share=share)

    alone, together, staged = (made(share).rows[0] for share in (Share(), Share(0, 2), Share(0, 1, 2)))
    assert alone.speed is not None
    assert together.speed is not None
    assert staged.speed is not None
    assert together.speed.tokens_per_second == pytest.approx(2 * alone.speed.tokens_per_second, rel=0.01)
    assert staged.speed.tokens_per_second == alone.speed.tokens_per_second, "stages run one after another"
    assert staged.weight_bytes.linears == alone.weight_bytes.linears // 2


def test_what_cannot_be_shared_is_left_out_of_a_plan() -> None:
    storages = [Storage.named("dense"), Storage.named("w4g128"), Storage.named("w8a8")]
    share = Share(0, 32)  # heads of 128 columns stay whole; the width's 448 columns are no groups
    made = fit.plan("m", CONFIG, storages, fit.Demand(1024), 8 * GB, "x", kv_schemes=["int8"], share=share)
    assert [row.weights for row in made.rows] == ["bf16", "w8a8"]
    with pytest.raises(ValueError, match="multiples of 128"):
        fit.plan("m", CONFIG, storages[1:], fit.Demand(1024), 8 * GB, "x", kv_schemes=["int8"], share=share)
