"""A recipe: the passes over a model, their order, and the scheme of each linear. Pure data.

A recipe has a short name, `method[+method]-scheme` (`parser`): `rtn-w4g128`, `awq-w3g64`, `smoothquant+gptq-w8a8`.
Options and per-layer overrides come from a YAML file (`recipe_file`).

The LM head, `lm_head`, stays unless `head` (or an override, or a `keep` that leaves it out) says otherwise. `head` is
bf16 (unchanged), int8, int4 (for which a GGUF file has types of its own), or a scheme of weights alone. The LM head can
be larger than several blocks and is never in memory whole. It is rounded to nearest, rows after rows, whatever the
method, with the method's `scale_search`.

Unknown words are errors that offer the nearest names. So are options that none of the schemes reads: a silently ignored
option costs hours. `to_dict` is canonical (two spellings of one recipe give one dict, defaults written out) because the
receipt stores it and a resumed run compares it. Not done: options per layer. An override changes the scheme, never the
method, so that the block pass stays the same for every recipe. Torch-free: planners read recipes too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from attar.compression.recipe.methods import (
    ActivationRange,
    AutoRound,
    Awq,
    Gptq,
    Hqq,
    Pass,
    Prune,
    Pruning,
    Rotate,
    Rtn,
    SpinQuant,
    SqueezeLlm,
    Structured,
    Tune,
)
from attar.compression.recipe.parser import KEEP, Keep, Spelling, offer, parse_head
from attar.compression.recipe.pattern import Pattern
from attar.errors import UserError, code_of
from attar.formats.codecs import ggml_mix
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp4, GgmlBlocks, Lookup, Progressive, Sparse24, WeightFormat

HEAD = "lm_head"
"""The LM head's name in every family."""

KEPT = (HEAD, "*.mlp.gate", "*.block_sparse_moe.gate", "*.shared_expert_gate")
"""Kept by default: the LM head, and the routers of mixtures of experts, tiny matrices whose error picks the wrong
expert."""

FILE_HEADS: Mapping[str, str] = {"int8": "q8_0", "int4": "q4_0"}
"""GGUF types of the words for an LM head."""


@contextmanager
def naming(name: str, before: str = "") -> Iterator[None]:
    """Prefix a name to the message of a ValueError raised within: that of the linear, or of the recipe."""
    try:
        yield
    except ValueError as error:
        raise UserError(code_of(error), f"{before}{name}: {error}") from None


@dataclass(frozen=True, slots=True)
class Override:
    """Linears whose module name matches the glob `match` are stored in `scheme`; where it is None, they stay
    unchanged."""

    match: str
    scheme: Scheme | None


def _first(overrides: Sequence[Override]) -> Callable[[str], Override | None]:
    """Return a function that finds the first override matching a name. Where bits were chosen for each linear there are
    as many overrides as linears, and each names one. Those are looked up, not tried on all other names."""
    named: dict[str, int] = {}
    globs = []
    for at, each in enumerate(overrides):
        if any(mark in each.match for mark in "*?["):
            globs.append(at)
        else:
            named.setdefault(each.match, at)

    def find(name: str) -> Override | None:
        found = named.get(name, len(overrides))
        found = next((at for at in globs if at < found and fnmatch.fnmatchcase(name, overrides[at].match)), found)
        return overrides[found] if found < len(overrides) else None

    return find


@dataclass(frozen=True, slots=True)
class Recipe:
    """The passes to run, the scheme of every linear they reach, and the linears they leave alone. Only linears are ever
    compressed: embeddings and norms stay, whatever a pattern says, but for an embedding that is also the LM head. The
    first override that matches a linear decides; then `keep`; then the default `scheme`. For the LM head `head` decides
    before them all, unless it is None."""

    passes: tuple[Pass, ...]
    scheme: Scheme | None  # None: pruned or only rotated weights stay dense
    overrides: tuple[Override, ...] = ()
    keep: tuple[str, ...] = KEPT
    head: Scheme | Keep | None = None
    tune: Tune | None = None  # training after the last block
    mix: str | None = None  # of a GGUF file: `codecs.ggml_mix` chooses the scheme of each matrix; nothing is kept
    rotate: Rotate | None = None  # rotation before the first block
    activation_range: ActivationRange = "minmax"  # of scales that are fixed at calibration
    said: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Options that were set explicitly, and the method of each: those that nothing reads are rejected."""
    head_word: str | None = field(default=None, compare=False)
    """The word that `head` was given by, if it was: in a GGUF file it may mean something else."""

    @property
    def name(self) -> str:
        """Return the canonical short name; it omits options, overrides, `keep` and `head`."""
        return Spelling(self.passes, self.scheme, self.mix, self.rotate, self.tune).name

    @property
    def pruning(self) -> Pruning | None:
        """Return the last pass, where it prunes."""
        last = self.passes[-1]
        return last if isinstance(last, Pruning) else None

    @property
    def structured(self) -> Structured | None:
        """Return the one pass, where it removes structures."""
        last = self.passes[-1]
        return last if isinstance(last, Structured) else None

    def reshapes(self, module: str) -> bool:
        """Return whether the linear with this module name gets zeros, or may lose rows or columns."""
        return module != HEAD if self.structured is not None else self.pattern_for(module) is not None

    @property
    def rounding(self) -> Rtn | Gptq | AutoRound | Hqq | SqueezeLlm | Pruning | Structured:
        """Return the last pass, which chooses the codes."""
        last = self.passes[-1]
        assert isinstance(last, Rtn | Gptq | AutoRound | Hqq | SqueezeLlm | Pruning | Structured)
        return last

    @property
    def corrects(self) -> bool:
        """Return whether the last pass corrects for earlier rounding, and so reads the original model's states too."""
        return isinstance(self.rounding, Gptq | Prune | AutoRound | Structured) and self.rounding.correct

    @property
    def guide(self) -> int:
        """Return the number of gradient-weighted Hessians of a linear; 0: one, unweighted."""
        return self.rounding.guide if isinstance(self.rounding, Gptq | Prune) else 0

    @property
    def couples(self) -> bool:
        """Return whether rows compensate for one another, as the loss couples them."""
        return isinstance(self.rounding, Gptq) and self.rounding.couple

    def pattern_for(self, module: str) -> Pattern | None:
        """Return the pattern of zeros of the linear with this module name, or None. The LM head never has one."""
        if self.pruning is None or module == HEAD:
            return None
        for override in self.overrides:
            if fnmatch.fnmatchcase(module, override.match):
                return None if override.scheme is None else self.pruning.pattern
        return None if any(fnmatch.fnmatchcase(module, pattern) for pattern in self.keep) else self.pruning.pattern

    def scheme_for(
        self, module: str, mixed: Scheme | None = None, first: Callable[[str], Override | None] | None = None
    ) -> Scheme | None:
        """Return the scheme of the linear with this module name; None where it stays unchanged. `mixed` is the scheme
        by the mix of the recipe, which only an explicit choice of the user overrides. `first` is `_first` of the
        overrides, for callers with many names."""
        if module == HEAD and self.head is not None:
            return None if self.head == KEEP else self.head
        if (override := (first or _first(self.overrides))(module)) is not None:
            return override.scheme
        if mixed is not None and self.keep == KEPT:
            return mixed
        return None if any(fnmatch.fnmatchcase(module, pattern) for pattern in self.keep) else mixed or self.scheme

    def schemes(
        self, shapes: Mapping[str, tuple[int, int]], mixed: Mapping[str, Scheme] | None = None
    ) -> dict[str, Scheme | None]:
        """Return the scheme of each linear, given the module name and shape (out, in) of all of them. `mixed` holds the
        schemes by the mix, where the recipe has one. Raises ValueError where an override matches no linear, and, naming
        the linear, where a group size does not divide its columns or a scheme is not for the LM head. Also raises it
        where no scheme reads an option that was set: all before any work is done."""
        for method, key in self.said:
            self._check_read(method, key)
        for override in self.overrides:
            if override.match not in shapes and not any(fnmatch.fnmatchcase(name, override.match) for name in shapes):
                raise UserError(
                    "override_invalid", f"override {override.match!r} matches no linear{offer(override.match, shapes)}"
                )
        first = _first(self.overrides)
        chosen = {name: self.scheme_for(name, None if mixed is None else mixed[name], first) for name in shapes}
        if self.structured is not None and (self.overrides or self.keep != KEPT):
            raise UserError(
                "recipe_conflict",
                "structured pruning leaves all layers of one size: it takes no overrides and keeps none",
            )
        for name, (_, columns) in shapes.items():
            if (sparsity := self.pattern_for(name)) is not None:
                with naming(name):
                    _check_sparsity(sparsity, chosen[name], columns)
        for name, scheme in chosen.items():
            if scheme is not None:
                with naming(name):
                    scheme.check(shapes[name][1])
                    if name != HEAD:
                        self._check_rounding(scheme, shapes[name][1])
                    elif scheme.activation is not None or not scheme.weight.by_row:
                        raise UserError(
                            "scheme_unsupported",
                            "the LM head has a scheme of weights alone, with a scale for each row or group, such "
                            f"as w8 or w4g128, not {scheme.name}",
                        )
        return chosen

    def check_read(self, plans: Sequence[Recipe]) -> None:
        """Raise ValueError where none of `plans`, this recipe with other schemes, reads an option that was set."""
        for method, key in self.said:
            for at, plan in enumerate(plans, 1):
                try:
                    plan._check_read(method, key)
                    break
                except ValueError:
                    if at == len(plans):
                        raise

    def _check_read(self, method: str, key: str) -> None:
        """Raise ValueError where the recipe has no scheme that the option is for."""
        others = [each.scheme for each in self.overrides if each.match != HEAD]
        blocks = [scheme.weight for scheme in (self.scheme, *others) if scheme is not None]
        head = self.scheme_for(HEAD)
        if key == "scale_search":
            of_head = isinstance(self.rounding, Hqq | SqueezeLlm | Structured)
            if self.pruning is not None:  # a sparse weight is rounded as a dense one
                blocks = [each.values if isinstance(each, Sparse24) and each.values else each for each in blocks]
            read = any(map(_is_searched, [*([] if of_head else blocks), *([] if head is None else [head.weight])]))
            schemes = "grids of integers such as w4g128, for nvfp4 and mxfp4, and for two levels such as qserve-g128"
            what = f"for a head in {schemes}" if of_head else f"for {schemes}"
        elif key == "static_groups":
            read = any(isinstance(each, Grid | Progressive) for each in blocks)  # `_check_rounding` says more
            what = "for grids such as w4g128: all others have their scales from the start"
        elif (method, key) == (Awq.method, "clip"):
            read = any(isinstance(each, Grid | Progressive) for each in blocks)
            what = "for grids such as w4g128, and for two levels such as qserve-g128"
        else:
            return
        if not read:
            raise UserError(
                "method_option_unused", f"{key} of {method} is {what}; {self.name} has none, so leave it out"
            )

    def _check_rounding(self, scheme: Scheme, columns: int) -> None:
        """Raise ValueError where the last pass cannot round a linear to its scheme."""
        method, form = self.rounding.method, scheme.weight
        if isinstance(self.rounding, AutoRound | Hqq) and not (isinstance(form, Grid) and form.kind == "int"):
            raise UserError(
                "scheme_unsupported", f"{method} is for grids such as w4g128; {scheme.name} is for rtn and gptq"
            )
        if isinstance(self.rounding, Gptq) and isinstance(form, Sparse24):
            raise UserError("scheme_unsupported", f"{scheme.name} is for what is pruned, as by prune-2:4-{scheme.name}")
        if isinstance(self.rounding, SqueezeLlm) and not isinstance(form, Lookup):
            raise UserError(
                "scheme_unsupported", f"{method} finds tables such as lut4, lut3-s45 or lut4-s5, not {scheme.name}"
            )
        if isinstance(self.rounding, Gptq) and isinstance(form, GgmlBlocks) and form.type.elements == 1:
            raise UserError(
                "recipe_without_effect",
                f"no quantized type takes rows of {columns} columns, so {self.mix or scheme.name} leaves them in 16 "
                f"bits, and {method} has nothing to round: leave {method} out, or override that linear",
            )
        if isinstance(self.rounding, Gptq) and isinstance(form, Progressive) and not self.rounding.static_groups:
            raise UserError(
                "recipe_conflict", f"{scheme.name} sets a row's scale for all its groups: leave static_groups on"
            )
        if self.couples and not isinstance(form, Grid | GgmlBlocks | Progressive):
            raise UserError(
                "scheme_unsupported",
                f"{method} lets rows make up for one another on grids and GGUF types only: {scheme.name} is for rtn, "
                "gptq and qronos",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready, canonical dict: equal recipes give equal dicts."""
        found = {
            "recipe": self.name,
            "passes": [{"method": p.method, **asdict(p)} for p in self.passes],
            "scheme": KEEP if self.scheme is None else self.scheme.name,
            "overrides": [{"match": o.match, "scheme": o.scheme.name if o.scheme else KEEP} for o in self.overrides],
            "keep": list(self.keep),
            "head": self.head_name,
        } | {
            key: {"method": each.method, **asdict(each)} if key == "rotate" else asdict(each)
            for key, each in (("rotate", self.rotate), ("tune", self.tune))
            if each is not None
        }
        return found | ({} if self.activation_range == "minmax" else {"activation_range": self.activation_range})

    @property
    def head_name(self) -> str:
        """Return the name of the LM head's scheme, or `keep`; where a mix decides about it, the mix."""
        scheme = self.scheme_for(HEAD, None if self.mix is None else self.scheme)
        if scheme is None:
            return KEEP
        said = self.head is not None or any(fnmatch.fnmatchcase(HEAD, each.match) for each in self.overrides)
        return scheme.name if said or self.mix is None else self.mix

    def with_head(self, word: object) -> Recipe:
        """Return the recipe with a user's word for the LM head. Raises ValueError as `parse_head`."""
        return replace(self, head=parse_head(word), head_word=str(word))

    def for_file(self) -> Recipe:
        """Return the recipe for a GGUF file. There a type stands for the mix of its name, as in llama.cpp, and words
        for the LM head stand for types. SpinQuant learns only the rotations that weights absorb, unless more was asked
        for. Raises ValueError where the scheme is not a GGML type, and where inputs are to be rotated at run time."""
        named = None if self.scheme is None else self.mix or self.scheme.name
        mix = None if named is None else ggml_mix.find(named)
        if mix is None:
            raise UserError(
                "gguf_inexpressible",
                f"{self.name} has no place in a GGUF file, which holds types and mixes such as q4_k_m or q6_k: name "
                "one, or an output that does not end in .gguf",
            )
        rotate = self.rotate
        if isinstance(rotate, SpinQuant) and (rotate.method, "online") not in self.said:
            rotate = replace(rotate, online=False)
        if rotate is not None and (rotate.online or rotate.across):
            word, reader = ("online", "down") if rotate.online else ("across", "o")
            raise UserError(
                "gguf_inexpressible",
                f"{self.name} with {word}: true rotates what {reader} reads at run time, which no program that reads "
                f"GGUF files does: say {word}: false, or use rotate or spinquant, which a file's weights take in",
            )
        meant = FILE_HEADS.get(self.head_word or "")
        return replace(self, mix=mix.name, rotate=rotate, head=self.head if meant is None else parse_head(meant))


def _check_sparsity(sparsity: Pattern, scheme: Scheme | None, columns: int) -> None:
    sparsity.check(columns)
    if scheme is not None and isinstance(scheme.weight, Sparse24):
        if sparsity.name != "2:4":
            raise UserError("sparsity_invalid", f"{scheme.name} stores 2:4 sparse weights, not {sparsity.name}")
    elif scheme is not None and not isinstance(scheme.weight, Grid):
        raise UserError(
            "scheme_unsupported",
            f"what is pruned is rounded to a grid with a zero, such as w4g128, not {scheme.name}",
        )


def _is_searched(form: WeightFormat) -> bool:
    """Return whether a `scale_search` finds the scales of this form."""
    return isinstance(form, Fp4 | Progressive) or (isinstance(form, Grid) and form.kind == "int")
