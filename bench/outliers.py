"""Give a checkpoint the activation outliers of large models without changing what it computes.

Six channels of each norm before q/k/v and before gate/up are multiplied by 20 to 100 in the norm's weight and divided
in the columns that read them. Small trained models have no such channels, and without them AWQ and SmoothQuant have
nothing to do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CHANNELS = 6
SMALLEST, LARGEST = 20.0, 100.0
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def inject(source: Path, target: Path, seed: int = 0) -> Path:
    """Copy the Llama checkpoint `source` to `target` in float32, with outlier channels."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: t.float() for name, t in load_file(source / "model.safetensors").items()}
    config = json.loads((target / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for norm, readers in READERS.items():
            at = f"model.layers.{layer}"
            chosen = torch.randperm(config["hidden_size"], generator=generator)[:CHANNELS]
            factors = SMALLEST * (LARGEST / SMALLEST) ** torch.rand(CHANNELS, generator=generator)
            tensors[f"{at}.{norm}.weight"][chosen] *= factors
            for reader in readers:
                tensors[f"{at}.{reader}.weight"][:, chosen] /= factors
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return target
