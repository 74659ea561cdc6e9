"""Reading the rope of a config.json: `rope_scaling` of transformers 4, `rope_parameters` of transformers 5.

Numbers that follow from others (the attention factors of YaRN and LongRoPE) are computed here by transformers' rules,
so that a `Rope` holds every number its arithmetic needs. A key that no kind of rope has is not used, with a warning, as
in transformers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import get_args

from attar.model.config import Rope, RopeKind
from attar.model.fields import COUNT, LENGTH, Fields, nearest

logger = logging.getLogger(__name__)

ROPES: Mapping[str, RopeKind] = {**{kind: kind for kind in get_args(RopeKind)}, "mrope": "default"}
KEYS = frozenset({
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
    "attention_factor", "short_factor", "long_factor", "mrope_section",
})  # fmt: skip
KINDS_OF_LAYER = ("full_attention", "sliding_attention")


def rope_parameters(f: Fields) -> Fields:
    """Return the flat object that describes the rope: `rope_scaling` of older files or `rope_parameters`."""
    key = "rope_scaling" if f.get("rope_scaling") else "rope_parameters"
    return _parameters(f, key, f.inner(key) or {})


def _parameters(f: Fields, where: str, data: Mapping[str, object]) -> Fields:
    for unknown in sorted(data.keys() - KEYS):
        hint = nearest(unknown, KEYS)
        logger.warning("%s: %s has the key %.60r, which no rope has: it is not used%s", f.where, where, unknown, hint)
    data = {k: v for k, v in data.items() if v is not None}
    defaults = {
        "rope_type": data.get("type", "default"),
        "rope_theta": f.get("rope_theta"),
        "partial_rotary_factor": f.get("partial_rotary_factor"),
        "original_max_position_embeddings": f.get("max_position_embeddings"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    if (outer := f.get("original_max_position_embeddings")) is not None:  # Phi-3 states it beside: that counts
        data["original_max_position_embeddings"] = outer
    return Fields(data, defaults, where=f"{f.where}: {where}")


def read_rope(
    f: Fields, p: Fields, head_dim: int, kinds: Mapping[str, RopeKind] = ROPES, partial: bool = False
) -> Rope:
    """Return the rope of parameters `p`; numbers that follow from others are computed by transformers' rules.

    Raises ValueError naming the key that is missing, malformed or unsupported.
    """
    kind, theta, share = p.choice("rope_type", kinds), p.number("rope_theta", low=1.0), 1.0
    if partial:
        share = p.number("partial_rotary_factor", high=1.0)
    else:
        p.only("partial_rotary_factor", 1.0, "rotating a part of each head in this family")
    dims = int(head_dim * share)
    if dims < 2 or dims % 2:
        raise p.error("partial_rotary_factor", f"and head size {head_dim} leave {dims} rotary columns: must be even")
    rope = Rope(theta, dims, kind, sections=_sections(p, dims))
    if kind == "default":
        return rope
    context = f.integer("max_position_embeddings", high=LENGTH)
    if kind == "dynamic":  # stretches from the declared context, whatever the original one was
        if dims == 2:
            raise p.error("rope_type", "is dynamic, which needs more than two rotary columns")
        return replace(rope, factor=p.number("factor"), original_context=context)
    if kind == "linear":
        return replace(rope, factor=p.number("factor"))
    original = p.integer("original_max_position_embeddings", low=2, high=LENGTH)
    if kind == "llama3":
        low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
        if low >= high:
            raise p.error("low_freq_factor", f"is {low:g}: it must be below high_freq_factor {high:g}")
        return replace(
            rope, factor=p.number("factor"), original_context=original, low_freq_factor=low, high_freq_factor=high
        )
    factor = p.optional_number("factor") or context / original
    rope = replace(rope, factor=factor, original_context=original)
    given = p.optional_number("attention_factor")
    if kind == "yarn":
        return replace(
            rope,
            beta_fast=p.number("beta_fast"),
            beta_slow=p.number("beta_slow"),
            truncate=p.flag("truncate"),
            attention_factor=_yarn_attention(p, factor) if given is None else given,
        )
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        rope,
        short_factor=p.numbers("short_factor", dims // 2),
        long_factor=p.numbers("long_factor", dims // 2),
        attention_factor=stretched if given is None else given,
    )


def _sections(p: Fields, dims: int) -> tuple[int, ...]:
    """Return the pairs that turn by time, height and width (`Rope.sections`); () where a token has one position."""
    if p.get("mrope_section") is None and p.get("rope_type") != "mrope":
        return ()
    sections = p.integers("mrope_section", 0, COUNT)
    if len(sections) != 3 or sum(sections) != dims // 2:
        raise p.error("mrope_section", f"must be three numbers of pairs, {dims // 2} in all")
    return sections


def _stretch(ropes: Collection[Rope | None]) -> float:
    """Return how many times the stated context is what a model supports, whose layers all have the one rope that states
    no context of its own."""
    (rope,) = ropes if len(ropes) == 1 else (None,)
    return max(rope.factor, 1.0) if rope is not None and rope.kind in ("linear", "dynamic") else 1.0


def scaled_context(stated: int, ropes: Collection[Rope | None]) -> int:
    """Return the positions that a model with these different ropes supports, where its config states
    `max_position_embeddings`.

    Model cards add a rope that stretches to configs whose stated context stays the trained one. vLLM's rule: a `linear`
    or `dynamic` rope multiplies it, and `yarn` multiplies the original one. Models whose layers have several ropes
    (Gemma 3) state what they support.
    """
    found = int(stated * _stretch(ropes))
    if len(ropes) == 1:
        found = max(
            [found, *(int(each.original_context * each.factor) for each in ropes if each and each.kind == "yarn")]
        )
    return min(found, LENGTH)


def stated_context(supported: int, ropes: Collection[Rope | None]) -> int:
    """Return the context to state for a model that supports `supported` positions: the inverse of `scaled_context`."""
    return round(supported / _stretch(ropes))


def _yarn_attention(p: Fields, factor: float) -> float:
    """Return YaRN's factor of cos and sin: 0.1 ln(factor) + 1 (Peng et al. 2023, section 3.4); DeepSeek's is a
    ratio."""

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    over, under = (p.optional_number(k, low=-math.ulp(0.0)) for k in ("mscale", "mscale_all_dim"))  # nought: not given
    return grown(over) / grown(under) if over and under else grown(1.0)


def read_gemma3_ropes(f: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """Return the ropes of sliding and of full layers. Scaling in the older form applies to the full ones alone."""
    given = dict(f.inner("rope_parameters") or {})
    each = Fields(given, where=f"{f.where}: rope_parameters")
    unknown = sorted(given.keys() - KINDS_OF_LAYER)
    if unknown:
        known = " and ".join(KINDS_OF_LAYER)
        raise f.error("rope_parameters", f"has {unknown[0]!r}: this family nests its ropes under {known}")
    local = {"rope_theta": f.number("rope_local_base_freq", low=1.0), **(each.inner("sliding_attention") or {})}
    full = {**(each.inner("full_attention") or {}), **(f.inner("rope_scaling") or {})}
    return (
        read_rope(f, _parameters(f, "rope_parameters", local), head_dim),
        read_rope(f, _parameters(f, "rope_scaling" if f.get("rope_scaling") else "rope_parameters", full), head_dim),
    )
