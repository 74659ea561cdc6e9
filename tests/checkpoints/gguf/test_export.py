"""The head of a GGUF file, made from configs: what is read back, and what has no words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attar.checkpoints.gguf.config import rope_with_factors
from attar.checkpoints.gguf.export import describe, neighbours, words
from attar.model.config import ModelConfig, Rope
from attar.model.families import read_config
from tests.errors import user_error

BASE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip

GEMMA3: dict[str, object] = {
    "num_hidden_layers": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16
}  # fmt: skip
EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {
    "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 64
}  # fmt: skip

LLAMA3: dict[str, object] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def config(name: str, **more: object) -> ModelConfig:
    return read_config({"architectures": [name], **BASE, **more})


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (config("LlamaForCausalLM"), "llama"),
        (config("LlamaForCausalLM", head_dim=16, tie_word_embeddings=True), "llama"),
        (config("MistralForCausalLM", sliding_window=None), "llama"),
        (config("MistralForCausalLM", sliding_window=16), "llama"),
        (config("Gemma2ForCausalLM", head_dim=8, query_pre_attn_scalar=8, sliding_window=16), "gemma2"),
        (config("Gemma3ForCausalLM", **GEMMA3), "gemma3"),
        (config("Gemma3ForCausalLM", **GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0}), "gemma3"),
        (config("Phi3ForCausalLM", sliding_window=16), "phi3"),
        (config("Phi3ForCausalLM", partial_rotary_factor=0.75), "phi3"),
        (config("GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=2), "gpt2"),
        (config("Qwen2ForCausalLM"), "qwen2"),
        (config("Qwen3ForCausalLM", head_dim=16), "qwen3"),
        (config("MixtralForCausalLM"), "llama"),
        (config("Qwen2MoeForCausalLM", **EXPERTS), "qwen2moe"),
        (config("Qwen3MoeForCausalLM", **EXPERTS, norm_topk_prob=True), "qwen3moe"),
        (config("LlamaForCausalLM", rope_scaling={"rope_type": "linear", "factor": 4.0}), "llama"),
        (
            config(
                "Qwen2ForCausalLM",
                rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            ),
            "qwen2",
        ),
    ],
)
def test_a_config_reads_back_the_same(made: ModelConfig, said: str) -> None:
    """`describe` reads back what it wrote and would raise; so that it looks at all fields is what is tested below."""
    metadata, factors = describe(made, 15, "a model")
    assert metadata["general.architecture"] == said
    assert metadata["general.file_type"] == 15
    assert not factors


def test_the_rope_of_llama_3_is_said_by_its_factors() -> None:
    made = config("LlamaForCausalLM", rope_scaling=LLAMA3, rope_theta=500000.0)
    metadata, factors = describe(made, 0, "")
    assert not any("scaling" in key for key in metadata)
    assert rope_with_factors(Rope(500000.0, 8), factors["rope_freqs.weight"].tolist()) == made.ropes[0]
    other = config("LlamaForCausalLM", rope_scaling=LLAMA3 | {"original_max_position_embeddings": 64})
    assert describe(other, 0, "")[1], "factors say any settings, known or not"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            config("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "gguf_inexpressible",
        ),
        (config("LlamaForCausalLM", hidden_act="gelu"), "gguf_inexpressible"),
        (config("LlamaForCausalLM", rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "gguf_inexpressible"),
        (
            config(
                "Qwen2ForCausalLM",
                rope_scaling={
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 2.0,
                },
            ),
            "gguf_inexpressible",
        ),
        (replace(config("LlamaForCausalLM"), attention_scale=0.5), "gguf_inexpressible"),
        (config("Phi3ForCausalLM", head_dim=16), "gguf_inexpressible"),
        (config("Gemma2ForCausalLM", head_dim=8, tie_word_embeddings=False), "gguf_inexpressible"),
        (config("Gemma2ForCausalLM", head_dim=8, query_pre_attn_scalar=16), "gguf_inexpressible"),
        (config("Gemma3ForCausalLM", **GEMMA3, rope_local_base_freq=20000.0), "gguf_inexpressible"),
        (config("Gemma3ForCausalLM", **GEMMA3, sliding_window_pattern=2), "gguf_inexpressible"),
        (replace(config("GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=2), attention_scale=1.0), "gguf_inexpressible"),
        (config("OPTForCausalLM", ffn_dim=48, num_key_value_heads=4), "architecture_unsupported"),
        (config("Qwen2MoeForCausalLM", norm_topk_prob=True, **EXPERTS), "gguf_inexpressible"),
        (config("Qwen3MoeForCausalLM", **EXPERTS, mlp_only_layers=[0]), "gguf_inexpressible"),
        (config("Qwen2MoeForCausalLM", **EXPERTS, tie_word_embeddings=True), "gguf_inexpressible"),
        (config("Qwen3ForCausalLM", head_dim=8, attention_bias=True), "gguf_inexpressible"),
        (config("Gemma3ForCausalLM", **GEMMA3, attention_bias=True), "gguf_inexpressible"),
        (config("Qwen2ForCausalLM", rope_scaling=LLAMA3), "gguf_inexpressible"),
    ],
)  # fmt: skip
def test_what_a_file_has_no_words_for_is_refused(made: ModelConfig, words: str) -> None:
    with user_error(words):
        describe(made, 0, "")


def yarn(**more: float) -> dict[str, object]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **more}


@pytest.mark.parametrize(("key", "value", "standard"), [("beta_fast", 4.0, "32"), ("beta_slow", 2.0, "1")])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_yarn_that_llama_cpp_would_turn_otherwise_is_refused(name: str, key: str, value: float, standard: str) -> None:
    none = {"sliding_window": None} if name == "MistralForCausalLM" else {}
    made = config(name, rope_scaling=yarn(**{key: value}), head_dim=8, **none)
    with user_error("gguf_inexpressible"):
        describe(made, 0, "")
    metadata, _ = describe(config(name, rope_scaling=yarn(beta_fast=32.0, beta_slow=1.0), head_dim=8, **none), 0, "")
    assert not any("beta" in key for key in metadata)


def test_a_qwen2_whose_heads_are_not_as_wide_as_it_is_is_refused() -> None:
    """As structured pruning leaves it: llama.cpp would not load it."""
    made = config("Qwen2ForCausalLM", num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    with user_error("gguf_inexpressible"):
        describe(made, 0, "")
    describe(config("Qwen3ForCausalLM", num_attention_heads=2, num_key_value_heads=1, head_dim=8), 0, "")


def test_rows_stand_side_by_side_as_llama_cpp_turns_them() -> None:
    """Row 2j + i of a head is row j of half i."""
    rows = torch.arange(16)[:, None].expand(16, 3)
    assert neighbours(rows, 8)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert neighbours(torch.arange(8), 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_the_window_of_a_mistral_becomes_its_context() -> None:
    """As in Mistral-7B-v0.1, whose window of 4096 no reader of files applies."""
    made = config("MistralForCausalLM", max_position_embeddings=32768, sliding_window=4096)
    metadata, _ = describe(made, 0, "")
    assert metadata["llama.context_length"] == 4096
    wide = config("MistralForCausalLM", max_position_embeddings=128, sliding_window=4096)
    assert describe(wide, 0, "")[0]["llama.context_length"] == 128


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Phi3ForCausalLM"])
def test_a_window_that_llama_cpp_does_not_have_is_told(name: str, tmp_path: Path) -> None:
    """A Phi-3's is in the file, which attar reads; llama.cpp leaves it out."""
    told, untold = (words(tmp_path, config(name, sliding_window=window))[1] for window in (77, 128))
    assert told is not None
    assert "77" in told
    assert untold is not None
    assert "128" not in untold


def test_a_longrope_is_two_tensors_and_a_factor_of_attention() -> None:
    scaling = {"rope_type": "longrope", **{key: LONGROPE[key] for key in ("short_factor", "long_factor")}}
    made = config("Phi3ForCausalLM", rope_scaling=scaling, original_max_position_embeddings=64)
    metadata, factors = describe(made, 0, "")
    assert factors["rope_factors_long.weight"].tolist() == LONGROPE["long_factor"]
    assert factors["rope_factors_short.weight"].tolist() == LONGROPE["short_factor"]
    assert metadata["phi3.rope.scaling.original_context_length"] == 64
    rope = made.ropes[0]
    assert rope is not None
    assert metadata["phi3.rope.scaling.attn_factor"] == rope.attention_factor


def test_a_folders_name_that_is_no_unicode_is_text_in_the_file() -> None:
    """As names beyond ASCII are in a locale of another encoding."""
    words, _ = describe(config("LlamaForCausalLM"), 0, "mod\udce8le")
    assert words["general.name"] == "mod\ufffdle"


def test_a_stretched_context_is_written_as_config_json_states_it() -> None:
    """As llama.cpp's converter does; the reader stretches it again."""
    for kind, stated in (("linear", 128), ("yarn", 512)):
        made = config("Qwen2ForCausalLM", rope_scaling={"rope_type": kind, "factor": 4.0})
        assert made.context == 512
        assert describe(made, 0, "")[0]["qwen2.context_length"] == stated
