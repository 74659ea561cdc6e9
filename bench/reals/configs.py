"""Configs of tiny models, one or two of each architecture that attar writes to GGUF files."""

from __future__ import annotations

from typing import Any

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "rms_norm_eps": 1e-5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
BASE = {**SIZES, **HEADS, "num_hidden_layers": 3}
EXPERTS = {"num_experts_per_tok": 2}
LONGROPE = {
    "type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + i for i in range(6)]
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **BASE},
    "mistral": {"architectures": ["MistralForCausalLM"], **BASE, "sliding_window": None},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **BASE, **EXPERTS, "num_local_experts": 4,
                "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **BASE, "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **BASE, "head_dim": 32},
    "qwen2moe": {"architectures": ["Qwen2MoeForCausalLM"], **BASE, **EXPERTS, "num_experts": 5,
                 "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    "qwen3moe": {"architectures": ["Qwen3MoeForCausalLM"], **BASE, **EXPERTS, "num_experts": 4, "head_dim": 32,
                 "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **BASE, "head_dim": 32, "query_pre_attn_scalar": 32,
               "sliding_window": 8},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], **BASE, "num_hidden_layers": 7, "head_dim": 32,
               "query_pre_attn_scalar": 32, "sliding_window": 8, "sliding_window_pattern": 6},
    "gemma3 scaled": {"architectures": ["Gemma3ForCausalLM"], **BASE, "num_hidden_layers": 6, "head_dim": 32,
                      "query_pre_attn_scalar": 32, "sliding_window": 8, "sliding_window_pattern": 6,
                      "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3": {"architectures": ["Phi3ForCausalLM"], **BASE, "sliding_window": 8},
    "phi3 long": {"architectures": ["Phi3ForCausalLM"], **BASE, "partial_rotary_factor": 0.75,
                  "original_max_position_embeddings": 16, "rope_scaling": LONGROPE},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4,
             "n_positions": 64},
}  # fmt: skip

TYPES = ("f32", "q8_0", "q4_k_m")
"""Types that tables of these families compare."""
