"""Memory of the first of several processes: what it really holds, and what that leaves for keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attar.checkpoints.sources import shards
from attar.checkpoints.sources.opening import stored
from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.kernels.operands import Prepared
from attar.kv.schemes import SCHEMES
from attar.model.parallel import Groups
from attar.model.shapes import shape
from attar.model.split import Share
from attar.plan import costs, fit
from attar.plan.costs import Storage
from attar.plan.fit import Deployment

GB = 10**9
CONFIG = shape("llama-3.1-8b")
STORAGE = Storage(Scheme.parse("w4g128").with_scale_dtype("bfloat16"))
BFLOAT16 = SCHEMES["bfloat16"]


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
    assert sum(each.nbytes for each in pages) == costs.block_bytes(own, SCHEMES["float32"])


def test_two_processes_hold_more_than_twice_the_tokens_in_twice_the_memory() -> None:
    alone = fit.fit(Deployment(CONFIG, STORAGE, BFLOAT16), 8 * GB)
    for share in (Share(0, 2), Share(0, 1, 2)):
        each = fit.fit(Deployment(CONFIG, STORAGE, BFLOAT16, share), 8 * GB)
        assert each.block_bytes == alone.block_bytes // 2
        assert each.tokens > 2 * alone.tokens, "weights are half as many"
    first = fit.fit(Deployment(CONFIG, STORAGE, BFLOAT16, Share(1, 2)), 8 * GB)
    assert first == fit.fit(Deployment(CONFIG, STORAGE, BFLOAT16, Share(0, 2)), 8 * GB), "the first holds the most"
