"""Header of a GGUF file for a model: its config and tokenizer as metadata, its tensors under the names of files.

`config.py` is the inverse, and the check: the metadata are read back, and a model that they describe otherwise than its
config.json did is not written. So a sliding window, a soft cap or a rope that no key describes is an error that names
it, and not a file that answers a little wrong. Only the rounding of numbers to float32 may differ.

This module knows names, shapes and the order of rows, not weights. Rows of q and k of the `llama` architecture are put
into the order in which llama.cpp rotates (neighbours, not the halves of a head). `neighbours` works on rows of bytes as
well as of numbers, because no block spans two rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.gguf.config import as_in_files, read_gguf_config, rope_with_factors
from attar.checkpoints.gguf.families import ARCHITECTURES, SECTIONS, Factors
from attar.checkpoints.gguf.names import (
    FACTORS,
    HEAD,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHARED_GATE,
    SHORT_FACTORS,
    file_name,
    place,
)
from attar.checkpoints.gguf.values import SAME, Typed, as_stored, same
from attar.checkpoints.vocabulary import NO_TOKENIZER, has_tokenizer
from attar.checkpoints.vocabulary import tokenizer as load_tokenizer
from attar.errors import UserError
from attar.formats.codecs.ggml import GgmlType
from attar.model.assembly import compressible, gates
from attar.model.config import Experts, ModelConfig, Rope
from attar.model.rope import frequencies
from attar.model.rope_config import stated_context
from attar.text.gguf_vocabulary import lost, vocabulary

PLAIN = 0  # general.file_type of a file whose matrices have several types, as in llama.cpp's own writers

FILE_TYPES: Mapping[str, int] = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16,
    "Q6_K": 18, "Q2_K": 21, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "MXFP4": 38, "NVFP4": 39,
}  # fmt: skip
"""Values of general.file_type by the type of most matrices; for k-quants, those of the mixes called small, nearly pure
ones."""

QUANTIZATION_VERSION = 2  # version of the layout of blocks, by llama.cpp's count

WRITTEN: Mapping[str, str] = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3", "GPT2LMHeadModel": "gpt2", "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe", "Idefics3ForConditionalGeneration": "llama",
    "SmolVLMForConditionalGeneration": "llama", "LlavaForConditionalGeneration": "llama",
    "Qwen2VLForConditionalGeneration": "qwen2vl", "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Gemma3ForConditionalGeneration": "gemma3",
}  # fmt: skip
"""Architectures of config.json that are written -> their names in GGUF files."""

_UNKNOWN_THERE = ("OPTForCausalLM",)

_UNSAID = {
    "architecture", "bos_ids", "eos_ids", "dtype", "names", "ropes", "qkv_bias", "output_bias", "feed_forward_bias"
}  # fmt: skip
"""Fields of a config that metadata lack or express otherwise: a bias exists where it is stored."""

YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Values of llama.cpp for every architecture that is written: it does not read the keys that files have for others."""

_SQUARE = ("qwen2", "qwen2vl", "qwen2moe", "phi3", "gpt2")
"""Architectures whose q llama.cpp takes to be as wide as the hidden size, whatever `key_length` says."""

_OUTPUT_BIAS = ("llama", "gpt2")
"""Architectures of which llama.cpp reads a bias of attention's output."""


def architecture(config: ModelConfig) -> str:
    """Return the name of the model's architecture in GGUF files. Raises ValueError for one that is not written."""
    if config.architecture not in WRITTEN:
        raise UserError(
            "architecture_unsupported",
            f"a {config.architecture} cannot be written to a GGUF file"
            + (", because llama.cpp has no such architecture" if config.architecture in _UNKNOWN_THERE else "")
            + f": attar writes {', '.join(sorted(WRITTEN))}",
        )
    return WRITTEN[config.architecture]


def file_type(names: Sequence[str]) -> int:
    """Return `general.file_type` for the types of a file's matrices: the number of the most frequent, on a tie of the
    first."""
    return FILE_TYPES.get(max(dict.fromkeys(names), key=names.count), PLAIN)


def describe(config: ModelConfig, file_type: int, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the metadata of a model except its tokenizer's, the tensors of its rope's factors [dims / 2] by name).

    Raises ValueError for an architecture that is not written, and for properties that the metadata cannot express.
    """
    at = architecture(config)
    config = within_window(config)
    _check_readers(config, at)
    family = ARCHITECTURES[at]
    found: dict[str, Any] = {
        "general.architecture": at,
        "general.name": os.fsencode(name).decode(errors="replace"),  # that of a folder, in the locale's encoding
        "general.file_type": file_type,
        "general.quantization_version": QUANTIZATION_VERSION,
        f"{at}.vocab_size": config.vocab_size,
        f"{at}.context_length": stated_context(config.context, set(config.ropes)),
        f"{at}.embedding_length": config.hidden,
        f"{at}.block_count": config.layers,
        f"{at}.feed_forward_length": config.intermediate,
        f"{at}.attention.head_count": config.heads,
        f"{at}.attention.head_count_kv": config.kv_heads,
        f"{at}.attention.key_length": config.head_dim,
        f"{at}.attention.value_length": config.head_dim,
        f"{at}.attention.{family.epsilon}": config.norm_eps,
    }
    if config.experts is not None:
        found |= _experts(config.experts, at)
    factors: dict[str, Tensor] = {}
    window = next((each for each in config.windows if each is not None), None)
    if at == "phi3" or (at in ("gemma2", "gemma3") and window is not None):
        found[f"{at}.attention.sliding_window"] = window or 0  # 0 tells Phi-4 from other models, in llama.cpp too
    if config.attention_soft_cap is not None:
        found[f"{at}.attn_logit_softcapping"] = config.attention_soft_cap
    if config.logit_soft_cap is not None:
        found[f"{at}.final_logit_softcapping"] = config.logit_soft_cap
    if family.rotates:
        words, factors = _rope(config, _full_rope(config), at)
        found |= words
    _check(config, found, factors)
    return found, factors


def _experts(experts: Experts, at: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{at}.expert_count": experts.count, f"{at}.expert_used_count": experts.top_k}
    if at != "llama":  # whose experts have the width of a dense feed-forward
        found[f"{at}.expert_feed_forward_length"] = experts.intermediate
    if experts.shared:
        found[f"{at}.expert_shared_feed_forward_length"] = experts.shared_intermediate
    return found


def within_window(config: ModelConfig) -> ModelConfig:
    """Return a Mistral or Mixtral whose context ends where its window does: llama.cpp has no window for it, and within
    the window attention is to everything. Others are returned as they are."""
    window = config.windows[0]
    if config.architecture not in ("MistralForCausalLM", "MixtralForCausalLM") or window is None:
        return config
    return replace(config, windows=(None,) * config.layers, context=min(config.context, window))


def _full_rope(config: ModelConfig) -> Rope:
    """Return the rope of layers with full attention: metadata have no words for that of layers that slide."""
    full = (rope for rope, window in zip(config.ropes, config.windows, strict=True) if window is None)
    found = next(full, config.ropes[0])
    assert found is not None, "the family rotates"
    return found


def _rope(config: ModelConfig, rope: Rope, at: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the metadata of a rope, the tensors of its factors)."""
    found: dict[str, Any] = {f"{at}.rope.dimension_count": rope.dims, f"{at}.rope.freq_base": rope.theta}
    factors: dict[str, Tensor] = {}
    where = f"{at}.rope.scaling"
    if rope.kind == "llama3":
        plain = frequencies(replace(rope, kind="default"), config.context)
        factors[ROPE_FACTORS] = plain / frequencies(rope, config.context)
    elif rope.kind in ("linear", "yarn"):
        found |= {f"{where}.type": rope.kind, f"{where}.factor": rope.factor}
    elif rope.kind == "longrope" and at == "phi3":
        found[f"{where}.attn_factor"] = rope.attention_factor
        factors[LONG_FACTORS] = torch.tensor(rope.long_factor)
        factors[SHORT_FACTORS] = torch.tensor(rope.short_factor)
    if rope.sections:
        found[f"{at}.{SECTIONS}"] = [*rope.sections, 0]
    if rope.kind in ("yarn", "longrope"):
        found[f"{where}.original_context_length"] = rope.original_context
    return found, factors


def words(folder: Path, config: ModelConfig) -> tuple[dict[str, Any], str | None]:
    """Return (the metadata of a folder's tokenizer, a note for the user or None). Raises ValueError as `vocabulary`."""
    if not has_tokenizer(folder):
        none = next(name for name in NO_TOKENIZER if name is not None)
        missing = "The source has no tokenizer, so the file has none: give it token ids."
        return {"tokenizer.ggml.model": none}, _joined(missing, _of_window(config))
    tokenizer = load_tokenizer(folder)
    found = vocabulary(tokenizer, config.vocab_size, config.eos_ids)
    merges, note = "tokenizer.ggml.merges", lost(tokenizer, found)
    if not found.get(merges, True):  # an empty array has no type of its own
        found[merges] = Typed("[string]", [])
    return found, _joined(note, _of_window(config))


def _joined(*notes: str | None) -> str | None:
    return " ".join(note for note in notes if note is not None) or None


def _of_window(config: ModelConfig) -> str | None:
    """Return what llama.cpp makes of a window that it does not have, as a sentence for people; None where nothing."""
    window = config.windows[0]
    if config.architecture == "Phi3ForCausalLM" and window is not None and window < config.context:
        return (
            f"llama.cpp has no sliding window for this architecture: its answers to texts of more than {window} tokens "
            "are others than the model's."
        )
    context = within_window(config).context
    if context == config.context:
        return None
    return (
        f"The file's context is {context} and not {config.context}: llama.cpp has no sliding window for this "
        "architecture, and the model's window has that length."
    )


def matrices(config: ModelConfig) -> Iterator[tuple[str, str, int]]:
    """Yield every matrix of a file: (our module, its name there without layer and ending, its layer), both ends first.

    The LM head is left out where the model is tied.
    """
    names = config.names
    yield names.embed, file_name(names, names.embed), 0
    if not config.tied:
        yield names.head, file_name(names, names.head), 0
    for layer in range(config.layers):
        for module in compressible(config, layer):
            yield module, file_name(config.names, module).rpartition(".")[2], layer


def tensor_names(config: ModelConfig, has: Callable[[str], bool]) -> Iterator[str]:
    """Yield every tensor of a file by our name, the ends first, then block after block; `has` tests for biases."""
    names = config.names
    of_norm = ("weight", "bias") if config.norm == "layer" else ("weight",)
    yield f"{names.embed}.weight"
    if names.positions is not None:
        yield f"{names.positions}.weight"
    yield from (f"{names.final_norm}.{part}" for part in of_norm)
    if not config.tied:
        yield f"{names.head}.weight"
    for layer in range(config.layers):
        at = names.layer.format(i=layer)
        after = [each for each in (names.attention_post_norm, names.feed_forward_post_norm) if each is not None]
        heads = [names.q_norm, names.k_norm] if config.qk_norm else []
        for norm in (names.attention_norm, names.feed_forward_norm, *after, *heads):
            yield from (f"{at}.{norm}.{part}" for part in of_norm)
        for module in compressible(config, layer):
            yield f"{module}.weight"
            if has(f"{module}.bias"):
                yield f"{module}.bias"
        yield from (f"{module}.weight" for module in gates(config, layer))


Planned = tuple[GgmlType, tuple[int, ...]]
"""Type and shape of a tensor of a file."""


def layout(config: ModelConfig, names: Iterable[str], planned: Callable[[str], Planned]) -> dict[str, Planned]:
    """Return type and shape of each tensor of a file by its name there, given those of ours. Experts are stacked, and
    the one row of a shared expert's gate is a vector. Raises ValueError where experts of a stack have two types."""
    found: dict[str, Planned] = {}
    for name in names:
        tensor, expert = place(config.names, name)
        kind, shape = planned(name)
        if expert is not None:
            assert config.experts is not None
            shape = (config.experts.count, *shape)
        elif SHARED_GATE in tensor:
            shape = shape[-1:]
        before = found.setdefault(tensor, (kind, shape))
        if before[0] is not kind:
            raise _inexpressible(
                f": {tensor} holds this matrix of all experts in one type, and {name.removesuffix('.weight')} is "
                f"{kind.name}, another {before[0].name}: give them one scheme"
            )
    return found


def is_norm(config: ModelConfig, module: str) -> bool:
    """Return whether the module is a norm."""
    return file_name(config.names, module).endswith("norm")


def in_file(config: ModelConfig, name: str, values: Tensor) -> Tensor:
    """Return the values of our dense tensor `name` as a file stores them, except for the order of rows: the weights of
    norms with the number that the family adds to them, in float32, and matrices [out, in]."""
    module, _, part = name.rpartition(".")
    if part == "weight" and config.norm_offset and is_norm(config, module):
        return values.float() + config.norm_offset
    if SHARED_GATE in file_name(config.names, module):
        return values.flatten()
    return values.T.contiguous() if values.ndim == 2 and turned(config, module) else values


def turned(config: ModelConfig, module: str) -> bool:
    """Return whether a folder stores this matrix [in, out], and a file [out, in]."""
    names = config.names
    return names.is_transposed(module) and module not in (names.embed, names.positions)


def interleaves(config: ModelConfig, module: str) -> bool:
    """Return whether rows of this module have another order in files."""
    matrix = file_name(config.names, module).rpartition(".")[2]
    return ARCHITECTURES[architecture(config)].interleaved and matrix in ("attn_q", "attn_k")


def neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Return rows [O, ...] of q or k, stored by halves of a head, with the pairs that rotate together side by side."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _check_readers(config: ModelConfig, at: str) -> None:
    """Raise ValueError for settings that files can express and llama.cpp does not read."""
    columns = config.heads * config.head_dim
    if at in _SQUARE and columns != config.hidden:
        raise _inexpressible(
            f": its heads have {columns} columns together and its hidden size is {config.hidden}, and llama.cpp loads "
            f"a {at} only where these are one: keep it in a folder"
        )
    if at == "gemma2" and not config.tied:
        raise _inexpressible(": its LM head is a matrix of its own, and llama.cpp's gemma2 has none")
    if at == "qwen2moe" and config.tied:
        raise _inexpressible(": its LM head is its embedding, and llama.cpp's qwen2moe has a matrix of its own there")
    if config.output_bias and at not in _OUTPUT_BIAS:
        raise _inexpressible(f": its attention ends in a bias, and llama.cpp's {at} has none there")
    if not ARCHITECTURES[at].rotates:
        return
    rope = _full_rope(config)
    if rope.kind == "llama3" and at != "llama":
        raise _inexpressible(f": its rope is llama3, whose factors llama.cpp's {at} does not read")
    for key, standard in YARN_BETAS.items():
        value = getattr(rope, key)
        if rope.kind == "yarn" and value != standard:
            raise _inexpressible(
                f": its rope is YaRN with {key} {value:g}, and llama.cpp takes {standard:g} for every {at}, whatever a "
                f"file says: keep it in a folder. Or give rope_scaling in config.json the {key} {standard:g}, and "
                "measure what that other model is worth"
            )


def _check(config: ModelConfig, metadata: Mapping[str, Any], factors: Mapping[str, Tensor]) -> None:
    """Read the metadata back. Raises ValueError naming the first field that differs."""
    tensors = () if config.tied else (f"{HEAD}.weight",)
    long = Factors(*(factors[each].tolist() for each in FACTORS)) if LONG_FACTORS in factors else None
    try:
        again = read_gguf_config(as_stored(metadata), tensors, config.vocab_size, config.dtype, long)
    except ValueError as error:
        raise _inexpressible(f": {error}") from None
    stored = as_in_files(config)
    for field in fields(ModelConfig):
        ours, theirs = getattr(stored, field.name), getattr(again, field.name)
        if field.name not in _UNSAID and not same(ours, theirs):
            raise _inexpressible(f", which has no words for its {field.name} ({_shown(ours)})")
    for ours, theirs in dict.fromkeys(zip(config.ropes, again.ropes, strict=True)):
        if theirs is not None and ROPE_FACTORS in factors:
            theirs = rope_with_factors(theirs, factors[ROPE_FACTORS].tolist())
        if (ours is None) != (theirs is None):
            raise _inexpressible(f", which has no words for its rope ({_shown(ours)})")
        if ours is not None and theirs is not None and not _turns_alike(ours, theirs, config.context):
            raise _inexpressible(f", which has no words for its rope ({_shown(ours)})")


def _inexpressible(why: str) -> UserError:
    return UserError("gguf_inexpressible", f"the model cannot be written to a GGUF file{why}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _turns_alike(ours: Rope, theirs: Rope, context: int) -> bool:
    """Return whether two ropes give the same angles at every length, to float32."""
    if (ours.dims, ours.sections) != (theirs.dims, theirs.sections):
        return False
    if not same(ours.attention_factor, theirs.attention_factor):
        return False
    pairs = ((frequencies(ours, length), frequencies(theirs, length)) for length in (1, context, 2 * context))
    return all(torch.allclose(a, b, rtol=4 * SAME, atol=0.0) for a, b in pairs)
