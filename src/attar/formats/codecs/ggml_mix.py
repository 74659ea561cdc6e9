"""Mixes: the GGML type of each matrix in a file called Q4_K_M, Q3_K_S, IQ4_XS and so on. Torch-free.

A file's name is not one type. The gain of an extra byte differs between matrices, so llama.cpp gives more to those
found to need it: the value projection, which grouped queries make small; the feed-forward's down projection, in the
first layers and every third of the others; the LM head. Stacked and shared experts have the rules of a dense
feed-forward, and attention beside exactly eight experts has more bits, as in Mixtral. `choose` follows its rules, so a
file written here has the types and the size of llama.cpp's file of that name: comparing the two compares the rounding.

Rows that a type's blocks of 256 do not divide get another type, as in llama.cpp: of 32, and as many bits or more. The
size then differs from the one asked for, so `choose` returns the wanted type too, for callers to report.

Not covered: architectures that attar does not write, and types below 2.6 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attar.formats.codecs.ggml import TYPES, GgmlType
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import GgmlBlocks

EMBED, HEAD, VALUES = "token_embd", "output", "attn_v"
"""Matrices that rules name, as GGUF files call them."""

DENSE = ("F32", "F16", "BF16")
"""Types whose rows are plain numbers."""

DENSE_MIXES = tuple(name.lower() for name in DENSE)
"""Mixes of plain numbers alone."""


@dataclass(frozen=True, slots=True)
class About:
    """Properties of a model that the rules use. `calibrated`: importances are known. `experts`: of each layer."""

    layers: int
    heads: int
    kv_heads: int
    tied: bool
    calibrated: bool
    experts: int = 0

    @property
    def shared(self) -> bool:
        """Return whether four or more query heads share one value head."""
        return self.heads >= 4 * self.kv_heads

    @property
    def seventy(self) -> bool:
        """Return whether the model has the shape of Llama 2 70B, which has a rule of its own."""
        return self.layers == 80 and self.heads != self.kv_heads


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix: the type of matrices without a rule, its number in `general.file_type`, and rules by matrix. A matrix's
    rules are pairs of a type and a condition (a key of `_HOLDS`). The first condition that holds decides."""

    name: str
    base: GgmlType
    file_type: int
    rules: Mapping[str, tuple[tuple[str, str], ...]]


def _mix(name: str, base: str, file_type: int, **rules: tuple[tuple[str, str], ...]) -> Mix:
    return Mix(name, TYPES[base], file_type, rules)


_MORE = (("Q6_K", "more"),)
_IQ4 = {"attn_v": (("Q5_K", "shared"),), "ffn_down": (("Q5_K", "first 8th, uncalibrated"),)}

MIXES: Mapping[str, Mix] = {
    each.name: each
    for each in (
        _mix("f32", "F32", 0),
        _mix("f16", "F16", 1),
        _mix("bf16", "BF16", 32),
        _mix("q8_0", "Q8_0", 7),
        _mix("q5_1", "Q5_1", 9),
        _mix("q5_0", "Q5_0", 8, ffn_down=(("Q5_1", "first 8th, calibrated"),)),
        _mix("q4_1", "Q4_1", 3),
        _mix("q4_0", "Q4_0", 2, ffn_down=(("Q4_1", "first 8th, calibrated"),)),
        _mix("q6_k", "Q6_K", 18),
        _mix("q5_k_m", "Q5_K", 17, attn_v=_MORE, ffn_down=_MORE),
        _mix("q5_k_s", "Q5_K", 16),
        _mix("q4_k_m", "Q4_K", 15, attn_v=_MORE, ffn_down=_MORE),
        _mix("q4_k_s", "Q4_K", 14, attn_v=(("Q5_K", "first 4"),), ffn_down=(("Q5_K", "first 8th"),)),
        _mix(
            "q3_k_l", "Q3_K", 13, attn_v=(("Q5_K", "all"),),
            attn_output=(("Q5_K", "all"),), ffn_down=(("Q5_K", "all"),),
        ),
        _mix(
            "q3_k_m", "Q3_K", 12, attn_v=(("Q5_K", "first 2"), ("Q4_K", "all")),
            attn_output=(("Q4_K", "all"),),
            ffn_down=(("Q5_K", "first 16th"), ("Q4_K", "all")),
        ),
        _mix("q3_k_s", "Q3_K", 11),
        _mix(
            "q2_k", "Q2_K", 10,
            attn_v=(("Q4_K", "shared"), ("Q3_K", "all")), attn_output=(("Q3_K", "all"),), ffn_down=(("Q3_K", "all"),),
        ),
        _mix("q2_k_s", "Q2_K", 21, attn_v=(("Q4_K", "shared"),), ffn_down=(("Q4_K", "first 8th"),)),
        _mix("iq4_nl", "IQ4_NL", 25, **_IQ4),
        _mix("iq4_xs", "IQ4_XS", 30, **_IQ4),
    )
}  # fmt: skip
"""Every mix by name."""

ALIASES: Mapping[str, str] = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
"""Mixes that llama.cpp reads these names as."""

_HOLDS: Mapping[str, Callable[[int, About], bool]] = {
    "all": lambda layer, about: True,
    "more": lambda layer, about: _more(layer, about.layers),
    "shared": lambda layer, about: about.shared,
    "first 2": lambda layer, about: layer < 2,
    "first 4": lambda layer, about: layer < 4,
    "first 8th": lambda layer, about: layer < about.layers // 8,
    "first 16th": lambda layer, about: layer < about.layers // 16,
    "first 8th, calibrated": lambda layer, about: about.calibrated and layer < about.layers // 8,
    "first 8th, uncalibrated": lambda layer, about: not about.calibrated and layer < about.layers // 8,
}

EIGHT = 8
"""Experts of a Mixtral, whose attention is a small part of it and gets more bits."""

_OUTPUT_OF_EIGHT = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")
"""Mixes that give the output of attention beside eight experts Q5_K."""

_SMALLER: Mapping[str, str] = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL",
}  # fmt: skip
"""Types of blocks of 32 for rows that 256 does not divide."""


def find(name: str) -> Mix | None:
    """Return the mix of a name in either case, as llama.cpp's users write it; None where there is none."""
    name = name.lower()
    return MIXES.get(ALIASES.get(name, name))


def scheme(kind: GgmlType) -> Scheme:
    """Return the scheme of a matrix of this type."""
    return Scheme(GgmlBlocks(kind), layout="plain")


def choose(mix: Mix, matrix: str, layer: int, columns: int, about: About) -> tuple[GgmlType, str | None]:
    """Return the type of a matrix with rows of `columns`, and the name of the mix's type where its blocks do not fit.
    `matrix` is its name in files without layer and `.weight`; `layer` is ignored for `token_embd` and `output`."""
    kind = mix.base if mix.base.name in DENSE else TYPES[_by_rule(mix, matrix, layer, columns, about)]
    if columns % kind.elements == 0:
        return kind, None
    wanted, found = kind.name, TYPES[_SMALLER.get(kind.name, kind.name)]
    if columns % found.elements:
        found = TYPES["F16"]
    return found, wanted


def _by_rule(mix: Mix, matrix: str, layer: int, columns: int, about: About) -> str:
    base = mix.base.name
    if matrix == HEAD or (matrix == EMBED and about.tied):
        return "Q8_0" if columns % mix.base.elements else base if base == "Q8_0" else "Q6_K"
    matrix = VALUES if matrix == "attn_qkv" else matrix.removesuffix("_exps").removesuffix("_shexp")
    if about.experts == EIGHT and matrix in (VALUES, "attn_k"):
        return "Q8_0"
    if about.experts == EIGHT and matrix == "attn_output":
        return "Q5_K" if mix.name in _OUTPUT_OF_EIGHT else base
    found = next((kind for kind, when in mix.rules.get(matrix, ()) if _HOLDS[when](layer, about)), base)
    return "Q5_K" if matrix == VALUES and about.seventy and found in ("Q3_K", "Q4_K") else found


def _more(layer: int, layers: int) -> bool:
    """Return whether a layer gets more bits: the first eighth, the last, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
