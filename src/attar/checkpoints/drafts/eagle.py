"""EAGLE-3 heads on disk: the layout of SafeAILab and SpecForge, and that of the speculators library and vLLM.

| | SafeAILab | speculators, vLLM |
|---|---|---|
| known by | `architectures: [LlamaForCausalLMEagle3]` | `speculators_model_type: eagle3` |
| shape of the block | the config itself | `transformer_layer_config` |
| names of the block | `midlayer.` | `layers.0.` |

Both: `fc.weight`, `norm.weight`, `lm_head.weight`; `d2t`, the token id of each row of the LM head less the row's
number; `t2d`, which `d2t` implies; and `embed_tokens.weight` where it is not the target's. The layers that are read are
`eagle_aux_hidden_state_layer_ids`, by default 2, L / 2 and L - 3 of the target's L. `norm_before_residual` is false
where the config does not say. Heads that norm states otherwise, or have several layers, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.drafts.files import HeadFolder, lay_out, write_head
from attar.checkpoints.strict_io import CheckpointError
from attar.kernels.dispatch import BackendWeights
from attar.kernels.operands import AttentionForm, Linear, Norm
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder, Embedding
from attar.model.drafts.eagle import EagleHead
from attar.model.families import read_config
from attar.model.layers import Attention, FeedForward

OTHER = ("norm_before_fc", "norm_output", "fc_norm")
"""Settings of heads that norm states otherwise."""


def read(path: Path, target: Decoder, store: BackendWeights | None = None) -> EagleHead:
    """Read the head of a folder for a model; in `store` where one is given, else in the model's dtype.

    Raises CheckpointError where it is of another vocabulary or hidden size than the model's, is no single Llama block,
    or tensors are missing, left over, or of other shapes; ValueError for a config that cannot be read.
    """
    files = HeadFolder(path, target.dtype if store is None else None)
    config = head_config(files, target)
    aux = _aux_layers(files, target.config.layers)
    hidden, wide, mine = config.hidden, target.config.hidden, target.config.vocab_size
    if (theirs := files.integer("target_hidden_size", default=hidden)) != wide:
        raise files.error(f"made for a model with a hidden size of {theirs}, and this one's is {wide}")
    if (count := config.vocab_size) != mine:
        raise files.error(f"made for a model with a vocabulary of {count}, and this one's is {mine}")
    rows = files.integer("draft_vocab_size", default=mine)
    tokens = files.indices("d2t", rows, mine, offset=True) if files.has("d2t") else None
    if tokens is None and rows != mine:
        raise files.error(f"a draft vocabulary of {rows} of {mine} tokens needs d2t, and there is none")
    files.skip("t2d")
    at = "midlayer" if files.has("midlayer.hidden_norm.weight") else "layers.0"

    parts = block_parts(files, config, target, at, 2 * hidden)
    linear, norm = parts.linear, parts.norm
    head = linear("lm_head", rows, hidden) if files.has("lm_head.weight") or tokens is not None else target.head
    made = EagleHead(
        config, aux, embedding_of(files, target, hidden), linear("fc", hidden, len(aux) * wide),
        norm(f"{at}.input_layernorm"), norm(f"{at}.hidden_norm"),
        parts.attention, norm(f"{at}.post_attention_layernorm"), parts.feed_forward, norm("norm"), head, mine, tokens,
        bool(files.config.get("norm_before_residual", False)),
    )  # fmt: skip
    files.finish()
    lay_out(store, target, made.linears(), made.norms())
    return made


@dataclass(frozen=True)
class BlockParts:
    """The parts of a head's block that are read in one way, and functions that read others."""

    linear: Callable[[str, int, int], Linear]
    norm: Callable[[str], Norm]
    attention: Attention
    feed_forward: FeedForward


def block_parts(files: HeadFolder, config: ModelConfig, target: Decoder, at: str, columns: int) -> BlockParts:
    """Read the attention, whose inputs have so many columns, and the feed-forward of the block `at`."""

    def linear(name: str, out: int, columns: int) -> Linear:
        bias = f"{name}.bias"
        return Linear(
            name, files.tensor(f"{name}.weight", (out, columns)),
            files.tensor(bias, (out,)).to(target.dtype) if files.has(bias) else None,
        )  # fmt: skip

    def norm(name: str) -> Norm:
        return Norm("rms", files.tensor(f"{name}.weight", (config.hidden,)), None, config.norm_eps, name=name)

    query, key, hidden = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.hidden
    qkv = [linear(f"{at}.self_attn.{n}_proj", o, columns) for n, o in (("q", query), ("k", key), ("v", key))]
    form = AttentionForm(config.heads, config.kv_heads, config.head_dim, config.scale)
    output = linear(f"{at}.self_attn.o_proj", hidden, query)
    up = [linear(f"{at}.mlp.{n}_proj", config.intermediate, hidden) for n in ("gate", "up")]
    down = linear(f"{at}.mlp.down_proj", hidden, config.intermediate)
    return BlockParts(
        linear, norm, Attention(0, tuple(qkv), output, form, config.ropes[0]),
        FeedForward(tuple(up), down, config.activation, True),
    )  # fmt: skip


def head_config(files: HeadFolder, target: Decoder) -> ModelConfig:
    """Return the config of a head's block, a Llama of one layer, for a model. Raises CheckpointError for another block,
    and where its rotary angles depend on the length; ValueError for a config that cannot be read."""
    config = read_config(_block_config(files.config, target.config.vocab_size))
    if config.ropes[0] is None or config.ropes[0].grows:
        message = f"{files.folder.path}: a head's rotary angles do not depend on the length: rope {config.ropes[0]}"
        raise CheckpointError("feature_unsupported", message)
    return config


def _block_config(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    inner = config.get("transformer_layer_config")
    shape = dict(inner) if isinstance(inner, Mapping) else dict(config)
    for name in OTHER:
        if config.get(name):
            raise CheckpointError("feature_unsupported", f"an EAGLE head with {name} is not read: without it one is")
    if shape.get("num_hidden_layers", 1) != 1:
        raise CheckpointError("feature_unsupported", "an EAGLE head of several layers is not read: one of one layer is")
    return {"vocab_size": vocab_size} | shape | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}


def _aux_layers(files: HeadFolder, layers: int) -> tuple[int, ...]:
    """Return the layers of a target of `layers` layers whose inputs are read."""
    found = files.config.get("eagle_aux_hidden_state_layer_ids")
    if found is None and isinstance(inner := files.config.get("eagle_config"), Mapping):
        found = inner.get("eagle_aux_hidden_state_layer_ids")
    found = [2, layers // 2, layers - 3] if found is None else found
    if not isinstance(found, list) or not found or not all(type(i) is int and 0 <= i < layers for i in found):
        raise files.error(f"reads the inputs of layers {found}: the model has layers 0 to {layers - 1}")
    return tuple(found)


def embedding_of(files: HeadFolder, target: Decoder, hidden: int) -> Embedding:
    """Return the head's embedding: its own, or the target's where that is a plain table of its width."""
    if files.has(name := "embed_tokens.weight"):
        return Embedding(files.tensor(name, (target.config.vocab_size, hidden)), target.dtype)
    shared = target.embedding
    if shared.scale != 1.0 or shared.positions is not None or target.config.hidden != hidden:
        raise files.error("has no embed_tokens.weight, and the model's own embedding is scaled, or of another width")
    return shared


def shape_of(target: ModelConfig, theta: float, rows: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """Return the config of a head of the target's width with `rows` draft tokens, a plain rotary embedding of base
    `theta`, and these layers read, in SafeAILab's layout."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": target.vocab_size,
        "draft_vocab_size": rows, "hidden_size": target.hidden, "target_hidden_size": target.hidden,
        "num_attention_heads": target.heads, "num_key_value_heads": target.kv_heads, "head_dim": target.head_dim,
        "intermediate_size": target.intermediate, "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": theta, "max_position_embeddings": target.context, "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }  # fmt: skip


def write(folder: Path, shape: Mapping[str, Any], tensors: Mapping[str, Tensor], tokens: Tensor) -> None:
    """Write a head of a shape in SafeAILab's layout; `tokens` are the ids of the LM head's rows."""
    write_head(folder, shape, {**tensors, **_maps(tokens, shape["vocab_size"])})


def write_speculators(
    folder: Path, shape: Mapping[str, Any], tensors: Mapping[str, Tensor], tokens: Tensor, target: str, drafts: int
) -> None:
    """Write the same head in the layout of the speculators library, which vLLM reads: for a model of the name `target`,
    with `drafts` drafts a step."""
    outer = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    block = {name: value for name, value in shape.items() if name not in (*outer, "architectures")}
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.4.0",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": block, **{name: shape[name] for name in outer}, "norm_before_fc": False,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    write_head(folder, config, {**renamed, **_maps(tokens, shape["vocab_size"])})


def _maps(tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return the tensors that say which tokens the rows of the LM head are."""
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": torch.isin(torch.arange(vocab_size), tokens)}
