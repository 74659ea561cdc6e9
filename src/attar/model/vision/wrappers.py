"""How checkpoints of vision-language models hold their language model.

Such a config.json names an architecture around a language model, which its `text_config` describes. Qwen's published
files have no text_config: the text's keys stand beside `vision_config`. `vision.config` reads the tower. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from attar.errors import UserError
from attar.model.fields import Fields

Prefixes = tuple[tuple[str, str], ...]

NESTED: Prefixes = (
    ("model.", "language_model.model."),
    ("model.", "model.language_model."),
    ("lm_head", "language_model.lm_head"),
)
"""Names of transformers 4, and of transformers 5, which keeps the LM head outside."""


@dataclass(frozen=True)
class Wrapper:
    """An architecture around a language model: the kinds of text models, and their tensors' names in it."""

    texts: Mapping[str, str]
    """Architecture of each `model_type` that text_config may state; the first where it states none."""
    prefixes: Prefixes
    tied_within: bool = False  # text_config's tie_word_embeddings counts as well as the outer one
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of omitted keys that differ from those of the text architecture."""

    def text_architecture(self, text: Mapping[str, object] | None) -> str:
        """Return the architecture of the language model of `text`, the text_config where there is one. Raises
        ValueError for others."""
        if text is None or text.get("model_type") is None:
            return next(iter(self.texts.values()))
        return Fields(text, where="config.json: text_config").choice("model_type", self.texts)

    def tied(self, config: Mapping[str, object], text: Mapping[str, object] | None) -> object:
        """Return what the config says of `tie_word_embeddings`; None where it says nothing."""
        outer = config.get("tie_word_embeddings")
        return outer or text.get("tie_word_embeddings") or outer if self.tied_within and text is not None else outer


LLAMA = {"llama": "LlamaForCausalLM"}
COMMON_TEXTS = {
    **LLAMA, "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
QWEN: Mapping[str, object] = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "max_window_layers": 80, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip

WRAPPERS: Mapping[str, Wrapper] = {
    "Idefics3ForConditionalGeneration": Wrapper(LLAMA, (("model.", "model.text_model."),)),
    "SmolVLMForConditionalGeneration": Wrapper(LLAMA, (("model.", "model.text_model."),)),
    "LlavaForConditionalGeneration": Wrapper(COMMON_TEXTS, NESTED, tied_within=True),
    "LlavaNextForConditionalGeneration": Wrapper(COMMON_TEXTS, NESTED),
    "LlavaDownsampleForConditionalGeneration": Wrapper(COMMON_TEXTS, NESTED, tied_within=True),
    "Qwen2VLForConditionalGeneration": Wrapper(
        {"qwen2_vl_text": "Qwen2ForCausalLM"}, NESTED, tied_within=True, defaults=QWEN
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        {"qwen2_5_vl_text": "Qwen2ForCausalLM"}, NESTED, tied_within=True, defaults=QWEN
    ),
}
"""Architectures whose language model is that of a family of its own. The one with `Downsample` in its name is attar's:
`attar convert` writes VILA so."""

_LLAVA = ("vision_tower", "multi_modal_projector")
OUTSIDE: Mapping[str, tuple[str, ...]] = {
    "Idefics3ForConditionalGeneration": ("vision_model", "connector"),
    "SmolVLMForConditionalGeneration": ("vision_model", "connector"),
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "LlavaDownsampleForConditionalGeneration": _LLAVA,
    "Gemma3ForConditionalGeneration": _LLAVA,
    "Qwen2VLForConditionalGeneration": ("visual",),
    "Qwen2_5_VLForConditionalGeneration": ("visual",),
}
"""Modules of an architecture that are no part of its language model: all that lies within them stays in 16 bits."""

VILA = ("LlavaLlamaModel", "LlavaTopDownLlamaModel", "VILAForCausalLM", "VILAForConditionalGeneration")
VILA_PARTS = ("llm_cfg", "vision_tower_cfg", "mm_projector_cfg")
VILA_CONVERTED = "VILA's folders of language model, tower and projector are read by `attar convert FOLDER OUT` alone"

REFUSED: Mapping[str, str] = {
    "PaliGemmaForConditionalGeneration": "PaliGemma reads the whole prompt in both directions",
    **dict.fromkeys(VILA, VILA_CONVERTED),
}
"""Architectures that are known and not supported, each with the reason."""


def is_vila(config: Mapping[str, object]) -> bool:
    """Return whether a config.json is that of VILA's three folders."""
    names = config.get("architectures")
    named = isinstance(names, list) and any(each in VILA for each in names)
    return named or all(key in config for key in VILA_PARTS)


def vila_part(config: Mapping[str, object], key: str) -> str:
    """Return the name of VILA's folder for one of `VILA_PARTS`. Raises UserError for what is no name within a
    folder."""
    stated = config.get(key)
    if stated is None or isinstance(stated, dict):
        return key.removesuffix("_cfg")
    if not isinstance(stated, str):
        raise UserError("config_invalid", f"{key} is neither a config nor the name of a folder")
    name = PurePosixPath(stated).as_posix()
    if "/" in name or name in (".", "..") or not name.isprintable():
        raise UserError("file_unsafe", f"{key} names {stated!r:.80}, which is no folder within it")
    return name


def refuse(architecture: str) -> None:
    """Raise ValueError where an architecture is known as one that attar does not read."""
    if architecture in REFUSED:
        raise UserError("architecture_unsupported", f"{architecture} is not supported: {REFUSED[architecture]}")
