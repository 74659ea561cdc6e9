"""Configuration of the model in a GGUF file: its metadata as a `ModelConfig`.

The metadata hold the settings of config.json under other names. So they are read, each checked under its name in the
file, into the keys of config.json, and the family's own reader (`model.families`) makes the config: one implementation
of an architecture for both kinds of files. `families.py` beside this module says what each architecture adds. The two
kinds of files differ in these points:

* a file has no `tie_word_embeddings`: a model is tied where `output.weight` is missing;
* `vocab_size` is the rows of `token_embd.weight`: the key of that name is often missing, and counts no padding;
* Llama 3's scaling of the rope is not described but applied: `rope_freqs.weight` holds the number that divides the
  frequency of each pair. Where the usual settings give these numbers the rope is called llama3 as in config.json;
  otherwise they are kept as they are (a longrope whose factors do not depend on the length);
* the tokenizer provides the tokens that end a text, because it knows more of them than `tokenizer.ggml.eos_token_id`;
* in files of the `llama` architecture the rows of q and k are in another order, since llama.cpp rotates neighbours
  there, and not the halves of a head: `interleaved` marks them;
* the weights of Gemma's norms are stored with the one that the family adds to them, so `norm_offset` is 0;
* every matrix is stored [out, in], GPT-2's too.

Torch-free.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attar.checkpoints.gguf.families import ARCHITECTURES, Architecture, Factors, scaling
from attar.checkpoints.gguf.names import HEAD, ROPE_FACTORS
from attar.errors import UserError, code_of
from attar.model.config import ModelConfig, Rope
from attar.model.families import ARCHITECTURES as FAMILIES
from attar.model.families import read_config
from attar.model.fields import COUNT, EPSILON, LENGTH, Fields, nearest

BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Settings that llama.cpp reads as one number or as one a layer."""
LLAMA3_FACTORS, LLAMA3_CONTEXT = (8.0, 32.0), 8192
"""Settings of Llama 3's rope in circulation, beside its bounds of 1 and 4 turns."""
SAME_FACTOR = 1e-4  # relative; the file's factors are rounded to float32


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file. Raises ValueError for an unsupported one, naming the supported ones."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(
            "architecture_unsupported",
            f"general.architecture is {reprlib.repr(name)}: attar reads GGUF files of {', '.join(ARCHITECTURES)}"
            + (nearest(name, ARCHITECTURES) if isinstance(name, str) else ""),
        )
    return ARCHITECTURES[name]


def read_gguf_config(
    metadata: Mapping[str, Any], names: Collection[str], vocab: int, dtype: str, factors: Factors | None = None
) -> ModelConfig:
    """Return the model that the metadata describe.

    `names` are the file's tensors, `vocab` the rows of its embedding, `factors` those of a longrope where the file has
    them. Raises ValueError naming the key that is missing, of the wrong type, out of bounds, or not supported.
    """
    config = config_json(metadata, names, vocab, dtype, factors)
    bos = Fields(metadata, where="metadata").optional_integer("tokenizer.ggml.bos_token_id", low=-LENGTH, high=LENGTH)
    try:
        found = read_config(config)
    except ValueError as error:  # errors of the family's reader name keys of config.json
        raise UserError(code_of(error), f"metadata: {str(error).removeprefix('config.json: ')}") from None
    return replace(as_in_files(found), bos_ids=(bos,) if bos is not None and 0 <= bos < vocab else (), eos_ids=())


def as_in_files(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model whose weights are stored as GGUF files store them."""
    return replace(config, norm_offset=0.0, names=replace(config.names, transposed=False))


def config_json(
    metadata: Mapping[str, Any], names: Collection[str], vocab: int, dtype: str, factors: Factors | None = None
) -> dict[str, object]:
    """Return the metadata in the keys of config.json. Arguments and errors as `read_gguf_config`."""
    family = architecture(metadata)
    at = metadata["general.architecture"]
    f = Fields(_by_layer(metadata, at), where="metadata")
    count = f.optional_integer(f"{at}.expert_count", low=0, high=COUNT)
    if count and not family.experts:
        known = ", ".join(name for name, each in ARCHITECTURES.items() if each.experts)
        raise f.error(
            f"{at}.expert_count", f"is set: mixtures of experts are read of {known} alone", "feature_unsupported"
        )
    hidden, heads = f.integer(f"{at}.embedding_length"), f.integer(f"{at}.attention.head_count", high=COUNT)
    size = f.optional_integer(f"{at}.attention.key_length", high=COUNT)
    if size is None:
        if hidden % heads:
            raise f.error(f"{at}.attention.head_count", f"is {heads}, which does not divide the {hidden} columns")
        size = hidden // heads
    whole = ("attention.value_length", *([] if family.partial else ["rope.dimension_count"]))
    for key in (f"{at}.{each}" for each in whole):
        given = f.optional_integer(key, high=COUNT)
        if given is not None and given != size:
            raise f.error(
                key,
                f"is {given}, and heads have {size} columns: a part of a head is not supported",
                "feature_unsupported",
            )
    found: dict[str, object] = {
        "architectures": [family.experts if family.experts and count else family.name],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": f.integer(f"{at}.feed_forward_length"),
        "num_hidden_layers": f.integer(f"{at}.block_count", high=COUNT),
        "num_attention_heads": heads,
        "num_key_value_heads": f.optional_integer(f"{at}.attention.head_count_kv", high=COUNT) or heads,
        "head_dim": size,
        "max_position_embeddings": f.integer(f"{at}.context_length", high=LENGTH),
        "rms_norm_eps": f.number(f"{at}.attention.{family.epsilon}", high=EPSILON),
        "tie_word_embeddings": f"{HEAD}.weight" not in names,
        "dtype": dtype,
    }
    if family.rotates:
        found["rope_theta"] = f.optional_number(f"{at}.rope.freq_base", low=1.0) or 10000.0
        if not family.partial:
            found["rope_scaling"] = scaling(f, at)
    found |= family.more(f, at, found, factors)
    aliases = FAMILIES[family.name].aliases if family.renamed else {}
    return {aliases.get(key, (key,))[0]: value for key, value in found.items()}


def _by_layer(metadata: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    """Return the metadata with one number for each setting that a file may list layer by layer, and that all layers
    share here. Raises ValueError where layers differ."""
    found, layers = {}, metadata.get(f"{at}.block_count")
    for key in (f"{at}.{each}" for each in BY_LAYER):
        given = metadata.get(key)
        if isinstance(given, Collection) and not isinstance(given, str) and len(given) == layers:
            values = set(given)
            if len(values) > 1:
                raise UserError(
                    "feature_unsupported",
                    f"metadata: {key} differs from layer to layer: layers of different shapes are not supported",
                )
            found[key] = values.pop()
    return {**metadata, **found} if found else metadata


def rope_with_factors(rope: Rope, factors: Sequence[float]) -> Rope:
    """Return a default rope with frequencies divided by `factors` [dims / 2]. Raises ValueError if they do not fit."""
    assert len(factors) == rope.dims // 2, (len(factors), rope.dims)
    if rope.kind != "default":
        raise UserError("config_invalid", f"{ROPE_FACTORS} is there although the rope is {rope.kind}")
    if not all(0 < factor < math.inf for factor in factors):
        raise UserError("config_invalid", f"{ROPE_FACTORS} must hold positive numbers")
    for factor in LLAMA3_FACTORS:
        known = replace(rope, kind="llama3", factor=factor, original_context=LLAMA3_CONTEXT)
        if all(math.isclose(a, b, rel_tol=SAME_FACTOR) for a, b in zip(factors, _llama3(known), strict=True)):
            return known
    same = tuple(factors)
    return replace(rope, kind="longrope", original_context=2, short_factor=same, long_factor=same)


def _llama3(rope: Rope) -> list[float]:
    """Return Llama 3.1's divisor of each pair's frequency; `model.rope` computes the frequencies themselves."""
    factors = []
    for pair in range(rope.dims // 2):
        turns = rope.original_context / (2 * math.pi) * rope.theta ** (-2 * pair / rope.dims)
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / (smooth + (1 - smooth) / rope.factor))
    return factors
