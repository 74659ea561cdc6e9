"""The paged cache: where rows go, and an attention layer through it against the same layer without one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attar import env
from attar.kernels.operands import AttentionForm, Linear, Norm
from attar.kv.schemes import scheme
from attar.model.cache import ForwardBatch, KVCache
from attar.model.config import ModelConfig, Rope
from attar.model.families import read_config
from attar.model.layers import Attention
from attar.model.rope import rotation, table
from tests.errors import user_error

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "int8": 3e-2, "fp8": 0.15}  # of outputs, relative to the largest
LENGTHS = (150, 40)
DYNAMIC = Rope(10000.0, 16, "dynamic", factor=2.0, original_context=50)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return read_config(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 64,
            "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 24, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
        }
    )  # fmt: skip


def layer(rope: Rope, window: int | None, norm: str | None) -> Attention:
    qkv = tuple(
        Linear(name, randn(rows * 24, 64, seed=rows + i))
        for i, (name, rows) in enumerate([("q", 4), ("k", 2), ("v", 2)])
    )
    weights = (randn(24, seed=s) * 0.1 + 1 for s in (8, 9))
    norms = [None if norm is None else Norm(norm, w, torch.zeros(24) if norm == "layer" else None) for w in weights]  # type: ignore[arg-type]
    return Attention(1, qkv, Linear("o", randn(64, 96, seed=7)), AttentionForm(4, 2, 24, 0.02, window), rope, *norms)


@pytest.mark.parametrize("kv", TOLERANCE)
@pytest.mark.parametrize("backend", ["native", "ref"])
@pytest.mark.parametrize(
    "rope, window, norm",
    [(Rope(10000.0, 24), None, None), (Rope(500.0, 8), 30, "rms"), (DYNAMIC, None, "layer")],
    ids=["plain", "window", "grows"],
)
def test_a_layer_through_the_cache_is_the_layer(
    rope: Rope, window: int | None, norm: str | None, backend: str, kv: str, config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two sequences in uneven pieces, of horizons of their own, in blocks of 16 slots."""
    if backend == "ref":
        monkeypatch.setattr(env, "get", lambda: env.Env(kernels="ref"))
    one, inputs = layer(rope, window, norm), [randn(length, 64, seed=length) for length in LENGTHS]
    whole = one.forward(torch.cat(inputs), ForwardBatch(LENGTHS, LENGTHS)).split(LENGTHS)
    cache = KVCache(config, 150, 2, scheme(kv), block=16)
    outputs: list[list[Tensor]] = [[], []]
    for lengths in [(30, 0), (1, 1), (70, 38), (0, 1), (49, 0)]:
        rows = torch.cat([x[n : n + m] for x, n, m in zip(inputs, cache.filled, lengths, strict=True)])
        parts = one.forward(rows, ForwardBatch(lengths, LENGTHS, cache)).split(lengths)
        cache.advance(lengths)
        for collected, part in zip(outputs, parts, strict=True):
            collected.append(part)
    assert tuple(cache.filled) == LENGTHS
    for ours, expected in zip(outputs, whole, strict=True):
        assert (torch.cat(ours) - expected).abs().max() <= TOLERANCE[kv] * expected.abs().max()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6), st.sampled_from([16, 48]))
def test_rows_go_to_slots_of_their_own(config: ModelConfig, calls: list[tuple[int, int]], block: int) -> None:
    cache = KVCache(config, 120, 2, block=block)
    blocks = [set(row) for row in cache.block_tables.tolist()]
    assert not blocks[0] & blocks[1]
    seen: list[list[int]] = [[], []]
    for lengths in calls:
        place = cache.place(lengths)
        assert place.row_starts.tolist() == [0, lengths[0], sum(lengths)]
        for s, (slots, at) in enumerate(
            zip(place.slot_mapping.split(lengths), place.positions.split(lengths), strict=True)
        ):
            assert at.tolist() == list(range(cache.filled[s], cache.filled[s] + lengths[s]))
            assert {slot // block for slot in slots.tolist()} <= blocks[s]
            seen[s] += slots.tolist()
        cache.advance(lengths)
        assert place.lengths.tolist() == cache.filled
    for s, slots in enumerate(seen):
        assert len(set(slots)) == len(slots) == cache.filled[s]


def test_int8_is_a_quarter_and_a_scale(config: ModelConfig) -> None:
    """Per slot and head, keys and values: 24 columns, values padded to 32."""
    sizes = {kv: KVCache(config, 64, 1, scheme(kv)).layers[0].nbytes for kv in TOLERANCE}
    assert sizes["float32"] == 64 * 2 * (24 + 32) * 4
    assert sizes["bfloat16"] == 64 * 2 * (24 + 32) * 2
    assert sizes["int8"] == sizes["fp8"] == 64 * 2 * (24 + 32 + 2 * 4)


def test_what_a_cache_cannot_be(config: ModelConfig) -> None:
    with user_error("kv_unsupported"):
        KVCache(config, 64, scheme=scheme("int4"))
    with pytest.raises(ValueError, match="multiple of 16"):
        KVCache(config, 64, block=20)
    with pytest.raises(ValueError, match="holds 64 positions: 3 too few"):
        ForwardBatch((67,), 100, KVCache(config, 64))


@pytest.mark.parametrize("rope", [Rope(10000.0, 12), DYNAMIC], ids=["fixed", "grows"])
def test_the_table_of_angles(rope: Rope) -> None:
    cos, sin = table(rope, 300)
    assert cos.shape[0] >= 300
    expected = rotation(rope, torch.arange(300), 300)
    assert (cos[:300] - expected[0]).abs().max() <= 1e-6
    assert (sin[:300] - expected[1]).abs().max() <= 1e-6
    longer = table(rope, 1000)[0]
    assert torch.equal(longer[: len(cos)], cos) != rope.grows
