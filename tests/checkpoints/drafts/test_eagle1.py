"""EAGLE heads in SafeAILab's layout against a plain-torch oracle, and ways in which one does not fit its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoints.drafts import eagle1
from attar.checkpoints.drafts.files import kind_of
from attar.kernels import dispatch, ops
from attar.kv.schemes import SCHEMES
from attar.model import cache
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from tests.checkpoints.drafts.test_eagle import (
    CLOSE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    SHAPE,
    SIZE,
    VOCAB,
    WIDE,
    numbers,
    rms,
    turned,
    write,
)
from tests.errors import user_error


def tensors(bias: bool = True, embedding: bool = False) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * SIZE, HIDDEN), "self_attn.k_proj": (KV_HEADS * SIZE, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * SIZE, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE),
    }  # fmt: skip
    found = {f"layers.0.{name}.weight": numbers(name, *shape) for name, shape in shapes.items()}
    found["layers.0.post_attention_layernorm.weight"] = 1 + numbers("post", HIDDEN)
    found["fc.weight"] = numbers("fc", HIDDEN, 2 * HIDDEN)
    found |= {"fc.bias": numbers("bias", HIDDEN)} if bias else {}
    return found | ({"embed_tokens.weight": numbers("embed", VOCAB, HIDDEN) * 8} if embedding else {})


def config(**changed: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **SHAPE, **changed}


def oracle(parts: dict[str, Tensor], embedded: Tensor, states: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Next states and logits of rows [N] of one sequence, by plain matrices."""
    w = {name.removeprefix("layers.0.").removesuffix(".weight"): t for name, t in parts.items()}
    n = len(states)
    x = torch.cat((embedded, states), 1) @ w["fc"].T + w.get("fc.bias", torch.zeros(HIDDEN))
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj"].T).view(n, heads, SIZE)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    positions = torch.arange(n)
    q, k = turned(q, positions), turned(k, positions).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / SIZE**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = torch.einsum("hij,jhd->ihd", scores, v.repeat_interleave(HEADS // KV_HEADS, 1)).reshape(n, -1)
    y = x + mixed @ w["self_attn.o_proj"].T
    m = rms(y, w["post_attention_layernorm"])
    z = y + (torch.nn.functional.silu(m @ w["mlp.gate_proj"].T) * (m @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return z, z @ head.T


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("embedding", [True, False])
def test_logits_and_states_are_those_of_the_oracle(
    target: Decoder, tmp_path: Path, bias: bool, embedding: bool
) -> None:
    parts = tensors(bias, embedding)
    folder = write(tmp_path / "head", config(), parts)
    assert kind_of(folder) == "eagle"
    head = eagle1.read(folder, target, None if target.store is None else dispatch.store("exact"))
    assert head.layers == (3,)
    table = target.embedding.forward(torch.arange(VOCAB), torch.zeros(VOCAB, dtype=torch.int64))
    ids, raw = torch.tensor([5, 9, 9, 30, 2, 7, 8]), numbers("states", 7, HIDDEN) * 8
    fused = head.fuse(raw)
    assert (fused - ops.norm(raw, None, target.final_norm)[1]).abs().max() == 0
    pages = cache.pool(head.config, 1, SCHEMES["float32"], "cpu")
    step = ForwardBatch((7,), 64, KVCache.over(pages, torch.zeros((1, 1), dtype=torch.int32), [0]))
    states, x = head.forward(ids, fused, step)
    wanted_states, wanted = oracle(parts, parts.get("embed_tokens.weight", table)[ids], fused, table)
    assert (states - wanted_states).abs().max() < CLOSE
    assert (head.logits(x) - wanted).abs().max() < CLOSE * 10  # of logits around 30


FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], tuple[str, ...]]] = {
    "another vocabulary": ("checkpoint_mismatch", {"vocab_size": 90}, {}, ("90", "97")),
    "another hidden size": ("checkpoint_mismatch", {"hidden_size": 128, "head_dim": 16}, {}, ("128", "64")),
    "another shape": ("checkpoint_mismatch", {}, {"fc.weight": torch.ones(64, 64)}, ("[64, 64]", "[64, 128]")),
    "a norm that the block does not have": (
        "checkpoint_mismatch", {}, {"layers.0.input_layernorm.weight": torch.ones(64)}, ("input_layernorm",),
    ),
    "an embedding of fewer tokens": (
        "checkpoint_mismatch", {}, {"embed_tokens.weight": torch.ones(90, 64)}, ("[90, 64]", "[97, 64]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_does_not_fit_is_refused(tiny_decoder: Callable[..., Decoder], tmp_path: Path, fault: str) -> None:
    code, changed, parts, words = FAULTS[fault]
    folder = write(tmp_path / "head", config(**changed), tensors() | parts)
    with user_error(code, *words):
        eagle1.read(folder, tiny_decoder())


def test_a_truncated_file_is_refused(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    folder = write(tmp_path / "head", config(), tensors())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with user_error("checkpoint_incomplete"):
        eagle1.read(folder, tiny_decoder())


@pytest.mark.parametrize("kind", ["mtp", "dflash", "peagle"])
def test_kinds_that_are_not_read_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """No family that attar reads has MTP modules."""
    with user_error("feature_unsupported", kind, "EAGLE-3"):
        kind_of(write(tmp_path / "head", {"speculators_model_type": kind}, {"fc.weight": torch.ones(2, 2)}))


def test_a_model_of_one_layer_is_no_head(tmp_path: Path) -> None:
    parts = {f"model.{name}": each for name, each in tensors(bias=False).items() if not name.startswith("fc")}
    assert kind_of(write(tmp_path / "model", config(), parts)) is None
