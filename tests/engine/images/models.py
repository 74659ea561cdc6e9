"""Tiny vision-language models with tokenizer, chat template and image settings, and their greedy answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.images import oracle
from tests.images.test_placeholders import backend
from tests.model.vision import tiny

IMAGE = 5  # the id of <image>
SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}assistant:"
)
KINDS = ("smolvlm", "llava", "llava_next", "qwen2_vl", "gemma3")


def _model(kind: str, vocab: int) -> Any:
    text = {**tiny.TEXT, "vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    clip = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 8, "image_size": 32}
    if kind == "smolvlm":
        config = transformers.SmolVLMConfig(
            text_config={**text, "model_type": "llama"}, vision_config={**SIGLIP, "image_size": 64}, scale_factor=2,
            image_token_id=IMAGE, pad_token_id=3,
        )  # fmt: skip
        return transformers.SmolVLMForConditionalGeneration(config)
    if kind == "qwen2_5_vl":
        tower = {
            "depth": 4, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
            "patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1, 3],
        }  # fmt: skip
        ids = {"image_token_id": IMAGE, "video_token_id": 4, "vision_start_token_id": 6, "vision_end_token_id": 7}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**text, **tiny.MROPE}, vision_config=tower, **ids, tie_word_embeddings=False
        )
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    if kind == "qwen2_vl":
        tower = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8}
        ids = {"image_token_id": IMAGE, "video_token_id": 4, "vision_start_token_id": 6, "vision_end_token_id": 7}
        config = transformers.Qwen2VLConfig(
            text_config={**text, **tiny.MROPE}, vision_config=tower, **ids, tie_word_embeddings=False
        )
        return transformers.Qwen2VLForConditionalGeneration(config)
    if kind == "gemma3":
        own = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 20}
        config = transformers.Gemma3Config(
            text_config={**text, **own}, vision_config={**SIGLIP, "image_size": 48}, mm_tokens_per_image=4,
            boi_token_index=6, eoi_token_index=7, image_token_index=IMAGE, attn_implementation="eager",
        )  # fmt: skip
        return transformers.Gemma3ForConditionalGeneration(config)
    more = {"image_grid_pinpoints": oracle.CASES["llava_next"][1]["image_grid_pinpoints"]} if "next" in kind else {}
    if kind == "llava_siglip":  # a tower without a class token
        clip |= {"model_type": "siglip_vision_model"}
        more = {"vision_feature_select_strategy": "full"}
    name = "LlavaNext" if "next" in kind else "Llava"
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, "model_type": "llama"}, vision_config=clip, image_token_index=IMAGE, image_seq_length=16,
        **more,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def place(kind: str) -> str:
    """What a prompt's text has for an image."""
    return "<start_of_image>" if kind == "gemma3" else "<image>"


def save(kind: str, folder: Path) -> Any:
    """Write a checkpoint's folder; return transformers' model, in float32."""
    tokens = backend()
    torch.manual_seed(0)
    model = _model(kind, tokens.get_vocab_size()).eval()
    tiny._randomize(model)
    model.save_pretrained(folder, save_original_format=True)
    tokens.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("<image>", place(kind))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _, given, _ = oracle.CASES[{"qwen2_5_vl": "qwen2_vl", "llava_siglip": "llava"}.get(kind, kind)]
    oracle.put(folder / "preprocessor_config.json", given)
    return model


@torch.inference_mode()
def answer(kind: str, model: Any, ids: Sequence[int], pictures: Sequence[Any], count: int) -> list[int]:
    """Return greedy tokens behind a prompt with pictures, each by a forward pass over all tokens."""
    more: dict[str, Any] = {}
    if pictures:
        batch = [list(pictures)] if kind == "smolvlm" else list(pictures)
        more = dict(oracle.processor(kind)(images=batch, return_tensors="pt"))
        more = {name: value for name, value in more.items() if isinstance(value, torch.Tensor)}
    found: list[int] = []
    while len(found) < count:
        tokens = torch.tensor([[*ids, *found]])
        if kind == "qwen2_vl":
            more["mm_token_type_ids"] = (tokens == IMAGE).int()
        if kind == "gemma3":
            more["token_type_ids"] = (tokens == IMAGE).long()
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **more).logits
        logits[0, -1, IMAGE] -= 100  # no answer has an image
        found.append(int(logits[0, -1].argmax()))
    return found
