"""Blocks of layers with a sliding window: bounds against counted blocks, and caches against their pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.schemes import SCHEMES
from attar.model.cache import pool
from attar.model.families import read_config
from attar.plan import costs, fit
from attar.plan.costs import BLOCK, Storage
from attar.plan.fit import CacheLimits, Deployment
from attar.plan.sliding import CacheShape, SlidingLimits, window_of
from attar.plan.steps import StepLimits
from tests.model.random_model import LLAMA

FLOAT = SCHEMES["float32"]
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768, "sliding_window": 4096}
GEMMA = read_config(
    {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 1024, "hidden_size": 640, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048,
        "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    }
)  # fmt: skip
ALONE = StepLimits(sequences=1)


@given(st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 99))
def test_no_sequence_touches_more_blocks_than_its_bound(window: int, block: int, rows: list[int], start: int) -> None:
    """Each sequence reads from the first row's window to its last row; rows of all count together."""
    limits = SlidingLimits(window, block, max(1, sum(rows)))
    touched = 0
    for n in rows:
        positions = range(max(0, start - window + 1), start + n)
        assert limits.first(start) == max(0, start - window + 1) // block
        touched += len({at // block for at in positions})
    assert touched <= len(rows) * limits.held + limits.of_steps
    assert touched <= len(rows) * limits.promised(10**6) + limits.of_steps
    assert limits.promised(block) == 1


shapes = st.builds(
    CacheShape, st.just(18), st.integers(1, 60), st.integers(1, 8), st.sampled_from([0, 9, 15, 18]),
    st.none() | st.builds(SlidingLimits, st.integers(1, 900), st.just(64), st.integers(1, 600)),
)  # fmt: skip


@given(shapes, st.integers(0, 2000))
def test_a_cache_grows_with_its_blocks_and_fills_what_is_left(shape: CacheShape, blocks: int) -> None:
    assert shape.bytes(blocks) <= shape.bytes(blocks + 1)
    assert shape.bytes(blocks) <= blocks * shape.block_bytes
    most = shape.most(shape.bytes(blocks))
    assert most >= blocks
    assert shape.bytes(most) <= shape.bytes(blocks) < shape.bytes(most + 1)
    if sliding := shape.sliding_blocks(blocks):
        assert shape.limits is not None
        assert sliding >= shape.sequences * shape.limits.held + shape.limits.of_steps


@pytest.mark.parametrize("config", [GEMMA, read_config(MISTRAL)])
def test_a_plan_counts_the_bytes_of_the_pages(config: object) -> None:
    found = fit.fit(Deployment(config, Storage(), FLOAT), 64 * 10**9, 16384, CacheLimits(16384), ALONE)  # type: ignore[arg-type]
    assert 0 < found.sliding_blocks < found.blocks
    pages = pool(config, found.blocks, FLOAT, sliding=found.sliding_blocks)  # type: ignore[arg-type]
    assert sum(each.nbytes for each in pages) == found.cache
    assert sum(count for _, count in found.table()) == 64 * 10**9


def test_gemma_at_32k_takes_a_fifth() -> None:
    found = fit.fit(Deployment(GEMMA, Storage(), FLOAT), 64 * 10**9, 32768, CacheLimits(32768), ALONE)
    assert window_of(GEMMA) == 512
    assert found.cache <= 0.20 * found.blocks * costs.block_bytes(GEMMA, FLOAT)
    assert found.requests == 1


def test_where_windows_save_nothing_all_layers_have_as_many_blocks() -> None:
    for context, sequences in ((512, 1), (4096, 32)):
        limits = StepLimits(sequences=sequences)
        found = fit.fit(Deployment(GEMMA, Storage(), FLOAT), 64 * 10**9, context, CacheLimits(context), limits)
        assert found.sliding_blocks == 0
        assert found.cache == found.blocks * costs.block_bytes(GEMMA, FLOAT)


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SlidingLimits(0, BLOCK, 1)
