"""The model families: each a small reader that turns a checkpoint's config.json into a `ModelConfig`.

A family is its defaults (those of its config class in transformers, because configs omit values that equal them) and
the few fields that set it apart from Llama. Files of transformers 4 and 5 are read alike: `rope_theta` with
`rope_scaling` or `rope_parameters` (also one for each kind of layer), `torch_dtype` or `dtype`, a nested `text_config`.

A setting that would change the numbers and is not supported (a norm after attention, latent attention, an unknown
activation or rope) raises a ValueError that names the key. Keys that only matter to training are not read.

End-of-text ids: those of generation_config.json where it has any, else those of config.json, as `generate` in
transformers does; never the union, because chat models narrow or widen the list there on purpose. Torch-free.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from attar.errors import UserError
from attar.model.config import Activation, Experts, ModelConfig, Names, RopeKind
from attar.model.fields import COUNT, EPSILON, LENGTH, Fields, nearest
from attar.model.rope_config import read_gemma3_ropes, read_rope, rope_parameters, scaled_context
from attar.model.vision.wrappers import WRAPPERS, refuse

logger = logging.getLogger(__name__)

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
SLIDING: Mapping[str, bool] = {"full_attention": False, "sliding_attention": True}  # the words of layer_types
DTYPES: Mapping[str, str] = {d: d for d in ("float32", "float16", "bfloat16")}

UNSUPPORTED: Mapping[str, str] = {
    "add_cross_attention": "cross-attention",
    "is_encoder_decoder": "an encoder",
    "kv_lora_rank": "multi-head latent attention",
    "per_layer_config": "layers of different shapes",
    "pruned_heads": "layers with fewer heads than others",
    "use_bidirectional_attention": "attention to later tokens",
}
"""Keys of any family that, when set, require an unsupported feature."""


@dataclass(frozen=True)
class Family:
    read: Callable[[Fields], ModelConfig]
    defaults: Mapping[str, object]
    aliases: Mapping[str, tuple[str, ...]]


ARCHITECTURES: dict[str, Family] = {}
"""Every architecture that config.json may name, filled by the readers below."""

COMMON: Mapping[str, object] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    "tie_word_embeddings": False, "dtype": "float32", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
"""Keys of the sizes that `family` takes, in this order."""

MODEL_TYPES: Mapping[str, str] = {
    "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration", "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM", "opt": "OPTForCausalLM", "phi3": "Phi3ForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "idefics3": "Idefics3ForConditionalGeneration", "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_downsample": "LlavaDownsampleForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration", "smolvlm": "SmolVLMForConditionalGeneration",
}  # fmt: skip
"""Architecture of a config.json that states its `model_type` alone."""

Reader = Callable[[Fields], ModelConfig]


def family(
    architecture: str,
    sizes: Sequence[int | None],
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    /,
    **defaults: object,
) -> Callable[[Reader], Reader]:
    """Register a reader under its name in config.json, with the defaults of omitted keys, first those of `SIZES`.

    Keys have their usual names, those of Llama; `aliases` maps them to this family's names.
    """

    def register(read: Reader) -> Reader:
        named = dict(zip(SIZES, sizes, strict=True))
        ARCHITECTURES[architecture] = Family(read, {**COMMON, **named, **defaults}, aliases or {})
        return read

    return register


def read_config(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
    """Return the model that a config.json (and, where there is one, a generation_config.json) describes.

    Raises ValueError for an unknown architecture (with the known ones), for unsupported features, and for values that
    are missing, of the wrong type, out of bounds or contradictory.
    """
    architecture = _architecture(config)
    text = Fields(config).inner("text_config")
    wrapper = WRAPPERS.get(architecture)
    found = ARCHITECTURES[architecture if wrapper is None else wrapper.text_architecture(text)]
    if wrapper is not None:
        config = {**config, "tie_word_embeddings": wrapper.tied(config, text)}
        found = replace(found, defaults={**found.defaults, **wrapper.defaults})
    if text is not None:
        outer = {k: v for k, v in config.items() if k in OUTER and v is not None}
        config = {**{k: v for k, v in text.items() if k != "tie_word_embeddings"}, **outer}
    if "dtype" not in config and "torch_dtype" in config:
        config = {**config, "dtype": config["torch_dtype"]}
    fields = Fields(config, found.defaults, found.aliases)
    for key, meaning in UNSUPPORTED.items():
        if fields.get(key):
            raise fields.error(key, f"is set: {meaning} is not supported", "feature_unsupported")
    own = Fields(generation or {}, where="generation_config.json")
    keys = ("bos_token_id", "eos_token_id")
    bos, eos = ((own if own.get(key) is not None else fields).integers(key, -LENGTH, LENGTH) for key in keys)
    model = found.read(fields)
    if wrapper is not None:
        model = replace(model, names=replace(model.names, prefixes=wrapper.prefixes))
    context = scaled_context(model.context, set(model.ropes))
    return replace(
        model,
        architecture=architecture,
        context=context,
        bos_ids=_of_vocabulary(bos, model, "bos_token_id"),
        eos_ids=_of_vocabulary(eos, model, "eos_token_id"),
    )


def _of_vocabulary(ids: tuple[int, ...], model: ModelConfig, key: str) -> tuple[int, ...]:
    """Return the ids that the model can give; others, such as -1, are left out with a warning."""
    known = tuple(each for each in ids if 0 <= each < model.vocab_size)
    if known != ids:
        logger.warning("%s %s is not used where it is outside the vocabulary of %d", key, ids, model.vocab_size)
    return known


OUTER = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
"""Keys of the outer object that override those in its text_config; `tie_word_embeddings` counts nowhere else."""


def _architecture(config: Mapping[str, object]) -> str:
    names = Fields(config, {"architectures": []}).items("architectures")
    kind = config.get("model_type")
    if not names and isinstance(kind, str) and kind in MODEL_TYPES:  # all that transformers' Auto classes look at
        names = [MODEL_TYPES[kind]]
    every = ARCHITECTURES.keys() | WRAPPERS.keys()
    for name in names:
        if isinstance(name, str) and name in every:
            return name
        refuse(str(name))
    known = ", ".join(sorted(every))
    if not names:
        raise UserError(
            "config_invalid",
            f"config.json names no architecture under 'architectures', nor a known model_type: known are {known}",
        )
    raise UserError(
        "architecture_unsupported",
        f"unknown architecture {names[0]!r}: known are {known}{nearest(str(names[0]), every)}",
    )


# Shared by families


def _base(f: Fields, rotary: bool = True) -> ModelConfig:
    """Read a Llama-like decoder by the usual keys: every layer has full attention and the same rope."""
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads", high=COUNT)
    head_dim = f.optional_integer("head_dim", high=COUNT)
    if head_dim is None:
        if hidden % heads:
            raise f.error("num_attention_heads", f"is {heads}, which does not divide hidden_size {hidden}")
        head_dim = hidden // heads
    kv_heads = f.optional_integer("num_key_value_heads", high=COUNT) or heads
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads {heads}")
    layers = f.integer("num_hidden_layers", high=COUNT)
    rope = read_rope(f, rope_parameters(f), head_dim) if rotary else None
    return ModelConfig(
        architecture="",  # `read_config` fills it in
        vocab_size=f.integer("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=f.integer("intermediate_size"),
        context=f.integer("max_position_embeddings", high=LENGTH),
        windows=(None,) * layers,
        ropes=(rope,) * layers,
        norm_eps=f.number("rms_norm_eps", high=EPSILON),
        activation=f.choice("hidden_act", ACTIVATIONS),
        tied=f.flag("tie_word_embeddings"),
        dtype=DTYPES.get(str(f.get("dtype")), "float32"),  # only a declaration: the tensors say how they are stored
    )


def _everywhere(f: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the same sliding window for every layer, where one is set."""
    return (f.optional_integer("sliding_window", high=LENGTH),) * layers


def _sliding(f: Fields, layers: int, otherwise: Callable[[int], bool]) -> tuple[bool, ...]:
    """Return which layers slide: `layer_types` says so; in older files, `otherwise` by the layer's number."""
    if f.get("layer_types") is None:
        return tuple(map(otherwise, range(layers)))
    return f.words("layer_types", layers, SLIDING)


def _windows(f: Fields, sliding: tuple[bool, ...]) -> tuple[int | None, ...]:
    if not any(sliding):
        return (None,) * len(sliding)
    window = f.optional_integer("sliding_window", high=LENGTH)
    if window is None:
        raise f.error("sliding_window", "is null, but some layers slide")
    return tuple(window if slides else None for slides in sliding)


def _qwen_windows(f: Fields, layers: int, otherwise: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return Qwen's windows: the file's window only counts where `use_sliding_window` is set."""
    used = f.flag("use_sliding_window") and f.get("sliding_window") is not None
    sliding = _sliding(f, layers, lambda i: used and otherwise(i))
    if any(sliding) and not used:
        raise f.error("layer_types", "has sliding layers, but use_sliding_window is false or sliding_window null")
    return _windows(f, sliding)


# The families


@family("LlamaForCausalLM", (32000, 4096, 11008, 32, 32, None, 2048), bos_token_id=1, eos_token_id=2)
def llama(f: Fields) -> ModelConfig:
    """Read Llama 2, 3, 3.x and the many models of the same shape."""
    bias = f.flag("attention_bias")
    return replace(_base(f), qkv_bias=bias, output_bias=bias, feed_forward_bias=f.flag("mlp_bias"))


@family(
    "MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 131072), sliding_window=4096, bos_token_id=1, eos_token_id=2
)
def mistral(f: Fields) -> ModelConfig:
    base = _base(f)
    return replace(base, windows=_everywhere(f, base.layers))


QWEN: Mapping[str, object] = {
    "use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "norm_topk_prob": False,
}  # fmt: skip


@family("Qwen2ForCausalLM", (151936, 4096, 22016, 32, 32, 32, 32768), **QWEN, max_window_layers=28)
def qwen2(f: Fields) -> ModelConfig:
    """Read Qwen2 and 2.5: biases on q, k and v alone; windows, if used, in the layers from max_window_layers on."""
    base = _base(f)
    first = f.integer("max_window_layers", low=0)
    return replace(base, qkv_bias=True, windows=_qwen_windows(f, base.layers, lambda i: i >= first))


@family("Qwen3ForCausalLM", (151936, 4096, 22016, 32, 32, 32, 32768), head_dim=128, **QWEN, max_window_layers=28)
def qwen3(f: Fields) -> ModelConfig:
    bias = f.flag("attention_bias")
    return replace(qwen2(f), qk_norm=True, qkv_bias=bias, output_bias=bias)


def _gemma(f: Fields, rotary: bool) -> ModelConfig:
    """Read the common part of Gemma 2 and 3.

    Norms are stored less one and stand on both sides of each part; embeddings are scaled.
    """
    bias, base = f.flag("attention_bias"), _base(f, rotary)
    return replace(
        base,
        norm_offset=1.0,
        embedding_scale=math.sqrt(base.hidden),
        attention_scale=f.number("query_pre_attn_scalar") ** -0.5,
        logit_soft_cap=f.optional_number("final_logit_softcapping"),
        qkv_bias=bias,
        output_bias=bias,
        names=Names(
            attention_post_norm="post_attention_layernorm",
            feed_forward_norm="pre_feedforward_layernorm",
            feed_forward_post_norm="post_feedforward_layernorm",
        ),
    )


GEMMA_ALIASES = {"hidden_act": ("hidden_activation",)}
GEMMA: Mapping[str, object] = {
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip


@family(
    "Gemma2ForCausalLM", (256000, 2304, 9216, 26, 8, 4, 8192), GEMMA_ALIASES, **GEMMA,
    final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
)  # fmt: skip
def gemma2(f: Fields) -> ModelConfig:
    """Read Gemma 2: every other layer slides, the first among them; attention and logits are capped."""
    base = _gemma(f, rotary=True)
    sliding = _sliding(f, base.layers, lambda i: i % 2 == 0)
    return replace(base, windows=_windows(f, sliding), attention_soft_cap=f.optional_number("attn_logit_softcapping"))


GEMMA3: Mapping[str, object] = {
    **GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6
}  # fmt: skip
GEMMA3_SIZES = (262208, 2304, 9216, 26, 8, 4, 131072)


@family("Gemma3ForCausalLM", GEMMA3_SIZES, GEMMA_ALIASES, **GEMMA3)
def gemma3(f: Fields) -> ModelConfig:
    """Read Gemma 3: sliding and full layers turn by different ropes."""
    f.only("attn_logit_softcapping", None, "capping attention in Gemma 3 (transformers ignores it)")
    base = _gemma(f, rotary=False)
    every = f.integer("sliding_window_pattern")
    sliding = _sliding(f, base.layers, lambda i: (i + 1) % every != 0)
    local, full = read_gemma3_ropes(f, base.head_dim)
    return replace(
        base, qk_norm=True, windows=_windows(f, sliding), ropes=tuple(local if slides else full for slides in sliding)
    )


@family("Gemma3ForConditionalGeneration", GEMMA3_SIZES, GEMMA_ALIASES, **GEMMA3)
def gemma3_text(f: Fields) -> ModelConfig:
    """Read the text part of the multimodal Gemma 3 models; the rest of the checkpoint is not read."""
    f.only("final_logit_softcapping", None, "capping the logits of a Gemma 3 with vision (transformers ignores it)")
    base = gemma3(f)
    prefixes = (
        ("model.", "language_model.model."),
        ("model.", "model.language_model."),
        ("lm_head", "language_model.lm_head"),
    )
    return replace(base, names=replace(base.names, prefixes=prefixes))


@family(
    "Phi3ForCausalLM", (32064, 3072, 8192, 32, 32, None, 4096), original_max_position_embeddings=4096,
    rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=32000,
)  # fmt: skip
def phi3(f: Fields) -> ModelConfig:
    """Read Phi-3, 3.5 and 4-mini: q, k, v in one matrix, gate and up in another; longrope under three names."""
    base = _base(f, rotary=False)
    kinds: Mapping[str, RopeKind] = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
    rope = read_rope(f, rope_parameters(f), base.head_dim, kinds, partial=True)
    names = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return replace(base, ropes=(rope,) * base.layers, windows=_everywhere(f, base.layers), names=names)


def _learned(base: ModelConfig, bias: bool) -> ModelConfig:
    """Return the common part of OPT and GPT-2: LayerNorm, learned positions, an un-gated feed-forward, biases in all
    linears or in none."""
    return replace(
        base, norm="layer", gated=False, learned_positions=base.context, qkv_bias=bias, output_bias=bias,
        feed_forward_bias=bias,
    )  # fmt: skip


@family(
    "OPTForCausalLM", (50272, 768, 3072, 12, 12, None, 2048),
    {"intermediate_size": ("ffn_dim",), "hidden_act": ("activation_function",)},
    hidden_act="relu", bos_token_id=2, eos_token_id=2, enable_bias=True, tie_word_embeddings=True,
)  # fmt: skip
def opt(f: Fields) -> ModelConfig:
    """Read OPT: LayerNorm, an un-gated feed-forward, and learned positions whose table begins two rows early."""
    f.only("do_layer_norm_before", True, "the norm after attention of OPT-350M")
    f.only("_remove_final_layer_norm", False, "a model without final norm")
    f.only("layer_norm_elementwise_affine", True, "LayerNorm without weights")
    base, bias = _base(f, rotary=False), f.flag("enable_bias")
    f.only("word_embed_proj_dim", base.hidden, "an embedding of another width than the layers (OPT-350M)")
    names = Names(
        embed="model.decoder.embed_tokens", positions="model.decoder.embed_positions",
        layer="model.decoder.layers.{i}", final_norm="model.decoder.final_layer_norm",
        attention_norm="self_attn_layer_norm", feed_forward_norm="final_layer_norm", output="self_attn.out_proj",
        gate_up=("fc1",), down="fc2",
    )  # fmt: skip
    return replace(_learned(base, bias), norm_eps=1e-5, position_offset=2, names=names)


@family(
    "GPT2LMHeadModel", (50257, 768, None, 12, 12, None, 1024),
    {
        "hidden_size": ("n_embd",), "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("n_positions",), "intermediate_size": ("n_inner",),
        "hidden_act": ("activation_function",), "rms_norm_eps": ("layer_norm_epsilon",),
    },
    hidden_act="gelu_new", rms_norm_eps=1e-5, bos_token_id=50256, eos_token_id=50256, scale_attn_weights=True,
    tie_word_embeddings=True,
)  # fmt: skip
def gpt2(f: Fields) -> ModelConfig:
    """Read GPT-2: like OPT, with weights stored [in, out], q, k and v in one, and four times the width by default."""
    f.only("scale_attn_by_inverse_layer_idx", False, "attention scaled by the layer's number")
    if f.get("intermediate_size") is None:
        f = Fields(f.data, {**f.defaults, "intermediate_size": 4 * f.integer("hidden_size")}, f.aliases)
    base = _base(f, rotary=False)
    names = Names(
        embed="transformer.wte", positions="transformer.wpe", layer="transformer.h.{i}", final_norm="transformer.ln_f",
        attention_norm="ln_1", feed_forward_norm="ln_2", qkv=("attn.c_attn",), output="attn.c_proj",
        gate_up=("mlp.c_fc",), down="mlp.c_proj", transposed=True, prefixes=(("transformer.", ""),),
    )  # fmt: skip
    scale = None if f.flag("scale_attn_weights") else 1.0
    return replace(_learned(base, bias=True), attention_scale=scale, names=names)


EXPERT_ALIASES = {"num_experts": ("num_local_experts", "num_experts")}


@family(
    "MixtralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 131072), EXPERT_ALIASES, rms_norm_eps=1e-5, rope_theta=1e6,
    bos_token_id=1, eos_token_id=2, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
def mixtral(f: Fields) -> ModelConfig:
    base = mistral(f)
    experts = Experts(*_counts(f), base.intermediate, normalise_top_k=True)
    at = "block_sparse_moe"
    names = Names(router=f"{at}.gate", expert=at + ".experts.{e}", expert_gate_up=("w1", "w3"), expert_down="w2")
    return replace(base, experts=experts, names=names)


def _counts(f: Fields) -> tuple[int, int]:
    """Return how many experts there are, and how many run for each token."""
    count = f.integer("num_experts", high=COUNT)
    return count, f.integer("num_experts_per_tok", high=count)


def _qwen_experts(f: Fields, base: ModelConfig, shared: int) -> ModelConfig:
    """Add experts in every `decoder_sparse_step`-th layer, except in those that mlp_only_layers names."""
    if f.integer("num_experts", low=0, high=COUNT) == 0:
        return base
    every, dense = f.integer("decoder_sparse_step"), f.integers("mlp_only_layers", 0, COUNT)
    experts = Experts(*_counts(f), f.integer("moe_intermediate_size"), f.flag("norm_topk_prob"), shared)
    sparse = tuple(i not in dense and (i + 1) % every == 0 for i in range(base.layers))
    return replace(base, experts=experts, sparse=sparse)


@family(
    "Qwen2MoeForCausalLM", (151936, 2048, 5632, 24, 16, 16, 32768), **QWEN, max_window_layers=28,
    moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts_per_tok=4, num_experts=60,
    qkv_bias=True,
)  # fmt: skip
def qwen2_moe(f: Fields) -> ModelConfig:
    """Read Qwen1.5-MoE and Qwen2-MoE: a shared expert beside the chosen ones; windows, if used, in every other
    layer."""
    base, until = _base(f), f.integer("max_window_layers", low=0)
    windows = _qwen_windows(f, base.layers, lambda i: i % 2 == 0 and i < until)
    base = replace(base, qkv_bias=f.flag("qkv_bias"), windows=windows)
    return _qwen_experts(f, base, f.integer("shared_expert_intermediate_size"))


@family(
    "Qwen3MoeForCausalLM", (151936, 2048, 6144, 24, 32, 4, 32768), EXPERT_ALIASES, **QWEN, moe_intermediate_size=768,
    num_experts_per_tok=8, num_experts=128,
)  # fmt: skip
def qwen3_moe(f: Fields) -> ModelConfig:
    base, bias = _base(f), f.flag("attention_bias")
    windows = _everywhere(f, base.layers) if f.flag("use_sliding_window") else base.windows
    return _qwen_experts(f, replace(base, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=windows), shared=0)
