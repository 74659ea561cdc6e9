"""Tiny vision-language models of transformers with random weights, saved to folders as users find them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, IMAGE = 120, 119
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "max_position_embeddings": 512,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 4,
}  # fmt: skip
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 8, "image_size": 24}
PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e4}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 118, "vision_start_token_id": 117, "vision_end_token_id": 116}
QWEN2_TOWER = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
QWEN25_TOWER = {
    "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "patch_size": 4,
    "window_size": 16, "fullatt_block_indexes": [1],
}  # fmt: skip


def _idefics(kind: str) -> Any:
    text = {**TEXT, "model_type": "llama"}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=SIGLIP, image_token_id=IMAGE, scale_factor=2, pad_token_id=0
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _llava(kind: str, text: str, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "model_type": text}, vision_config=CLIP, image_token_index=IMAGE, image_seq_length=36,
        **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _qwen(kind: str, tower: dict[str, Any], **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, **MROPE, **more}, vision_config=tower, **QWEN_IDS, tie_word_embeddings=False
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _gemma() -> Any:
    text = {**TEXT, "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 20}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=SIGLIP, mm_tokens_per_image=16, boi_token_index=117, eoi_token_index=118,
        image_token_index=IMAGE, attn_implementation="eager",
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


MODELS = {
    "smolvlm": lambda: _idefics("SmolVLM"),
    "idefics3": lambda: _idefics("Idefics3"),
    "llava": lambda: _llava("Llava", "llama"),
    "llava-qwen2": lambda: _llava("Llava", "qwen2"),
    "llava_next": lambda: _llava("LlavaNext", "mistral", image_grid_pinpoints=PINPOINTS),
    "qwen2_vl": lambda: _qwen("Qwen2VL", QWEN2_TOWER),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL", QWEN25_TOWER),
    "gemma3": _gemma,
}


def _randomize(model: Any) -> None:
    """Fill all parameters so that every norm and bias matters and logits vary by about 1."""
    generator = torch.Generator().manual_seed(1)
    centre = 0.0 if "Gemma" in type(model).__name__ else 1.0
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.data = noise * 0.3
        elif parameter.ndim == 1:
            parameter.data = (centre if "vision" not in name else 1.0) + noise * 0.3
        elif "embed_tokens" in name or "lm_head" in name or "position_embedding" in name:
            parameter.data = noise * 0.4
        else:
            parameter.data = noise * (1.4 * parameter[0].numel() ** -0.5)


@functools.cache
def model(kind: str) -> Any:
    """Return a model of transformers, in float32."""
    torch.manual_seed(0)
    made = MODELS[kind]().eval()
    _randomize(made)
    return made


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()  # kept until the process ends, which removes it


@functools.cache
def folder(kind: str, old_names: bool = True) -> Path:
    """Return the folder of a model's checkpoint, with the tensor names of older files or those of transformers 5."""
    path = Path(_temporary().name) / f"{kind}-{old_names}"
    model(kind).save_pretrained(path, save_original_format=old_names)
    return path
