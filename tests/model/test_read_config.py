"""Reading config.json: files as found on the Hub (transformers 4), what transformers 5 makes of them, and bad ones."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.model.config import Experts, ModelConfig, Rope
from attar.model.families import ARCHITECTURES, read_config
from tests.errors import user_error

HUB: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
        "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
    },
    "gemma-3-1b-pt": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "Phi-3-mini-128k-instruct": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.07 + i for i in range(48)], "short_factor": [1.1 + 0.02 * i for i in range(48)],
            "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
    },
    "opt-125m": {
        "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2,
        "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
        "model_type": "opt", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
        "prefix": "</s>", "torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": True,
        "vocab_size": 50272, "word_embed_proj_dim": 768,
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    },
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip

LLAMA3_ROPE = Rope(500000.0, 64, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
LOCAL, GLOBAL = Rope(1e4, 256), Rope(1e6, 256)

EXPECTED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "vocab_size": 128256, "hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "intermediate": 8192,
        "context": 131072, "windows": (None,) * 16, "ropes": (LLAMA3_ROPE,) * 16, "norm": "rms", "norm_eps": 1e-5,
        "norm_offset": 0.0, "qk_norm": False, "activation": "silu", "gated": True, "tied": True, "experts": None,
        "bos_ids": (128000,), "eos_ids": (128001,), "dtype": "bfloat16", "qkv_bias": False, "scale": 0.125,
    },
    "Mistral-7B-v0.1": {
        "head_dim": 128, "windows": (4096,) * 32, "ropes": (Rope(1e4, 128),) * 32, "tied": False, "context": 32768,
    },
    "Qwen2.5-0.5B": {
        "hidden": 896, "heads": 14, "kv_heads": 2, "head_dim": 64, "windows": (None,) * 24, "qkv_bias": True,
        "output_bias": False, "feed_forward_bias": False, "ropes": (Rope(1e6, 64),) * 24, "tied": True,
    },
    "Qwen3-0.6B": {
        "head_dim": 128, "qk_norm": True, "qkv_bias": False, "windows": (None,) * 28,
        "ropes": (Rope(1e6, 128),) * 28, "tied": True, "eos_ids": (151645,), "context": 40960,
    },
    "gemma-2-2b": {
        "windows": (4096, None) * 13, "ropes": (LOCAL,) * 26, "norm_offset": 1.0, "activation": "gelu_tanh",
        "attention_scale": 1 / 16, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0, "embedding_scale": 48.0,
        "tied": True, "qk_norm": False, "dtype": "float32",
    },
    "gemma-3-1b-pt": {
        "kv_heads": 1, "windows": ((512,) * 5 + (None,)) * 4 + (512,) * 2,
        "ropes": ((LOCAL,) * 5 + (GLOBAL,)) * 4 + (LOCAL,) * 2, "qk_norm": True, "norm_offset": 1.0,
        "attention_soft_cap": None, "logit_soft_cap": None, "embedding_scale": math.sqrt(1152), "tied": True,
    },
    "gemma-3-4b-it": {
        "vocab_size": 262208, "hidden": 2560, "heads": 8, "kv_heads": 4, "head_dim": 256, "intermediate": 10240,
        "context": 131072, "windows": ((1024,) * 5 + (None,)) * 5 + (1024,) * 4,
        "ropes": ((LOCAL,) * 5 + (Rope(1e6, 256, "linear", 8.0),)) * 5 + (LOCAL,) * 4, "eos_ids": (1, 106),
        "bos_ids": (2,), "dtype": "bfloat16", "tied": True, "attention_scale": 1 / 16,
    },
    "Phi-3-mini-128k-instruct": {"head_dim": 96, "windows": (262144,) * 32, "tied": False, "eos_ids": (32000,)},
    "opt-125m": {
        "norm": "layer", "norm_eps": 1e-5, "gated": False, "activation": "relu", "learned_positions": 2048,
        "position_offset": 2, "ropes": (None,) * 12, "intermediate": 3072, "tied": True, "qkv_bias": True,
        "output_bias": True, "feed_forward_bias": True, "dtype": "float16",
    },
    "gpt2": {
        "hidden": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "intermediate": 3072, "activation": "gelu_tanh",
        "norm": "layer", "learned_positions": 1024, "position_offset": 0, "tied": True, "eos_ids": (50256,),
        "dtype": "float32", "gated": False,
    },
    "Mixtral-8x7B-v0.1": {
        "windows": (None,) * 32, "experts": Experts(8, 2, 14336, True), "ropes": (Rope(1e6, 128),) * 32,
    },
    "Qwen1.5-MoE-A2.7B": {
        "experts": Experts(60, 4, 1408, False, 5632), "sparse": (True,) * 24, "qkv_bias": True, "qk_norm": False,
    },
    "Qwen3-30B-A3B": {
        "experts": Experts(128, 8, 768, True), "sparse": (True,) * 48, "qk_norm": True, "head_dim": 128,
        "qkv_bias": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("model", HUB)
def test_files_of_the_hub(model: str) -> None:
    config = read_config(HUB[model])
    assert config.architecture == HUB[model]["architectures"][0]
    assert {field: getattr(config, field) for field in EXPECTED[model]} == EXPECTED[model]


def test_longrope_in_full() -> None:
    raw = HUB["Phi-3-mini-128k-instruct"]
    rope = read_config(raw).ropes[0]
    assert rope is not None
    assert (rope.kind, rope.dims, rope.factor, rope.original_context) == ("longrope", 96, 32.0, 4096)
    assert rope.attention_factor == pytest.approx(1.1902380714238083)
    assert rope.short_factor == tuple(raw["rope_scaling"]["short_factor"])
    assert rope.long_factor == tuple(raw["rope_scaling"]["long_factor"])
    for older in ("su", "yarn"):  # what the first files called it
        assert read_config({**raw, "rope_scaling": {**raw["rope_scaling"], "type": older}}).ropes[0] == rope


@pytest.mark.parametrize("model", HUB)
def test_transformers_5_writes_the_same_model(model: str) -> None:
    """The file is read and written again by transformers 5, in its own form."""
    kind = transformers.CONFIG_MAPPING[HUB[model]["model_type"]]
    again = json.loads(kind.from_dict(copy.deepcopy(HUB[model])).to_json_string(use_diff=False))
    assert "torch_dtype" not in again
    assert "rope_scaling" not in again
    ours, theirs = read_config(HUB[model]), read_config(again)
    if "dtype" not in again or again["dtype"] is None:  # gpt2 does not say
        theirs = replace(theirs, dtype=ours.dtype)
    if model.startswith("gemma-3-4b"):
        theirs = replace(theirs, eos_ids=ours.eos_ids)  # only the outer object of the file lists both
    assert ours == theirs


CLASSES = {
    "GPT2LMHeadModel": "GPT2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma3ForConditionalGeneration": "Gemma3Config",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_file_leaves_out_is_as_in_transformers(architecture: str) -> None:
    kind = getattr(transformers, CLASSES.get(architecture, architecture.replace("ForCausalLM", "Config")))
    theirs = read_config({**json.loads(kind().to_json_string(use_diff=False)), "architectures": [architecture]})
    assert read_config({"architectures": [architecture]}) == theirs


def test_end_of_text_ids() -> None:
    raw = HUB["Qwen3-0.6B"]
    assert read_config(raw, {"eos_token_id": [151645, 151643]}).eos_ids == (151645, 151643)
    assert read_config(raw, {"eos_token_id": 151643, "bos_token_id": 7}).eos_ids == (151643,)
    assert read_config(raw, {"eos_token_id": 151643, "bos_token_id": 7}).bos_ids == (7,)
    assert read_config(raw, {"eos_token_id": None, "temperature": 0.6}).eos_ids == (151645,)
    assert read_config({**raw, "eos_token_id": None}).eos_ids == ()
    assert read_config(raw, {"eos_token_id": [1, -1]}).eos_ids == (1,)
    with user_error("config_invalid", "generation_config.json"):
        read_config(raw, {"eos_token_id": [1, "</s>"]})


def test_windows_by_layer() -> None:
    raw = {**HUB["Qwen2.5-0.5B"], "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 64}
    assert read_config({**raw, "max_window_layers": 3}).windows == (None, None, None, 64)
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert read_config({**raw, "layer_types": kinds}).windows == (64, None, None, 64)
    moe = {**HUB["Qwen1.5-MoE-A2.7B"], "num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 64}
    assert read_config({**moe, "max_window_layers": 3}).windows == (64, None, 64, None, None, None)
    assert read_config({**HUB["Qwen3-30B-A3B"], "use_sliding_window": True, "sliding_window": 9}).windows == (9,) * 48
    assert read_config({**HUB["Mistral-7B-v0.1"], "sliding_window": None}).windows == (None,) * 32
    left_out = {k: v for k, v in HUB["Mistral-7B-v0.1"].items() if k != "sliding_window"}
    assert read_config(left_out).windows == (4096,) * 32


def test_sparse_layers() -> None:
    raw = {**HUB["Qwen3-30B-A3B"], "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = read_config(raw)
    assert config.sparse == (False, True, False, False, False, True)
    assert [config.is_sparse(i) for i in range(6)] == list(config.sparse)
    assert read_config({**raw, "num_experts": 0}).experts is None


@pytest.mark.parametrize(
    "scaling, expected",
    [
        ({"type": "linear", "factor": 2}, Rope(500000.0, 64, "linear", 2.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, Rope(500000.0, 64, "dynamic", 2.0, 131072)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            Rope(500000.0, 64, "yarn", 4.0, 32768, attention_factor=0.1 * math.log(4) + 1),
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.0},
            Rope(500000.0, 64, "yarn", 4.0, 32768),
        ),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32768, "beta_fast": 16},
            Rope(500000.0, 64, "yarn", 4.0, 32768, beta_fast=16.0, attention_factor=0.1 * math.log(4) + 1),
        ),
        ({"rope_type": "default", "rope_theta": 7.0}, Rope(7.0, 64)),
        ({}, Rope(500000.0, 64)),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_ropes(key: str, scaling: dict[str, Any], expected: Rope) -> None:
    raw = {k: v for k, v in HUB["Llama-3.2-1B"].items() if k != "rope_scaling"}
    assert read_config({**raw, key: scaling}).ropes == (expected,) * 16


@pytest.mark.parametrize("key", ["attn_factor", "finetuned", "x" * 10_000])
def test_a_key_that_no_rope_has_is_not_used(key: str, caplog: pytest.LogCaptureFixture) -> None:
    raw, yarn = HUB["Llama-3.2-1B"], {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    expected = read_config({**raw, "rope_scaling": yarn})
    assert not caplog.text
    assert read_config({**raw, "rope_scaling": {**yarn, key: 0.5}}) == expected
    assert key[:50] in caplog.text
    assert len(caplog.text) < 500


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0}, 256),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "linear", "factor": 2.5}, 160),
        ({"type": "linear", "factor": 0.5}, 64),
        ({"type": "dynamic", "factor": 4.0}, 256),
        ({"type": "linear", "factor": 1e12}, 1 << 32),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 64),
        (None, 64),
    ],
)
def test_a_rope_that_stretches_stretches_the_context(scaling: dict[str, Any] | None, context: int) -> None:
    """vLLM's rule: cards tell users to add the rope, and `max_position_embeddings` stays the trained length."""
    raw = {**HUB["Llama-3.2-1B"], "max_position_embeddings": 64, "rope_scaling": scaling}
    assert read_config(raw).context == context


def test_a_gemma_3_states_what_it_supports() -> None:
    assert read_config(HUB["gemma-3-4b-it"]).context == 131072


@pytest.mark.parametrize("model", HUB)
def test_a_config_without_architectures_is_read_by_its_type(model: str) -> None:
    raw = {**HUB[model], "architectures": None}
    assert read_config(raw) == read_config(HUB[model])


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "auto", 16])
def test_a_dtype_that_is_not_computed_in_is_taken_as_float32(dtype: object) -> None:
    """The tensors say how they are stored."""
    assert read_config({**HUB["Llama-3.2-1B"], "torch_dtype": dtype}).dtype == "float32"


@pytest.mark.parametrize("wrong", [-1, 1 << 31, 128256])
def test_ids_outside_the_vocabulary_are_not_used(wrong: int, caplog: pytest.LogCaptureFixture) -> None:
    config = read_config({**HUB["Llama-3.2-1B"], "bos_token_id": wrong, "eos_token_id": [5, wrong]})
    assert (config.bos_ids, config.eos_ids) == ((), (5,))
    assert str(wrong) in caplog.text


def test_phi3_rotates_a_part() -> None:
    raw = {**HUB["Phi-3-mini-128k-instruct"], "rope_scaling": None, "partial_rotary_factor": 0.75}
    assert read_config(raw).ropes[0] == Rope(10000.0, 72)


@pytest.mark.parametrize(
    "architecture, near",
    [("LLaMAForCausalLM", "LlamaForCausalLM"), ("Qwen2ForCausaLM", "Qwen2ForCausalLM")],
)
def test_unknown_architectures_list_the_known(architecture: str, near: str) -> None:
    with user_error("architecture_unsupported") as error:
        read_config({"architectures": [architecture]})
    assert all(known in str(error.value) for known in ARCHITECTURES)


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": []}, {"architectures": "Llama"}])
def test_no_architecture(config: dict[str, Any]) -> None:
    with user_error("config_invalid"):
        read_config(config)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("Llama-3.2-1B", {"hidden_size": 0}, "config_invalid"),
    ("Llama-3.2-1B", {"hidden_size": True}, "config_invalid"),
    ("Llama-3.2-1B", {"hidden_size": 2048.0}, "config_invalid"),
    ("Llama-3.2-1B", {"hidden_size": "2048"}, "config_invalid"),
    ("Llama-3.2-1B", {"hidden_size": 1 << 40}, "config_invalid"),
    ("Llama-3.2-1B", {"hidden_size": 2047, "head_dim": None}, "config_invalid"),
    ("Llama-3.2-1B", {"num_hidden_layers": 10**9}, "config_invalid"),
    ("Llama-3.2-1B", {"num_key_value_heads": 7}, "config_invalid"),
    ("Llama-3.2-1B", {"head_dim": 63}, "config_invalid"),
    ("Llama-3.2-1B", {"rms_norm_eps": math.nan}, "config_invalid"),
    ("Llama-3.2-1B", {"rms_norm_eps": math.inf}, "config_invalid"),
    ("Llama-3.2-1B", {"rms_norm_eps": -1e-5}, "config_invalid"),
    ("Llama-3.2-1B", {"rms_norm_eps": "1e-5"}, "config_invalid"),
    ("Llama-3.2-1B", {"hidden_act": "siluu"}, "feature_unsupported"),
    ("Llama-3.2-1B", {"hidden_act": "quick_gelu"}, "feature_unsupported"),
    ("Llama-3.2-1B", {"tie_word_embeddings": 1}, "config_invalid"),
    ("Llama-3.2-1B", {"attention_bias": "no"}, "config_invalid"),
    ("Llama-3.2-1B", {"rope_theta": 1.0}, "config_invalid"),
    ("Llama-3.2-1B", {"rope_scaling": [8.0]}, "config_invalid"),
    ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "yarm"}}, "feature_unsupported"),
    ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "linear"}}, "config_invalid"),
    ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "config_invalid"),
    ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 2]}}, "config_invalid"),
    ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "feature_unsupported"),
    ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, "feature_unsupported"),
    (
        "Llama-3.2-1B",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "config_invalid",
    ),
    ("Llama-3.2-1B", {"kv_lora_rank": 512}, "feature_unsupported"),
    ("Llama-3.2-1B", {"pruned_heads": {"1": [2]}}, "feature_unsupported"),
    ("Llama-3.2-1B", {"eos_token_id": "</s>"}, "config_invalid"),
    ("Llama-3.2-1B", {"eos_token_id": [True]}, "config_invalid"),
    ("Mistral-7B-v0.1", {"sliding_window": 0}, "config_invalid"),
    ("Qwen2.5-0.5B", {"layer_types": ["sliding_attention"] * 24}, "config_invalid"),
    ("Qwen2.5-0.5B", {"layer_types": ["full_attention"] * 3}, "config_invalid"),
    ("Qwen2.5-0.5B", {"layer_types": ["linear_attention"] * 24}, "feature_unsupported"),
    (
        "Qwen2.5-0.5B",
        {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 24},
        "config_invalid",
    ),
    ("gemma-2-2b", {"sliding_window": None}, "config_invalid"),
    ("gemma-2-2b", {"final_logit_softcapping": 0.0}, "config_invalid"),
    ("gemma-2-2b", {"query_pre_attn_scalar": -256}, "config_invalid"),
    ("gemma-3-1b-pt", {"attn_logit_softcapping": 50.0}, "feature_unsupported"),
    ("gemma-3-1b-pt", {"use_bidirectional_attention": True}, "feature_unsupported"),
    ("gemma-3-1b-pt", {"rope_parameters": {"rope_type": "default"}}, "config_invalid"),
    ("gemma-3-4b-it", {"text_config": [1]}, "config_invalid"),
    ("Phi-3-mini-128k-instruct", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "feature_unsupported"),
    (
        "Phi-3-mini-128k-instruct",
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 47, "long_factor": [1.0] * 48}},
        "config_invalid",
    ),
    (
        "Phi-3-mini-128k-instruct",
        {"rope_scaling": {"type": "su", "short_factor": [math.nan] * 48, "long_factor": [1.0] * 48}},
        "config_invalid",
    ),
    ("opt-125m", {"do_layer_norm_before": False}, "feature_unsupported"),
    ("opt-125m", {"word_embed_proj_dim": 512}, "feature_unsupported"),
    ("opt-125m", {"layer_norm_elementwise_affine": False}, "feature_unsupported"),
    ("opt-125m", {"ffn_dim": -1}, "config_invalid"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "feature_unsupported"),
    ("gpt2", {"add_cross_attention": True}, "feature_unsupported"),
    ("gpt2", {"n_embd": 770}, "config_invalid"),
    ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}, "config_invalid"),
    ("Mixtral-8x7B-v0.1", {"num_local_experts": 10**9}, "config_invalid"),
    ("Qwen1.5-MoE-A2.7B", {"mlp_only_layers": [-1]}, "config_invalid"),
    ("Qwen1.5-MoE-A2.7B", {"decoder_sparse_step": 0}, "config_invalid"),
]


@pytest.mark.parametrize("model, change, message", BAD)
def test_bad_values_are_named(model: str, change: dict[str, Any], message: str) -> None:
    with user_error(message):
        read_config({**HUB[model], **change})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), model=st.sampled_from(sorted(HUB)))
def test_any_value_is_read_or_refused(data: st.DataObject, model: str) -> None:
    """No value of any key may end in another exception than ValueError."""
    raw = copy.deepcopy(HUB[model])
    for key in data.draw(st.lists(st.sampled_from(sorted(raw)), min_size=1, max_size=2, unique=True)):
        inner = raw[key]
        if isinstance(inner, dict) and data.draw(st.booleans()):
            inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(JSON)
        else:
            raw[key] = data.draw(JSON)
    try:
        config = read_config(raw)
    except ValueError:
        return
    assert config.layers >= 1
    assert config.heads % config.kv_heads == 0


@pytest.mark.parametrize(
    "change",
    [
        {"windows": ()},
        {"kv_heads": 3},
        {"ropes": (None,)},
        {"ropes": (Rope(1e4, 65),) * 16},
        {"ropes": (Rope(1e4, 66),) * 16},
        {"sparse": (True,)},
        {"experts": Experts(4, 5, 8, True)},
    ],
)
def test_a_model_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    config: ModelConfig = read_config(HUB["Llama-3.2-1B"])
    with pytest.raises(ValueError):
        replace(config, **change)


def test_reading_needs_no_torch() -> None:
    code = "import sys, attar.model.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
