"""Put the toy that sees together: a SmolVLM checkpoint of the embedded model, an adapter, and a small vision tower.

`WEIGHTS` holds what was trained (`train.py`): tower, projector, the rows of two new tokens, and a LoRA adapter of the
embedded model. The adapter is merged, so that the checkpoint is an ordinary one.

    PYTHONPATH=src:tools python -m toy_vision.checkpoint OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "src" / "attar" / "data" / "demo"
WEIGHTS = ROOT / "tests" / "toy_vision.safetensors"
NEW_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
ROWS = 16  # feature rows of a picture
SCALE = 2  # patches of a side that become one row
VISION = {
    "model_type": "smolvlm_vision", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "num_channels": 3, "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""A question's line, and an answer that ends with EOS."""


def adapted(module: str) -> str:
    """Return the prefix of an adapter's tensors in `WEIGHTS`, of a module of the embedded model."""
    return f"adapter.{module.removeprefix('model.')}"


def merged(base: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the checkpoint's tensors, by the names of transformers' SmolVLM."""
    tensors = {f"model.{name}": value for name, value in trained.items() if name.startswith(("vision_model", "conn"))}
    for name, value in base.items():
        prefix = adapted(name.removesuffix(".weight"))
        if f"{prefix}.a" in trained:
            change = trained[f"{prefix}.b"].float() @ trained[f"{prefix}.a"].float()
            value = (value.float() + change).to(value.dtype)
        tensors[f"model.text_model.{name.removeprefix('model.')}"] = value
    name = "model.text_model.embed_tokens.weight"
    around, whole = trained["tokens"].to(tensors[name].dtype)
    tensors[name] = torch.cat((tensors[name], torch.zeros_like(around)[None], around[None], whole[None]))
    return {name: value.contiguous() for name, value in tensors.items()}


def write(folder: Path, trained: Mapping[str, Tensor] | None = None) -> None:
    """Write the checkpoint's folder, of the tensors of `WEIGHTS` or of others."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = merged(load_file(DEMO / "model.safetensors"), load_file(WEIGHTS) if trained is None else trained)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    text = json.loads((DEMO / "config.json").read_text())
    first = text.pop("vocab_size")
    architecture = {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm"}
    config = {
        **architecture, "dtype": text["dtype"], "image_token_id": first, "scale_factor": SCALE,
        "tie_word_embeddings": True, "text_config": {**text, "vocab_size": first + len(NEW_TOKENS)},
        "vision_config": VISION,
    }  # fmt: skip
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": first + number, "content": content, **more} for number, content in enumerate(NEW_TOKENS)
    ]
    pixels = {
        "image_processor_type": "SmolVLMImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
        "do_convert_rgb": True, "do_image_splitting": False, "do_pad": True, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3, "resample": 1, "rescale_factor": 1 / 255, "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 64},
    }  # fmt: skip
    settings = json.loads((DEMO / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    for name, value in (
        ("config.json", config),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("preprocessor_config.json", pixels),
        ("processor_config.json", {"processor_class": "SmolVLMProcessor", "image_seq_len": ROWS}),
        ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False}),
    ):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
