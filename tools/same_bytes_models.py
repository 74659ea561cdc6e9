"""Write the inputs that `same_bytes.py` gives to both commits: texts, recipes and a random model of each family.

    python tools/same_bytes_models.py FOLDER TOKENIZER_FOLDER LICENSE

The models are transformers' own, with random weights, norms and biases, so neither commit decides what they hold. They
share the embedded model's tokenizer. Sliding windows and rope scaling begin within the 64 tokens that are generated.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, HIDDEN, CONTEXT = 4096, 256, 256
IDS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
SIZES = {
    **IDS, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {**SIZES, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SIZES, "rope_parameters": ROPE}),
    "mistral": ("mistral", {**SIZES, "sliding_window": 32}),
    "qwen2": ("qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 64}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "phi3": ("phi3", {**SIZES, "sliding_window": 64}),
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2moe": ("qwen2_moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 256}),
    "qwen3moe": ("qwen3_moe", {**SIZES, **EXPERTS, "head_dim": 64}),
    "gpt2": ("gpt2", {**IDS, "n_embd": HIDDEN, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}),
    "opt": ("opt", {**SIZES, "num_key_value_heads": 4, "ffn_dim": 512, "word_embed_proj_dim": HIDDEN}),
}
RECIPES = {
    "autoround": "recipe: autoround-w4g128\nsteps: 4\n",
    "spinquant": "recipe: spinquant+gptq-w4a4\nrotation_steps: 4\n",
    "distill": "recipe: gptq+distill-w4g128\ndistill: {epochs: 1, drawn: 4}\n",
    "mixed": (
        "recipe: gptq-w4g128\ndamping: 0.02\norder: natural\nstatic_groups: false\nhead: int8\noverrides:\n"
        '  - {match: "*.down_proj", scheme: w8}\n  - {match: "model.layers.0.*", scheme: keep}\n'
    ),
}


def write(folder: Path, name: str, tokenizer: Path) -> None:
    """Write the model folder of one family: bfloat16 weights from a fixed seed, and the tokenizer's files."""
    kind, config = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            noise = torch.randn(values.shape)
            if values.dim() > 1:
                values.copy_(noise / values.shape[-1] ** 0.5)
            else:
                values.copy_(0.1 * noise + (0.0 if parameter.endswith("bias") or kind.startswith("gemma") else 1.0))
    model.to(torch.bfloat16).save_pretrained(folder / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / name / file)


def main(folder: Path, tokenizer: Path, license: Path) -> None:
    """Write everything into `folder`, which must not exist. The two texts are the halves of a license."""
    for part in ("models", "recipes"):
        (folder / part).mkdir(parents=True)
    text = license.read_text()
    (folder / "calib.txt").write_text(text[: len(text) // 2])
    (folder / "eval.txt").write_text(text[len(text) // 2 :])
    for name, recipe in RECIPES.items():
        (folder / "recipes" / f"{name}.yaml").write_text(recipe)
    for name in FAMILIES:
        write(folder / "models", name, tokenizer)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
