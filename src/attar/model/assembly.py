"""Assembly of a decoder from a source of named weights, part by part.

Building block by block is what lets compression hold one block in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.kernels.dispatch import BackendWeights, Table
from attar.kernels.operands import AttentionForm, Linear, Norm, Prepared
from attar.kernels.triton.store import GpuWeights
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder, Embedding
from attar.model.layers import Attention, Block, FeedForward, MixtureOfExperts
from attar.progress import StageProgress


class Weights(Protocol):
    """Named weights of a checkpoint. Dense ones are in the compute dtype; matrices may be in their stored dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""

    def matrix(self, name: str) -> Tensor:
        """Return a tensor like `tensor`, but in its stored dtype, for tables and weights whose kernels can read it."""

    def linear(self, name: str) -> Linear:
        """Return the linear layer of module `name`: its weight [O, I] dense or packed, and its bias if one is stored.

        Weights for which `Names.is_transposed(name)` holds are stored [I, O] and transposed here.
        """

    def tensor(self, name: str) -> Tensor:
        """Return the dense tensor stored under `name`, or under another of its `Names.spellings`."""

    def has(self, name: str) -> bool:
        """Return whether `tensor(name)` would find one."""


def build_norm(config: ModelConfig, weights: Weights, name: str, size: int | None = None) -> Norm:
    """Build the norm of module `name` over `size` columns, by default the hidden size. Raises ValueError for other
    shapes."""
    weight = _expect(weights.tensor(f"{name}.weight"), f"{name}.weight", (size or config.hidden,))
    if config.norm == "rms":
        return Norm("rms", weight, None, config.norm_eps, config.norm_offset, name)
    bias = _expect(weights.tensor(f"{name}.bias"), f"{name}.bias", (size or config.hidden,))
    return Norm("layer", weight, bias, config.norm_eps, name=name)


def build_linear(weights: Weights, name: str, shape: tuple[int, int], bias: bool) -> Linear:
    """Build the linear layer of module `name`.

    Raises ValueError where it is not [O, I] = `shape` or lacks a bias it must have.
    """
    linear = weights.linear(name)
    _require(linear.shape, f"{name}.weight", shape)
    if bias and linear.bias is None:
        raise UserError("checkpoint_incomplete", f"the checkpoint has no {name}.bias, which config.json declares")
    if linear.bias is not None:
        _expect(linear.bias, f"{name}.bias", (shape[0],))
    return linear


def _expect(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    _require(tuple(tensor.shape), name, shape)
    return tensor


def _require(found: tuple[int, ...], name: str, shape: tuple[int, ...]) -> None:
    if found != shape:
        said = f"{name} is {list(found)} in the checkpoint: config.json makes it {list(shape)}"
        raise UserError("checkpoint_mismatch", said)


def build_embedding(config: ModelConfig, weights: Weights) -> Embedding:
    names = config.names
    # Checkpoints of tied models store the one matrix under either name.
    name = names.embed if weights.has(f"{names.embed}.weight") or not config.tied else names.head
    table = _expect(weights.matrix(f"{name}.weight"), f"{name}.weight", (config.vocab_size, config.hidden))
    return _embedding(config, weights, table)


def _embedding(config: ModelConfig, weights: Weights, table: Tensor | PackedTensor) -> Embedding:
    names, positions = config.names, None
    if names.positions is not None:
        rows = config.learned_positions + config.position_offset
        at = f"{names.positions}.weight"
        positions = _expect(weights.tensor(at), at, (rows, config.hidden))
    return Embedding(table, weights.dtype, config.embedding_scale, positions, config.position_offset)


def build_head(config: ModelConfig, weights: Weights, embedding: Embedding | None = None) -> Linear:
    """Build the LM head. In a tied model it is the embedding's own table, unless both are stored and differ."""
    names, shape = config.names, (config.vocab_size, config.hidden)
    if not config.tied:
        return build_linear(weights, names.head, shape, bias=False)
    table = (embedding or build_embedding(config, weights)).table
    assert isinstance(table, Tensor)
    if weights.has(f"{names.embed}.weight") and weights.has(f"{names.head}.weight"):
        own = build_linear(weights, names.head, shape, bias=False)
        if not isinstance(own.weight, Tensor) or not torch.equal(own.weight, table):
            return own  # trained apart after all: the config is out of date, and transformers 5 does the same
    return Linear(names.head, table)


def packed_ends(config: ModelConfig, weights: Weights) -> bool:
    """Return whether a tied model stores its one matrix packed; `linear` then finds it under the LM head's name."""
    names = config.names
    return config.tied and not any(weights.has(f"{name}.weight") for name in (names.embed, names.head))


def build_ends(config: ModelConfig, weights: Weights) -> tuple[Embedding, Linear]:
    """Build embedding and LM head. A tied model may store its one matrix packed: the embedding then reads that. So may
    a model that is not tied its embedding, which then stays packed."""
    names, shape = config.names, (config.vocab_size, config.hidden)
    if packed_ends(config, weights):
        head = build_linear(weights, names.head, shape, bias=False)
        assert isinstance(head.weight, Tensor | PackedTensor)
        return _embedding(config, weights, head.weight), head
    if config.tied or weights.has(f"{names.embed}.weight"):
        embedding = build_embedding(config, weights)
    else:
        table = build_linear(weights, names.embed, shape, bias=False).weight
        assert isinstance(table, Tensor | PackedTensor)
        embedding = _embedding(config, weights, table)
    return embedding, build_head(config, weights, embedding)


def build_final_norm(config: ModelConfig, weights: Weights) -> Norm:
    return build_norm(config, weights, config.names.final_norm)


def compressible(config: ModelConfig, layer: int) -> list[str]:
    """Return module names of the block's linear layers that a recipe may compress: all but the gates of experts."""
    names, at = config.names, config.names.layer.format(i=layer)
    found = [*names.qkv, names.output]
    if config.experts is not None and config.is_sparse(layer):
        within = (*names.expert_gate_up, names.expert_down)
        found += [f"{names.expert.format(e=e)}.{n}" for e in range(config.experts.count) for n in within]
        found += [f"{names.shared_expert}.{n}" for n in within] if config.experts.shared else []
    else:
        found += [*names.gate_up, names.down]
    return [f"{at}.{name}" for name in found]


def all_compressible(config: ModelConfig) -> list[str]:
    """Return module names of all blocks' linear layers that a recipe may compress, in order."""
    return [name for layer in range(config.layers) for name in compressible(config, layer)]


def gates(config: ModelConfig, layer: int) -> list[str]:
    """Return module names of the block's other linear layers: the router of its experts, and the gate of a
    shared one."""
    names, at = config.names, config.names.layer.format(i=layer)
    if config.experts is None or not config.is_sparse(layer):
        return []
    return [f"{at}.{names.router}", *([f"{at}.{names.shared_gate}"] if config.experts.shared else [])]


def build_block(config: ModelConfig, weights: Weights, layer: int) -> Block:
    """Build block `layer` of the model; nothing else is read. Raises ValueError where a shape contradicts the
    config."""
    at = config.names.layer.format(i=layer)

    def norm(name: str | None) -> Norm | None:
        return None if name is None else build_norm(config, weights, f"{at}.{name}")

    names = config.names
    return Block(
        build_norm(config, weights, f"{at}.{names.attention_norm}"),
        _build_attention(config, weights, layer, at),
        build_norm(config, weights, f"{at}.{names.feed_forward_norm}"),
        _build_experts(config, weights, at) if config.is_sparse(layer) else _build_dense(config, weights, at),
        norm(names.attention_post_norm),
        norm(names.feed_forward_post_norm),
    )


def _build_attention(config: ModelConfig, weights: Weights, layer: int, at: str) -> Attention:
    names, hidden, size = config.names, config.hidden, config.head_dim
    rows = _rows(names.qkv, (config.heads * size, config.kv_heads * size, config.kv_heads * size))
    qkv = (build_linear(weights, f"{at}.{n}", (o, hidden), config.qkv_bias) for n, o in rows)
    window, cap = config.windows[layer], config.attention_soft_cap
    form = AttentionForm(config.heads, config.kv_heads, size, config.scale, window, cap)
    q_norm = k_norm = None
    if config.qk_norm:
        q_norm, k_norm = (build_norm(config, weights, f"{at}.{n}", size) for n in (names.q_norm, names.k_norm))
    output = build_linear(weights, f"{at}.{names.output}", (hidden, config.heads * size), config.output_bias)
    return Attention(layer, tuple(qkv), output, form, config.ropes[layer], q_norm, k_norm)


def _rows(names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yield module names with their rows: one name for several sizes means that the checkpoint stores them fused."""
    return zip(names, sizes if len(names) == len(sizes) else (sum(sizes),), strict=True)


def _build_feed_forward(
    config: ModelConfig, weights: Weights, up: tuple[str, ...], down: str, width: int, bias: bool
) -> FeedForward:
    rows = _rows(up, (width, width) if config.gated else (width,))
    ups = (build_linear(weights, name, (o, config.hidden), bias) for name, o in rows)
    down_ = build_linear(weights, down, (config.hidden, width), bias)
    return FeedForward(tuple(ups), down_, config.activation, config.gated)


def _build_dense(config: ModelConfig, weights: Weights, at: str) -> FeedForward:
    up, down = tuple(f"{at}.{n}" for n in config.names.gate_up), f"{at}.{config.names.down}"
    return _build_feed_forward(config, weights, up, down, config.intermediate, config.feed_forward_bias)


def _build_experts(config: ModelConfig, weights: Weights, at: str) -> MixtureOfExperts:
    names, experts = config.names, config.experts
    assert experts is not None

    def expert(module: str, width: int) -> FeedForward:
        up = tuple(f"{at}.{module}.{n}" for n in names.expert_gate_up)
        return _build_feed_forward(config, weights, up, f"{at}.{module}.{names.expert_down}", width, False)

    return MixtureOfExperts(
        build_linear(weights, f"{at}.{names.router}", (experts.count, config.hidden), False),
        tuple(expert(names.expert.format(e=e), experts.intermediate) for e in range(experts.count)),
        experts.top_k,
        experts.normalise_top_k,
        expert(names.shared_expert, experts.shared_intermediate) if experts.shared else None,
        build_linear(weights, f"{at}.{names.shared_gate}", (1, config.hidden), False) if experts.shared else None,
    )


def check(config: ModelConfig, outline: Weights) -> None:
    """Build the model from shapes alone: `outline` gives tensors without data. Raises ValueError like `build`."""
    if packed_ends(config, outline):
        build_ends(config, outline)
    else:
        build_embedding(config, outline)
    for layer in range(config.layers):
        build_block(config, outline, layer)
    build_final_norm(config, outline)
    if not config.tied:  # a tied head needs the values
        build_head(config, outline)


def build(
    config: ModelConfig, weights: Weights, on_block: StageProgress | None = None, store: BackendWeights | None = None
) -> Decoder:
    """Build the whole decoder, its weights in `store` where one is given. `on_block(done, total)` reports progress.

    Raises ValueError where a shape contradicts the config.
    """
    embedding, head = build_ends(config, weights)
    final_norm = build_final_norm(config, weights)
    lay_out_ends(embedding, head, final_norm, store)
    blocks = build_blocks(config, weights, range(config.layers), on_block, store)
    return Decoder(config, embedding, blocks, final_norm, head, store)


def lay_out_ends(embedding: Embedding, head: Linear, final_norm: Norm, store: BackendWeights | None) -> None:
    """Put the parts around the blocks into `store`; where embedding and LM head are one, they stay one."""
    if store is None:
        return
    tied = head.weight is embedding.table
    store.take(head)
    store.take_norm(final_norm)
    assert not isinstance(embedding.table, Table)
    embedding.table = store.table(head.weight if tied and isinstance(head.weight, Prepared) else embedding.table)
    if isinstance(store, GpuWeights) and embedding.positions is not None:
        embedding.positions = embedding.positions.to(store.device)


def lay_out(block: Block, store: BackendWeights) -> None:
    for linear in block.linears():
        store.take(linear)
    for norm in block.norms():
        store.take_norm(norm)


def build_blocks(
    config: ModelConfig, weights: Weights, layers: range, on_block: StageProgress | None, store: BackendWeights | None
) -> list[Block]:
    """Build blocks `layers` of the model, in `store` where one is given. `on_block(done, total)` reports progress."""
    blocks = []
    for layer in layers:
        block = build_block(config, weights, layer)
        if store is not None:
            lay_out(block, store)
        blocks.append(block)
        if on_block is not None:
            on_block(len(blocks), len(layers))
    return blocks
