"""EAGLE-3 heads in both layouts against a plain-torch oracle, and ways in which one does not fit its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attar.checkpoints.drafts import eagle
from attar.checkpoints.drafts.files import kind_of
from attar.kernels import dispatch
from attar.kernels.native.linear import PackedWeight
from attar.kv.schemes import SCHEMES
from attar.model import cache
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.drafts.eagle import EagleHead
from tests.errors import user_error

HIDDEN, VOCAB, WIDE, HEADS, KV_HEADS, SIZE = 64, 97, 96, 4, 2, 16
TOKENS = torch.tensor([2, 3, 17, 40, 90])
ROUNDED = 0.05  # relative, of logits by matrices and rows of 8 bits
CLOSE = 3e-5  # of logits around 3, float32


def numbers(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 4)


def tensors(at: str = "midlayer", mapped: bool = True) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * SIZE, 2 * HIDDEN), "self_attn.k_proj": (KV_HEADS * SIZE, 2 * HIDDEN),
        "self_attn.v_proj": (KV_HEADS * SIZE, 2 * HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE),
    }  # fmt: skip
    found = {f"{at}.{name}.weight": numbers(name, *shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        found[f"{at}.{name}.weight"] = 1 + numbers(name, HIDDEN)
    found |= {"norm.weight": 1 + numbers("norm", HIDDEN), "fc.weight": numbers("fc", HIDDEN, 3 * HIDDEN)}
    found["lm_head.weight"] = numbers("head", len(TOKENS) if mapped else VOCAB, HIDDEN) * 3
    if mapped:
        found |= {"d2t": TOKENS - torch.arange(len(TOKENS)), "t2d": torch.isin(torch.arange(VOCAB), TOKENS)}
    return found


SHAPE = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": WIDE,
    "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "hidden_act": "silu", "rope_theta": 10000.0, "model_type": "llama",
}  # fmt: skip
AUX = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


def config(**changed: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(TOKENS), **SHAPE, **AUX, **changed}


def write(folder: Path, settings: dict[str, Any], parts: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(parts, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [N, heads, size], halves side by side."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def oracle(parts: dict[str, Tensor], embedded: Tensor, states: Tensor, normed: bool = False) -> tuple[Tensor, Tensor]:
    """Next states and draft logits of rows [N] of one sequence, by plain matrices."""
    at = next(name for name in parts if "hidden_norm" in name).rpartition(".hidden_norm")[0]
    w = {name.removeprefix(f"{at}.").removesuffix(".weight"): t for name, t in parts.items()}
    e, h = rms(embedded, w["input_layernorm"]), rms(states, w["hidden_norm"])
    x, n = torch.cat((e, h), -1), len(states)
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj"].T).view(n, heads, SIZE)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    positions = torch.arange(n)
    q, k = turned(q, positions), turned(k, positions).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / SIZE**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = torch.einsum("hij,jhd->ihd", scores, v.repeat_interleave(HEADS // KV_HEADS, 1)).reshape(n, -1)
    y = (h if normed else states) + mixed @ w["self_attn.o_proj"].T
    m = rms(y, w["post_attention_layernorm"])
    wide = torch.nn.functional.silu(m @ w["mlp.gate_proj"].T) * (m @ w["mlp.up_proj"].T)
    z = y + wide @ w["mlp.down_proj"].T
    return z, rms(z, w["norm"]) @ w["lm_head"].T


def read(folder: Path, target: Decoder) -> EagleHead:
    return eagle.read(folder, target, None if target.store is None else dispatch.store("exact"))


def step_of(head: EagleHead, rows: int) -> ForwardBatch:
    pages = cache.pool(head.config, 1, SCHEMES["float32"], "cpu")
    return ForwardBatch((rows,), 64, KVCache.over(pages, torch.zeros((1, 1), dtype=torch.int32), [0]))


LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "SafeAILab": ("midlayer", config(), False),
    "vLLM": ("layers.0", config(architectures=["Eagle3LlamaForCausalLM"], norm_before_residual=True), True),
    "speculators": (
        "layers.0",
        {"speculators_model_type": "eagle3", "draft_vocab_size": len(TOKENS), "transformer_layer_config": SHAPE, **AUX},
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_states_of_each_layout(target: Decoder, tmp_path: Path, layout: str) -> None:
    at, settings, normed = LAYOUTS[layout]
    parts = tensors(at)
    folder = write(tmp_path / "head", settings, parts)
    assert kind_of(folder) == "eagle3"
    head = read(folder, target)
    assert head.layers == (0, 1, 2)
    ids, raw = torch.tensor([5, 9, 9, 30, 2, 7, 8]), numbers("states", 7, 3 * HIDDEN) * 8
    table = target.embedding.forward(torch.arange(VOCAB), torch.zeros(VOCAB, dtype=torch.int64))
    fused = head.fuse(raw)
    assert (fused - raw @ parts["fc.weight"].T).abs().max() < CLOSE
    states, x = head.forward(ids, fused, step_of(head, 7))
    wanted_states, wanted = oracle(parts, table[ids], raw @ parts["fc.weight"].T, normed)
    assert (states - wanted_states).abs().max() < CLOSE
    logits = head.logits(x)
    assert (logits[:, TOKENS] - wanted).abs().max() < CLOSE
    assert torch.isinf(logits).sum() == 7 * (VOCAB - len(TOKENS))


@pytest.mark.parametrize("activations", ["int8g128", "int8"])
def test_matrices_are_rounded_where_rows_are(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, activations: str
) -> None:
    """Draft logits stay close to those of the matrices as they are stored."""
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    target, parts = tiny_decoder(store=dispatch.store("exact")), tensors()
    store = dispatch.store(activations)
    head = eagle.read(write(tmp_path / "head", config(), parts), target, store)
    assert all(each.weight.shape == parts[f"{each.name}.weight"].shape for each in head.linears())
    sizes = [each.weight.read_bytes for each in head.linears() if isinstance(each.weight, PackedWeight)]
    numbers_stored = sum(parts[f"{each.name}.weight"].numel() for each in head.linears())
    assert numbers_stored < sum(sizes) < 2 * numbers_stored
    ids, states = torch.tensor([5, 9, 4]), numbers("states", 3, HIDDEN) * 8
    table = target.embedding.forward(torch.arange(VOCAB), torch.zeros(VOCAB, dtype=torch.int64))
    wanted = oracle(parts, table[ids], states)[1]
    _, x = head.forward(ids, states, step_of(head, 3))
    assert (head.logits(x)[:, TOKENS] - wanted).norm() < ROUNDED * wanted.norm()


def test_a_head_may_have_its_own_embedding_and_all_tokens(target: Decoder, tmp_path: Path) -> None:
    parts = tensors(mapped=False) | {"embed_tokens.weight": numbers("embed", VOCAB, HIDDEN) * 8}
    head = read(write(tmp_path / "head", config(draft_vocab_size=VOCAB), parts), target)
    ids, states = torch.tensor([5, 9, 4]), numbers("states", 3, HIDDEN) * 8
    _, x = head.forward(ids, states, step_of(head, 3))
    wanted = oracle(parts, parts["embed_tokens.weight"][ids], states)[1]
    assert (head.logits(x) - wanted).abs().max() < CLOSE


FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], tuple[str, ...]]] = {
    "another vocabulary": ("checkpoint_mismatch", {"vocab_size": 90}, {}, ("90", "97")),
    "another target": ("checkpoint_mismatch", {"target_hidden_size": 128}, {}, ("128", "64")),
    "a layer that is not there": (
        "checkpoint_mismatch", {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, {}, ("[0, 1, 3]",),
    ),
    "d2t out of range": ("checkpoint_mismatch", {}, {"d2t": torch.tensor([2, 2, 15, 37, 93])}, ("97", "96")),
    "d2t of another length": ("checkpoint_mismatch", {"draft_vocab_size": 6}, {}, ("d2t", "[5]", "[6]")),
    "norms of another place": ("feature_unsupported", {"norm_before_fc": True}, {}, ("norm_before_fc",)),
    "two layers": ("feature_unsupported", {"num_hidden_layers": 2}, {}, ("layers",)),
    "a tensor left over": ("checkpoint_mismatch", {}, {"fc_norm.0.weight": torch.ones(4)}, ("fc_norm.0.weight",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_does_not_fit_is_refused(tiny_decoder: Callable[..., Decoder], tmp_path: Path, fault: str) -> None:
    code, changed, parts, words = FAULTS[fault]
    folder = write(tmp_path / "head", config(**changed), tensors() | parts)
    with user_error(code, *words):
        eagle.read(folder, tiny_decoder())


def test_a_truncated_file_is_refused(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    folder = write(tmp_path / "head", config(), tensors())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with user_error("checkpoint_incomplete"):
        eagle.read(folder, tiny_decoder())
