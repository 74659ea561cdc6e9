"""The short name of a recipe, `method[+method]-scheme`, read and written: `rtn-w4g128`, `smoothquant+gptq-w8a8`.

Methods come in two sorts. Transforms (`smoothquant`, `awq`) move scale between a linear and its producer; roundings
(`rtn`, `gptq`) choose codes. A recipe is any transforms followed by one rounding, which is `rtn` where none is named. A
rotation of the whole model may stand in front. `rotate+gptq-w8a8` is folded into the weights and leaves an ordinary
model, which a GGUF file can hold as well (`rotate+gptq-q4_k_m`). `quarot+gptq-w4a4` also rotates the inputs of down at
run time, and `rotate-keep` rounds nothing. `tune`, of the whole model after its last block, may follow, or `distill`,
which also trains on text that the original model writes. A pruning (`magnitude`, `wanda`, `sparsegpt`, `prune`) stands
where a rounding could, and has a sparsity before the scheme, or instead of one: `prune-2:4`, `sparsegpt-s50-w4g128`.
Without a scheme the pruned weights stay dense, in their own dtype. `structured-p25` removes a quarter of the blocks'
weights, leaves a smaller model, and stands alone.

SmoothQuant's three presets (Xiao et al. 2022, table 2) are ways to scale the activations, hence spellings of the
scheme: `w8a8-o1` is w8a8 (per token), `w8a8-o2` w8a8-atensor (per tensor), `w8a8-o3` w8a8-static (fixed at
calibration). The scheme of a GGUF file is a mix of types (`codecs.ggml_mix`), and may stand alone: `q4_k_m`,
`gptq-iq4_xs`.

An unknown word is an error that offers the nearest names. Torch-free.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from attar.compression.recipe.methods import (
    METHODS,
    ROTATIONS,
    ROUNDINGS,
    TRANSFORMS,
    TUNINGS,
    Pass,
    Pruning,
    Rotate,
    Rtn,
    Structured,
    Tune,
)
from attar.errors import UserError, code_of
from attar.formats.codecs import ggml_mix
from attar.formats.scheme import HEADS, Scheme
from attar.formats.weight_formats import WEIGHT_FORMATS, Progressive, Sparse24

Keep = Literal["keep"]
KEEP: Keep = "keep"
"""The word in place of a scheme for a linear that stays unchanged."""

PRESETS: Mapping[str, str] = {"w8a8-o1": "w8a8", "w8a8-o2": "w8a8-atensor", "w8a8-o3": "w8a8-static"}

_EXAMPLES = (
    "rtn-w4g128", "awq-w3g64", "gptq-w4g128", "awq+gptq-w4g128", "smoothquant-w8a8", "smoothquant+gptq-w8a8",
    "rotate+gptq-w8a8", "quarot+gptq-w4a4", "prune-2:4", "prune-s50",
)  # fmt: skip
_KNOWN = (*_EXAMPLES, *ggml_mix.MIXES)
MOST_OFFERED = 60  # names in a sentence; models have more linears
_SCHEMES = ("w4g128", "w4g64", "w4g32", "w3g128", "w3g64", "w2g64", "w4g128-asym", "w8", "w8a8", "fp8", "fp8-e5m2")


@dataclass(frozen=True, slots=True)
class Spelling:
    """Parsed content of a short name, each method with its defaults. Fields are those of `Recipe`."""

    passes: tuple[Pass, ...]
    scheme: Scheme | None
    mix: str | None = None
    rotate: Rotate | None = None
    tune: Tune | None = None

    @property
    def name(self) -> str:
        """Return the canonical name: two spellings of one recipe have the same."""
        methods = [*([self.rotate.method] if self.rotate is not None else []), *(p.method for p in self.passes)]
        if len(methods) > 1 and methods[-1] == "rtn":
            methods.pop()
        if self.tune is not None:
            methods.append(self.tune.method)
        if self.mix is not None:
            return self.mix if methods == ["rtn"] else f"{'+'.join(methods)}-{self.mix}"
        last, sparsity = self.passes[-1], list[str]()
        if isinstance(last, Pruning):
            sparsity = [last.sparsity]
        if isinstance(last, Structured):
            sparsity = [f"p{last.percent}"]
        stored = [self.scheme.name] if self.scheme is not None else [KEEP] * (not sparsity)
        return "-".join(["+".join(methods), *sparsity, *stored])


def parse(name: str) -> Spelling:
    """Parse a short name. Raises ValueError on anything unknown or out of place."""
    try:
        return _parse(name)
    except ValueError:
        if (meant := _meant(name)) is None:
            raise
        raise UserError("recipe_unknown", f"unknown recipe {name!r}: did you mean {meant}?") from None


def _meant(name: str) -> str | None:
    """Return the recipe meant by a name in capitals, or by a scheme alone; None for any other."""
    small = name.lower()
    with suppress(ValueError):
        _parse(small)
        return small
    with suppress(ValueError):
        pruned = isinstance(Scheme.parse(PRESETS.get(small, small)).weight, Sparse24)
        return f"{'prune-2:4' if pruned else 'rtn'}-{small}"
    return None


def _parse(name: str) -> Spelling:
    methods, dash, scheme = name.partition("-")
    words = methods.split("+")
    rotate = ROTATIONS[words.pop(0)]() if dash and words[0] in ROTATIONS else None
    tune = TUNINGS[words.pop()]() if dash and words and words[-1] in TUNINGS else None
    if rotate is not None and scheme == KEEP:
        if words or tune is not None or rotate.online:
            raise UserError(
                "recipe_conflict",
                f"recipe {name!r}: what is kept is not rounded, nor rotated at run time: rotate-{KEEP}",
            )
        return Spelling((Rtn(),), None, rotate=rotate)
    found = _parse_passes(f"{'+'.join(words or ['rtn'])}-{scheme}" if rotate or tune else name)
    if tune is not None and found.mix in ggml_mix.DENSE_MIXES:
        raise UserError(
            "recipe_without_effect",
            f"recipe {name!r}: {found.mix} holds plain numbers, which leave {tune.method} no scales",
        )
    if rotate is not None and isinstance(found.passes[-1], Structured):
        raise UserError(
            "recipe_conflict",
            f"recipe {name!r}: {rotate.method} mixes the columns that structured pruning chooses among",
        )
    return replace(found, rotate=rotate, tune=tune)


def _parse_passes(name: str) -> Spelling:
    if ggml_mix.find(name) is not None:
        return _with_mix((Rtn(),), name)
    methods, dash, scheme = name.partition("-")
    if not dash or not scheme:
        raise UserError(
            "recipe_malformed", f"recipe {name!r} is not of the form method[+method]-scheme{offer(name, _KNOWN)}"
        )
    passes: list[Pass] = []
    for word in methods.split("+"):
        if word in ROTATIONS:
            raise UserError(
                "recipe_malformed", f"recipe {name!r}: {word} is of the whole model, so it comes first, and once"
            )
        if word not in METHODS:
            offered = (*ROTATIONS, *METHODS, *TUNINGS)
            raise UserError("method_unknown", f"recipe {name!r}: unknown method {word!r}{offer(word, offered)}")
        if any(p.method == word for p in passes):
            raise UserError("recipe_malformed", f"recipe {name!r} names {word} twice")
        if passes and passes[-1].method not in TRANSFORMS:
            does = "codes" if passes[-1].method in ROUNDINGS else "zeros"
            raise UserError(
                "recipe_malformed",
                f"recipe {name!r}: {passes[-1].method} chooses the {does}, so it comes last, and alone",
            )
        passes.append(METHODS[word]())
    if isinstance(last := passes[-1], Pruning):
        sparsity, _, scheme = scheme.partition("-")
        passes[-1] = replace(last, sparsity=sparsity)
        if len(passes) > 1 and not scheme:
            raise UserError(
                "recipe_without_effect",
                f"recipe {name!r}: {passes[0].method} prepares weights for a scheme, and there is none",
            )
        return Spelling(tuple(passes), parse_scheme(scheme) if scheme else None)
    if isinstance(last, Structured):
        percent = scheme.removeprefix("p")
        if len(passes) > 1 or not scheme.startswith("p") or not percent.isdecimal() or not percent.isascii():
            raise UserError(
                "recipe_malformed",
                f"recipe {name!r}: structured pruning stands alone, with a percentage: structured-p25",
            )
        return Spelling((replace(last, percent=int(percent)),), None)
    if passes[-1].method not in ROUNDINGS:
        passes.append(Rtn())
    if scheme.lower() in ggml_mix.MIXES and scheme not in WEIGHT_FORMATS:  # a type alone is the type of every linear
        return _with_mix(tuple(passes), scheme)
    return Spelling(tuple(passes), parse_scheme(scheme))


def _with_mix(passes: tuple[Pass, ...], name: str) -> Spelling:
    mix = ggml_mix.find(name)
    assert mix is not None
    if mix.base.name in ggml_mix.DENSE and passes != (Rtn(),):
        raise UserError(
            "recipe_without_effect",
            f"{mix.name} holds plain numbers, which leave {passes[-1].method} nothing to choose",
        )
    return Spelling(passes, ggml_mix.scheme(mix.base), mix=mix.name)


def parse_scheme(name: str) -> Scheme:
    """Parse a word for a scheme. Raises ValueError on anything unknown, naming what is near."""
    try:
        return Scheme.parse(PRESETS.get(name, name))
    except ValueError as error:
        raise UserError(code_of(error), f"{error}{nearest(name, (*_SCHEMES, *PRESETS, *WEIGHT_FORMATS))}") from None


def parse_head(word: object) -> Scheme | Keep:
    """Parse a user's word for the LM head. Raises ValueError on anything unknown, naming what is near."""
    if not isinstance(word, str):
        raise UserError("recipe_malformed", f"head is bf16, int8, int4 or a scheme, not {word!r}")
    name = HEADS.get(word, word) or KEEP
    if name == KEEP:
        return KEEP
    try:
        scheme = Scheme.parse(name)
    except ValueError:
        raise UserError("scheme_unknown", f"unknown head {word!r}{offer(word, (*HEADS, KEEP, *_SCHEMES))}") from None
    if isinstance(scheme.weight, Progressive):
        raise UserError("scheme_unsupported", f"head {word!r}: weights of two levels are for the blocks' linears alone")
    return scheme


def offer(word: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence: the nearest known names, or all of them where none is near."""
    names = sorted(known)
    if close := nearest(word, names):
        return close
    if len(names) <= MOST_OFFERED:
        return f": known are {', '.join(names)}"
    return f": the nearest of {len(names)} are {', '.join(difflib.get_close_matches(word, names, n=12, cutoff=0))}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence: the known names that are near, if any."""
    close = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.5)
    return f": did you mean {' or '.join(close)}?" if close else ""
