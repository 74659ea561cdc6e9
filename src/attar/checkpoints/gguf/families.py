"""The architectures of GGUF files, and what each adds to the settings that all have.

A reader receives the settings in the keys of config.json as far as they are common, and returns further ones. Names and
defaults of keys are llama.cpp's. Two settings are no key of a file but follow from the number of layers, as llama.cpp
has it: the scale of attention of Gemma 2 and 3 with 27 B parameters. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attar.model.fields import COUNT, LENGTH, Fields


class Factors(NamedTuple):
    """Factors of a longrope: up to the context of training, and beyond."""

    short: Sequence[float]
    long: Sequence[float]


Found = dict[str, object]
Reader = Callable[[Fields, str, Mapping[str, object], Factors | None], Found]
"""A function more(fields, name of the architecture, settings so far, factors)."""


def _nothing(f: Fields, at: str, found: Mapping[str, object], factors: Factors | None) -> Found:
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files."""

    name: str  # in config.json
    more: Reader = _nothing
    experts: str | None = None  # name in config.json where it has experts; None: it never has
    interleaved: bool = False  # rows of q and k are stored by pairs that rotate together
    epsilon: str = "layer_norm_rms_epsilon"
    rotates: bool = True
    partial: bool = False  # a part of each head may rotate
    renamed: bool = False  # config.json has other names for the common settings


def scaling(f: Fields, at: str) -> dict[str, object] | None:
    """Return `rope_scaling` in the form of config.json."""
    where = f"{at}.rope.scaling"
    f.only(f"{where}.attn_factor", 1.0, "another factor of attention")
    given = f.get(f"{where}.type") is not None
    kind = f.choice(f"{where}.type", {"none": "none", "linear": "linear", "yarn": "yarn"}) if given else "linear"
    if kind == "none":
        return None
    factor = _given(f, f"{where}.factor") or _given(f, f"{at}.rope.scale_linear")  # the latter in files of 2023
    if factor is None or (not given and factor == 1.0):
        return None
    found: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        # `yarn_beta_fast` and `yarn_beta_slow` are ignored: llama.cpp, which makes and runs these files, reads them for
        # other architectures (mistral3, grok), and never for those read here. Its logits are the same bits with any
        # betas, and ours without (test_llamacpp.py).
        original = f.optional_integer(f"{where}.original_context_length", low=2, high=LENGTH)
        found["original_max_position_embeddings"] = original
    return found


def _given(f: Fields, key: str) -> float | None:
    """Return a positive number of the file; None where it is missing or 0, which llama.cpp takes for "not set"."""
    return None if f.get(key) == 0 else f.optional_number(key)


def _llama(f: Fields, at: str, found: Mapping[str, object], factors: Factors | None) -> Found:
    """Read Llama, Mistral and Mixtral.

    llama.cpp attends to everything, whatever window a file names, so a window is the context: within it the two agree.
    """
    more: Found = {}
    if f.optional_integer(f"{at}.expert_count", low=0, high=COUNT):
        more = {"num_local_experts": f.integer(f"{at}.expert_count", high=COUNT), **_used(f, at)}
        more["sliding_window"] = None
    window = f.optional_integer(f"{at}.attention.sliding_window", low=0, high=LENGTH)
    context = found["max_position_embeddings"]
    assert isinstance(context, int)
    return more | {"max_position_embeddings": min(context, window)} if window else more


def _used(f: Fields, at: str) -> Found:
    return {"num_experts_per_tok": f.integer(f"{at}.expert_used_count", high=COUNT)}


def _qwen_experts(f: Fields, at: str, found: Mapping[str, object], factors: Factors | None) -> Found:
    """Read the experts of Qwen 2 and 3; widths that an older file does not name follow from the dense one."""
    width, used = found["intermediate_size"], _used(f, at)
    assert isinstance(width, int)
    each = f.optional_integer(f"{at}.expert_feed_forward_length")
    count = used["num_experts_per_tok"]
    assert isinstance(count, int)
    more: Found = {
        "num_experts": f.integer(f"{at}.expert_count", high=COUNT),
        "moe_intermediate_size": width // count if each is None else each,
        "norm_topk_prob": at == "qwen3moe",
    }
    if at == "qwen2moe":
        shared = f.optional_integer(f"{at}.expert_shared_feed_forward_length")
        more["shared_expert_intermediate_size"] = width if shared is None else shared
    return more | used


SECTIONS = "rope.dimension_sections"
"""Pairs that turn by time, height and width, and a fourth number that is 0."""


def _qwen2_vl(f: Fields, at: str, found: Mapping[str, object], factors: Factors | None) -> Found:
    """Read the language model of Qwen2-VL and Qwen2.5-VL, whose rope has sections."""
    key = f"{at}.{SECTIONS}"
    given = f.get(key)
    if not isinstance(given, Collection) or isinstance(given, str) or len(given) not in (3, 4):
        raise f.error(key, "must be three or four numbers of pairs")
    time, height, width, *rest = (Fields({key: each}, where=f.where).integer(key, 0, COUNT) for each in given)
    if any(rest):
        raise f.error(key, "has a fourth section, which is not supported", "feature_unsupported")
    if found["rope_scaling"] is not None:
        raise f.error(
            f"{at}.rope.scaling.type", "is set, and a rope with sections is not scaled", "feature_unsupported"
        )
    return {"rope_scaling": {"rope_type": "default", "mrope_section": [time, height, width]}}


_LARGE = {"gemma2": 46, "gemma3": 62}  # layers of the models of 27 B
_PERIOD = {"gemma2": 2, "gemma3": 6}  # the last layer of so many has full attention
_LOCAL_BASE = 10000.0


def _gemma(f: Fields, at: str, found: Mapping[str, object], factors: Factors | None) -> Found:
    """Read Gemma 2 and 3."""
    layers, hidden, heads = (found[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    assert isinstance(layers, int)
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    more: Found = {"query_pre_attn_scalar": hidden // heads if layers == _LARGE[at] else found["head_dim"]}
    window = f.optional_integer(f"{at}.attention.sliding_window", low=0, high=LENGTH)
    if window is None and at == "gemma2":
        window = 4096
    sliding = _sliding(f, at, layers) if window else (False,) * layers
    more["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    more["sliding_window"] = window or None
    local = f.optional_number(f"{at}.rope.freq_base_swa", low=1.0)
    cap = _given(f, f"{at}.final_logit_softcapping")
    if at == "gemma3":
        scaled = found["rope_scaling"]
        if isinstance(scaled, dict) and scaled["rope_type"] != "linear":
            f.only(f"{at}.rope.scaling.type", "linear", "another scaling of the rope of full layers alone")
        return more | {
            "rope_local_base_freq": _LOCAL_BASE if local is None else local, "final_logit_softcapping": cap
        }  # fmt: skip
    f.only(f"{at}.rope.freq_base_swa", found["rope_theta"], "another rope in layers that slide")
    attention = f.optional_number(f"{at}.attn_logit_softcapping")
    return more | {
        "final_logit_softcapping": 30.0 if cap is None else cap,
        "attn_logit_softcapping": 50.0 if attention is None else attention,
    }


def _sliding(f: Fields, at: str, layers: int) -> tuple[bool, ...]:
    """Return which layers slide: as the file lists them, or all but the last of each period."""
    key = f"{at}.attention.sliding_window_pattern"
    given = f.get(key)
    if isinstance(given, Collection) and not isinstance(given, str):
        if len(given) != layers:
            raise f.error(key, f"has {len(given)} entries, and the model {layers} layers")
        return tuple(Fields({key: each}, where=f.where).flag(key) for each in given)
    period = f.optional_integer(key, low=0, high=COUNT)
    period = _PERIOD[at] if period is None else period
    return tuple(period == 0 or (i + 1) % period != 0 for i in range(layers))


def _phi3(f: Fields, at: str, found: Mapping[str, object], factors: Factors | None) -> Found:
    """Read Phi-3, 3.5 and 4; their longrope is two tensors, and a factor of attention."""
    size, context = found["head_dim"], found["max_position_embeddings"]
    assert isinstance(size, int)
    dims = f.optional_integer(f"{at}.rope.dimension_count", high=size)
    share = 1.0 if dims is None else dims / size
    while dims is not None and int(size * share) < dims:  # the reader's product must be the number again
        share = math.nextafter(share, 1.0)
    where = f"{at}.rope.scaling"
    original = f.optional_integer(f"{where}.original_context_length", low=2, high=LENGTH)
    more: Found = {
        "partial_rotary_factor": share,
        "sliding_window": f.optional_integer(f"{at}.attention.sliding_window", low=0, high=LENGTH) or None,
        "original_max_position_embeddings": context if original is None else original,
    }
    if factors is None:
        if scaling(f, at) is not None:
            raise f.error(f"{where}.factor", "is set, and a phi3 is scaled by rope_factors_*.weight alone")
        return more
    if f.get(f"{where}.type") is not None:
        f.choice(f"{where}.type", {"longrope": "longrope"})
    attention = f.optional_number(f"{where}.attn_factor")
    more["rope_scaling"] = {
        "rope_type": "longrope", "short_factor": list(factors.short), "long_factor": list(factors.long),
        "attention_factor": 1.0 if attention is None else attention,
    }  # fmt: skip
    return more


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _llama, experts="MixtralForCausalLM", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM", _qwen2_vl),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen_experts, experts="Qwen2MoeForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen_experts, experts="Qwen3MoeForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma),
    "phi3": Architecture("Phi3ForCausalLM", _phi3, partial=True),
    "gpt2": Architecture("GPT2LMHeadModel", epsilon="layer_norm_epsilon", rotates=False, renamed=True),
}
