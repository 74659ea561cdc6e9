"""A model as data: one `ModelConfig` describes every architecture that the one decoder runs.

Every field's default means "feature off", so a family is the few fields that it turns on. `families.py` fills this in
from a checkpoint's config.json. Torch-free: planners compute with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from attar.errors import UserError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: the columns that turn, their speed, and how the angles stretch past the trained context."""

    theta: float
    dims: int  # columns of a head that turn; the rest pass
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0  # positions seen in training, where the kind needs it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole-numbered correction range
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope
    sections: tuple[int, ...] = ()
    """Pairs that turn by the time, height and width of a token, in this order (M-RoPE); (): a token has one position.
    The three positions of a text token are equal, so text turns as without sections."""

    @property
    def grows(self) -> bool:
        """Return whether the angles depend on the length of the sequence."""
        return self.kind == "dynamic" or (self.kind == "longrope" and self.short_factor != self.long_factor)

    def horizons(self, context: int) -> tuple[int, ...]:
        """Return the lengths, ascending to `context` or beyond, up to each of which one set of angles serves.

        () where one set serves all lengths. `longrope` changes once, past the original context. `dynamic` would change
        with every token; here it changes each time that the length has doubled.
        """
        if not self.grows or context <= self.original_context:
            return ()
        found = [self.original_context]
        while found[-1] < context:
            found.append(context if self.kind == "longrope" else 2 * found[-1])
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts feed-forward: a router scores all experts, `top_k` of them run."""

    count: int
    top_k: int
    intermediate: int  # width of each expert
    normalise_top_k: bool  # the chosen weights are divided by their sum
    shared_intermediate: int = 0  # width of one expert more that always runs, behind a sigmoid gate; 0: none

    @property
    def shared(self) -> bool:
        return self.shared_intermediate > 0


@dataclass(frozen=True, slots=True)
class Names:
    """Module names of a family's tensors: within a layer, and of the parts around the layers.

    A tuple of one for `qkv` or `gate_up` means that the checkpoint stores them fused, in that order of rows.
    """

    embed: str = "model.embed_tokens"
    positions: str | None = None
    layer: str = "model.layers.{i}"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str | None = None
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_post_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{e}"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    transposed: bool = False  # linear layers are stored [in, out] (GPT-2); the head never is
    prefixes: tuple[tuple[str, str], ...] = (("model.", ""),)
    """Other spellings in circulation: names that begin with the first may be stored beginning with the second."""

    def spellings(self, name: str) -> Iterator[str]:
        """Yield `name` and the names under which checkpoints in circulation store the same tensor, most common
        first."""
        yield name
        for ours, theirs in self.prefixes:
            if name.startswith(ours):
                yield theirs + name.removeprefix(ours)

    def is_transposed(self, name: str) -> bool:
        """Return whether the linear layer of module `name` is stored [in, out]."""
        return self.transposed and name != self.head


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Per-layer tuples have one entry a layer.

    Raises ValueError on construction where the fields contradict each other.
    """

    architecture: str  # the name in config.json, e.g. LlamaForCausalLM
    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of the dense feed-forward
    context: int  # positions the model declares to support
    windows: tuple[int | None, ...]  # sliding window of each layer
    ropes: tuple[Rope | None, ...]  # rotary embedding of each layer
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to norm weights (Gemma: 1)
    qk_norm: bool = False  # RMSNorm of each head of q and k before the rotation
    activation: Activation = "silu"
    gated: bool = True
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    learned_positions: int = 0  # positions that have a learned vector; 0: none have
    position_offset: int = 0  # rows of the position table before position 0 (OPT: 2)
    qkv_bias: bool = False  # these biases must be stored; any others that are stored are used too
    output_bias: bool = False
    feed_forward_bias: bool = False
    tied: bool = False  # the LM head is the embedding
    experts: Experts | None = None
    sparse: tuple[bool, ...] = ()  # layers that use experts; empty: all, where there are experts
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # dtype of the checkpoint, by its own declaration
    names: Names = field(default_factory=Names)

    def __post_init__(self) -> None:
        if (problem := self._problem()) is not None:
            raise UserError("config_invalid", problem)

    def _problem(self) -> str | None:
        if not self.windows:
            return "a model has at least one layer"
        if self.heads % self.kv_heads:
            return f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly"
        if len(self.ropes) != self.layers or (self.sparse and len(self.sparse) != self.layers):
            return f"per-layer fields must have one entry for each of {self.layers} layers"
        for rope in self.ropes:
            if rope is not None and (rope.dims % 2 or not 2 <= rope.dims <= self.head_dim):
                return f"{rope.dims} rotary columns: needed is an even number up to {self.head_dim}"
        if self.experts is not None and not 1 <= self.experts.top_k <= self.experts.count:
            return f"{self.experts.top_k} of {self.experts.count} experts cannot run for each token"
        return None

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def angles_grow(self) -> bool:
        """Whether rotary angles depend on how long a sequence can get."""
        return any(rope is not None and rope.grows for rope in self.ropes)

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and (not self.sparse or self.sparse[layer])
