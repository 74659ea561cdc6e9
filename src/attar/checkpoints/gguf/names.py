"""Names of tensors in GGUF files: our module names of any family, and their places in a file.

A file names tensors by their role (`blk.3.ffn_up.weight`), equally for every family, and a family's `Names` say which
of its modules has which role. So one table follows from `Names`, and a family needs no table of its own. Torch-free.

The experts of a layer are one tensor in a file, stacked: `Place.expert` is the index of one of them in it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from attar.model.config import Names

EMBED, HEAD, POSITIONS, FINAL_NORM = "token_embd", "output", "position_embd", "output_norm"
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (SHORT_FACTORS, LONG_FACTORS)
ROUTER, SHARED_GATE = "ffn_gate_inp", "ffn_gate_inp_shexp"
"""The gates of experts: the router, and that of a shared expert, whose one row is stored as a vector."""

_QKV = ("attn_q", "attn_k", "attn_v")
_GATE_UP = ("ffn_gate", "ffn_up")


class Place(NamedTuple):
    """The tensor of a file that holds one of ours, and the index of the expert where a tensor holds all experts."""

    tensor: str
    expert: int | None = None


def place(names: Names, name: str) -> Place:
    """Return the place in GGUF files of our tensor or module `name`; under its own name where files have no such
    thing."""
    around, layer = _tables(names)
    for ending in (".weight", ".bias", ""):
        if not name.endswith(ending):
            continue
        module = name.removesuffix(ending)
        if module in around:
            return Place(around[module] + ending)
        number, within = _split(names.layer, "{i}", module)
        if number is None:
            continue
        if within in layer:
            return Place(f"blk.{number}.{layer[within]}{ending}")
        expert, part = _split(names.expert, "{e}", within)
        if expert is not None and f"*.{part}" in layer:
            return Place(f"blk.{number}.{layer[f'*.{part}']}{ending}", expert)
    return Place(name)


def file_name(names: Names, name: str) -> str:
    """Return the name in GGUF files of the tensor that holds our tensor or module `name`."""
    return place(names, name).tensor


def homes(names: Names, ours: Iterable[str]) -> dict[str, list[str]]:
    """Return our names by the tensor of a file that holds them: one, or those of all experts in order."""
    found: dict[str, list[str]] = {}
    for name in ours:
        found.setdefault(file_name(names, name), []).append(name)
    return found


def _split(pattern: str, mark: str, name: str) -> tuple[int | None, str]:
    """Return (the number at `mark`, what follows the pattern and a dot) of a name that begins by the pattern, else
    (None, "")."""
    before, behind = pattern.split(mark)
    if not name.startswith(before):
        return None, ""
    number, _, rest = name.removeprefix(before).partition(f"{behind}.")
    return (int(number), rest) if number.isascii() and number.isdecimal() else (None, "")


@functools.lru_cache(maxsize=64)
def _tables(names: Names) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return our names -> names in files, (around the layers, within a layer); parts of an expert begin with `*.`."""
    around = {names.embed: EMBED, names.final_norm: FINAL_NORM, names.head: HEAD}
    if names.positions is not None:
        around[names.positions] = POSITIONS
    found: dict[str, str] = {
        names.attention_norm: "attn_norm", names.feed_forward_norm: "ffn_norm", names.output: "attn_output",
        names.q_norm: "attn_q_norm", names.k_norm: "attn_k_norm", names.down: "ffn_down",
        names.router: ROUTER, names.shared_gate: SHARED_GATE,
    }  # fmt: skip
    for ours, theirs in (
        (names.attention_post_norm, "post_attention_norm"),
        (names.feed_forward_post_norm, "post_ffw_norm"),
    ):
        if ours is not None:
            found[ours] = theirs
    found |= dict(zip(names.qkv, _QKV if len(names.qkv) == len(_QKV) else ("attn_qkv",), strict=True))
    found |= dict(zip(names.gate_up, _gate_up(names.gate_up), strict=True))
    parts = dict(zip(names.expert_gate_up, _gate_up(names.expert_gate_up), strict=True))
    for ours, theirs in (*parts.items(), (names.expert_down, "ffn_down")):
        found[f"*.{ours}"] = f"{theirs}_exps"
        found[f"{names.shared_expert}.{ours}"] = f"{theirs}_shexp"
    return around, found


def _gate_up(ours: tuple[str, ...]) -> tuple[str, ...]:
    return _GATE_UP if len(ours) == len(_GATE_UP) else ("ffn_up",)
