"""The formats of folders that a compressed linear can be re-packed into: what each can hold, and how it lays it out.

All three store integers, a scale for each group of a row's columns, and zero points or none. So a weight on one such
grid is the same numbers in another order of bits; what differs is what a format has no field for:

* compressed-tensors takes any grid, and scales in the dtype they have;
* AWQ takes 4 bits, with zero points always, eight outputs a word, and its columns in order;
* GPTQ takes 2, 3, 4 or 8 bits with zero points always. Its first version stores them minus one, which is undone in ways
  that disagree where one is zero: so symmetric weights, whose zero points are in the middle, are written as version 1,
  which everybody reads, and others as version 2.

A group size and a number of bits hold for a whole folder in the last two, and scales are float16, which is what their
kernels load: a scale of another dtype is converted where it is a number of float16, and refused where it is none.
Modules that are dense are named in the config, or readers would look for their integers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attar.checkpoints import libraries
from attar.checkpoints.convert.source import Stored
from attar.checkpoints.layouts import compressed_tensors
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.packing import pack_awq, pack_words
from attar.formats.scheme import Grid, Part
from attar.kernels.operands import Linear


class Target(Protocol):
    """A format to write. Modules go by their stored names."""

    name: str

    def against(self, each: Stored) -> str | None:
        """What of a linear it has no place for, as the end of a sentence; None where it can hold it."""
        ...

    def declared(self, module: str, each: Stored) -> dict[str, Part]:
        """Every tensor that the linear becomes."""
        ...

    def arrays(self, module: str, linear: Linear) -> dict[str, Tensor]:
        """The same with their values. Raises ValueError where a scale cannot be stored exactly."""
        ...

    def config(self, modules: Mapping[str, Stored], dense: Sequence[str]) -> dict[str, Any]:
        """The quantization_config. Raises ValueError where the linears differ in what holds for a whole folder."""
        ...


def bits_per_weight(target: Target, modules: Mapping[str, Stored]) -> float:
    """All that the format stores of the linears, over their weights."""
    stored = sum(part.bytes for module, each in modules.items() for part in target.declared(module, each).values())
    return 8 * stored / sum(math.prod(each.shape) for each in modules.values())


def grid_of(each: Stored) -> Grid | None:
    """The grid of a weight that is integers alone, with scales for each row or group; None for any other."""
    grid = each.scheme.weight
    plain = isinstance(grid, Grid) and grid.kind == "int" and grid.by_row and each.scheme.activation is None
    return grid if plain and isinstance(grid, Grid) else None


class ToCompressedTensors:
    name = compressed_tensors.METHOD

    def against(self, each: Stored) -> str | None:
        return compressed_tensors.against([each.scheme])

    def declared(self, module: str, each: Stored) -> dict[str, Part]:
        index = {f"{module}.weight_g_idx": Part("int32", (each.shape[1],))} if each.permuted else {}
        return libraries.declared(compressed_tensors, module, each.scheme, each.shape) | index

    def arrays(self, module: str, linear: Linear) -> dict[str, Tensor]:
        packed, index = linear.weight, {}
        assert isinstance(packed, PackedTensor)
        if linear.permutation is not None:
            codes, scale, zero = affine.decode(packed)
            codes, groups = _in_order(codes, linear.permutation, scale.shape[1])
            packed = affine.encode(codes, scale, zero, packed.scheme, packed.shape)
            index = {f"{module}.weight_g_idx": groups}
        return libraries.parts_of(compressed_tensors, module, packed, linear.activation_scale) | index

    def config(self, modules: Mapping[str, Stored], dense: Sequence[str]) -> dict[str, Any]:
        found = compressed_tensors.quantization_config({name: each.scheme for name, each in modules.items()}, dense)
        if any(each.permuted for each in modules.values()):
            for group in found["config_groups"].values():
                group["weights"]["actorder"] = "group"
        return found


class ToAwq:
    name = "awq"

    def against(self, each: Stored) -> str | None:
        grid = grid_of(each)
        if grid is None or grid.bits != 4:
            return f"AWQ holds integers of 4 bits, not {each.scheme.name}"
        if each.permuted:
            return "AWQ has no field for columns that are out of their order (desc_act)"
        if each.shape[0] % 8:
            return f"AWQ holds eight outputs in a word, which do not divide {each.shape[0]}"
        return None

    def declared(self, module: str, each: Stored) -> dict[str, Part]:
        (rows, columns), groups = each.shape, each.scheme.grid.groups(each.shape[1])
        return {
            f"{module}.qweight": Part("int32", (columns, rows // 8)),
            f"{module}.qzeros": Part("int32", (groups, rows // 8)),
            f"{module}.scales": Part("float16", (groups, rows)),
        }

    def arrays(self, module: str, linear: Linear) -> dict[str, Tensor]:
        codes, scale, zero = _decoded(linear)
        return {
            f"{module}.qweight": pack_awq(codes.t().contiguous()),
            f"{module}.qzeros": pack_awq(zero.t().contiguous()),
            f"{module}.scales": as_half(scale).t().contiguous(),
        }

    def config(self, modules: Mapping[str, Stored], dense: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": _one({name: each.scheme.grid.group_size or -1 for name, each in modules.items()}, "AWQ"),
            "zero_point": True,
            "modules_to_not_convert": list(dense) or None,
        }


class ToGptq:
    name = "gptq"

    def against(self, each: Stored) -> str | None:
        grid = grid_of(each)
        if grid is None or grid.bits not in (2, 3, 4, 8):
            return f"GPTQ holds integers of 2, 3, 4 or 8 bits, not {each.scheme.name}"
        for size, what in zip(each.shape, ("outputs", "inputs"), strict=True):
            if size * grid.bits % 32:
                return f"GPTQ holds whole words of 32 bits, and {size} {what} of {grid.bits} bits are none"
        return None

    def declared(self, module: str, each: Stored) -> dict[str, Part]:
        (rows, columns), grid = each.shape, each.scheme.grid
        groups = grid.groups(columns)
        return {
            f"{module}.qweight": Part("int32", (columns * grid.bits // 32, rows)),
            f"{module}.qzeros": Part("int32", (groups, rows * grid.bits // 32)),
            f"{module}.scales": Part("float16", (groups, rows)),
            f"{module}.g_idx": Part("int32", (columns,)),
        }

    def arrays(self, module: str, linear: Linear) -> dict[str, Tensor]:
        codes, scale, zero = _decoded(linear)
        assert isinstance(linear.weight, PackedTensor)
        grid, order = linear.weight.scheme.grid, linear.permutation
        codes, groups = _in_order(codes, torch.arange(codes.shape[1]) if order is None else order, scale.shape[1])
        return {
            f"{module}.qweight": pack_words(codes, grid.bits).t().contiguous(),
            f"{module}.qzeros": pack_words((zero - int(grid.symmetric)).t().contiguous(), grid.bits),
            f"{module}.scales": as_half(scale).t().contiguous(),
            f"{module}.g_idx": groups,
        }

    def config(self, modules: Mapping[str, Stored], dense: Sequence[str]) -> dict[str, Any]:
        symmetric = _one({name: each.scheme.grid.symmetric for name, each in modules.items()}, "GPTQ")
        left_out = [name for name in dense if name != "lm_head"]  # which has a setting of its own
        return {
            "quant_method": "gptq",
            "bits": _one({name: each.scheme.grid.bits for name, each in modules.items()}, "GPTQ"),
            "group_size": _one({name: each.scheme.grid.group_size or -1 for name, each in modules.items()}, "GPTQ"),
            "desc_act": any(each.permuted for each in modules.values()),
            "sym": symmetric,
            "checkpoint_format": "gptq" if symmetric else "gptq_v2",
            "lm_head": "lm_head" in modules,
            **({"dynamic": {f"-:^{re.escape(name)}$": {} for name in left_out}} if left_out else {}),
        }


TARGETS: Mapping[str, Target] = {each.name: each for each in (ToCompressedTensors(), ToAwq(), ToGptq())}


def as_half(scale: Tensor) -> Tensor:
    """A scale in float16. Raises ValueError where one is not a number of that dtype."""
    half = scale.half()
    if not torch.equal(half.float(), scale.float()):
        at = int((half.float() != scale.float()).flatten().nonzero()[0])
        raise ValueError(
            f"a scale of {str(scale.dtype).removeprefix('torch.')} is no number of float16, which is what the format "
            f"has: {float(scale.flatten()[at]):g}"
        )
    return half


def _decoded(linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Signed codes [O, I], scales [O, G] and signed zero points [O, G]: zero, the middle, where there are none."""
    assert isinstance(linear.weight, PackedTensor)
    codes, scale, zero = affine.decode(linear.weight)
    return codes, scale, torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero


def _in_order(codes: Tensor, permutation: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Codes [O, I] whose columns were taken in the order of `permutation`, back in theirs, and each column's group."""
    found, index = torch.empty_like(codes), torch.empty(codes.shape[1], dtype=torch.int32)
    found[:, permutation] = codes
    index[permutation] = torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // groups)
    return found, index


def _one(values: Mapping[str, Any], format_name: str) -> Any:
    """What all modules share. Raises ValueError naming two that differ."""
    (first, value), *others = values.items()
    for name, other in others:
        if other != value:
            raise ValueError(f"{format_name} has one setting for a whole folder, and {first} and {name} differ")
    return value
